"""Messages along every chain and their adjoints, on the CPU: every thread walks whole chains.

Forward: a chain's tables are read once and exponentiated into scratch that stays in the core's cache; both directions are then
products of a matrix and a vector. Backward: the weights are recomputed from the stored messages, in the log domain.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.kernels.numba import edges
from dualcrf.kernels.numba.rows import add_gradient, add_rows, add_source, keep, keep_total
from dualcrf.kernels.numba.threads import chunks, parallel
from dualcrf.kernels.numba.vector import LANES, any_invalid, exp, jit, kernel, lanes_of, largest, log, number, padded, width

# A chain's exponentiated tables are kept for the way back if they fit a core's own cache.
_SCRATCH_BYTES = 1 << 20


class Chains(NamedTuple):
    """The layout as numpy arrays, and the chains [first, first + count) that a launch is about."""

    node: np.ndarray
    edge: np.ndarray
    flip: np.ndarray
    start: np.ndarray
    first: int
    count: int
    shared: bool  # some parameter is shared by all batch items: a chain's items are then one piece of work


class Needs(NamedTuple):
    """Which gradients are asked for beside that of psi."""

    parameters: bool
    gamma: bool
    places: int  # of the longest chain


@jit
def _edge_at(chains, place, batch, chunk):
    here, there = chains.node[place], chains.node[place + 1]
    if chains.flip[place]:
        here, there = there, here
    return edges.Edge(batch, np.int64(chains.edge[place]), np.int64(here), np.int64(there), chunk)


@jit
def _chain_energy(scores, labels, gamma):
    peak = largest(scores, labels)
    if gamma == 0 or peak == -np.inf:
        return peak
    total = number(0, peak)
    for k in range(labels):
        total += exp((scores[k] - peak) / gamma)
    return peak + gamma * log(total)


@jit
def _prepare_chain(params, chains, scratch, kept, begin, end, b, chunk, labels, gamma):
    """Ready all edges of a chain if there is room; True if NaN or +inf is among their scores."""
    invalid = False
    for place in range(begin, end):
        if place + 1 < end:
            edges.fetch_ahead(params, _edge_at(chains, place + 1, b, chunk))
        edge = _edge_at(chains, place, b, chunk)
        invalid |= edges.prepare(params, edge, scratch, place - begin if kept else 0, labels, gamma)
    return invalid


@kernel
def _messages(first, last, chunk, params, chains, all_shared, width, slots, tile_size, memory, psi, gamma, outputs):
    forward, backward, energy = outputs
    batch, _, labels = psi.shape
    lanes = lanes_of(width)
    scratch = edges.scratch_in(memory[chunk], slots, tile_size, 0, labels, lanes)
    ahead, back = scratch.ahead, scratch.back
    for item in range(first, last):
        chain = chains.first + item % chains.count
        begin, end = chains.start[chain], chains.start[chain + 1] - 1
        kept = slots >= end - begin
        invalid = False
        low = 0 if chains.shared else item // chains.count
        for b in range(low, batch if chains.shared else low + 1):
            if b == low or not (kept and all_shared):
                invalid |= _prepare_chain(params, chains, scratch, kept, begin, end, b, chunk, labels, gamma)
            forward[b, begin] = 0
            backward[b, end] = 0
            ahead.result[:] = 0
            back.result[:] = 0
            # The two directions go by turns: neither waits for the other, so the core can work on both at once.
            for t in range(end - begin):
                place = begin + t
                edge, slot = _edge_at(chains, place, b, chunk), t if kept else 0
                if not kept:
                    edges.prepare(params, edge, scratch, slot, labels, gamma)
                add_source(psi[b, place], ahead.result, ahead.source, labels, lanes)
                edges.message(params, edge, scratch, slot, ahead, labels, lanes, gamma, not chains.flip[place])
                keep(ahead.result, forward[b, place + 1], labels, lanes)
                place = end - 1 - t
                edge, slot = _edge_at(chains, place, b, chunk), place - begin if kept else 0
                if not kept:
                    edges.prepare(params, edge, scratch, slot, labels, gamma)
                add_source(psi[b, place + 1], back.result, back.source, labels, lanes)
                edges.message(params, edge, scratch, slot, back, labels, lanes, gamma, chains.flip[place])
                keep(back.result, backward[b, place], labels, lanes)
            add_source(psi[b, end], ahead.result, ahead.source, labels, lanes)
            energy[b, chain] = _chain_energy(ahead.source, labels, gamma)
            for place in range(begin, end + 1):
                invalid |= any_invalid(psi[b, place], labels)
            if invalid:
                energy[b, chain] = np.nan


@jit
def _energy_adjoint(psi, messages, gradient, out, labels, gamma):
    """Gradient of a chain's energy with respect to the scores at its last place; returns gamma's share."""
    peak, best = number(-np.inf, gamma), 0
    for k in range(labels):
        out[k] = psi[k] + messages[k]
        if out[k] > peak:
            peak, best = out[k], k
    total, share = number(0, gamma), 0.0
    for k in range(labels):
        if gamma == 0 or peak == -np.inf:
            out[k] = number(1 if k == best and peak > -np.inf else 0, gamma)
        else:
            out[k] = exp((out[k] - peak) / gamma)
        total += out[k]
    for k in range(labels):
        weight = out[k] / max(total, number(1, gamma))
        out[k] = weight * gradient
        if weight > 0:
            share -= out[k] * np.log(weight)
    return share


@kernel
def _adjoint(first, last, chunk, params, grads, chains, width, slots, tile_size, memory, given, saved, gamma, needs, outputs):
    grad_forward, grad_backward, grad_energy = given
    psi, forward, backward = saved
    grad_psi, grad_gamma = outputs
    batch, _, labels = psi.shape
    lanes = lanes_of(width)
    scratch = edges.scratch_in(memory[chunk], slots, tile_size, needs.places, labels, lanes)
    totals = scratch.totals
    for item in range(first, last):
        chain = chains.first + item % chains.count
        begin, end = chains.start[chain], chains.start[chain + 1] - 1
        kept = slots >= end - begin
        low = 0 if chains.shared else item // chains.count
        for b in range(low, batch if chains.shared else low + 1):
            _prepare_chain(params, chains, scratch, kept, begin, end, b, chunk, labels, gamma)
            grad_gamma[chunk] += _energy_adjoint(
                psi[b, end], forward[b, end], grad_energy[b, chain], totals[0, end - begin], labels, gamma
            )
            totals[1, 0] = 0
            for t in range(end - begin):
                for back in range(2):  # by turns, as for the messages
                    edge_t = t if back else end - begin - 1 - t
                    slot = edge_t if kept else 0
                    if not kept:
                        edges.prepare(params, _edge_at(chains, begin + edge_t, b, chunk), scratch, slot, labels, gamma)
                    _send_back(
                        params, chains, scratch, slot, back, begin, edge_t, b, chunk,
                        psi, backward if back else forward, grad_backward if back else grad_forward, labels, lanes, gamma,
                    )  # fmt: skip
            if needs.parameters or needs.gamma:
                for t in range(end - begin):
                    slot = t if kept else 0
                    edge = _edge_at(chains, begin + t, b, chunk)
                    if not kept:
                        edges.prepare(params, edge, scratch, slot, labels, gamma)
                        for back in range(2):
                            _send_back(
                                params, chains, scratch, slot, back, begin, t, b, chunk, psi,
                                backward if back else forward, grad_backward if back else grad_forward, labels, lanes, gamma,
                            )  # fmt: skip
                    flip = int(chains.flip[begin + t])
                    down, across = edges.step_at(scratch, slot, flip), edges.step_at(scratch, slot, 1 - flip)
                    safe = scratch.safe[slot, 0] * scratch.safe[slot, 1] > 0
                    grad_gamma[chunk] += edges.gradient(
                        params, grads, edge, scratch, slot, down, across, safe, labels, lanes, gamma, needs.gamma
                    )
            for place in range(begin, end + 1):
                t = place - begin
                keep_total(totals[0, t], totals[1, t], grad_psi[b, place], labels, lanes)


@jit
def _send_back(
    params, chains, scratch, slot, back, begin, t, b, chunk, psi, messages, grads, labels, lanes, gamma
):  # fmt: skip
    """The adjoint of one message over the t-th edge of a chain: from the total at its target to that at its source."""
    place = begin + t
    source, target = (place + 1, place) if back else (place, place + 1)
    step = edges.step_at(scratch, slot, back)
    step = edges.Step(step.source, step.gradient, scratch.totals[back, source - begin], step.left, step.right)
    add_rows(psi[b, source], messages[b, source], step.source, labels, lanes)
    add_gradient(grads[b, target], scratch.totals[back, target - begin], step.gradient, labels, lanes)
    edge, rows = _edge_at(chains, place, b, chunk), bool(back) == chains.flip[place]
    scratch.safe[slot, back] = edges.adjoint(params, edge, scratch, slot, step, labels, lanes, gamma, rows)


def _numpy(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as numpy sees it; 16-bit floats as the integers that `widen` reads."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype == torch.float16:
        return tensor.view(torch.int16).numpy()
    return tensor.numpy()


def _parameters(kind: str, tensors: Sequence[Tensor]) -> Any:
    """The kind's NamedTuple of arrays, tables as rows of labels² numbers."""
    return edges.EDGE_KINDS[kind](*(_numpy(t.flatten(-2) if t.ndim > 2 else t) for t in tensors))


def _chains(layout: ChainLayout, parameters: Sequence[Tensor], batch: int, first: int, last: int) -> Chains:
    shared = batch > 1 and any(p.shape[0] == 1 for p in parameters)
    index = (_numpy(t) for t in (layout.node, layout.edge, layout.flip, layout.start))
    return Chains(*index, first, last - first, shared)


def _scratch(psi: Tensor, layout: ChainLayout, kind: str, pieces: int, places: int) -> tuple[int, int, np.ndarray]:
    """Tiles that a thread keeps, their size, and memory for every piece of work, beginning at a cache line."""
    labels, number = psi.shape[-1], _numpy(psi).dtype
    tile_size = int(padded((0 if kind == "potts" else labels * labels) + LANES))
    slots = max(int(layout.start.diff().max()) - 1, 1)
    if slots * tile_size * number.itemsize > _SCRATCH_BYTES:
        slots = 1
    size = int(padded(edges.scratch_size(slots, tile_size, places, padded(labels))))
    memory = np.zeros(pieces * size + LANES, number)
    skip = -memory.ctypes.data % (LANES * number.itemsize) // number.itemsize
    return slots, tile_size, memory[skip : skip + pieces * size].reshape(pieces, size)


def _gamma(gamma: Tensor | None, psi: Tensor) -> Any:
    return _numpy(psi).dtype.type(0 if gamma is None else gamma.item())


def messages(
    psi: Tensor, parameters: Sequence[Tensor], layout: ChainLayout, kind: str, gamma: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.reference.chain_messages`."""
    batch = psi.shape[0]
    forward, backward = edges.empty(psi.shape, psi), edges.empty(psi.shape, psi)
    energy = psi.new_empty(batch, layout.families[-1])
    chains = _chains(layout, parameters, batch, 0, layout.families[-1])
    count = chains.count * (1 if chains.shared else batch)
    slots, tile_size, memory = _scratch(psi, layout, kind, chunks(count), 0)
    parallel(
        _messages,
        count,
        _parameters(kind, parameters),
        chains,
        all(p.shape[0] == 1 for p in parameters),
        width(psi.shape[-1], _numpy(psi).dtype),
        slots,
        tile_size,
        memory,
        _numpy(psi),
        _gamma(gamma, psi),
        (_numpy(forward), _numpy(backward), _numpy(energy)),
    )
    return forward, backward, energy


def messages_backward(
    grads: Sequence[Tensor],
    saved: Sequence[Tensor],
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    kind: str,
    gamma: Tensor | None,
    needs_parameters: bool,
    needs_gamma: bool,
) -> list[Tensor]:
    """Gradients of psi, then of the parameters if needed, then of gamma if needed."""
    psi = saved[0]
    batch = psi.shape[0]
    grad_psi = edges.empty(psi.shape, psi)
    params = _parameters(kind, parameters)
    spans = list(zip(layout.families[:-1], layout.families[1:], strict=True))
    # Within a family no two chains share a node, so an additive potential's gradients meet no other thread's.
    if kind != "additive":
        spans = [(0, layout.families[-1])]
    pieces = max(chunks((last - first) * batch) for first, last in spans)
    grad_gamma = np.zeros(max(pieces, 1))
    longest = int(layout.start.diff().max())
    slots, tile_size, memory = _scratch(psi, layout, kind, pieces, longest)
    buffers = edges.gradient_buffers(kind, parameters if needs_parameters else [p[:0] for p in parameters], psi, pieces)
    for first, last in spans:
        chains = _chains(layout, parameters, batch, first, last)
        parallel(
            _adjoint,
            chains.count * (1 if chains.shared else batch),
            params,
            _parameters(kind, buffers),
            chains,
            width(psi.shape[-1], _numpy(psi).dtype),
            slots,
            tile_size,
            memory,
            tuple(map(_numpy, grads)),
            tuple(map(_numpy, saved[:3])),
            _gamma(gamma, psi),
            Needs(needs_parameters, needs_gamma, longest),
            (_numpy(grad_psi), grad_gamma),
        )
    result = [grad_psi]
    if needs_parameters:
        result += [g.to(p.dtype) for g, p in zip(edges.gathered(kind, buffers), parameters, strict=True)]
    if needs_gamma:
        result.append(torch.tensor(grad_gamma.sum(), dtype=psi.dtype))
    return result
