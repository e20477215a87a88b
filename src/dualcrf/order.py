"""An order of the nodes for sweeping over a graph, and the graph's chains cut so that all of them follow it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from dualcrf.decompose import Family
from dualcrf.graph import Graph, assemble
from dualcrf.kernels.order import SweepOrder

_FORESTS = 256  # how many different ones are made at most


@dataclass(frozen=True, eq=False)
class Sweep:
    """How to sweep over a graph: its nodes in levels, and its chains split where they turn.

    Attributes:
        graph: the same nodes and edges; all of its chains run towards higher levels.
        level: [N] int64, the longest path of edges that leads to a node.
        origin: [S'] int64, the place of the given graph from which every place of `graph` was made; a place at which a
            chain turns is there twice. None where no chain had to be changed.
        by_number: whether the chains of `graph` run towards higher node numbers.
    """

    graph: Graph
    level: Tensor
    origin: Tensor | None
    by_number: bool
    _orders: dict[torch.device, SweepOrder] = field(default_factory=dict, init=False, repr=False)
    _forests: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, init=False, repr=False)

    def order(self, device: torch.device) -> SweepOrder:
        """The order as the operations read it, on a device; made once per device."""
        found = self._orders.get(device)
        if found is None:
            found = self._orders[device] = self._make_order(device)
        return found

    def forest(self, number: int, device: torch.device) -> tuple[Tensor, bool]:
        """One of some random forests of nodes: `parent` and `reverse` as `improve_labels` takes them."""
        number %= _FORESTS
        reverse = number % 2 == 1
        found = self._forests.get((number, device))
        if found is None:
            generator = torch.Generator().manual_seed(number)
            part = (1 + number // 2 % 4) / 10  # of the nodes is left out beforehand
            dropped = torch.rand(self.graph.num_nodes, generator=generator) < part
            parent = forest(self.graph, self.level, dropped, reverse).to(torch.int32).to(device)
            found = self._forests[number, device] = parent
        return found, reverse

    def split(self, places: Tensor, given: Graph) -> Tensor:
        """Scores at the given graph's places, halved where a chain turns: [..., S, L] -> [..., S', L]."""
        if self.origin is None:
            return places
        copies = torch.bincount(self.origin, minlength=given.num_places).to(places.device)
        origin = self.origin.to(places.device)
        return places.index_select(-2, origin) / copies[origin].unsqueeze(-1)

    def merge(self, places: Tensor, given: Graph) -> Tensor:
        """The way back, [..., S', L] -> [..., S, L]; a chain is worth at most the sum of its parts."""
        if self.origin is None:
            return places
        out = places.new_zeros(*places.shape[:-2], given.num_places, places.shape[-1])
        return out.index_add(-2, self.origin.to(places.device), places)

    def _make_order(self, device: torch.device) -> SweepOrder:
        def index(values: Tensor) -> Tensor:
            return values.to(torch.int32).to(device)

        start = torch.zeros(int(self.level.max()) + 2, dtype=torch.int64)
        start[1:] = torch.bincount(self.level).cumsum(0)
        place_start = torch.zeros(self.graph.num_nodes + 1, dtype=torch.int64)
        place_start[1:] = self.graph.chains_per_node.cumsum(0)
        place = torch.argsort(self.graph.place_node, stable=True)
        node = torch.argsort(self.level, stable=True)
        levels = tuple(start.tolist())
        return SweepOrder(index(node), index(start), index(place_start), index(place), levels, self.by_number)


@lru_cache(maxsize=64)
def sweep_of(graph: Graph) -> Sweep:
    """The levels of a graph in the order of its nodes, and its chains split where they turn.

    On a grid with stride 1 the levels are the anti-diagonals; with diagonals they are column + 2 · row. Where no node
    is on two chains, the chains' own direction is the order, and nothing is split.

    Example:
        >>> sweep_of(dualcrf.grid(2, 3)).level.tolist()
        [0, 1, 2, 1, 2, 3]
    """
    apart = graph.num_places == graph.num_nodes
    rank = torch.argsort(graph.place_node) if apart else torch.arange(graph.num_nodes)
    split, origin = ascending_chains(graph, rank)
    return Sweep(split, levels(graph.num_nodes, graph.edges, rank), origin, not apart)


def levels(num_nodes: int, edges: Tensor, rank: Tensor) -> Tensor:
    """[N] the number of edges on the longest path to every node along which `rank` increases."""
    up = rank[edges[:, 0]] < rank[edges[:, 1]]
    low, high = torch.where(up, edges[:, 0], edges[:, 1]), torch.where(up, edges[:, 1], edges[:, 0])
    order = torch.argsort(low, stable=True)
    upper = high[order]
    degree = torch.bincount(low, minlength=num_nodes)
    first = degree.cumsum(0) - degree
    waiting = torch.bincount(high, minlength=num_nodes)
    level = torch.zeros(num_nodes, dtype=torch.int64)
    front = (waiting == 0).nonzero().squeeze(1)
    depth = 0
    while len(front):
        level[front] = depth
        depth += 1
        reached = upper[_ranges(first[front], degree[front])]
        waiting.index_add_(0, reached, torch.full_like(reached, -1))
        front = reached[waiting[reached] == 0].unique()
    return level


def forest(graph: Graph, level: Tensor, dropped: Tensor, reverse: bool) -> Tensor:
    """Choose nodes with at most one chosen neighbour each on lower levels (higher ones if `reverse`), its parent.

    Returns:
        [N] int64, the place from which the edge between a node and its parent leads on; -1 at a root, -2 where not
        chosen.
    """
    lead = (graph.place_edge >= 0).nonzero().squeeze(1)
    upper, lower = graph.place_node[lead], graph.place_node[lead + 1]
    if reverse:
        upper, lower = lower, upper
    edges_of_level = torch.bincount(level[lower], minlength=int(level.max()) + 1)
    order = torch.argsort(level[lower], stable=True)
    groups = order.split(edges_of_level.tolist())
    parent = torch.full((graph.num_nodes,), -1)
    parent[dropped] = -2
    chosen_above = torch.zeros(graph.num_nodes, dtype=torch.int64)
    for group in reversed(groups) if reverse else groups:
        joined = group[(parent[upper[group]] > -2) & (parent[lower[group]] > -2)]
        node = lower[joined]
        chosen_above.index_add_(0, node, torch.ones_like(node))
        alone = chosen_above[node] == 1
        parent[node] = torch.where(alone, lead[joined], -2)
    return parent


def ascending_chains(graph: Graph, rank: Tensor) -> tuple[Graph, Tensor | None]:
    """The graph with its chains split where `rank` turns and reversed where it falls, and each new place's old one.

    Successive pieces of a chain share the node at which it turns, so they go to different families.
    """
    leads = (graph.place_edge >= 0).nonzero().squeeze(1)  # the place from which each edge of a chain leads on
    rises = rank[graph.place_node[leads]] < rank[graph.place_node[leads + 1]] if len(leads) else leads.bool()
    if rises.all():
        return graph, None
    starts = torch.ones(len(leads), dtype=torch.bool)  # a chain begins with this edge
    starts[1:] = leads[1:] != leads[:-1] + 1
    turns = starts.clone()
    turns[1:] |= rises[1:] != rises[:-1]
    piece = turns.cumsum(0) - 1
    begin = turns.nonzero().squeeze(1)
    size = torch.bincount(piece)
    number_of_chain = starts.cumsum(0) - 1
    number_on_chain = piece - piece[starts][number_of_chain]
    chain = torch.searchsorted(graph.chain_start, leads[begin], right=True) - 1
    family = torch.searchsorted(torch.tensor(graph.family_start), chain, right=True) - 1
    family = 2 * family + number_on_chain[begin] % 2

    families, origins = [], []
    for f in range(2 * graph.num_families):
        chosen = (family == f).nonzero().squeeze(1)
        if not len(chosen):
            continue
        places, up = leads[begin[chosen]], rises[begin[chosen]]
        lengths = size[chosen] + 1
        start = lengths.cumsum(0) - lengths
        offset = torch.arange(int(lengths.sum())) - start.repeat_interleave(lengths)
        up, last = up.repeat_interleave(lengths), (lengths - 1).repeat_interleave(lengths)
        first = places.repeat_interleave(lengths)
        origin = torch.where(up, first + offset, first + last - offset)
        edge_place = torch.where(up, origin, origin - 1).clamp(min=0)
        inside = offset < last
        edge = torch.where(inside, graph.place_edge[edge_place], -1)
        flip = inside & (graph.place_flip[edge_place] == up)
        families.append(Family(graph.place_node[origin], lengths, edge, flip))
        origins.append(origin)
    alone = graph.chain_start[:-1][graph.chain_lengths == 1]
    split = assemble(graph.num_nodes, graph.edges, families)
    # `assemble` gives the nodes that no edge touches chains of their own at the end of the first family.
    origins.insert(1, alone[torch.argsort(graph.place_node[alone])])
    return split, torch.cat(origins)


def _ranges(first: Tensor, count: Tensor) -> Tensor:
    """first[0], first[0] + 1, … (count[0] of them), then the same for first[1], and so on."""
    end = count.cumsum(0)
    number = torch.arange(int(end[-1]) if len(end) else 0)
    # `repeat_interleave` starts all threads, which takes longer than the few nodes of a level.
    return number + (first - end + count)[torch.searchsorted(end, number, right=True)]
