"""The schedules' sweeps in plain torch: any device, any float. `ops/schedules.py` says what each of them means."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.kernels.order import SweepOrder
from dualcrf.ops.reference import oriented_scores, smooth_max
from dualcrf.ops.rows import EDGE_ROWS


class _Level(NamedTuple):
    """Nodes that are visited at once."""

    node: Tensor  # [n]
    place: Tensor  # [m] their places
    owner: Tensor  # [m] which of the nodes each place belongs to


def _levels(layout: ChainLayout, order: SweepOrder, reverse: bool) -> Iterator[_Level]:
    position = torch.empty_like(order.node)
    position[order.node] = torch.arange(len(order.node), dtype=position.dtype, device=position.device)
    at = position[layout.node]
    place = at.argsort(stable=True).to(torch.int32)
    at = at[place]
    place_start = torch.searchsorted(at, order.start).tolist()
    spans = list(zip(pairwise(order.levels), pairwise(place_start), strict=True))
    for (n0, n1), (p0, p1) in reversed(spans) if reverse else spans:
        yield _Level(order.node[n0:n1], place[p0:p1], at[p0:p1] - n0)


def _begins(layout: ChainLayout) -> Tensor:
    """[S] bool: the places at which a chain begins."""
    begins = torch.zeros(layout.node.shape, dtype=torch.bool, device=layout.node.device)
    begins[layout.start[:-1]] = True
    return begins


def _smooth_max(values: Tensor, gamma: Tensor | None, dim: int) -> Tensor:
    """`smooth_max` with a gamma [B] for every item of the batch."""
    if gamma is None:
        return smooth_max(values, None, dim)
    scale = gamma.view(-1, *(1,) * (values.ndim - 1))
    return smooth_max(values / scale, torch.ones_like(gamma[:1]), dim) * scale.squeeze(-1)


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
    """Level after level, all nodes of a level at once."""
    allowed = unary > -torch.inf
    ends, begins = layout.edge < 0, _begins(layout)
    duals = []
    for _ in range(sweeps):
        into, against, last, step = (backward, forward, begins, -1) if reverse else (forward, backward, ends, 1)
        dual = unary.new_zeros(unary.shape[0], dtype=torch.float64)
        for level in _levels(layout, order, reverse):
            messages = forward[:, level.place] + backward[:, level.place]
            scores = unary[:, level.node].index_add(1, level.owner, messages)
            share = (scores / layout.count[level.node].unsqueeze(-1))[:, level.owner]
            done = last[level.place]
            dual += _smooth_max(share[:, done], gamma, dim=2).sum(1, dtype=torch.float64)
            going = level.place[~done]
            table = oriented_scores(unary.shape[-1], parameters, layout, kind, going - max(-step, 0))
            sent = (share[:, ~done] - against[:, going]).unsqueeze(-1) + (table if step > 0 else table.mT)
            message = _smooth_max(sent, gamma, dim=2)
            target = allowed[:, layout.node[going + step]]
            peak = message.where(target, -torch.inf).amax(2, keepdim=True)
            into[:, going + step] = (message - peak).where(target, 0)
            dual += peak.sum((1, 2), dtype=torch.float64)
        duals.append(dual)
        reverse = not reverse
    return torch.stack(duals, 1)


def handover_sweeps(
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    kind: str,
    scores: Tensor,
    handed: Tensor,
    sweeps: int,
    reverse: bool,
) -> Tensor:
    """Family after family, all chains of a family at once."""
    duals = []
    for _ in range(sweeps):
        dual = scores.new_zeros(scores.shape[0], dtype=torch.float64)
        for chains in pairwise(layout.families):
            dual += _hand_over(parameters, layout, kind, scores, handed, slice(*chains), reverse)
        duals.append(dual)
        reverse = not reverse
    return torch.stack(duals, 1)


def _hand_over(
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    kind: str,
    scores: Tensor,
    handed: Tensor,
    chains: slice,
    reverse: bool,
) -> Tensor:
    """One family's turn; the sum of its chains' energies before it."""
    first, last = layout.start[:-1][chains], layout.start[1:][chains] - 1
    length, longest_first = (last - first + 1).sort(descending=True, stable=True)
    if not len(length):
        return scores.new_zeros(scores.shape[0], dtype=torch.float64)
    running = [int(n) for n in (length.unsqueeze(1) > torch.arange(int(length[0]), device=length.device)).sum(0)]
    # The pass that collects messages starts at `origin`; the one that takes out comes back to it.
    origin, step = (last, -1) if reverse else (first, 1)
    origin = origin[longest_first]

    def cross(values: Tensor, place: Tensor, step: int) -> Tensor:
        table = oriented_scores(values.shape[-1], parameters, layout, kind, place - max(-step, 0))
        return smooth_max(values.unsqueeze(-1) + (table if step > 0 else table.mT), None, dim=2)

    # By the steps from `origin`: the places, and the max-marginals of the part of the chain up to them.
    places, partial = [origin], [_multipliers(layout, scores, handed, origin)]
    for n in running[1:]:
        message = cross(partial[-1][:, :n], places[-1][:n], step)
        places.append(places[-1][:n] + step)
        partial.append(_multipliers(layout, scores, handed, places[-1]) + message)

    energy = scores.new_zeros(scores.shape[0], dtype=torch.float64)
    back = torch.zeros_like(partial[-1])
    taken = []
    for t in reversed(range(len(places))):
        n = running[t]
        begun = back.shape[1]
        back = torch.cat([back, torch.zeros_like(partial[t][:, begun:])], 1)
        marginals = partial[t] + back
        peak = marginals.amax(2, keepdim=True)
        energy += peak[:, (running[t + 1] if t + 1 < len(running) else 0) :].sum((1, 2), dtype=torch.float64)
        excess = ((marginals - peak) / 2).where(marginals > -torch.inf, 0)
        taken.append((places[t], excess))
        if t:
            left = _multipliers(layout, scores, handed, places[t]) - excess + back
            back = cross(left, places[t], -step)
    for place, excess in taken:
        handed[:, place] += excess
        scores[:, layout.node[place]] += excess
    return energy


def _multipliers(layout: ChainLayout, scores: Tensor, handed: Tensor, place: Tensor) -> Tensor:
    node = layout.node[place]
    return scores[:, node] / layout.count[node].unsqueeze(-1) - handed[:, place]


def decode_labels(
    scores: Tensor,
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    order: SweepOrder,
    kind: str,
    reverse: bool,
) -> Tensor:
    """Level after level, given the levels before."""
    labels = torch.zeros(scores.shape[:2], dtype=torch.int64, device=scores.device)
    joined = ~_begins(layout) if not reverse else layout.edge >= 0
    for level in _levels(layout, order, reverse):
        known = joined[level.place]
        near = level.place[known] - (0 if reverse else 1)
        rows = _rows(labels, parameters, layout, kind, near, not reverse, scores.shape[2])
        labels[:, level.node] = scores[:, level.node].index_add(1, level.owner[known], rows).argmax(2)
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
    """A forest, from its leaves to its roots and back."""
    count = unary.shape[2]
    free = parent > -2
    total = unary.clone()
    before, after = layout.node[layout.place], layout.node[layout.place + 1]
    for onward, given, asked in ((True, before, after), (False, after, before)):
        fixed = free[asked] & ~free[given]
        rows = _rows(labels, parameters, layout, kind, layout.place[fixed], onward, count)
        total.index_add_(1, asked[fixed], rows)
    hanging = []
    for level in _levels(layout, order, not reverse):
        child = level.node[parent[level.node] >= 0]
        near = parent[child]
        above = layout.node[near + 1 if reverse else near]
        table = oriented_scores(count, parameters, layout, kind, near)
        message = ((table.mT if not reverse else table) + total[:, child].unsqueeze(3)).amax(2)
        total.index_add_(1, above, message)
        hanging.append((child, near))
    labels.copy_(torch.where(free, total.argmax(2), labels))
    for child, near in reversed(hanging):
        rows = _rows(labels, parameters, layout, kind, near, not reverse, count)
        labels[:, child] = (total[:, child] + rows).argmax(2)


def _rows(
    labels: Tensor,
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    kind: str,
    near: Tensor,
    onward: bool,
    count: int,
) -> Tensor:
    """[B, n, L] rows of the edges that lead on from the places `near`, given the labels there or else one place on."""
    flip = layout.flip[near]
    here, there = layout.node[near], layout.node[near + 1]
    first, second = torch.where(flip, there, here), torch.where(flip, here, there)
    given = labels[:, here if onward else there]
    rows = EDGE_ROWS[kind](parameters, layout.edge[near], first, second, given, flip != onward, count)
    return rows.expand(len(labels), -1, -1)
