"""Labels for the nodes in their order, on the CPU: a thread labels one item of the batch at a time."""

from collections.abc import Sequence

import numpy as np
import torch
from numba.extending import overload
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.kernels.numba import edges
from dualcrf.kernels.numba.chain import _edge_at, _numpy
from dualcrf.kernels.numba.potts import first_largest
from dualcrf.kernels.numba.sweep import copy, leads_on, make_work, scratch_of, tile_of
from dualcrf.kernels.numba.threads import chunks, parallel
from dualcrf.kernels.numba.vector import INLINE, jit, kernel, number, padded, widen
from dualcrf.kernels.order import SweepOrder


def score(params, edge, first, second, labels):
    """The score of a label at the edge's first node and one at its second."""
    raise NotImplementedError


@overload(score, jit_options=INLINE)
def _score(params, edge, first, second, labels):
    if params.instance_class is edges.Dense:

        def dense(params, edge, first, second, labels):
            item = edge.batch if params.table.shape[0] > 1 else 0
            return widen(params.table[item, edge.index, first * labels + second])

        return dense
    if params.instance_class is edges.Additive:

        def additive(params, edge, first, second, labels):
            source = params.source[edge.batch if params.source.shape[0] > 1 else 0, edge.first, first * labels + second]
            target = params.target[edge.batch if params.target.shape[0] > 1 else 0, edge.second, first * labels + second]
            return widen(source) + widen(target)

        return additive
    if params.instance_class is edges.Weighted:

        def weighted(params, edge, first, second, labels):
            weight = params.weight[edge.batch if params.weight.shape[0] > 1 else 0, edge.index]
            compat = widen(params.compat[0, first * labels + second])
            return compat if compat == -np.inf else widen(weight) * compat

        return weighted

    def potts(params, edge, first, second, labels):
        weight = widen(params.weight[edge.batch if params.weight.shape[0] > 1 else 0, edge.index])
        return weight if first == second else number(0, weight)

    return potts


@jit
def _add_row(params, sweep, near, onward, labels, b, chunk, out, count):
    """Add the scores of the edge that leads on from `near`, given the label there (`onward`) or one place on."""
    edge = _edge_at(sweep, near, b, chunk)
    given = labels[b, sweep.node[near if onward else near + 1]]
    if sweep.flip[near] != onward:
        for k in range(count):
            out[k] += score(params, edge, given, k, count)
    else:
        for k in range(count):
            out[k] += score(params, edge, k, given, count)


@kernel
def _decode(first, last, chunk, work, scores, reverse, labels):
    sweep, nodes, count = work.sweep, scores.shape[1], scores.shape[2]
    value = scratch_of(work, chunk, count, padded(count)).ahead.source
    for b in range(first, last):
        for t in range(nodes):
            node = sweep.visit[nodes - 1 - t if reverse else t]
            copy(scores[b, node], value, count)
            for at in range(sweep.place_start[node], sweep.place_start[node + 1]):
                place = np.int64(sweep.place[at])
                if leads_on(sweep, place, not reverse):
                    near = place if reverse else place - 1
                    _add_row(work.params, sweep, near, not reverse, labels, b, chunk, value, count)
            labels[b, node] = first_largest(value, count, -1)


@jit
def _fixed_rows(work, parent, node, labels, b, chunk, out, count):
    """Add the scores of a node's edges to nodes outside the forest."""
    sweep = work.sweep
    for at in range(sweep.place_start[node], sweep.place_start[node + 1]):
        place = np.int64(sweep.place[at])
        for onward in (True, False):
            if leads_on(sweep, place, onward):
                given, near = (place - 1, place - 1) if onward else (place + 1, place)
                if parent[sweep.node[given]] == -2:
                    _add_row(work.params, sweep, near, onward, labels, b, chunk, out, count)


@kernel
def _improve(first, last, chunk, work, parent, unary, totals, labels, reverse):
    sweep, nodes, count = work.sweep, unary.shape[1], unary.shape[2]
    lanes, gamma = padded(count), number(0, unary[0, 0, 0])
    scratch, total = scratch_of(work, chunk, count, lanes), totals[chunk]
    step = scratch.ahead
    for b in range(first, last):
        work.ready[chunk, :] = False
        for node in range(nodes):
            copy(unary[b, node], total[node], count)
        for t in range(nodes):
            node = sweep.visit[t if reverse else nodes - 1 - t]
            near = np.int64(parent[node])
            if near == -2:
                continue
            _fixed_rows(work, parent, node, labels, b, chunk, total[node], count)
            if near >= 0:
                edge = _edge_at(sweep, near, b, chunk)
                slot = tile_of(work, scratch, edge, count, gamma)
                copy(total[node], step.source, count)
                edges.message(work.params, edge, scratch, slot, step, count, lanes, gamma, sweep.flip[near] != reverse)
                above = total[sweep.node[near + 1 if reverse else near]]
                for k in range(count):
                    above[k] += step.result[k]
        for t in range(nodes):
            node = sweep.visit[nodes - 1 - t if reverse else t]
            near = np.int64(parent[node])
            if near >= 0:
                _add_row(work.params, sweep, near, not reverse, labels, b, chunk, total[node], count)
            if near > -2:
                labels[b, node] = first_largest(total[node], count, -1)


def decode_labels(
    scores: Tensor,
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    order: SweepOrder,
    kind: str,
    reverse: bool,
) -> Tensor:
    """See `ops.schedules.decode_labels`."""
    scores = scores.contiguous()
    labels = torch.zeros(scores.shape[:2], dtype=torch.int64)
    work = make_work(parameters, layout, order, kind, scores, 0)
    parallel(_decode, len(labels), work, _numpy(scores), reverse, _numpy(labels))
    return labels


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
    unary = unary.contiguous()
    work = make_work(parameters, layout, order, kind, unary, 1)
    totals = np.empty((max(chunks(len(labels)), 1), *unary.shape[1:]), _numpy(unary).dtype)
    parallel(_improve, len(labels), work, _numpy(parent), _numpy(unary), totals, _numpy(labels), reverse)
