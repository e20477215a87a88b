"""Potts messages along all chains in O(L) a step, and their gradients: nothing of size L² anywhere.

A program walks several chains of one batch item in one direction, in step. A tensor has the axes [chains, labels /
LANES, LANES]: of a warp's 32 lanes 8 lie along the labels and 4 along the chains, so that a maximum over a chain's
labels takes three shuffles for four chains. An edge adds w where its two labels agree; so label l hears either from
itself or from the best of the others, and that is one and the same label, the *leader*, for all but the leader itself.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (kernels are Triton's language, which only looks like Python)

import triton
import triton.language as tl
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.kernels.triton.tiles import (
    LN2,
    LOG2E,
    energy_adjoint,
    finite,
    first_over,
    log2,
    max_over,
    nan_over,
    smooth_max,
    sum_over,
)


def _blocks(num_labels: int) -> dict[str, int]:
    size = 1 << (num_labels - 1).bit_length()
    lanes = min(size, 8 if size <= 64 else 32)
    return {"LABELS": size, "LANES": lanes, "CHAINS": 32 // lanes, "num_warps": 1}


@triton.jit
def labels_of(LABELS: tl.constexpr, LANES: tl.constexpr):
    """0 … LABELS - 1, for the chains to stand before them."""
    return tl.arange(0, LABELS // LANES)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]


@triton.jit
def in_item(place, label, L: tl.constexpr):
    """Where the labels of places stand in a batch item's [S, L]."""
    # Triton lays out loads and stores by the axes' contiguity: after a piece of the labels are to come the chains.
    at = place.to(tl.int64) * L + label
    return tl.max_contiguous(at, [place.shape[0], 1, label.shape[2]])


@triton.jit
def _hard_choices(f, w, label):
    """Each label's score from itself, the best of the others, and whether it stays with itself; the leader and the
    runner-up."""
    top = max_over(f, ROWS=False)
    leader = first_over(f == top, label, ROWS=False)
    rest = tl.where(label == leader, -float("inf"), f)
    second = max_over(rest, ROWS=False)
    runner_up = first_over((rest == second) & (label != leader), label, ROWS=False)
    own = f + w
    other = tl.where(label == leader, second, top)
    stays = (own > other) | ((own == other) & (label < tl.where(label == leader, runner_up, leader)))
    return own, other, stays, leader, runner_up


@triton.jit
def _soft_terms(f, w, scale, label):
    """Terms of m = base + gamma · log(others + exp((f + w - base) / gamma)), each label's own share set apart.

    `others` sums the exponentials of the other labels relative to `base`, the leader's score: so a 1 stays in the sum
    and nothing cancels. For the leader itself both are relative to the runner-up's.

    Returns:
        base, others; z, the label's own exponent (base 2), t = 2^-|z|, norm = (others + 2^z) · 2^-max(z, 0); top,
        leads (whether the label is the leader); rest = 2^exponent, all others relative to the runner-up, its exponent
        and sum, and ratio, the runner-up's exponential relative to the leader.
    """
    top = max_over(f, ROWS=False)
    leads = label == first_over(f == top, label, ROWS=False)
    followers = tl.where(leads, -float("inf"), f)
    second = max_over(followers, ROWS=False)
    exponent = (followers - finite(second)) * scale
    rest = tl.exp2(exponent)
    total = sum_over(rest, ROWS=False)
    ratio = tl.where(second == -float("inf"), 0, tl.exp2((finite(second) - finite(top)) * scale))
    others = tl.where(leads, total, 1 + ratio * (total - rest))
    base = tl.where(leads, finite(second), finite(top))
    z = (f + w - base) * scale
    t = tl.exp2(-tl.abs(z))
    norm = tl.where(z > 0, others * t + 1, others + t)
    return base, others, z, t, norm, top, leads, rest, exponent, total, ratio


@triton.jit
def message_over(f, w, gamma, label, HARD: tl.constexpr):
    """The message of scores f over edges of weight w."""
    if HARD:
        own, other, stays, _, _ = _hard_choices(f, w, label)
        m = tl.where(stays, own, other) + nan_over(f, ROWS=False) + nan_over(w, ROWS=False)
    else:
        base, others, _, _, norm, top, _, _, _, _, _ = _soft_terms(f, w, LOG2E / gamma, label)
        m = tl.maximum(f + w, base) + gamma * LN2 * log2(norm)
        m = tl.where(others == 0, f + w, m)  # a leader without followers
        m = tl.where(top == -float("inf"), top, m)
    return m


@triton.jit
def weight_at(weight, edge, place, exists, DTYPE: tl.constexpr):
    """The weight of the edge that leaves a place, and the edge."""
    e = tl.load(edge + place, mask=exists, other=0)
    return tl.load(weight + e, mask=exists, other=0).to(DTYPE), e


# On the image grid (batch 8, 257×257, L = 21, strides 1, 3, 9, 27, fp32): 4.2 M places. Bytes: psi read twice, both messages
# written: 1.42 GB, 0.33 ms. Operations: 198 warp instructions for a step of four chains, 8.4 M steps: 0.45 ms. Launches: 1.
# Measured on an H200: 0.67 ms.
@triton.jit(do_not_specialize=["B", "S", "C"])
def scan_kernel(
    psi, forward, backward, energy, weight, weight_batch, start, edge, gamma, B, S, C,
    L: tl.constexpr, LABELS: tl.constexpr, LANES: tl.constexpr, CHAINS: tl.constexpr,
):  # fmt: skip
    """Messages of CHAINS chains, one batch item, one direction, and in the forward direction the chains' energies."""
    program = tl.program_id(0)
    b = (program // 2 % B).to(tl.int64)
    chain = program // (2 * B) * CHAINS + tl.arange(0, CHAINS)[:, None, None]
    exists = chain < C
    first = tl.load(start + chain, mask=exists, other=0)
    steps = tl.load(start + chain + 1, mask=exists, other=1) - 1 - first
    item = b * S * L
    HARD: tl.constexpr = gamma is None
    strength = 1.0 if HARD else tl.load(gamma)
    for direction in tl.static_range(2):
        if program % 2 == direction:
            FORWARD: tl.constexpr = direction == 0
            f = _scan(
                psi + item, (forward if FORWARD else backward) + item, weight + b * weight_batch, edge,
                exists, first, steps, strength, L, LABELS, LANES, FORWARD, HARD,
            )  # fmt: skip
            if FORWARD:
                tl.store(energy + b * C + chain, smooth_max(f, strength, False, HARD), mask=exists)


@triton.jit
def _scan(
    psi, message, weight, edge, exists, first, steps, gamma,
    L: tl.constexpr, LABELS: tl.constexpr, LANES: tl.constexpr, FORWARD: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """Write the messages into every place; return the scores at the places where they end."""
    STEP: tl.constexpr = 1 if FORWARD else -1
    LEAD: tl.constexpr = 0 if FORWARD else -1  # a message from place s crosses the edge that leaves place s + LEAD
    label = labels_of(LABELS, LANES)
    inside = exists & (label < L)
    place = first if FORWARD else first + steps
    at = in_item(place, label, L)
    f = tl.load(psi + at, mask=inside, other=-float("inf"))
    tl.store(message + at, tl.zeros_like(f), mask=inside)
    w, _ = weight_at(weight, edge, place + LEAD, steps > 0, f.dtype)
    for t in range(tl.max(steps)):
        going = t < steps
        place += STEP
        at += STEP * L
        score = tl.load(psi + at, mask=going & inside, other=-float("inf"))
        w_next, _ = weight_at(weight, edge, place + LEAD, t + 1 < steps, f.dtype)
        m = message_over(f, w, gamma, label, HARD)
        tl.store(message + at, m, mask=going & inside)
        f = tl.where(going, score + m, f)
        w = w_next
    return f


# On the image grid. Bytes: psi, messages, their gradients and the adjoints, for each direction 355 MB each: 2.8 GB, 0.67 ms;
# the sum of the two directions 1.1 GB, 0.25 ms. Operations: 348 warp instructions for a step of four chains: 0.79 ms.
# Launches: 2. Measured on an H200: 1.50 ms together.
@triton.jit(do_not_specialize=["B", "S", "C", "E"])
def adjoint_kernel(
    psi, forward, backward, grad_forward, grad_backward, grad_energy, adjoint, grad_weight, grad_gamma,
    weight, weight_batch, start, edge, gamma, B, S, C, E,
    L: tl.constexpr, LABELS: tl.constexpr, LANES: tl.constexpr, CHAINS: tl.constexpr,
):  # fmt: skip
    """Total gradients of the scores f = psi + message (`adjoint` [2, B, S, L]) and of the weights (`grad_weight` [2,
    B, E])."""
    program = tl.program_id(0)
    b = (program // 2 % B).to(tl.int64)
    chain = program // (2 * B) * CHAINS + tl.arange(0, CHAINS)[:, None, None]
    exists = chain < C
    first = tl.load(start + chain, mask=exists, other=0)
    steps = tl.load(start + chain + 1, mask=exists, other=1) - 1 - first
    item = b * S * L
    own = program % 2 * B + b
    HARD: tl.constexpr = gamma is None
    ENTROPY: tl.constexpr = grad_gamma is not None
    strength = 1.0 if HARD else tl.load(gamma)
    share = tl.load(grad_energy + b * C + chain, mask=exists, other=0)
    for direction in tl.static_range(2):
        if program % 2 == direction:
            FORWARD: tl.constexpr = direction == 0
            entropy = _adjoint(
                psi + item, (forward if FORWARD else backward) + item,
                (grad_forward if FORWARD else grad_backward) + item, share,
                adjoint + own * S * L, None if grad_weight is None else grad_weight + own * E,
                weight + b * weight_batch, edge, exists, first, steps, strength,
                L, LABELS, LANES, FORWARD, HARD, ENTROPY,
            )  # fmt: skip
            if ENTROPY:
                tl.store(grad_gamma + program, entropy)


@triton.jit
def _adjoint(
    psi, message, grad_message, grad_energy, adjoint, grad_weight, weight, edge, exists, first, steps, gamma,
    L: tl.constexpr, LABELS: tl.constexpr, LANES: tl.constexpr,
    FORWARD: tl.constexpr, HARD: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Run against the messages; return what these chains add to gamma's gradient."""
    STEP: tl.constexpr = 1 if FORWARD else -1
    LEAD: tl.constexpr = 0 if FORWARD else -1
    label = labels_of(LABELS, LANES)
    inside = exists & (label < L)
    place = first + steps if FORWARD else first
    at = in_item(place, label, L)
    f = _score(psi, message, at, inside)
    a = tl.zeros_like(f)
    entropy = tl.zeros_like(f)
    energy_entropy = tl.zeros_like(grad_energy)
    if FORWARD:
        # The energy is a message from the last place to nowhere.
        a, energy_entropy = energy_adjoint(f, label, grad_energy, gamma, False, HARD, ENTROPY)
    tl.store(adjoint + at, a, mask=inside)
    w, e = weight_at(weight, edge, place - STEP + LEAD, steps > 0, f.dtype)
    for t in range(tl.max(steps)):
        going = t < steps
        g = a + tl.load(grad_message + at, mask=going & inside, other=0)
        at -= STEP * L
        place -= STEP
        f = _score(psi, message, at, going & inside)
        w_next, e_next = weight_at(weight, edge, place - STEP + LEAD, t + 1 < steps, f.dtype)
        if HARD:
            own, other, stays, leader, runner_up = _hard_choices(f, w, label)
            g = tl.where(tl.maximum(own, other) > -float("inf"), g, 0)
            kept = tl.where(stays, g, 0)
            moved = g - kept
            from_leader = tl.where(label == leader, moved, 0)
            new = kept + tl.where(label == leader, sum_over(moved - from_leader, ROWS=False), 0)
            new += tl.where(label == runner_up, sum_over(from_leader, ROWS=False), 0)
        else:
            _, others, z, own, norm, top, leads, rest, exponent, total, ratio = _soft_terms(f, w, LOG2E / gamma, label)
            # What part of a label's message comes from itself, and from each other label per unit of its exponential.
            inverse = 1 / norm
            stays = tl.where(z > 0, 1, own) * inverse
            moves = tl.where(z > 0, own, 1) * inverse
            alone = others == 0
            stays = tl.where(alone, tl.where(f + w > -float("inf"), 1.0, 0.0), stays)
            moves = tl.where(alone | (top == -float("inf")), 0, moves)
            kept = stays * g
            moved = moves * g
            to_leader = sum_over(tl.where(leads, 0, moved), ROWS=False)
            from_leader = sum_over(tl.where(leads, moved, 0), ROWS=False)
            new = kept + tl.where(leads, to_leader, rest * (ratio * (to_leader - moved) + from_leader))
            if ENTROPY:
                weighed = tl.where(rest > 0, rest * exponent, 0)
                sum_weighed = sum_over(weighed, ROWS=False)
                behind = tl.where(ratio > 0, log2(ratio), 0)
                mean = ratio * (sum_weighed - weighed + behind * (total - rest))
                mean = tl.where(leads, sum_weighed, mean)
                lost = tl.where(z > 0, z * others * moves, tl.where(stays > 0, -z * stays, 0))
                h = LN2 * (log2(norm) + lost - moves * mean)
                entropy += tl.where(going & (moves > 0), h * g, 0)
        if grad_weight is not None:
            tl.store(grad_weight + e, sum_over(kept, ROWS=False), mask=going)
        tl.store(adjoint + at, new, mask=going & inside)
        a = tl.where(going, new, a)
        w, e = w_next, e_next
    return tl.sum(entropy) + tl.sum(energy_entropy)


@triton.jit
def _score(psi, message, at, mask):
    f = tl.load(psi + at, mask=mask, other=-float("inf"))
    return f + tl.load(message + at, mask=mask, other=0)


def scan(
    psi: Tensor,
    forward: Tensor,
    backward: Tensor,
    energy: Tensor,
    weight: Tensor,
    layout: ChainLayout,
    gamma: Tensor | None,
) -> None:
    """Fill forward and backward [B, S, L] and energy [B, C]; weight is [B or 1, E]."""
    B, S, L = psi.shape
    C = layout.start.shape[0] - 1
    blocks = _blocks(L)
    scan_kernel[(2 * B * -(-C // blocks["CHAINS"]),)](
        psi, forward, backward, energy, weight, weight.stride(0) if weight.shape[0] > 1 else 0,
        layout.start, layout.edge, gamma, B, S, C, L=L, **blocks,
    )  # fmt: skip


def adjoint(
    grads: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    weight: Tensor,
    layout: ChainLayout,
    gamma: Tensor | None,
    needs_weight: bool,
    needs_gamma: bool,
) -> list[Tensor]:
    """Gradients of psi, then of the weight if needed, then of gamma if needed."""
    psi, forward, backward, _ = saved
    B, S, L = psi.shape
    C, E = layout.start.shape[0] - 1, weight.shape[1]
    blocks = _blocks(L)
    programs = 2 * B * -(-C // blocks["CHAINS"])
    adjoint = psi.new_empty(2, B, S, L)
    grad_weight = psi.new_empty(2, B, E) if needs_weight else None
    entropy = psi.new_empty(programs) if needs_gamma else None
    adjoint_kernel[(programs,)](
        psi, forward, backward, *grads, adjoint, grad_weight, entropy,
        weight, weight.stride(0) if weight.shape[0] > 1 else 0, layout.start, layout.edge, gamma, B, S, C, E,
        L=L, **blocks,
    )  # fmt: skip
    gradients = [adjoint[0] + adjoint[1]]
    if grad_weight is not None:
        over = (0,) if weight.shape[0] > 1 else (0, 1)
        gradients.append(grad_weight.sum(over).view_as(weight).to(weight.dtype))
    if entropy is not None:
        gradients.append(entropy.sum())
    return gradients
