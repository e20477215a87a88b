"""Wavefront sweeps on the GPU: all levels of all sweeps in one launch (`team.py`).

With a tile (`tiles.py`) a task is one place of a node; without (Potts, `potts.py`) it is a node, and the rows of a tensor
are its places.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (kernels are Triton's language, which only looks like Python)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.kernels.order import SweepOrder
from dualcrf.kernels.triton import potts
from dualcrf.kernels.triton.edges import batch_strides, crossed
from dualcrf.kernels.triton.team import gather_teams, meet, widest
from dualcrf.kernels.triton.tiles import labels, max_over, smooth_max, tile_blocks


# 64 models of 33×33, L = 21, strides 1 and 2, fp32, dense: 266,112 messages and 65 levels a sweep. Bytes: the scores once,
# 469 MB, 0.11 ms. Operations: some 800 warp instructions a message, with the node's sum: 0.24 ms. Launches: 1 for all sweeps.
# Measured on an H200: 0.52 ms a sweep, smoothed and hard; 0.33 for 16 models (5 µs a level, what each has to wait for), 0.79
# for 128. 8 Potts grids of 257×257, strides 1, 3, 9, 27, 513 levels: 2.7 ms a sweep, also 5 µs a level; bytes alone 0.25 ms.
@triton.jit(do_not_specialize=["B", "N", "S", "levels", "sweeps", "reverse", "teams", "size"])
def wavefront_kernel(
    unary, forward, backward, dual, one, two, one_batch, two_batch, edge, node, flip, gamma,
    level_start, level_node, place_start, node_place, B, N, S, levels, sweeps, reverse, counters, teams, size,
    L: tl.constexpr, LABELS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, PLACES: tl.constexpr,
    FAMILIES: tl.constexpr, KIND: tl.constexpr, HAS_FLIPS: tl.constexpr,
):  # fmt: skip
    """All sweeps of a team's items; `dual` [B, sweeps, size] gets every program's part."""
    program = tl.program_id(0)
    team = program // size
    member = program % size
    HARD: tl.constexpr = gamma is None
    TASKS: tl.constexpr = 1 if KIND == "potts" else FAMILIES  # of a node
    arrivals = 0
    for item in range(team, B, teams):
        b = tl.cast(item, tl.int64)
        own_unary, own_forward, own_backward = unary + b * N * L, forward + b * S * L, backward + b * S * L
        strength = 1.0 if HARD else tl.load(gamma + b)
        for sweep in range(sweeps):
            part = tl.zeros([1, 1, 1], tl.float64)
            backwards = (reverse + sweep) % 2
            for step in range(levels):
                level = step if backwards == 0 else levels - 1 - step
                first = tl.load(level_start + level)
                tasks = (tl.load(level_start + level + 1) - first) * TASKS
                for task in range(member, tasks, size):
                    i = tl.load(level_node + first + task // TASKS).to(tl.int64)
                    begin, end = tl.load(place_start + i), tl.load(place_start + i + 1)
                    for direction in tl.static_range(2):
                        if backwards == direction:
                            FORWARD: tl.constexpr = direction == 0
                            against = own_backward if FORWARD else own_forward
                            into = own_forward if FORWARD else own_backward
                            if KIND == "potts":
                                part += _send_all(
                                    own_unary, against, into, one + b * one_batch, edge, node, node_place,
                                    i, begin, end, strength, L, LABELS, PIECE, PLACES, FORWARD, HARD,
                                )  # fmt: skip
                            elif begin + task % TASKS < end:
                                part += _send(
                                    own_unary, against, into, one, two, one_batch, two_batch, edge, node, flip, b,
                                    node_place, i, begin, end, task % TASKS, strength,
                                    L, LABELS, CHUNK, PIECE, PLACES, KIND, HAS_FLIPS, FORWARD, HARD,
                                )  # fmt: skip
                arrivals += size
                meet(counters, team, arrivals)
            tl.store(dual + ((b * sweeps + sweep) * size + member), tl.sum(part))


@triton.jit
def _share(
    unary, against, into, node_place, i, begin, end,
    L: tl.constexpr, LABELS: tl.constexpr, PIECE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """A node's scores and all its messages, divided among its places; in column form."""
    label = labels(LABELS, False, PIECE)
    total = tl.load(unary + i * L + label, mask=label < L, other=-float("inf"))
    for at in range(begin, end, PLACES):
        which = at + tl.arange(0, PLACES)[:, None, None]
        place = tl.load(node_place + which, mask=which < end, other=0).to(tl.int64)
        inside = (which < end) & (label < L)
        messages = tl.load(into + place * L + label, mask=inside, other=0)
        messages += tl.load(against + place * L + label, mask=inside, other=0)
        total += tl.sum(messages, 0, keep_dims=True)
    return total / (end - begin).to(total.dtype)


@triton.jit
def _send(
    unary, against, into, one, two, one_batch, two_batch, edge, node, flip, b, node_place, i, begin, end, which, gamma,
    L: tl.constexpr, LABELS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, PLACES: tl.constexpr,
    KIND: tl.constexpr, HAS_FLIPS: tl.constexpr, FORWARD: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """One place's message; what was taken off it, or where the chain ends the maximum there."""
    CHUNKS: tl.constexpr = (L + CHUNK - 1) // CHUNK
    DTYPE: tl.constexpr = unary.dtype.element_ty
    label = labels(LABELS, False, PIECE)
    source = labels(LABELS, FORWARD, PIECE)
    chunk = labels(CHUNK, not FORWARD, PIECE)
    place = tl.load(node_place + begin + which).to(tl.int64)
    lead = place if FORWARD else place - 1
    goes = tl.load(edge + lead, mask=lead >= 0, other=-1) >= 0
    target_place = place + 1 if FORWARD else place - 1
    share = _share(unary, against, into, node_place, i, begin, end, L, LABELS, PIECE, PLACES)
    peak = smooth_max(share, gamma, False, HARD)
    if goes:
        score = share - tl.load(against + place * L + label, mask=label < L, other=0)
        if FORWARD:
            score = tl.reshape(score, [LABELS, 1, 1])
        to = tl.load(node + target_place).to(tl.int64)
        peak = tl.full([1, 1, 1], -float("inf"), DTYPE)
        for c in range(CHUNKS):
            target = chunk + c * CHUNK
            # Triton lays tensors out as the last load needs: the tile must not come before the node's scores.
            tile = crossed(
                one, two, one_batch, two_batch, edge, node, flip, b, place, source, target,
                L, KIND, HAS_FLIPS, FORWARD, DTYPE,
            )  # fmt: skip
            message = smooth_max(tile + score, gamma, FORWARD, HARD)
            allowed = tl.load(unary + to * L + target, mask=target < L, other=-float("inf")) > -float("inf")
            peak = tl.maximum(peak, max_over(tl.where(allowed, message, -float("inf")), not FORWARD))
            if CHUNKS == 1:
                message -= peak
            tl.store(into + target_place * L + target, tl.where(allowed, message, 0), mask=target < L)
        if CHUNKS > 1:
            tl.debug_barrier()
            message = tl.load(into + target_place * L + label, mask=label < L, other=0)
            allowed = tl.load(unary + to * L + label, mask=label < L, other=-float("inf")) > -float("inf")
            tl.store(into + target_place * L + label, tl.where(allowed, message - peak, 0), mask=label < L)
    return peak.to(tl.float64)


@triton.jit
def _send_all(
    unary, against, into, weight, edge, node, node_place, i, begin, end, gamma,
    L: tl.constexpr, LABELS: tl.constexpr, PIECE: tl.constexpr, PLACES: tl.constexpr,
    FORWARD: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """All messages of a node over Potts edges, and the sum of what `_send` returns."""
    STEP: tl.constexpr = 1 if FORWARD else -1
    label = labels(LABELS, False, PIECE)
    # All loads come first, as none waits for a sum, and in an order by which Triton lays the rest out as the last of them.
    which = begin + tl.arange(0, PLACES)[:, None, None]
    exists = which < end
    place = tl.load(node_place + which, mask=exists, other=0).to(tl.int64)
    lead = place if FORWARD else place - 1
    e = tl.load(edge + lead, mask=exists & (lead >= 0), other=-1)
    goes = e >= 0
    there = goes & (label < L)
    to = tl.load(node + place + STEP, mask=goes, other=0).to(tl.int64)
    own = tl.load(unary + i * L + label, mask=label < L, other=-float("inf"))
    w = tl.load(weight + e, mask=goes, other=0).to(own.dtype)
    allowed = tl.load(unary + potts.in_item(to, label, L), mask=there, other=-float("inf")) > -float("inf")
    at = potts.in_item(place, label, L)
    came = tl.load(into + at, mask=exists & (label < L), other=0)
    given = tl.load(against + at, mask=exists & (label < L), other=0)
    share = (own + tl.sum(came + given, 0, keep_dims=True)) / (end - begin).to(own.dtype)
    message = potts.message_over(share - given, w, gamma, label, HARD)
    peak = max_over(tl.where(allowed, message, -float("inf")), False)
    tl.store(into + STEP * L + at, tl.where(allowed, message - peak, 0), mask=there)
    last = smooth_max(share, gamma, False, HARD)
    return tl.sum(tl.where(goes, peak, tl.where(exists, last, 0)).to(tl.float64), 0, keep_dims=True)


def blocks(num_labels: int, families: int, kind: str) -> dict[str, int]:
    """Sizes of the tensors and warps: `tile_blocks`, and PLACES rows for the places of a node, at most one of each family.

    With a tile more places than rows take several rounds.
    """
    sizes = tile_blocks(num_labels) | {"FAMILIES": families}
    rows = triton.next_power_of_2(families)
    if kind == "potts":
        return sizes | {"PLACES": rows, "num_warps": min(16, max(1, rows * sizes["LABELS"] // 256))}
    return sizes | {"PLACES": max(1, min(8, rows, 256 * sizes["num_warps"] // sizes["LABELS"]))}


def wavefront_sweeps(
    unary: Tensor,
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    order: SweepOrder,
    kind: str,
    gamma: Tensor | None,
    forward: Tensor,
    backward: Tensor,
    sweeps: int,
    reverse: bool,
) -> Tensor:
    """See `ops.schedules.wavefront_sweeps`."""
    B, N, L = unary.shape
    families = len(layout.families) - 1
    if B == 0 or sweeps == 0:
        return unary.new_empty(B, sweeps, dtype=torch.float64)
    unary, (one, two) = unary.contiguous(), (parameters[0], parameters[-1])
    options = {
        **blocks(L, families, kind), "L": L, "KIND": kind, "HAS_FLIPS": layout.has_flips, "launch_cooperative_grid": True,
    }  # fmt: skip
    tasks = widest(order) * (1 if kind == "potts" else families)

    def arguments(dual: Tensor) -> list:
        return [
            unary, forward, backward, dual, one, two, *batch_strides([one, two]), layout.edge, layout.node, layout.flip,
            gamma, order.start, order.node, order.place_start, order.place,
            B, N, forward.shape[1], len(order.levels) - 1, sweeps, int(reverse),
        ]  # fmt: skip

    teams = gather_teams(wavefront_kernel, arguments(unary.new_empty(0, dtype=torch.float64)), options, B, tasks)
    dual = unary.new_empty(B, sweeps, teams.size, dtype=torch.float64)
    wavefront_kernel[teams.grid](*arguments(dual), *teams.arguments, **options)
    return dual.sum(2)
