"""Cutting graphs into chains: grids by arithmetic, any other graph by pairing edges; no Python loop over nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Family(NamedTuple):
    """Chains that share no node, one after the other."""

    nodes: Tensor  # [places] the node at every place
    lengths: Tensor  # [chains] places of every chain
    edge: Tensor  # [places] the edge to the next place, -1 at a chain's end
    flip: Tensor  # [places] bool: the edge is given against the chain's direction


def shift(edge: Tensor, offset: int) -> Tensor:
    """Renumber a family's edges, leaving the -1 at the chains' ends."""
    return torch.where(edge >= 0, edge + offset, edge)


def cover(num_nodes: int, families: Sequence[Family]) -> list[Family]:
    """Drop the chains without an edge, and give every node that is then on no chain one of its own, in the first family."""
    kept = [_drop_single_nodes(family) for family in families] or [_single_nodes(torch.empty(0, dtype=torch.int64))]
    bare = torch.ones(num_nodes, dtype=torch.bool)
    for family in kept:
        bare[family.nodes] = False
    if bare.any():
        alone = _single_nodes(bare.nonzero().squeeze(1))
        kept[0] = Family(*(torch.cat(columns) for columns in zip(kept[0], alone, strict=True)))
    return kept


def _drop_single_nodes(family: Family) -> Family:
    long = family.lengths > 1
    places = long.repeat_interleave(family.lengths)
    return Family(family.nodes[places], family.lengths[long], family.edge[places], family.flip[places])


def _single_nodes(nodes: Tensor) -> Family:
    return Family(nodes, torch.ones_like(nodes), torch.full_like(nodes, -1), torch.zeros_like(nodes, dtype=torch.bool))


def grid_family(shape: Sequence[int], step: Sequence[int], first_edge: int) -> tuple[Family, Tensor]:
    """All chains of a grid along one step, such as (0, 2) for every second pixel of a row, and their edges [E, 2].

    Chains stand in raster order of their first node, edges in raster order of theirs, numbered from `first_edge`.
    """
    size = torch.Size(shape).numel()
    nodes = torch.arange(size)
    before = torch.full((size,), size)  # nodes before this one on its chain
    after = torch.full((size,), size)
    jump, stride = 0, size
    for n, d in zip(shape, step, strict=True):
        stride //= n
        jump += d * stride
        if d:
            coordinate = nodes // stride % n
            down, up = coordinate // abs(d), (n - 1 - coordinate) // abs(d)
            before = torch.minimum(before, down if d > 0 else up)
            after = torch.minimum(after, up if d > 0 else down)
    heads = (before == 0).nonzero().squeeze(1)
    lengths = after[heads] + 1
    chain = torch.empty(size, dtype=torch.int64)
    chain[heads] = lengths.cumsum(0) - lengths
    place = chain[nodes - before * jump] + before
    leads = after > 0
    node_edge = torch.where(leads, first_edge - 1 + leads.cumsum(0), -1)
    order = torch.empty_like(place)
    order[place] = nodes
    first = leads.nonzero().squeeze(1)
    return (
        Family(order, lengths, node_edge[order], torch.zeros(size, dtype=torch.bool)),
        torch.stack([first, first + jump], 1),
    )


def monotone_chains(num_nodes: int, low: Tensor, high: Tensor) -> Family:
    """Edge-disjoint chains that run upwards in the order of the nodes and cover every edge (low[e], high[e]).

    At every node the k-th shortest incoming edge goes on into the k-th shortest outgoing one, so a grid's edges give its
    rows and columns, and a node is on max(incoming, outgoing) chains. The chains may share nodes.
    """
    count = len(low)
    length = high - low

    def slot(node: Tensor) -> Tensor:  # node and rank of the edge among the node's edges, as one number
        by_length = torch.argsort(length, stable=True)
        order = by_length[torch.argsort(node[by_length], stable=True)]
        start = torch.bincount(node, minlength=num_nodes).cumsum(0).roll(1)
        start[0] = 0
        ranked = torch.empty(count, dtype=torch.int64)
        ranked[order] = torch.arange(count) - start[node[order]]
        return node * count + ranked

    incoming, sorted_edges = slot(high).sort()
    outgoing = slot(low)
    found = torch.searchsorted(incoming, outgoing).clamp(max=count - 1)
    previous = torch.where(incoming[found] == outgoing, sorted_edges[found], torch.arange(count))
    # Pointer doubling: after k rounds an edge knows the one 2^k before it on its chain.
    position = (previous != torch.arange(count)).long()
    while True:
        further = previous[previous]
        if torch.equal(further, previous):
            break
        position = position + position[previous]
        previous = further
    head = previous
    order = torch.argsort(position, stable=True)
    order = order[torch.argsort(head[order], stable=True)]  # chain by chain, each from its head on
    chain_edges = torch.bincount(head, minlength=count)
    chain_edges = chain_edges[chain_edges > 0]
    ends = torch.zeros(count, dtype=torch.bool)
    ends[chain_edges.cumsum(0) - 1] = True
    # Every edge gives the place of its lower node, and the last of a chain also that of its upper one.
    edge_place = torch.arange(count) + ends.cumsum(0) - ends.long()
    places = count + len(chain_edges)
    nodes = torch.empty(places, dtype=torch.int64)
    edge = torch.full((places,), -1)
    nodes[edge_place], edge[edge_place] = low[order], order
    nodes[edge_place[ends] + 1] = high[order[ends]]
    return Family(nodes, chain_edges + 1, edge, torch.zeros(places, dtype=torch.bool))


def independent_families(num_nodes: int, chains: Family) -> Iterator[Family]:
    """Sort chains that may share nodes into families whose chains share none.

    Greedy, in rounds over all chains at once: those that come first, by length, at each of their nodes are taken.
    """
    lengths = chains.lengths
    count = len(lengths)
    chain_of_place = torch.arange(count).repeat_interleave(lengths)
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(count, generator=generator)
    priority = torch.empty(count, dtype=torch.int64)
    priority[shuffled[torch.argsort(lengths[shuffled], descending=True, stable=True)]] = torch.arange(count)
    waiting = torch.ones(count, dtype=torch.bool)
    while waiting.any():
        taken = torch.zeros(count, dtype=torch.bool)
        free = waiting.clone()
        while free.any():
            places = free[chain_of_place]
            node, owner = chains.nodes[places], chain_of_place[places]
            best = torch.full((num_nodes,), count)
            best.scatter_reduce_(0, node, priority[owner], "amin")
            loses = torch.zeros(count, dtype=torch.bool)
            loses[owner[best[node] != priority[owner]]] = True
            chosen = free & ~loses
            used = torch.zeros(num_nodes, dtype=torch.bool)
            used[chains.nodes[chosen[chain_of_place]]] = True
            free &= ~chosen
            free[owner[used[node]]] = False
            taken |= chosen
        waiting &= ~taken
        places = taken[chain_of_place]
        yield Family(chains.nodes[places], lengths[taken], chains.edge[places], chains.flip[places])
