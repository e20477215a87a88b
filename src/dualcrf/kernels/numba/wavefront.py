"""Sweeps over the nodes in their order, on the CPU: a thread sweeps one item of the batch at a time.

A node's predecessors all come before it, so a sweep node by node is the sweep level by level. All sweeps of an item are run
before the next is begun: its tables stay in the cache, and what was exponentiated serves all of them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.kernels.numba import edges
from dualcrf.kernels.numba.chain import _chain_energy, _edge_at, _numpy
from dualcrf.kernels.numba.rows import add_source
from dualcrf.kernels.numba.sweep import leads_on, make_work, scratch_of, tile_of
from dualcrf.kernels.numba.sweep_rows import add_both, keep_normalised, without
from dualcrf.kernels.numba.threads import parallel
from dualcrf.kernels.numba.vector import kernel, lanes_of, number, width
from dualcrf.kernels.order import SweepOrder


@kernel
def _sweep(first, last, chunk, work, width, unary, gammas, messages, reverse, duals):
    forward, backward = messages
    sweep, (_, nodes, labels) = work.sweep, unary.shape
    lanes = lanes_of(width)
    scratch = scratch_of(work, chunk, labels, lanes)
    step, share, peak, none = scratch.ahead, scratch.back.source, scratch.back.left, scratch.back.right
    none[:] = 0
    for b in range(first, last):
        gamma = gammas[b]
        work.ready[chunk, :] = False
        for number_of_sweep in range(duals.shape[1]):
            backwards = reverse != (number_of_sweep % 2 == 1)
            into, against = (backward[b], forward[b]) if backwards else (forward[b], backward[b])
            dual = 0.0
            for t in range(nodes):
                node = sweep.visit[nodes - 1 - t if backwards else t]
                begin, end = sweep.place_start[node], sweep.place_start[node + 1]
                add_source(unary[b, node], none, share, labels, lanes)
                for at in range(begin, end):
                    place = sweep.place[at]
                    add_both(share, into[place], against[place], labels, lanes)
                part = number(1, gamma) / number(end - begin, gamma)
                for k in range(lanes):
                    share[k] *= part
                for at in range(begin, end):
                    place = np.int64(sweep.place[at])
                    if not leads_on(sweep, place, backwards):
                        dual += _chain_energy(share, labels, gamma)
                        continue
                    near, target = (place - 1, place - 1) if backwards else (place, place + 1)
                    edge = _edge_at(sweep, near, b, chunk)
                    slot = tile_of(work, scratch, edge, labels, gamma)
                    without(share, against[place], step.source, labels, lanes)
                    rows = sweep.flip[near] == backwards
                    edges.message(work.params, edge, scratch, slot, step, labels, lanes, gamma, rows)
                    keep_normalised(step.result, unary[b, sweep.node[target]], into[target], peak, labels, lanes)
                    dual += peak[0]
            duals[b, number_of_sweep] = dual


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
    unary = unary.contiguous()
    duals = torch.empty(unary.shape[0], sweeps, dtype=torch.float64)
    gammas = unary.new_zeros(unary.shape[0]) if gamma is None else gamma.to(unary.dtype).contiguous()
    parallel(
        _sweep,
        unary.shape[0],
        make_work(parameters, layout, order, kind, unary, sweeps),
        width(unary.shape[2], _numpy(unary).dtype),
        _numpy(unary),
        _numpy(gammas),
        (_numpy(forward), _numpy(backward)),
        reverse,
        _numpy(duals),
    )
    return duals
