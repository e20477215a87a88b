"""Proofs in float64, apart from solver and kernels: what a labelling is worth, and what no labelling can exceed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dualcrf.graph import Graph
from dualcrf.kernels.layout import ChainLayout
from dualcrf.ops.edges import EDGE_KINDS
from dualcrf.ops.rows import EDGE_ENTRIES
from dualcrf.potentials import Pairwise


def energy(labels: Tensor, unary: Tensor, pairwise: Pairwise, graph: Graph) -> Tensor:
    """The score of a labelling in float64, -inf if a label or a pair of labels is forbidden.

    Args:
        labels: [..., N] whole numbers in [0, L).
        unary: [..., N, L] scores of the nodes.
        pairwise: scores of the edges.

    Returns:
        [...], the batch shapes of all three broadcast.

    Example:
        >>> dualcrf.energy(torch.tensor([0, 1]), torch.eye(2), dualcrf.Potts(torch.ones(1)), dualcrf.grid(2))
        tensor(2., dtype=torch.float64)
    """
    if unary.ndim < 2 or unary.shape[-2] != graph.num_nodes:
        raise ValueError(f"unary has shape {tuple(unary.shape)}, expected [..., {graph.num_nodes} nodes, labels]")
    if labels.ndim < 1 or labels.shape[-1] != graph.num_nodes:
        raise ValueError(f"labels have shape {tuple(labels.shape)}, expected [..., {graph.num_nodes} nodes]")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels are {labels.dtype}, expected whole numbers")
    count = unary.shape[-1]
    outside = ((labels < 0) | (labels >= count)).nonzero()
    if len(outside):
        where = tuple(outside[0].tolist())
        raise ValueError(f"label {labels[where].item()} at {where} is none of the {count} labels 0 to {count - 1}")
    pairwise.check(graph, count, unary.device)
    batch = torch.broadcast_shapes(labels.shape[:-1], unary.shape[:-2], pairwise.batch_shape)
    flat_labels = labels.long().expand(*batch, -1).reshape(-1, graph.num_nodes)
    flat_unary = unary.expand(*batch, -1, -1).reshape(-1, graph.num_nodes, count)
    layout = graph.layout(unary.device)
    total = flat_energy(flat_labels, flat_unary, pairwise.flat_parameters(batch), layout, pairwise.kind)
    return total.view(batch)


def dual_bound(places: Tensor, pairwise: Pairwise, graph: Graph) -> Tensor:
    """The sum of the chains' max-energies in float64.

    No labelling scores more than that, if the scores of every node's places sum to its unary scores.

    Args:
        places: [..., S, L] scores of every chain's nodes, such as `solution.multipliers` or `graph.split(unary)`.
        pairwise: scores of the edges.

    Example:
        >>> bound = dualcrf.dual_bound(graph.split(unary), pairwise, graph)  # before any message was passed
    """
    if places.ndim < 2 or places.shape[-2] != graph.num_places:
        raise ValueError(f"places has shape {tuple(places.shape)}, expected [..., {graph.num_places} places, labels]")
    count = places.shape[-1]
    pairwise.check(graph, count, places.device)
    batch = torch.broadcast_shapes(places.shape[:-2], pairwise.batch_shape)
    flat = places.expand(*batch, -1, -1).reshape(-1, graph.num_places, count)
    layout = graph.layout(places.device)
    return flat_dual(flat, pairwise.flat_parameters(batch), layout, pairwise.kind).view(batch)


def feasible(places: Tensor, unary: Tensor, graph: Graph) -> Tensor:
    """The nearest scores of the places in float64 that sum to the unary scores at every node: [..., S, L]."""
    places, unary = places.double(), unary.double()
    allowed = unary > -torch.inf
    everywhere = allowed.index_select(-2, graph.layout(unary.device).node)
    missing = unary.where(allowed, 0) - graph.gather(places.where(everywhere, 0))
    return (places + graph.split(missing)).where(everywhere, -torch.inf)


def flat_energy(labels: Tensor, unary: Tensor, parameters: Sequence[Tensor], layout: ChainLayout, kind: str) -> Tensor:
    """`energy` with one batch axis: [B, N] labels, [B, N, L] unary -> [B]."""
    total = unary.gather(2, labels.unsqueeze(2)).double().sum((1, 2))
    first, second = _ends(layout, layout.place)
    edge = layout.edge[layout.place]
    return total + EDGE_ENTRIES[kind](parameters, edge, first, second, labels[:, first], labels[:, second]).sum(1)


def flat_dual(places: Tensor, parameters: Sequence[Tensor], layout: ChainLayout, kind: str) -> Tensor:
    """`dual_bound` with one batch axis: [B, S, L] -> [B]."""
    total = places.new_zeros(places.shape[0], dtype=torch.float64)
    for place, scores in _walk(places, parameters, layout, kind, onward=True):
        ends = layout.edge[place] < 0
        total += scores[:, ends].amax(2).sum(1)
    return total


def flat_dual_and_loss(
    labels: Tensor, places: Tensor, parameters: Sequence[Tensor], layout: ChainLayout, kind: str
) -> tuple[Tensor, Tensor]:
    """`flat_dual`, and how far each node's label is from the best one on the chain through it that likes it least.

    Returns:
        [B] and [B, N], float64.
    """
    batch, _, count = places.shape
    marginals = torch.empty(batch, places.shape[1], count, dtype=torch.float64, device=places.device)
    for place, scores in _walk(places, parameters, layout, kind, onward=True):
        marginals[:, place] = scores
    dual = marginals[:, layout.edge < 0].amax(2).sum(1)
    for place, scores in _walk(places, parameters, layout, kind, onward=False):
        marginals[:, place] += scores - places[:, place]
    chosen = labels[:, layout.node].unsqueeze(2)
    impossible = (places == -torch.inf).gather(2, chosen).squeeze(2)
    loss = marginals.nan_to_num(nan=-torch.inf).amax(2) - marginals.gather(2, chosen).squeeze(2)
    loss = loss.masked_fill(impossible, torch.inf)
    worst = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
    return dual, worst.scatter_reduce(1, layout.node.long().expand(batch, -1), loss, "amax")


def _walk(
    places: Tensor, parameters: Sequence[Tensor], layout: ChainLayout, kind: str, onward: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Along all chains at once: places [n], and max-marginals [B, n, L] of the chains up to there."""
    place = layout.start[:-1] if onward else layout.start[1:] - 1
    chain_end = (layout.start[1:] - 1) if onward else layout.start[:-1]
    step = 1 if onward else -1
    scores = places[:, place].double()
    while True:
        yield place, scores
        going = place != chain_end
        if not going.any():
            return
        place, chain_end = place[going] + step, chain_end[going]
        scores = _hard_messages(scores[:, going], parameters, layout, kind, place - step, onward) + places[:, place]


def _hard_messages(
    scores: Tensor, parameters: Sequence[Tensor], layout: ChainLayout, kind: str, place: Tensor, onward: bool
) -> Tensor:
    """[B, n, L] messages from each place to the next one on its chain, or to the one before."""
    edge_place = place if onward else place - 1
    if kind == "potts":
        weight = parameters[0][:, layout.edge[edge_place]].double().unsqueeze(2)
        two, which = scores.topk(min(2, scores.shape[2]), dim=2)
        other = two[..., :1].repeat(1, 1, scores.shape[2])
        runner_up = two[..., 1:] if two.shape[2] > 1 else torch.full_like(two, -torch.inf)
        return torch.maximum(scores + weight, other.scatter(2, which[..., :1], runner_up))
    out = torch.empty_like(scores)
    batch, _, labels = scores.shape
    step = max(1, _room(scores) // max(1, batch * labels * labels))
    for start in range(0, len(place), step):
        part = slice(start, start + step)
        here = torch.arange(len(edge_place[part]), device=place.device)
        local = _local(parameters, layout, kind, edge_place[part])
        tables = EDGE_KINDS[kind].scores(local, here, here, here + len(here), labels)
        if layout.has_flips:
            tables = torch.where(layout.flip[edge_place[part], None, None], tables.mT, tables)
        source, target = (2, 3) if onward else (3, 2)
        out[:, part] = (tables + scores[:, part].unsqueeze(target)).amax(source)
    return out


def _local(parameters: Sequence[Tensor], layout: ChainLayout, kind: str, place: Tensor) -> list[Tensor]:
    """The parameters of the edges that lead on from some places, in float64: edge k and its ends, nodes k and n + k."""
    index = {"edges": layout.edge[place], "nodes": torch.cat(_ends(layout, place))}
    axes = EDGE_KINDS[kind].parameters.values()
    return [
        (p.index_select(1, index[names[0]]) if names[0] in index else p).double()
        for p, names in zip(parameters, axes, strict=True)
    ]


def _ends(layout: ChainLayout, place: Tensor) -> tuple[Tensor, Tensor]:
    """edges[e, 0] and edges[e, 1] of the edges that lead on from some places."""
    flip, here, there = layout.flip[place], layout.node[place], layout.node[place + 1]
    return torch.where(flip, there, here), torch.where(flip, here, there)


def _room(values: Tensor) -> int:
    """How many numbers to hold at once: few enough to stay in a cache, enough to keep all cores busy."""
    return 2**21 if values.device.type == "cpu" else 2**25
