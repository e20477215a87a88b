"""Labelling nodes level by level on the GPU, in one launch (`team.py`): conditional decoding, and a forest at once."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (kernels are Triton's language, which only looks like Python)

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.kernels.order import SweepOrder
from dualcrf.kernels.triton import potts
from dualcrf.kernels.triton.edges import batch_strides, crossed, scores
from dualcrf.kernels.triton.team import gather_teams, meet, widest
from dualcrf.kernels.triton.tiles import first_over, labels, max_over, smooth_max, tile_blocks


# Measured on an H200: 64 models of 33×33, L = 21, strides 1 and 2, dense 0.64 ms; 8 Potts grids of 257×257, strides 1, 3, 9, 27
# 4.5 ms (9 µs a level). To improve a forest takes twice as long: it visits the levels there and back.
@triton.jit(do_not_specialize=["B", "N", "levels", "reverse", "teams", "size"])
def decode_kernel(
    values, chosen, one, two, one_batch, two_batch, edge, node, flip,
    level_start, level_node, place_start, node_place, B, N, levels, reverse, counters, teams, size,
    L: tl.constexpr, LABELS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr,
    KIND: tl.constexpr, HAS_FLIPS: tl.constexpr,
):  # fmt: skip
    """Give every node its best label: `values` [B, N, L] and the edges to the nodes that have one in `chosen` [B, N]."""
    team, member = tl.program_id(0) // size, tl.program_id(0) % size
    label = labels(LABELS, False, PIECE)
    arrivals = 0
    for item in range(team, B, teams):
        b = tl.cast(item, tl.int64)
        own_values, own_chosen = values + b * N * L, chosen + b * N
        for step in range(levels):
            level = step if reverse == 0 else levels - 1 - step
            first, last = tl.load(level_start + level), tl.load(level_start + level + 1)
            for position in range(first + member, last, size):
                i = tl.load(level_node + position).to(tl.int64)
                total = tl.load(own_values + i * L + label, mask=label < L, other=-float("inf"))
                for at in range(tl.load(place_start + i), tl.load(place_start + i + 1)):
                    place = tl.load(node_place + at).to(tl.int64)
                    for direction in tl.static_range(2):
                        if reverse == direction:
                            BEFORE: tl.constexpr = direction == 0
                            if _joined(edge, place, BEFORE):
                                total += _row(
                                    own_chosen, one, two, one_batch, two_batch, edge, node, flip, b, place, label,
                                    L, KIND, HAS_FLIPS, BEFORE, total.dtype,
                                )  # fmt: skip
                tl.store(own_chosen + i, tl.sum(_best(total, label)))
            arrivals += size
            meet(counters, team, arrivals)


@triton.jit(do_not_specialize=["B", "N", "levels", "reverse", "teams", "size"])
def improve_kernel(
    total, chosen, parent, one, two, one_batch, two_batch, edge, node, flip,
    level_start, level_node, place_start, node_place, B, N, levels, reverse, counters, teams, size,
    L: tl.constexpr, LABELS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr,
    KIND: tl.constexpr, HAS_FLIPS: tl.constexpr,
):  # fmt: skip
    """Sum up in `total` [B, N, L], the unary scores at first, from the leaves to the roots; then choose on the way back."""
    team, member = tl.program_id(0) // size, tl.program_id(0) % size
    arrivals = 0
    for item in range(team, B, teams):
        b = tl.cast(item, tl.int64)
        own_total, own_chosen = total + b * N * L, chosen + b * N
        for step in range(2 * levels):
            upward = step < levels
            level = (2 * levels - 1 - step if upward == (reverse == 0) else step) % levels
            first, last = tl.load(level_start + level), tl.load(level_start + level + 1)
            for position in range(first + member, last, size):
                i = tl.load(level_node + position).to(tl.int64)
                up = tl.load(parent + i).to(tl.int64)
                if up > -2:
                    if upward:
                        for at in range(tl.load(place_start + i), tl.load(place_start + i + 1)):
                            place = tl.load(node_place + at).to(tl.int64)
                            for direction in tl.static_range(2):
                                _add(
                                    own_total, own_chosen, parent, one, two, one_batch, two_batch, edge, node, flip, b,
                                    i, place, L, LABELS, CHUNK, PIECE, KIND, HAS_FLIPS, direction == 0,
                                )  # fmt: skip
                    else:
                        for direction in tl.static_range(2):
                            if reverse == direction:
                                _choose(
                                    own_total, own_chosen, one, two, one_batch, two_batch, edge, node, flip, b,
                                    i, up, L, LABELS, PIECE, KIND, HAS_FLIPS, direction == 0,
                                )  # fmt: skip
            arrivals += size
            meet(counters, team, arrivals)


@triton.jit
def _add(
    total, chosen, parent, one, two, one_batch, two_batch, edge, node, flip, b, i, place,
    L: tl.constexpr, LABELS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr,
    KIND: tl.constexpr, HAS_FLIPS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Add to a node's total what comes from the place before or after: the row of a node outside the forest, or the message
    of a child."""
    CHUNKS: tl.constexpr = (L + CHUNK - 1) // CHUNK
    DTYPE: tl.constexpr = total.dtype.element_ty
    label = labels(LABELS, False, PIECE)
    if _joined(edge, place, BEFORE):
        lead = place - 1 if BEFORE else place
        given = place - 1 if BEFORE else place + 1
        other = tl.load(node + given).to(tl.int64)
        above = tl.load(parent + other)
        at = total + i * L
        tl.debug_barrier()
        if above == -2:
            row = _row(
                chosen, one, two, one_batch, two_batch, edge, node, flip, b, place, label, L, KIND, HAS_FLIPS, BEFORE, DTYPE
            )
            tl.store(at + label, tl.load(at + label, mask=label < L, other=0) + row, mask=label < L)
        elif above == lead:
            if KIND == "potts":
                score = tl.load(total + other * L + label, mask=label < L, other=-float("inf"))
                w = tl.load(one + b * one_batch + tl.load(edge + lead)).to(DTYPE)
                m = potts.message_over(score, tl.full([1, 1, 1], 0, DTYPE) + w, 1.0, label, True)
                tl.store(at + label, tl.load(at + label, mask=label < L, other=0) + m, mask=label < L)
            else:
                source = labels(LABELS, BEFORE, PIECE)
                chunk = labels(CHUNK, not BEFORE, PIECE)
                score = tl.load(total + other * L + source, mask=source < L, other=-float("inf"))
                for c in range(CHUNKS):
                    target = chunk + c * CHUNK
                    tile = crossed(
                        one, two, one_batch, two_batch, edge, node, flip, b, given, source, target,
                        L, KIND, HAS_FLIPS, BEFORE, DTYPE,
                    )  # fmt: skip
                    m = smooth_max(tile + score, 1.0, BEFORE, True)
                    tl.store(at + target, tl.load(at + target, mask=target < L, other=0) + m, mask=target < L)


@triton.jit
def _choose(
    total, chosen, one, two, one_batch, two_batch, edge, node, flip, b, i, up,
    L: tl.constexpr, LABELS: tl.constexpr, PIECE: tl.constexpr,
    KIND: tl.constexpr, HAS_FLIPS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """A node's best label, given that of its parent, which is before or after it on their chain."""
    label = labels(LABELS, False, PIECE)
    value = tl.load(total + i * L + label, mask=label < L, other=-float("inf"))
    if up >= 0:
        place = up + 1 if BEFORE else up
        value += _row(
            chosen, one, two, one_batch, two_batch, edge, node, flip, b, place, label,
            L, KIND, HAS_FLIPS, BEFORE, value.dtype,
        )  # fmt: skip
    tl.store(chosen + i, tl.sum(_best(value, label)))


@triton.jit
def _joined(edge, place, BEFORE: tl.constexpr):
    """Whether the chain has a place before, or after, this one."""
    lead = place - 1 if BEFORE else place
    return tl.load(edge + lead, mask=lead >= 0, other=-1) >= 0


@triton.jit
def _row(
    chosen, one, two, one_batch, two_batch, edge, node, flip, b, place, label,
    L: tl.constexpr, KIND: tl.constexpr, HAS_FLIPS: tl.constexpr, BEFORE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Scores of the labels at a place, given the label of the node before or after it on the chain."""
    lead = place - 1 if BEFORE else place
    given_label = tl.load(chosen + tl.load(node + (place - 1 if BEFORE else place + 1)))
    if KIND == "potts":
        w = tl.load(one + b * one_batch + tl.load(edge + lead)).to(DTYPE)
        row = tl.where(label == given_label, w, 0)
    else:
        given = tl.full([1, 1, 1], 0, tl.int32) + given_label.to(tl.int32)
        rows, cols = given, label
        if not BEFORE:
            rows, cols = label, given
        row = scores(
            one, two, one_batch, two_batch, edge, node, flip, b, lead, True, rows, cols, L, KIND, HAS_FLIPS, True, DTYPE
        )
    return row


@triton.jit
def _best(values, label):
    return first_over(values == max_over(values, False), label, False)


def decode_labels(
    scores: Tensor,
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    order: SweepOrder,
    kind: str,
    reverse: bool,
) -> Tensor:
    """See `ops.schedules.decode_labels`."""
    chosen = torch.empty(scores.shape[:2], dtype=torch.int64, device=scores.device)
    _launch(decode_kernel, [scores.contiguous(), chosen], parameters, layout, order, kind, reverse)
    return chosen


def improve_labels(
    labels: Tensor,
    unary: Tensor,
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    order: SweepOrder,
    kind: str,
    parent: Tensor,
    reverse: bool,
) -> None:
    """See `ops.schedules.improve_labels`."""
    total = unary.clone(memory_format=torch.contiguous_format)
    chosen = labels.contiguous()
    _launch(improve_kernel, [total, chosen, parent], parameters, layout, order, kind, reverse)
    if chosen is not labels:
        labels.copy_(chosen)


def _launch(
    kernel: Any,
    state: list[Tensor],
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    order: SweepOrder,
    kind: str,
    reverse: bool,
) -> None:
    B, N, L = state[0].shape
    if B == 0:
        return
    one, two = parameters[0], parameters[-1]
    arguments = [
        *state, one, two, *batch_strides([one, two]), layout.edge, layout.node, layout.flip,
        order.start, order.node, order.place_start, order.place, B, N, len(order.levels) - 1, int(reverse),
    ]  # fmt: skip
    options = {**blocks(L, kind), "L": L, "KIND": kind, "HAS_FLIPS": layout.has_flips, "launch_cooperative_grid": True}
    teams = gather_teams(kernel, arguments, options, B, widest(order))
    kernel[teams.grid](*arguments, *teams.arguments, **options)


def blocks(num_labels: int, kind: str) -> dict[str, int]:
    """Sizes of the tensors, and the warps that hold them."""
    return tile_blocks(num_labels) | ({"num_warps": 1} if kind == "potts" else {})
