"""Steps through an edge's table of scores: a message, its adjoint, and the gradient of the scores.

`rows` says which way: True when the message's source is the label of the rows (it runs from the edge's first node to its
second). Vectors have `lanes` elements; behind the labels a source holds -inf, a gradient 0.
"""

import numpy as np

from dualcrf.kernels.numba.rows import best_columns, best_rows, max_columns, max_rows, sum_columns, sum_rows
from dualcrf.kernels.numba.vector import exp, jit, largest, log, number, smallest, total


@jit
def exponentiate(tile, count, gamma):
    """Replace scores by exp((score - shift) / gamma), with their maximum as shift, and return it; 0 where all are -inf."""
    shift = largest(tile, count)
    shift = shift if shift > -np.inf else number(0, gamma)
    scale = number(1, gamma) / gamma
    for k in range(count):
        tile[k] = exp((tile[k] - shift) * scale)
    return shift


@jit
def smooth_message(tile, shift, source, target, weights, labels, lanes, gamma, rows):
    """The message through an exponentiated tile, a product of matrix and vector; False if that is unsafe."""
    peak = largest(source, labels)
    if peak == -np.inf:
        for k in range(labels):
            target[k] = -np.inf
        return True
    scale = number(1, gamma) / gamma
    for k in range(lanes):
        weights[k] = exp((source[k] - peak) * scale)
    if rows:
        sum_rows(tile, weights, target, labels, lanes)
    else:
        sum_columns(tile, weights, target, labels, lanes)
    safe = _safe(target, labels)
    if safe:
        peak += shift
        for k in range(lanes):
            target[k] = peak + gamma * log(target[k])
    return safe


@jit
def log_message(scores, source, target, peaks, weights, labels, lanes, gamma, rows):
    """The message through the scores themselves: right for any finite input, and for -inf."""
    _log_sums(scores, source, target, peaks, weights, labels, lanes, gamma, rows)
    for k in range(labels):
        target[k] = peaks[k] + gamma * log(target[k]) if target[k] > 0 else -np.inf


@jit
def _log_sums(scores, source, sums, peaks, weights, labels, lanes, gamma, rows):
    """For each target the largest source + score, 0 where that is -inf, and the sum of exponentials relative to it."""
    scale = number(1, gamma) / gamma
    if rows:
        best_rows(scores, source, peaks, weights, labels, lanes)
        for k in range(lanes):
            peaks[k] = peaks[k] if peaks[k] > -np.inf else number(0, gamma)
            sums[k] = 0
        for j in range(labels):
            for k in range(lanes):
                sums[k] += exp((source[j] + scores[j * labels + k] - peaks[k]) * scale)
    else:
        max_columns(scores, source, peaks, labels, lanes)
        for j in range(labels):
            peaks[j] = peaks[j] if peaks[j] > -np.inf else number(0, gamma)
            for k in range(lanes):
                weights[k] = exp((scores[j * labels + k] + source[k] - peaks[j]) * scale)
            sums[j] = total(weights, lanes)


@jit
def hard_message(scores, source, target, labels, lanes, rows):
    """The message of the hard max."""
    if rows:
        max_rows(scores, source, target, labels, lanes)
    else:
        max_columns(scores, source, target, labels, lanes)


@jit
def smooth_factors(tile, source, gradient, left, right, labels, lanes, gamma, rows):
    """Vectors with which weight · gradient = exponentiated tile · left[source] · right[target]; False if that is unsafe.

    The sums of exponentials are made again: taken from the stored messages they would carry the rounding of scores that grow
    with the length of the chain.
    """
    peak = largest(source, labels)
    if peak == -np.inf:
        return False
    scale = number(1, gamma) / gamma
    for k in range(lanes):
        left[k] = exp((source[k] - peak) * scale)
    if rows:
        sum_rows(tile, left, right, labels, lanes)
    else:
        sum_columns(tile, left, right, labels, lanes)
    if not _safe(right, labels):
        return False
    for k in range(labels):
        right[k] = gradient[k] / right[k]
    for k in range(labels, lanes):
        right[k] = 0
    return True


@jit
def _safe(sums, labels):
    """Whether no sum of exponentials is so small that it may miss terms that underflowed."""
    return smallest(sums, labels) >= (1e-20 if sums.itemsize == 4 else 1e-200)


@jit
def smooth_adjoint(tile, left, right, out, labels, lanes, rows):
    """The source's adjoint, from the factors and the exponentiated tile."""
    if rows:
        sum_columns(tile, right, out, labels, lanes)
    else:
        sum_rows(tile, right, out, labels, lanes)
    for k in range(lanes):
        out[k] *= left[k]


@jit
def log_gradient(scores, source, gradient, out, peaks, sums, labels, lanes, gamma, rows):
    """out = weight · gradient of one direction in the log domain, through peaks and sums as in the message."""
    scale = number(1, gamma) / gamma
    _log_sums(scores, source, sums, peaks, out, labels, lanes, gamma, rows)
    for k in range(lanes):
        sums[k] = gradient[k] / sums[k] if k < labels and sums[k] > 0 else number(0, gamma)
    for j in range(labels):
        row = j * labels
        if rows:
            for k in range(lanes):
                out[row + k] = exp((source[j] + scores[row + k] - peaks[k]) * scale) * sums[k]
        else:
            for k in range(lanes):
                out[row + k] = exp((scores[row + k] + source[k] - peaks[j]) * scale) * sums[j]


@jit
def sum_targets(tile, ones, out, labels, lanes, rows):
    """The source's adjoint: the sum of a direction's gradient over the message's labels."""
    if rows:
        sum_columns(tile, ones, out, labels, lanes)
    else:
        sum_rows(tile, ones, out, labels, lanes)


@jit
def first_best(scores, source, best, origin, labels, lanes, rows):
    """The hard message, and for each of its labels the first source that attains it, as a float."""
    if rows:
        best_rows(scores, source, best, origin, labels, lanes)
    else:
        best_columns(scores, source, best, origin, labels, lanes)


@jit
def hard_adjoint(best, origin, gradient, out, labels, lanes):
    """The source's adjoint: all of a gradient goes to the first of the best sources."""
    for k in range(lanes):
        out[k] = 0
    for k in range(labels):
        if best[k] > -np.inf:
            out[int(origin[k])] += gradient[k]


@jit
def add_hard_gradient(best, origin, gradient, out, labels, rows):
    """Add one direction's gradient of the scores."""
    for k in range(labels):
        if best[k] > -np.inf:
            first = int(origin[k])
            out[first * labels + k if rows else k * labels + first] += gradient[k]


@jit
def entropy(tile, gradient, labels, rows):
    """Σ -w log(w) · gradient over the weights w of a tile of weight · gradient, the share of gamma's gradient."""
    share = 0.0
    for j in range(labels):
        for k in range(labels):
            given = tile[j * labels + k]
            if given != 0:
                share -= given * np.log(given / gradient[k if rows else j])
    return share
