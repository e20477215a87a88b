"""Messages along all chains of a graph and their gradients on the GPU.

A program walks one chain of one batch item in one direction and holds the scores of one edge as a tile (`tiles.py`). A
message goes from the *source* label to the *target* label: in the forward direction sources are a tile's rows, in the
backward one its columns. A step hands its message to the next one through memory, where it is written anyway, so that
more than 64 labels go through a tile in chunks of targets in just the same way. How each kind of edge is read and its
gradient given back stands in `edges.py`; Potts edges have no tile and kernels of their own (`potts.py`).
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (kernels are Triton's language, which only looks like Python)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.kernels.triton import potts
from dualcrf.kernels.triton.edges import (
    batch_strides,
    collect,
    contribution,
    edge_range,
    give_back,
    new_gradient,
    scores,
    shares,
)
from dualcrf.kernels.triton.tiles import (
    LOG2E,
    energy_adjoint,
    finite,
    first_over,
    labels,
    max_over,
    smooth_max,
    soft_weights,
    sum_over,
    tile_blocks,
)


# At the paper's size (batch 16, 33×33, L = 21, strides 1 and 2, fp32, dense): 66,528 edges, 117 MB of scores, 133,056 steps.
# Bytes: the scores once for each direction (some of the second reading from L2), 18 MB of places: 160-250 MB, 40-60 µs.
# Operations: 18 registers of tile × (load, add, max, subtract, multiply, exp2, add), 16 or 42 shuffles, some 100 for addresses
# and the message: 336 warp instructions a step, at 132 × 4 a clock 48 µs. Launches: 1. Measured on an H200: 81 µs.
@triton.jit(do_not_specialize=["B", "S", "C"])
def scan_kernel(
    psi, forward, backward, energy, one, two, one_batch, two_batch, start, edge, node, flip, gamma, B, S, C,
    L: tl.constexpr, LABELS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr,
    KIND: tl.constexpr, HAS_FLIPS: tl.constexpr,
):  # fmt: skip
    """Messages of one chain, one batch item, one direction, and in the forward direction the chain's energy."""
    program = tl.program_id(0)
    b = (program // 2 % B).to(tl.int64)
    chain = program // (2 * B)
    first = tl.load(start + chain).to(tl.int64)
    steps = (tl.load(start + chain + 1) - 1 - first).to(tl.int32)
    item = b * S * L
    HARD: tl.constexpr = gamma is None
    strength = 1.0 if HARD else tl.load(gamma)
    for direction in tl.static_range(2):
        if program % 2 == direction:
            FORWARD: tl.constexpr = direction == 0
            f = _scan(
                psi + item, (forward if FORWARD else backward) + item,
                one, two, one_batch, two_batch, edge, node, flip, b, first, steps, strength,
                L, LABELS, CHUNK, PIECE, KIND, HAS_FLIPS, FORWARD, HARD,
            )  # fmt: skip
            if FORWARD:
                tl.store(energy + b * C + chain, tl.sum(smooth_max(f, strength, True, HARD)))


@triton.jit
def _scan(
    psi, message, one, two, one_batch, two_batch, edge, node, flip, b, first, steps, gamma,
    L: tl.constexpr, LABELS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr,
    KIND: tl.constexpr, HAS_FLIPS: tl.constexpr, FORWARD: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    """Write the messages into every place; return the scores at the place where they end, in the sources' form."""
    CHUNKS: tl.constexpr = (L + CHUNK - 1) // CHUNK
    DTYPE: tl.constexpr = psi.dtype.element_ty
    STEP: tl.constexpr = 1 if FORWARD else -1
    begin = first if FORWARD else first + steps
    source = labels(LABELS, FORWARD, PIECE)
    chunk = labels(CHUNK, not FORWARD, PIECE)
    rounds = steps * CHUNKS
    tile = _tile(
        one, two, one_batch, two_batch, edge, node, flip, b, begin, rounds > 0, source, chunk,
        L, KIND, HAS_FLIPS, FORWARD, DTYPE,
    )  # fmt: skip
    tl.store(message + begin * L + source, tl.zeros_like(source).to(DTYPE), mask=source < L)
    score = tl.load(psi + begin * L + source, mask=source < L, other=-float("inf"))
    for t in range(rounds):
        place = begin + STEP * (t // CHUNKS)
        target = chunk + t % CHUNKS * CHUNK
        if t % CHUNKS == 0:
            tl.debug_barrier()
        x = tile + (score + tl.load(message + place * L + source, mask=source < L, other=0))
        # What the next round reads is on its way while this one is worked on. Triton lays a loop's tensors out as the
        # last load in it needs, so the tile comes last.
        ahead = begin + STEP * ((t + 1) // CHUNKS)
        score = tl.load(psi + ahead * L + source, mask=source < L, other=-float("inf"))
        tile = _tile(
            one, two, one_batch, two_batch, edge, node, flip, b, ahead, t + 1 < rounds,
            source, chunk + (t + 1) % CHUNKS * CHUNK, L, KIND, HAS_FLIPS, FORWARD, DTYPE,
        )  # fmt: skip
        m = smooth_max(x, gamma, FORWARD, HARD)
        tl.store(message + (place + STEP) * L + target, m, mask=target < L)
    tl.debug_barrier()
    end = begin + STEP * steps
    return score + tl.load(message + end * L + source, mask=source < L, other=0)


@triton.jit
def _tile(
    one, two, one_batch, two_batch, edge, node, flip, b, place, exists, source, target,
    L: tl.constexpr, KIND: tl.constexpr, HAS_FLIPS: tl.constexpr, FORWARD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The scores that a message from `place` crosses, if it exists."""
    rows, cols = source, target
    if not FORWARD:
        place -= 1
        rows, cols = target, source
    return scores(
        one, two, one_batch, two_batch, edge, node, flip, b, place, exists, rows, cols,
        L, KIND, HAS_FLIPS, True, DTYPE,
    )  # fmt: skip


# At the paper's size. Bytes: the scores once for each direction, 35 MB of places read, 50 MB written: 200-320 MB, 50-75 µs.
# Operations: the scan's, 18 × 2 and the sums over the other axis: 494 warp instructions a step, 71 µs. Launches: 1, and 1 for
# the sum of the two directions. Measured on an H200: 122 µs together.
@triton.jit(do_not_specialize=["B", "S", "C"])
def adjoint_kernel(
    psi, forward, backward, grad_forward, grad_backward, grad_energy, adjoint, score, peak, spread, grad_gamma,
    one, two, one_batch, two_batch, start, edge, node, flip, gamma, B, S, C,
    L: tl.constexpr, LABELS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr,
    KIND: tl.constexpr, HAS_FLIPS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Total gradients of the scores f = psi + message at every place of one chain, one batch item, one direction.

    `adjoint` [2, B, S, L] gets them. With KEEP `score`, `peak` and `spread` get what the gradient of an edge needs: f
    where a message left, and where it arrived the maximum (hard: the label it came from) and its gradient over its sum
    of exponentials.
    """
    program = tl.program_id(0)
    b = (program // 2 % B).to(tl.int64)
    chain = program // (2 * B)
    first = tl.load(start + chain).to(tl.int64)
    steps = (tl.load(start + chain + 1) - 1 - first).to(tl.int32)
    item = b * S * L
    own = (program % 2 * B + b) * S * L
    HARD: tl.constexpr = gamma is None
    ENTROPY: tl.constexpr = grad_gamma is not None
    strength = 1.0 if HARD else tl.load(gamma)
    share = tl.load(grad_energy + b * C + chain)
    for direction in tl.static_range(2):
        if program % 2 == direction:
            FORWARD: tl.constexpr = direction == 0
            entropy = _adjoint(
                psi + item, (forward if FORWARD else backward) + item,
                (grad_forward if FORWARD else grad_backward) + item, share,
                adjoint + own, score + own, peak + own, spread + own,
                one, two, one_batch, two_batch, edge, node, flip, b, first, steps, strength,
                L, LABELS, CHUNK, PIECE, KIND, HAS_FLIPS, FORWARD, HARD, KEEP, ENTROPY,
            )  # fmt: skip
            if ENTROPY:
                tl.store(grad_gamma + program, entropy)


@triton.jit
def _adjoint(
    psi, message, grad_message, grad_energy, adjoint, score, peak, spread,
    one, two, one_batch, two_batch, edge, node, flip, b, first, steps, gamma,
    L: tl.constexpr, LABELS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr,
    KIND: tl.constexpr, HAS_FLIPS: tl.constexpr, FORWARD: tl.constexpr, HARD: tl.constexpr,
    KEEP: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Run against the messages; return what this chain adds to gamma's gradient."""
    CHUNKS: tl.constexpr = (L + CHUNK - 1) // CHUNK
    DTYPE: tl.constexpr = psi.dtype.element_ty
    STEP: tl.constexpr = 1 if FORWARD else -1
    end = first + steps if FORWARD else first
    source = labels(LABELS, FORWARD, PIECE)
    chunk = labels(CHUNK, not FORWARD, PIECE)
    rounds = steps * CHUNKS
    tile = _tile(
        one, two, one_batch, two_batch, edge, node, flip, b, end - STEP, rounds > 0, source, chunk,
        L, KIND, HAS_FLIPS, FORWARD, DTYPE,
    )  # fmt: skip
    part = tl.zeros_like(tile)
    entropy = tl.zeros_like(chunk).to(DTYPE)
    last = tl.zeros_like(source).to(DTYPE)
    energy_entropy = 0.0
    if FORWARD:
        # The energy is a message from the last place to nowhere.
        f = _score(psi, message, end, True, source, L)
        last, end_entropy = energy_adjoint(f, source, grad_energy, gamma, True, HARD, ENTROPY)
        energy_entropy = tl.sum(end_entropy)
    tl.store(adjoint + end * L + source, last, mask=source < L)
    f = _score(psi, message, end - STEP, rounds > 0, source, L)
    for t in range(rounds):
        into = end - STEP * (t // CHUNKS)
        place = into - STEP
        target = chunk + t % CHUNKS * CHUNK
        if t % CHUNKS == 0:
            tl.debug_barrier()
        g = tl.load(grad_message + into * L + target, mask=target < L, other=0)
        g += tl.load(adjoint + into * L + target, mask=target < L, other=0)
        x = tile + f
        if KEEP and not HARD:
            tl.store(score + place * L + source, f, mask=source < L)
        ahead = end - STEP * ((t + 1) // CHUNKS + 1)
        f = _score(psi, message, ahead, t + 1 < rounds, source, L)
        tile = _tile(
            one, two, one_batch, two_batch, edge, node, flip, b, ahead, t + 1 < rounds,
            source, chunk + (t + 1) % CHUNKS * CHUNK, L, KIND, HAS_FLIPS, FORWARD, DTYPE,
        )  # fmt: skip
        top = max_over(x, FORWARD)
        if HARD:
            arg = first_over((x == top) & (x > -float("inf")), source, FORWARD)
            pulled = tl.where(source == arg, g, 0)
        else:
            arg = finite(top)
            e, total, h = soft_weights(x, arg, gamma, FORWARD, ENTROPY)
            entropy += h * g
            g = tl.where(total > 0, g / total, 0)
            pulled = e * g
        if KEEP:
            tl.store(peak + into * L + target, arg, mask=target < L)
            tl.store(spread + into * L + target, g, mask=target < L)
        part = pulled if CHUNKS == 1 else tl.where(t % CHUNKS == 0, pulled, part + pulled)
        if t % CHUNKS == CHUNKS - 1:
            tl.store(adjoint + place * L + source, sum_over(part, not FORWARD), mask=source < L)
    return tl.sum(entropy) + energy_entropy


@triton.jit
def _score(psi, message, place, exists, label, L: tl.constexpr):
    inside = exists & (label < L)
    f = tl.load(psi + place * L + label, mask=inside, other=-float("inf"))
    return f + tl.load(message + place * L + label, mask=inside, other=0)


# At the paper's size. Bytes: the scores read, their gradient written, 35 MB of places: 270 MB, 63 µs. Operations: 18 registers
# of tile × 13 and 6 vectors brought into the tile's layout: 470 warp instructions an edge, 34 µs. Launches: 1 a parameter.
# Measured on an H200: 93 µs, at 93 % of the L2's rate: pieces of 32 bytes of rows of 84 bytes straddle the L2's sectors.
@triton.jit(do_not_specialize=["B", "S", "E", "units"])
def edge_gradient_kernel(
    out, score, peak, spread, one, two, one_batch, two_batch, start, edges, place, edge, node, flip, gamma,
    B, S, E, units,
    L: tl.constexpr, LABELS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr,
    KIND: tl.constexpr, NAME: tl.constexpr, SHARED: tl.constexpr, HAS_FLIPS: tl.constexpr,
):  # fmt: skip
    """Gradient of one parameter: a unit's edges, and with SHARED all batch items, summed in registers and written
    once."""
    CHUNKS: tl.constexpr = (L + CHUNK - 1) // CHUNK
    DTYPE: tl.constexpr = spread.dtype.element_ty
    HARD: tl.constexpr = gamma is None
    program = tl.program_id(0)
    chunk = program % CHUNKS
    unit = program // CHUNKS % units
    item = (program // CHUNKS // units).to(tl.int64)
    rows = labels(LABELS, True, PIECE)
    cols = labels(CHUNK, False, PIECE) + chunk * CHUNK
    total = tl.zeros([LABELS, cols.shape[1], cols.shape[2]], DTYPE)
    begin, end, step = edge_range(start, E, unit, units, NAME)
    low = item  # of the batch
    high = low + 1
    if SHARED:
        high = low + B
    for i in range(begin, end, step):
        e = i if edges is None else tl.load(edges + i)
        s = tl.load(place + e).to(tl.int64)
        # The message towards an edge's second node is the forward one unless the edge runs against its chain.
        along, first, second = 0, s, s + 1
        if HAS_FLIPS:
            along = tl.load(flip + s).to(tl.int32)
            first, second = s + along, s + 1 - along
        against = 1 - along
        for b in range(low, high):
            here = ((along * B + b) * S + first) * L + rows
            there = ((along * B + b) * S + second) * L + cols
            back_here = ((against * B + b) * S + second) * L + cols
            back_there = ((against * B + b) * S + first) * L + rows
            top = tl.load(peak + there, mask=cols < L, other=0)
            back_top = tl.load(peak + back_there, mask=rows < L, other=0)
            g = tl.load(spread + there, mask=cols < L, other=0)
            back_g = tl.load(spread + back_there, mask=rows < L, other=0)
            if HARD:
                tile = tl.where(top == rows, g, 0) + tl.where(back_top == cols, back_g, 0)
            else:
                f = tl.load(score + here, mask=rows < L, other=0)
                back_f = tl.load(score + back_here, mask=cols < L, other=0)
                scale = LOG2E / tl.load(gamma)
                x = scores(
                    one, two, one_batch, two_batch, edge, node, flip, b, s, True, rows, cols,
                    L, KIND, HAS_FLIPS, False, DTYPE,
                )  # fmt: skip
                tile = tl.exp2((x + f - top) * scale) * g + tl.exp2((x + back_f - back_top) * scale) * back_g
            total += contribution(tile, one, one_batch, b, e, NAME)
    give_back(out, two, total, item, unit, units, chunk, CHUNKS, rows, cols, L, NAME)


def messages(
    psi: Tensor, parameters: Sequence[Tensor], layout: ChainLayout, kind: str, gamma: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward messages [B, S, L] and energies [B, C]; see `ops/reference.py`."""
    B, S, L = psi.shape
    C = layout.start.shape[0] - 1
    forward, backward, energy = torch.empty_like(psi), torch.empty_like(psi), psi.new_empty(B, C)
    if B == 0:
        return forward, backward, energy
    if kind == "potts":
        potts.scan(psi, forward, backward, energy, parameters[0], layout, gamma)
        return forward, backward, energy
    one, two = parameters[0], parameters[-1]
    scan_kernel[(2 * B * C,)](
        psi, forward, backward, energy, one, two, *batch_strides([one, two]),
        layout.start, layout.edge, layout.node, layout.flip, gamma, B, S, C,
        L=L, KIND=kind, HAS_FLIPS=layout.has_flips, **tile_blocks(L),
    )  # fmt: skip
    return forward, backward, energy


def messages_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    kind: str,
    gamma: Tensor | None,
    needs_parameters: bool,
    needs_gamma: bool,
) -> list[Tensor]:
    """Gradients of psi, then of the parameters if needed, then of gamma if needed."""
    psi, forward, backward, _ = saved
    B, S, L = psi.shape
    C, E = layout.start.shape[0] - 1, layout.place.shape[0]
    if B == 0:
        nothing = [torch.zeros_like(p) for p in parameters] if needs_parameters else []
        return [torch.empty_like(psi), *nothing, *([psi.new_zeros(())] if needs_gamma else [])]
    if kind == "potts":
        return potts.adjoint(grads, saved, parameters[0], layout, gamma, needs_parameters, needs_gamma)
    one, two = parameters[0], parameters[-1]
    strides = batch_strides([one, two])
    adjoint = psi.new_empty(2, B, S, L)
    score = peak = spread = adjoint
    if needs_parameters:
        score = torch.empty_like(adjoint)
        peak = torch.empty_like(adjoint, dtype=torch.int32 if gamma is None else psi.dtype)
        spread = torch.empty_like(adjoint)
    entropy = psi.new_empty(2 * B * C) if needs_gamma else None
    adjoint_kernel[(2 * B * C,)](
        psi, forward, backward, *grads, adjoint, score, peak, spread, entropy,
        one, two, *strides, layout.start, layout.edge, layout.node, layout.flip, gamma, B, S, C,
        L=L, KIND=kind, HAS_FLIPS=layout.has_flips, KEEP=needs_parameters, **tile_blocks(L),
    )  # fmt: skip
    gradients = [adjoint[0] + adjoint[1]]
    if needs_parameters:
        chunks = -(-L // tile_blocks(L)["CHUNK"])
        for share, parameter in zip(shares(kind, layout), parameters, strict=True):
            out = new_gradient(share, parameter, chunks, psi)
            if share.units:
                edge_gradient_kernel[(share.units * parameter.shape[0] * chunks,)](
                    out, score, peak, spread, one, two, *strides, share.start, share.edges,
                    layout.place, layout.edge, layout.node, layout.flip, gamma, B, S, E, share.units,
                    L=L, KIND=kind, NAME=share.name, SHARED=parameter.shape[0] == 1, HAS_FLIPS=layout.has_flips,
                    **tile_blocks(L),
                )  # fmt: skip
            gradients.append(collect(share, out, parameter))
    if entropy is not None:
        gradients.append(entropy.sum())
    return gradients
