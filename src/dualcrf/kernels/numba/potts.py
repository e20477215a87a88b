"""Steps through a Potts edge in O(labels): the score is `weight` where the two labels agree, 0 elsewhere.

A label's message weighs its own score plus `weight` against the rest, all other labels. For every label but the best one,
`top`, the rest contains `top`, and is summed relative to it; the rest of `top` itself is summed relative to the second best.
So no sum cancels or underflows.
"""

import numpy as np

from dualcrf.kernels.numba.vector import exp, jit, larger, largest, log, number, smaller, total


@jit
def first_largest(values, count, without):
    """Index of the first maximum among the first `count` values, one index left out; -1 if there is no other."""
    best = -1
    for k in range(count):
        if k != without and (best < 0 or values[k] > values[best]):
            best = k
    return best


@jit
def _relative(source, without, peak, out, labels, gamma):
    """out = exp((source - peak) / gamma), 0 for the index left out; returns their sum."""
    scale = number(1, gamma) / gamma
    for k in range(labels):
        out[k] = exp((source[k] - peak) * scale)
    if without >= 0:
        out[without] = 0
    return total(out, labels)


@jit
def _weigh(own, rest):
    """e^own against a sum `rest` of exponentials: the share of the one, the factor for the others, and the log of the total."""
    one = number(1, own)
    small = exp(-abs(own))
    first, factor = (one, small) if own > 0 else (small, one)
    whole = first + rest * factor
    return first / whole, factor / whole, larger(own, number(0, own)) + log(whole)


@jit
def _second_peak(source, top, labels):
    second = first_largest(source, labels, top)
    return source[second] if second >= 0 else number(-np.inf, source[0])


@jit
def _top_two(source, lanes):
    """The first index of the largest score, that score, and the largest of the others; -inf behind the labels."""
    peak = largest(source, lanes)
    first, second = number(lanes - 1, peak), number(-np.inf, peak)
    for k in range(lanes):
        first = smaller(first, number(k, peak) if source[k] == peak else first)
    top = int(first)
    for k in range(lanes):
        second = larger(second, source[k] if k != top else number(-np.inf, peak))
    return top, peak, second


@jit
def smooth_message(weight, source, target, weights, lanes, gamma):
    """target[l] = gamma · log(Σ_{j != l} exp(source[j] / gamma) + exp((source[l] + weight) / gamma))."""
    top, peak, second = _top_two(source, lanes)
    if peak == -np.inf:
        for k in range(lanes):
            target[k] = -np.inf
        return
    scale = number(1, gamma) / gamma
    rest = _relative(source, -1, peak, weights, lanes, gamma)
    for k in range(lanes):
        _, _, height = _weigh((source[k] + weight - peak) * scale, rest - weights[k])
        target[k] = peak + gamma * height
    if second > -np.inf:
        rest = _relative(source, top, second, weights, lanes, gamma)
        _, _, height = _weigh((peak + weight - second) * scale, rest)
        target[top] = second + gamma * height
    else:
        target[top] = peak + weight


@jit
def hard_message(weight, source, target, lanes):
    """target[l] = max(max_{j != l} source[j], source[l] + weight)."""
    peak = largest(source, lanes)
    for k in range(lanes):
        target[k] = larger(peak, source[k] + weight)
    if weight < 0:
        top, _, second = _top_two(source, lanes)
        target[top] = larger(second, peak + weight)


@jit
def smooth_adjoint(weight, source, gradient, out, weights, spare, labels, gamma):
    """The source's adjoint; returns the weight's gradient."""
    top = first_largest(source, labels, -1)
    peak, second = source[top], _second_peak(source, top, labels)
    given = number(0, gamma)
    if peak == -np.inf:
        for k in range(labels):
            out[k] = 0
        return given
    scale = number(1, gamma) / gamma
    rest = _relative(source, -1, peak, weights, labels, gamma)
    for k in range(labels):
        own, factor, _ = _weigh((source[k] + weight - peak) * scale, rest - weights[k])
        out[k] = own * gradient[k]
        spare[k] = factor * gradient[k]
    # What the loop says of `top` is void.
    out[top], spare[top] = 0, 0
    given, passed = total(out, labels), total(spare, labels)
    for k in range(labels):
        # What `passed` holds of a label's own gradient is taken back.
        out[k] += weights[k] * passed - weights[k] * spare[k]
    if second > -np.inf:
        rest = _relative(source, top, second, weights, labels, gamma)
        own, factor, _ = _weigh((peak + weight - second) * scale, rest)
        given += own * gradient[top]
        out[top] += own * gradient[top]
        for k in range(labels):
            out[k] += weights[k] * factor * gradient[top]
    elif weight > -np.inf:
        given += gradient[top]
        out[top] += gradient[top]
    return given


@jit
def hard_adjoint(weight, source, gradient, out, labels):
    """The source's adjoint, all of a gradient goes to the first of the best sources; returns the weight's gradient."""
    top = first_largest(source, labels, -1)
    second = first_largest(source, labels, top)
    given = number(0, weight)
    for k in range(labels):
        out[k] = 0
    for k in range(labels):
        other = second if k == top else top
        if _stays(weight, source, k, other):
            out[k] += gradient[k]
            given += gradient[k]
        elif other >= 0 and source[other] > -np.inf:
            out[other] += gradient[k]
    return given


@jit
def _stays(weight, source, label, other):
    """Whether the first best source of a hard message to `label` is `label` itself; not if that is forbidden."""
    own = source[label] + weight
    return own > -np.inf and (other < 0 or own > source[other] or (own == source[other] and label < other))


@jit
def entropy(weight, source, gradient, weights, labels, gamma):
    """Σ -w log(w) · gradient over all pairs of labels with w their weight, the share of gamma's gradient."""
    top = first_largest(source, labels, -1)
    share = 0.0
    if source[top] == -np.inf:
        return share
    scale = number(1, gamma) / gamma
    for pass_top in (False, True):
        peak = _second_peak(source, top, labels) if pass_top else source[top]
        if peak == -np.inf:
            break
        rest = _relative(source, top if pass_top else -1, peak, weights, labels, gamma)
        mean = 0.0  # Σ of the relative weights times their logs
        for k in range(labels):
            if weights[k] > 0:
                mean += weights[k] * (source[k] - peak) * scale
        for k in range(labels):
            if (k == top) == pass_top:
                without = number(0, gamma) if pass_top else weights[k]
                own, factor, _ = _weigh((source[k] + weight - peak) * scale, rest - without)
                others = mean - (without * (source[k] - peak) * scale if without > 0 else 0.0)
                surprise = -factor * (others + np.log(factor) * (rest - without)) if factor > 0 else 0.0
                share += (surprise - (own * np.log(own) if own > 0 else 0.0)) * gradient[k]
    return share
