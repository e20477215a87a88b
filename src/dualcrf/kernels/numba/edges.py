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
from dualcrf.kernels.numba.vector import fetch, jit, larger, number, padded, widen


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
    """Write the edge's [L, L] scores into `scores`, flat, row for the first node's label.

    Returns the largest of them, and whether NaN or +inf is among them.
    """
    raise NotImplementedError


def fetch_ahead(params, edge):
    """Start to bring the edge's parameters into the cache."""
    raise NotImplementedError


def give_back(grads, params, edge, gradient):
    """Put the gradient of the edge's scores where the parameters' gradients are."""
    raise NotImplementedError


@overload(fill, inline="always")
def _fill(params, edge, scores):
    if params.instance_class is Dense:

        def dense(params, edge, scores):
            table = params.table[edge.batch if params.table.shape[0] > 1 else 0, edge.index]
            peak, invalid = scores.dtype.type(widen(table[0])), False
            for k in range(len(table)):
                scores[k] = widen(table[k])
                peak = larger(peak, scores[k])
                invalid |= not (scores[k] < np.inf)
            return peak, invalid

        return dense
    if params.instance_class is Additive:

        def additive(params, edge, scores):
            source = params.source[edge.batch if params.source.shape[0] > 1 else 0, edge.first]
            target = params.target[edge.batch if params.target.shape[0] > 1 else 0, edge.second]
            peak, invalid = scores.dtype.type(widen(source[0]) + widen(target[0])), False
            for k in range(len(source)):
                scores[k] = widen(source[k]) + widen(target[k])
                peak = larger(peak, scores[k])
                invalid |= not (scores[k] < np.inf)
            return peak, invalid

        return additive

    def weighted(params, edge, scores):
        weight = widen(params.weight[edge.batch if params.weight.shape[0] > 1 else 0, edge.index])
        compat = params.compat[0]
        peak, invalid = scores.dtype.type(weight * widen(compat[0])), False
        for k in range(len(compat)):
            scores[k] = weight * widen(compat[k])
            peak = larger(peak, scores[k])
            invalid |= not (scores[k] < np.inf)
        return peak, invalid

    return weighted


@overload(fetch_ahead, inline="always")
def _fetch_ahead(params, edge):
    if params.instance_class is Dense:
        return lambda params, edge: fetch(params.table[edge.batch if params.table.shape[0] > 1 else 0, edge.index])
    return lambda params, edge: None


@overload(give_back, inline="always")
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
    """One message over an edge and its adjoint; the two directions take their steps by turns, each in its own."""

    source: np.ndarray  # scores at the source, -inf behind the labels
    message: np.ndarray  # +inf where it is -inf, and behind the labels
    gradient: np.ndarray  # the message's adjoint
    result: np.ndarray  # the message, or the adjoint of the source
    left: np.ndarray  # for the tile's own use
    right: np.ndarray


class Scratch(NamedTuple):
    """What one piece of work writes to on the side: tiles of labels² numbers and vectors of `lanes`, each with some spare."""

    tiles: np.ndarray  # [slots, tile]: a chain's scores (hard) or their exponentials
    shifts: np.ndarray  # [slots]
    scores: np.ndarray
    gradient: np.ndarray
    other: np.ndarray
    totals: np.ndarray  # [places of a chain, lanes]
    ones: np.ndarray  # 1 for each label
    ahead: Step
    back: Step


_STEP = 6  # vectors


def scratch_size(slots: int, tile: int, places: int, lanes: int) -> int:
    """The numbers that `scratch_in` cuts up."""
    return (slots + 3) * tile + padded(slots) + (places + 1 + 2 * _STEP) * lanes


@jit
def scratch_in(memory, slots, tile, places, labels, lanes):
    """Scratch in a piece of zeroed memory; each part begins where a cache line does if the memory and the tiles do."""
    tiles, rest = memory[: slots * tile].reshape(slots, tile), memory[slots * tile :]
    single, rest = rest[: 3 * tile].reshape(3, tile), rest[3 * tile :]
    shifts, rest = rest[:slots], rest[padded(slots) :]
    v = rest[: (places + 1 + 2 * _STEP) * lanes].reshape(-1, lanes)
    ahead, back = Step(v[0], v[1], v[2], v[3], v[4], v[5]), Step(v[6], v[7], v[8], v[9], v[10], v[11])
    for step in (ahead, back):
        step.source[:] = -np.inf
        step.message[:] = np.inf
    v[12, :labels] = 1
    return Scratch(tiles, shifts, single[0], single[1], single[2], v[13:], v[12], ahead, back)


def prepare(params, edge, scratch, slot, labels, gamma):
    """Ready an edge in a slot of the scratch; True if NaN or +inf is among its scores."""
    raise NotImplementedError


def message(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
    """Send the message of `step.source` through a prepared edge, to `step.result`."""
    raise NotImplementedError


def adjoint(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
    """Send `step.gradient` back through a prepared edge, to `step.result`."""
    raise NotImplementedError


def gradient(params, grads, edge, scratch, slot, down, across, labels, lanes, gamma, needs_gamma):
    """Give the parameters their gradient from both directions: `down` has its source in the rows, `across` in the columns.

    Returns gamma's share if that is needed.
    """
    raise NotImplementedError


_INLINE = {"forceinline": True}


@overload(prepare, jit_options=_INLINE)
def _prepare(params, edge, scratch, slot, labels, gamma):
    if params.instance_class is Potts:

        def check(params, edge, scratch, slot, labels, gamma):
            return not (potts_weight(params, edge, gamma) < np.inf)

        return check

    def exponentiate(params, edge, scratch, slot, labels, gamma):
        scores = scratch.tiles[slot]
        shift, invalid = fill(params, edge, scores)
        if gamma > 0:
            scratch.shifts[slot] = tile.exponentiate(scores, shift, labels * labels, gamma)
        return invalid

    return exponentiate


@jit
def potts_weight(params, edge, like):
    """The weight of a Potts edge in the float type of `like`."""
    return number(widen(params.weight[edge.batch if params.weight.shape[0] > 1 else 0, edge.index]), like)


@overload(message, jit_options=_INLINE)
def _message(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
    if params.instance_class is Potts:

        def through_potts(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
            weight = potts_weight(params, edge, gamma)
            if gamma > 0:
                potts.smooth_message(weight, step.source, step.result, step.left, labels, gamma)
            else:
                potts.hard_message(weight, step.source, step.result, labels)

        return through_potts

    def through_tile(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
        scores, source, target, left, right = scratch.tiles[slot], step.source, step.result, step.left, step.right
        if gamma == 0:
            tile.hard_message(scores, source, target, right, labels, lanes, rows)
        elif not tile.smooth_message(scores, scratch.shifts[slot], source, target, left, labels, lanes, gamma, rows):
            fill(params, edge, scratch.scores)
            tile.log_message(scratch.scores, source, target, left, right, labels, lanes, gamma, rows)

    return through_tile


@overload(adjoint, jit_options=_INLINE)
def _adjoint(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
    if params.instance_class is Potts:

        def through_potts(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
            weight = potts_weight(params, edge, gamma)
            if gamma > 0:
                potts.smooth_adjoint(weight, step.source, step.gradient, step.result, step.left, labels, gamma)
            else:
                potts.hard_adjoint(weight, step.source, step.message, step.gradient, step.result, labels)

        return through_potts

    def through_tile(params, edge, scratch, slot, step, labels, lanes, gamma, rows):
        source, message, given, out, left, right = step
        table = scratch.tiles[slot]
        if gamma == 0:
            tile.first_best(table, source, left, right, labels, lanes, rows)
            tile.hard_adjoint(message, given, right, out, labels, lanes)
        elif tile.smooth_factors(table, source, given, left, right, labels, lanes, gamma, rows):
            tile.smooth_adjoint(table, left, right, out, labels, lanes, rows)
        else:
            fill(params, edge, scratch.scores)
            tile.log_gradient(scratch.scores, source, given, scratch.gradient, left, right, labels, lanes, gamma, rows)
            tile.sum_targets(scratch.gradient, scratch.ones, out, labels, lanes, rows)

    return through_tile


@overload(gradient, jit_options=_INLINE)
def _gradient(params, grads, edge, scratch, slot, down, across, labels, lanes, gamma, needs_gamma):
    if params.instance_class is Potts:

        def of_potts(params, grads, edge, scratch, slot, down, across, labels, lanes, gamma, needs_gamma):
            weight = potts_weight(params, edge, gamma)
            item = edge.batch if grads.weight.shape[0] > 1 else 0
            share = 0.0
            for step in (down, across):
                given, extra = potts.weight_gradient(
                    weight, step.source, step.message, step.gradient, step.left, labels, gamma, needs_gamma
                )
                grads.weight[item, edge.index] += given
                share += extra
            return share

        return of_potts

    def of_tile(params, grads, edge, scratch, slot, down, across, labels, lanes, gamma, needs_gamma):
        table, out = scratch.tiles[slot], scratch.gradient
        share = 0.0
        if gamma == 0:
            out[:] = 0
            for step, rows in ((down, True), (across, False)):
                tile.first_best(table, step.source, step.left, step.right, labels, lanes, rows)
                tile.add_hard_gradient(step.message, step.gradient, step.right, out, labels, rows)
        elif (
            not needs_gamma
            and tile.smooth_factors(table, down.source, down.gradient, down.left, down.right, labels, lanes, gamma, True)
            and tile.smooth_factors(
                table, across.source, across.gradient, across.left, across.right, labels, lanes, gamma, False
            )
        ):
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
