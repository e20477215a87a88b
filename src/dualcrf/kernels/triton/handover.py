"""Hand-over on the GPU: one launch per family, all its chains and all items at once.

Without a tile (Potts) a program walks several chains in step and keeps their messages in registers; what it reads for the
next nodes is on its way while it works on these. With a tile a program walks one chain and hands its messages from step to
step through memory, as in `chain.py`.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (kernels are Triton's language, which only looks like Python)

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.kernels.triton import potts
from dualcrf.kernels.triton.edges import batch_strides, crossed
from dualcrf.kernels.triton.tiles import labels, max_over, smooth_max, tile_blocks


# 64 models of 33×33, L = 21, strides 1 and 2, fp32, dense. Bytes: the scores twice, 939 MB, 0.22 ms. Launches: 4. Measured
# on an H200: 0.45 ms a sweep.
@triton.jit(do_not_specialize=["B", "N", "S", "C", "first_chain"])
def handover_kernel(
    scores, handed, message, energy, one, two, one_batch, two_batch, start, edge, node, flip, count, first_chain, B, N, S, C,
    L: tl.constexpr, LABELS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr,
    KIND: tl.constexpr, HAS_FLIPS: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """One chain of one item: messages FORWARD, then back from where they end, taking out.

    `message` [B, S, L] holds the messages into every place, and after a place is done the one that goes back from it.
    """
    program = tl.program_id(0)
    b = (program % B).to(tl.int64)
    chain = first_chain + program // B
    scores, handed, message = scores + b * N * L, handed + b * S * L, message + b * S * L
    first = tl.load(start + chain).to(tl.int64)
    steps = (tl.load(start + chain + 1) - 1 - first).to(tl.int32)
    CHUNKS: tl.constexpr = (L + CHUNK - 1) // CHUNK
    DTYPE: tl.constexpr = scores.dtype.element_ty
    STEP: tl.constexpr = 1 if FORWARD else -1

    source = labels(LABELS, FORWARD, PIECE)
    chunk = labels(CHUNK, not FORWARD, PIECE)
    place = first if FORWARD else first + steps
    tl.store(message + place * L + source, tl.zeros_like(source).to(DTYPE), mask=source < L)
    for _ in range(steps):
        left = _multipliers(scores, handed, count, tl.load(node + place).to(tl.int64), place, source, source < L, L)
        tl.debug_barrier()
        left += tl.load(message + place * L + source, mask=source < L, other=0)
        for c in range(CHUNKS):
            target = chunk + c * CHUNK
            tile = crossed(
                one, two, one_batch, two_batch, edge, node, flip, b, place, source, target,
                L, KIND, HAS_FLIPS, FORWARD, DTYPE,
            )  # fmt: skip
            m = smooth_max(tile + left, 1.0, FORWARD, True)
            tl.store(message + (place + STEP) * L + target, m, mask=target < L)
        place += STEP

    source = labels(LABELS, not FORWARD, PIECE)
    chunk = labels(CHUNK, FORWARD, PIECE)
    inside = source < L
    for t in range(steps + 1):
        i = tl.load(node + place).to(tl.int64)
        left = _multipliers(scores, handed, count, i, place, source, inside, L)
        tl.debug_barrier()
        into = tl.load(message + place * L + source, mask=inside, other=0)
        back = tl.load(message + (place + STEP) * L + source, mask=inside & (t > 0), other=0)
        excess, peak = _excess(left + into + back, not FORWARD)
        if t == 0:
            tl.store(energy + b * C + chain, tl.sum(peak))
        _give(scores, handed, i, place, source, excess, inside, L)
        left += back - excess
        tl.debug_barrier()
        if t < steps:
            for c in range(CHUNKS):
                target = chunk + c * CHUNK
                tile = crossed(
                    one, two, one_batch, two_batch, edge, node, flip, b, place, source, target,
                    L, KIND, HAS_FLIPS, not FORWARD, DTYPE,
                )  # fmt: skip
                m = smooth_max(tile + left, 1.0, not FORWARD, True)
                tl.store(message + place * L + target, m, mask=target < L)
        place -= STEP


# 8 image grids of 257×257, L = 21, strides 1, 3, 9, 27, fp32: 4.2 M places. Bytes: h and R read in both passes and written in
# one, the messages written and read: 2.8 GB, 0.67 ms. Launches: 8. Measured on an H200: 2.4 ms a sweep.
@triton.jit(do_not_specialize=["B", "N", "S", "C", "first_chain", "last_chain"])
def potts_handover_kernel(
    scores, handed, partial, energy, weight, weight_batch, start, edge, node, count, first_chain, last_chain, B, N, S, C,
    L: tl.constexpr, LABELS: tl.constexpr, LANES: tl.constexpr, CHAINS: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """CHAINS chains of one item; `partial` [B, S, L] holds the max-marginals of the part of a chain up to every place."""
    program = tl.program_id(0)
    b = (program % B).to(tl.int64)
    chain = first_chain + program // B * CHAINS + tl.arange(0, CHAINS)[:, None, None]
    exists = chain < last_chain
    scores, handed, partial = scores + b * N * L, handed + b * S * L, partial + b * S * L
    weight += b * weight_batch
    first = tl.load(start + chain, mask=exists, other=0).to(tl.int64)
    steps = tl.load(start + chain + 1, mask=exists, other=1).to(tl.int64) - 1 - first
    longest = tl.max(tl.where(exists, steps, 0))
    STEP: tl.constexpr = 1 if FORWARD else -1
    LEAD: tl.constexpr = 0 if FORWARD else -1  # a message from place s crosses the edge that leaves place s + LEAD
    BACK: tl.constexpr = -1 - LEAD
    label = potts.labels_of(LABELS, LANES)
    inside = exists & (label < L)

    place = first if FORWARD else first + steps
    i = tl.load(node + place, mask=exists, other=0).to(tl.int64)
    f = _multipliers(scores, handed, count, i, place, label, inside, L)
    tl.store(partial + place * L + label, f, mask=inside)
    i = tl.load(node + place + STEP, mask=exists & (steps > 0), other=0).to(tl.int64)
    w, _ = potts.weight_at(weight, edge, place + LEAD, exists & (steps > 0), f.dtype)
    for t in range(longest):
        going = inside & (t < steps)
        own = _multipliers(scores, handed, count, i, place + STEP, label, going, L)
        ahead = exists & (t + 1 < steps)
        i = tl.load(node + place + 2 * STEP, mask=ahead, other=0).to(tl.int64)
        w_next, _ = potts.weight_at(weight, edge, place + STEP + LEAD, ahead, f.dtype)
        f = own + potts.message_over(f, w, 1.0, label, True)
        place += STEP
        tl.store(partial + place * L + label, f, mask=going)
        w = w_next

    tl.debug_barrier()
    place = first + steps if FORWARD else first
    i = tl.load(node + place, mask=exists, other=0).to(tl.int64)
    into = tl.load(partial + place * L + label, mask=inside, other=-float("inf"))
    own = _multipliers(scores, handed, count, i, place, label, inside, L)
    w, _ = potts.weight_at(weight, edge, place + BACK, exists & (steps > 0), own.dtype)
    back = tl.zeros_like(into)
    for t in range(longest + 1):
        ahead = t < steps
        i_next = tl.load(node + place - STEP, mask=exists & ahead, other=0).to(tl.int64)
        into_next = tl.load(partial + (place - STEP) * L + label, mask=inside & ahead, other=-float("inf"))
        own_next = _multipliers(scores, handed, count, i_next, place - STEP, label, inside & ahead, L)
        w_next, _ = potts.weight_at(weight, edge, place - STEP + BACK, exists & (t + 1 < steps), own.dtype)
        excess, peak = _excess(into + back, False)
        if t == 0:
            tl.store(energy + b * C + chain, peak, mask=exists)
        _give(scores, handed, i, place, label, excess, inside & (t <= steps), L)
        back = potts.message_over(own + back - excess, w, 1.0, label, True)
        place -= STEP
        i, into, own, w = i_next, into_next, own_next, w_next


@triton.jit
def _multipliers(scores, handed, count, i, place, label, inside, L: tl.constexpr):
    """A chain's scores at some places; -inf outside."""
    own = tl.load(scores + i * L + label, mask=inside, other=-float("inf"))
    return own / tl.load(count + i).to(own.dtype) - tl.load(handed + place * L + label, mask=inside, other=0)


@triton.jit
def _excess(marginals, ROWS: tl.constexpr):
    """What is handed over, half of what a label lacks to the best one, and the best one's max-marginal."""
    peak = max_over(marginals, ROWS)
    return tl.where(marginals > -float("inf"), (marginals - peak) / 2, 0), peak


@triton.jit
def _give(scores, handed, i, place, label, excess, inside, L: tl.constexpr):
    at = scores + i * L + label
    tl.store(at, tl.load(at, mask=inside, other=0) + excess, mask=inside)
    at = handed + place * L + label
    tl.store(at, tl.load(at, mask=inside, other=0) + excess, mask=inside)


def handover_sweeps(
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    kind: str,
    scores: Tensor,
    handed: Tensor,
    sweeps: int,
    reverse: bool,
) -> Tensor:
    """See `ops.schedules.handover_sweeps`."""
    B, N, L = scores.shape
    S, C = handed.shape[1], layout.families[-1]
    energy = scores.new_empty(sweeps, B, C)
    message = torch.empty_like(handed)
    for sweep in range(sweeps if B else 0):
        for first, last in pairwise(layout.families):
            if first < last:
                arguments = (parameters, layout, kind, scores, handed, message, energy[sweep], first, last)
                _hand_over(*arguments, reverse == (sweep % 2 == 1), (B, N, S, C, L))
    return energy.sum(2, dtype=torch.float64).T


def _hand_over(
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    kind: str,
    scores: Tensor,
    handed: Tensor,
    message: Tensor,
    energy: Tensor,
    first: int,
    last: int,
    forward: bool,
    sizes: tuple[int, int, int, int, int],
) -> None:
    """One family's turn."""
    B, N, S, C, L = sizes
    strides = batch_strides(parameters)
    if kind == "potts":
        blocks = potts._blocks(L)
        potts_handover_kernel[(B * -(-(last - first) // blocks["CHAINS"]),)](
            scores, handed, message, energy, parameters[0], strides[0], layout.start, layout.edge, layout.node,
            layout.count, first, last, B, N, S, C, L=L, FORWARD=forward, **blocks,
        )  # fmt: skip
    else:
        handover_kernel[(B * (last - first),)](
            scores, handed, message, energy, parameters[0], parameters[-1], strides[0], strides[-1],
            layout.start, layout.edge, layout.node, layout.flip, layout.count, first, B, N, S, C,
            L=L, KIND=kind, HAS_FLIPS=layout.has_flips, FORWARD=forward, **tile_blocks(L),
        )  # fmt: skip
