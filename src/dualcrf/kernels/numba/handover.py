"""Family after family, each chain hands over what it has too much of, on the CPU: every thread walks whole chains."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.kernels.numba import edges
from dualcrf.kernels.numba.chain import _chains, _edge_at, _numpy, _parameters, _scratch
from dualcrf.kernels.numba.sweep import copy
from dualcrf.kernels.numba.threads import chunks, parallel
from dualcrf.kernels.numba.vector import jit, kernel, larger, largest, number, padded


@jit
def _multipliers(scores, handed, count, out, labels):
    for k in range(labels):
        out[k] = scores[k] / count - handed[k]


@jit
def _take_out(partial, back, scores, handed, count, left, labels):
    """Hand over half of what each label's max-marginal lacks to the best one; what is left of the multipliers goes on."""
    peak = number(-np.inf, count)
    for k in range(labels):
        peak = larger(peak, partial[k] + back[k])
    for k in range(labels):
        marginal = partial[k] + back[k]
        excess = (marginal - peak) * number(0.5, count) if marginal > -np.inf else number(0, count)
        left[k] = scores[k] / count - handed[k] - excess + back[k]
        handed[k] += excess
        scores[k] += excess


@kernel
def _hand_over(first, last, chunk, params, chains, slots, tile_size, memory, partials, counts, state, reverse, energies):
    scores, handed = state
    labels = scores.shape[2]
    lanes, gamma = padded(labels), number(0, scores[0, 0, 0])
    scratch = edges.scratch_in(memory[chunk], slots, tile_size, 0, labels, lanes)
    partial, step = partials[chunk], scratch.ahead
    step.source[:] = -np.inf
    for item in range(first, last):
        chain, b = chains.first + item % chains.count, item // chains.count
        begin, end = chains.start[chain], chains.start[chain + 1] - 1
        kept = slots >= end - begin
        for t in range(end - begin + 1):
            place = end - t if reverse else begin + t
            node = chains.node[place]
            _multipliers(scores[b, node], handed[b, place], number(counts[node], gamma), partial[t], labels)
            if t > 0:
                near = place if reverse else place - 1
                edge, slot = _edge_at(chains, near, b, chunk), near - begin if kept else 0
                edges.prepare(params, edge, scratch, slot, labels, gamma)
                copy(partial[t - 1], step.source, labels)
                edges.message(params, edge, scratch, slot, step, labels, lanes, gamma, chains.flip[near] == reverse)
                for k in range(labels):
                    partial[t, k] += step.result[k]
        energies[b, chain] = largest(partial[end - begin], labels)
        step.result[:] = 0
        for t in range(end - begin, -1, -1):
            place = end - t if reverse else begin + t
            node = chains.node[place]
            count = number(counts[node], gamma)
            _take_out(partial[t], step.result, scores[b, node], handed[b, place], count, step.source, labels)
            if t > 0:
                near = place if reverse else place - 1
                edge, slot = _edge_at(chains, near, b, chunk), near - begin if kept else 0
                if not kept:
                    edges.prepare(params, edge, scratch, slot, labels, gamma)
                edges.message(params, edge, scratch, slot, step, labels, lanes, gamma, chains.flip[near] != reverse)


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
    (batch, _, labels), longest = scores.shape, int(layout.start.diff().max())
    spans = [span for span in pairwise(layout.families) if span[1] > span[0]]
    families = [_chains(layout, parameters, batch, *span) for span in spans]
    pieces = max(chunks(family.count * batch) for family in families)
    memory = _scratch(scores, layout, kind, pieces, 0)
    # By the steps from where a chain's messages start: the max-marginals of its part up to there.
    partials = np.empty((pieces, longest, labels), _numpy(scores).dtype)
    params, state = _parameters(kind, parameters), (_numpy(scores), _numpy(handed))
    energies = np.zeros((batch, layout.families[-1]))
    duals = torch.empty(batch, sweeps, dtype=torch.float64)
    for sweep in range(sweeps):
        for chains in families:
            parallel(
                _hand_over, chains.count * batch, params, chains, *memory, partials, _numpy(layout.count), state,
                reverse != (sweep % 2 == 1), energies,
            )  # fmt: skip
        duals[:, sweep] = torch.from_numpy(energies.sum(1))
    return duals
