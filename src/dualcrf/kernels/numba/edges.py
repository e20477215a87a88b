"""How a message crosses an edge, for every kind of potential, on the CPU.

A kind is a NamedTuple of its parameters. One with a table of scores says how the table is read (`fill`, `fetch`) and where a
gradient of it goes (`give_back`); the steps of `tile.py` do the rest. One with a closed form, as Potts has, brings steps of its
own (`prepare`, `message`, `adjoint`, `gradient`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba.extending import overload
from torch import Tensor

from dualcrf.kernels.numba import potts, tile
from dualcrf.kernels.numba.rows import outer_rows
from dualcrf.kernels.numba.vector import INLINE, any_invalid, fetch, jit, number, padded, widen


class Dense(NamedTuple):
    """table [B or 1, E, L²]."""

    table: np.ndarray


class Additive(NamedTuple):
    """source, target [B or 1, N, L²]."""

    source: np.ndarray
    target: np.ndarray


class Weighted(NamedTuple):
    """weight [B or 1, E], compat [1, L²]; the gradient of compat has a row for every chunk of work."""

    weight: np.ndarray
    compat: np.ndarray


class Potts(NamedTuple):
    """weight [B or 1, E]."""

    weight: np.ndarray


EDGE_KINDS = {"dense": Dense, "additive": Additive, "weighted": Weighted, "potts": Potts}


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Memory in the float type of `like`, through NumPy, which asks for huge pages: faulting in small ones costs more than
    the arithmetic."""
    return torch.from_numpy(np.empty(tuple(shape), {torch.float32: np.float32, torch.float64: np.float64}[like.dtype]))


def gradient_buffers(kind: str, parameters: Sequence[Tensor], psi: Tensor, pieces: int) -> list[Tensor]:
    """Memory for the parameters' gradients, in the arithmetic's float type, as `give_back` and `adjoint` fill it."""
    if kind == "dense":
        return [empty(parameters[0].shape, psi) if len(psi) else torch.zeros_like(parameters[0], dtype=psi.dtype)]
    buffers = [empty(p.shape, psi).zero_() for p in parameters]
    if kind == "weighted":
        buffers[1] = torch.zeros(pieces, *parameters[1].shape[1:], dtype=torch.float64)
    return buffers


def gathered(kind: str, buffers: Sequence[Tensor]) -> list[Tensor]:
    """The parameters' gradients from their buffers."""
    return [buffers[0], buffers[1].sum(0, keepdim=True)] if kind == "weighted" else list(buffers)


class Edge(NamedTuple):
    """Where an edge's parameters lie."""

    batch: int  # along the parameters' batch axis
    index: int
    first: int  # node edges[e, 0]
    second: int  # node edges[e, 1]
    chunk: int  # the piece of work that this is part of


def fill(params, edge, scores):
    """Write the edge's [L, L] scores into `scores`, flat, row for the first node's label."""
    raise NotImplementedError


def fetch_ahead(params, edge):
    """Start to bring the edge's parameters into the cache."""
    raise NotImplementedError


def give_back(grads, params, edge, gradient):
    """Put the gradient of the edge's scores where the parameters' gradients are."""
    raise NotImplementedError


@overload(fill, jit_options=INLINE)
def _fill(params, edge, scores):
    if params.instance_class is Dense:

        def dense(params, edge, scores):
            table = params.table[edge.batch if params.table.shape[0] > 1 else 0, edge.index]
            for k in range(len(table)):
                scores[k] = widen(table[k])

        return dense
    if params.instance_class is Additive:

        def additive(params, edge, scores):
            source = params.source[edge.batch if params.source.shape[0] > 1 else 0, edge.first]
            target = params.target[edge.batch if params.target.shape[0] > 1 else 0, edge.second]
            for k in range(len(source)):
                scores[k] = widen(source[k]) + widen(target[k])

        return additive

    def weighted(params, edge, scores):
        weight = widen(params.weight[edge.batch if params.weight.shape[0] > 1 else 0, edge.index])
        compat = params.compat[0]
        for k in range(len(compat)):
            score = widen(compat[k])
            scores[k] = score if score == -np.inf else weight * score

    return weighted


@overload(fetch_ahead, jit_options=INLINE)
def _fetch_ahead(params, edge):
    if params.instance_class is Dense:
        return lambda params, edge: fetch(params.table[edge.batch if params.table.shape[0] > 1 else 0, edge.index])
    return lambda params, edge: None


@overload(give_back, jit_options=INLINE)
def _give_back(grads, params, edge, gradient):
    if params.instance_class is Dense:

        def dense(grads, params, edge, gradient):
            shared = grads.table.shape[0] == 1
            table = grads.table[0 if shared else edge.batch, edge.index]
            if shared and edge.batch > 0:
                for k in range(len(table)):
                    table[k] += gradient[k]
            else:
                for k in range(len(table)):
                    table[k] = gradient[k]

        return dense
    if params.instance_class is Additive:

        def additive(grads, params, edge, gradient):
            source = grads.source[edge.batch if grads.source.shape[0] > 1 else 0, edge.first]
            target = grads.target[edge.batch if grads.target.shape[0] > 1 else 0, edge.second]
            for k in range(len(source)):
                source[k] += gradient[k]
                target[k] += gradient[k]

        return additive

    def weighted(grads, params, edge, gradient):
        item = edge.batch if grads.weight.shape[0] > 1 else 0
        weight = widen(params.weight[edge.batch if params.weight.shape[0] > 1 else 0, edge.index])
        compat, partial = params.compat[0], grads.compat[edge.chunk]
        total = 0.0
        for k in range(len(compat)):
            if gradient[k] != 0:
                total += gradient[k] * widen(compat[k])
                partial[k] += weight * gradient[k]
        grads.weight[item, edge.index] += total

    return weighted


class Step(NamedTuple):
    """One message over an edge and its adjoint."""

    source: np.ndarray  # scores at the source, -inf behind the labels
    gradient: np.ndarray  # the message's adjoint, 0 behind the labels
    result: np.ndarray  # the message, or the adjoint of the source
    left: np.ndarray  # for the tile's own use
    right: np.ndarray


class Scratch(NamedTuple):
    """What one piece of work writes to on the side: tiles of labels² numbers and vectors of `lanes`, each with some spare."""

    tiles: np.ndarray  # [slots, tile]: a chain's scores (hard) or their exponentials
    shifts: np.ndarray  # [slots]
    safe: np.ndarray  # [slots, 2]: what `adjoint` says of the steps ahead and back
    steps: np.ndarray  # [slots or 1, 2, 5, lanes]: the steps ahead and back over every edge
    totals: np.ndarray  # [2, places of a chain, lanes]: what comes back to every place, ahead and back
    scores: np.ndarray
    gradient: np.ndarray
    other: np.ndarray
    ones: np.ndarray  # 1 for each label
    ahead: Step  # the first of the steps
    back: Step


_STEP = len(Step._fields)


def scratch_size(slots: int, tile: int, places: int, lanes: int) -> int:
    """The numbers that `scratch_in` cuts up."""
    return (slots + 3) * tile + padded(3 * slots) + (2 * _STEP * (slots if places else 1) + 2 * places + 1) * lanes


@jit
def scratch_in(memory, slots, tile, places, labels, lanes):
    """Scratch in a piece of zeroed memory; each part begins where a cache line does if the memory and the tiles do.

    With `places` of a chain, for adjoints, there is a step for every slot and a total for every place.
    """
    tiles, rest = memory[: slots * tile].reshape(slots, tile), memory[slots * tile :]
    single, rest = rest[: 3 * tile].reshape(3, tile), rest[3 * tile :]
    shifts, safe, rest = rest[:slots], rest[slots : 3 * slots].reshape(slots, 2), rest[padded(3 * slots) :]
    count = slots if places else 1
    steps, rest = rest[: 2 * count * _STEP * lanes].reshape(count, 2, _STEP, lanes), rest[2 * count * _STEP * lanes :]
    totals, ones = rest[: 2 * places * lanes].reshape(2, places, lanes), rest[2 * places * lanes :]
    ones[:labels] = 1
    ahead, back = _step(steps[0, 0]), _step(steps[0, 1])
    return Scratch(tiles, shifts, safe, steps, totals, single[0], single[1], single[2], ones, ahead, back)


@jit
def _step(v):
    return Step(v[0], v[1], v[2], v[3], v[4])


@jit
def step_at(scratch, slot, back):
    """The step over the edge in a slot, ahead or back along its chain."""
    return _step(scratch.steps[slot, back])


def prepare(params, edge, scratch, slot, labels, gamma):
    """Ready an edge in a slot of the scratch; True if NaN or +inf is among its scores."""
    raise NotImplementedError


def message(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
    """Send the message of `step.source` through a prepared edge, to `step.result`."""
    raise NotImplementedError


def adjoint(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
    """Send `step.gradient` back through a prepared edge, to `step.result`.

    Returns what `gradient` wants to know: whether `left` and `right` hold a tile's factors, or a Potts weight's gradient.
    """
    raise NotImplementedError


def gradient(params, grads, edge, scratch, slot, down, across, safe, labels, lanes, gamma, needs_gamma):
    """Give the parameters their gradient from both directions: `down` has its source in the rows, `across` in the columns.

    `safe` says whether `adjoint` left its factors in both.

    Returns gamma's share if that is needed.
    """
    raise NotImplementedError


@overload(prepare, jit_options=INLINE)
def _prepare(params, edge, scratch, slot, labels, gamma):
    if params.instance_class is Potts:

        def check(params, edge, scratch, slot, labels, gamma):
            return not (potts_weight(params, edge, gamma) < np.inf)

        return check

    def exponentiate(params, edge, scratch, slot, labels, gamma):
        scores = scratch.tiles[slot]
        fill(params, edge, scores)
        invalid = any_invalid(scores, labels * labels)
        if gamma > 0:
            scratch.shifts[slot] = tile.exponentiate(scores, labels * labels, gamma)
        return invalid

    return exponentiate


@jit
def potts_weight(params, edge, like):
    """The weight of a Potts edge in the float type of `like`."""
    return number(widen(params.weight[edge.batch if params.weight.shape[0] > 1 else 0, edge.index]), like)


@overload(message, jit_options=INLINE)
def _message(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
    if params.instance_class is Potts:

        def through_potts(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
            weight = potts_weight(params, edge, gamma)
            if gamma > 0:
                potts.smooth_message(weight, step.source, step.result, step.left, lanes, gamma)
            else:
                potts.hard_message(weight, step.source, step.result, lanes)

        return through_potts

    def through_tile(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
        scores, source, target, left, right = scratch.tiles[slot], step.source, step.result, step.left, step.right
        if gamma == 0:
            tile.hard_message(scores, source, target, labels, lanes, rows)
        elif not tile.smooth_message(scores, scratch.shifts[slot], source, target, left, labels, lanes, gamma, rows):
            fill(params, edge, scratch.scores)
            tile.log_message(scratch.scores, source, target, left, right, labels, lanes, gamma, rows)

    return through_tile


@overload(adjoint, jit_options=INLINE)
def _adjoint(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
    if params.instance_class is Potts:

        def through_potts(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
            weight = potts_weight(params, edge, gamma)
            if gamma > 0:
                return potts.smooth_adjoint(
                    weight, step.source, step.gradient, step.result, step.left, step.right, labels, gamma
                )
            return potts.hard_adjoint(weight, step.source, step.gradient, step.result, labels)

        return through_potts

    def through_tile(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
        source, given, out, left, right = step
        table = scratch.tiles[slot]
        safe = True
        if gamma == 0:
            tile.first_best(table, source, left, right, labels, lanes, rows)
            tile.hard_adjoint(left, right, given, out, labels, lanes)
        elif tile.smooth_factors(table, source, given, left, right, labels, lanes, gamma, rows):
            tile.smooth_adjoint(table, left, right, out, labels, lanes, rows)
        else:
            safe = False
            fill(params, edge, scratch.scores)
            tile.log_gradient(scratch.scores, source, given, scratch.gradient, left, right, labels, lanes, gamma, rows)
            tile.sum_targets(scratch.gradient, scratch.ones, out, labels, lanes, rows)
        return safe

    return through_tile


@overload(gradient, jit_options=INLINE)
def _gradient(params, grads, edge, scratch, slot, down, across, safe, labels, lanes, gamma, needs_gamma):
    if params.instance_class is Potts:

        def of_potts(params, grads, edge, scratch, slot, down, across, safe, labels, lanes, gamma, needs_gamma):
            # `adjoint` has left each direction's gradient of the weight in place of a tile's factors.
            item = edge.batch if grads.weight.shape[0] > 1 else 0
            grads.weight[item, edge.index] += scratch.safe[slot, 0] + scratch.safe[slot, 1]
            share = 0.0
            if needs_gamma:
                weight = potts_weight(params, edge, gamma)
                for step in (down, across):
                    share += potts.entropy(weight, step.source, step.gradient, step.left, labels, gamma)
            return share

        return of_potts

    def of_tile(params, grads, edge, scratch, slot, down, across, safe, labels, lanes, gamma, needs_gamma):
        table, out = scratch.tiles[slot], scratch.gradient
        share = 0.0
        if gamma == 0:
            out[:] = 0
            tile.add_hard_gradient(down.left, down.right, down.gradient, out, labels, True)
            tile.add_hard_gradient(across.left, across.right, across.gradient, out, labels, False)
        elif safe and not needs_gamma:
            outer_rows(table, down.left, down.right, across.right, across.left, out, labels, lanes)
        else:
            # A direction's gradient of the scores, on its own: gamma's share needs it, or a tile was unsafe.
            scores, other = scratch.scores, scratch.other
            fill(params, edge, scores)
            for step, rows, given in ((down, True, out), (across, False, other)):
                source, left, right = step.source, step.left, step.right
                tile.log_gradient(scores, source, step.gradient, given, left, right, labels, lanes, gamma, rows)
                if needs_gamma:
                    share += tile.entropy(given, step.gradient, labels, rows)
            for k in range(labels * labels):
                out[k] += other[k]
        give_back(grads, params, edge, out)
        return share

    return of_tile
