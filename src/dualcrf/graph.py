"""Graphs cut into chains: the decomposition that every later part works on.

A *place* is one node on one chain. Places are numbered chain by chain, chains family by family; the chains of one family
share no node, so that a family can be solved in parallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from dualcrf.decompose import Family, cover, grid_family, independent_families, monotone_chains, shift
from dualcrf.kernels.layout import ChainLayout


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """Nodes, edges, and edge-disjoint chains that cover every node and every edge.

    Make one with [`grid`][dualcrf.grid], `Graph.from_edges`, `Graph.from_chains`, `Graph.join` or `Graph.disjoint`. A graph
    never changes; it is built on the CPU and copied to other devices when it is first used there.

    Attributes:
        num_nodes: N, the number of nodes.
        edges: [E, 2] int64, the two nodes of every edge; a table's first label axis belongs to `edges[:, 0]`.
        place_node: [S] int64, the node at every place.
        place_edge: [S] int64, the edge from a place to the next one on its chain, -1 at the chain's end.
        place_flip: [S] bool, whether that edge is given against the direction of its chain.
        chain_start: [C + 1] int64, the first place of every chain, and S.
        family_start: the first chain of every family, and C.
    """

    num_nodes: int
    edges: Tensor
    place_node: Tensor
    place_edge: Tensor
    place_flip: Tensor
    chain_start: Tensor
    family_start: tuple[int, ...]
    _layouts: dict[str, ChainLayout] = field(default_factory=dict)

    @property
    def num_edges(self) -> int:
        return self.edges.shape[0]

    @property
    def num_places(self) -> int:
        return self.place_node.shape[0]

    @property
    def num_chains(self) -> int:
        return self.chain_start.shape[0] - 1

    @property
    def num_families(self) -> int:
        return len(self.family_start) - 1

    @property
    def chain_lengths(self) -> Tensor:
        """[C] int64, the number of nodes on every chain."""
        return self.chain_start.diff()

    @property
    def chains_per_node(self) -> Tensor:
        """[N] int64, the number of chains through every node, at least 1."""
        return torch.bincount(self.place_node, minlength=self.num_nodes)

    def __repr__(self) -> str:
        return (
            f"Graph(num_nodes={self.num_nodes}, num_edges={self.num_edges}, "
            f"num_chains={self.num_chains}, num_families={self.num_families})"
        )

    def __copy__(self) -> Graph:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Graph:
        return self

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_layouts": {"cpu": self._layouts["cpu"]}}

    @staticmethod
    def from_edges(num_nodes: int, edges: Tensor | Sequence[tuple[int, int]]) -> Graph:
        """Any graph: chains that run upwards in the order of the nodes are made for it.

        Each node's incoming edges are paired with its outgoing ones, the shortest with the shortest, so that the edges of a
        grid give its rows and columns. Edges keep their order and orientation: `table[e, a, b]` is the score of label `a` at
        `edges[e, 0]` and `b` at `edges[e, 1]`, whichever way the chain runs.

        Args:
            num_nodes: N, at least 1.
            edges: [E, 2] integers in [0, N); no self-loops, no edge twice.

        Example:
            >>> Graph.from_edges(3, [(0, 1), (1, 2), (2, 0)])
            Graph(num_nodes=3, num_edges=3, num_chains=2, num_families=2)
        """
        edges = _checked_edges(num_nodes, edges)
        low, high = edges.amin(1), edges.amax(1)
        twice = _first_repeat(low * num_nodes + high)
        if twice is not None:
            raise ValueError(
                f"edge {twice} joins nodes {low[twice]} and {high[twice]} a second time; add the two scores into one edge"
            )
        if not len(edges):
            return assemble(num_nodes, edges, [])
        chains = monotone_chains(num_nodes, low, high)
        against = edges[:, 0] > edges[:, 1]
        chains = chains._replace(flip=against[chains.edge] & (chains.edge >= 0))
        return assemble(num_nodes, edges, list(independent_families(num_nodes, chains)))

    @staticmethod
    def from_chains(num_nodes: int, families: Iterable[Iterable[Tensor | Sequence[int]]]) -> Graph:
        """Chains as given, in any order; its edges are the consecutive pairs, family by family and chain by chain.

        Args:
            num_nodes: N, at least 1.
            families: for each family its chains, each the nodes along it; the chains of one family share no node (a node may
                be on chains of several families, and two chains may join the same two nodes). A node on no chain gets a
                chain of its own.

        Example:
            >>> Graph.from_chains(4, [[[0, 1], [2, 3]], [[3, 0, 2]]]).edges.tolist()
            [[0, 1], [2, 3], [3, 0], [0, 2]]
        """
        _check_num_nodes(num_nodes)
        built, all_edges, count = [], [], 0
        for f, chains in enumerate(families):
            parts = [_index_vector(chain, f"chain {c} of family {f}") for c, chain in enumerate(chains)]
            parts = [part for part in parts if len(part)]
            nodes = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
            lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
            _check_range(nodes, num_nodes, f"family {f}")
            twice = _first_repeat(nodes)
            if twice is not None:
                raise ValueError(
                    f"node {nodes[twice]} is twice in family {f}; the chains of a family share no node: "
                    f"put one of the chains into another family"
                )
            leads = torch.ones(len(nodes), dtype=torch.bool)
            leads[lengths.cumsum(0) - 1] = False
            edge = torch.where(leads, count + leads.cumsum(0) - 1, -1)
            first = leads.nonzero().squeeze(1)
            all_edges.append(torch.stack([nodes[first], nodes[first + 1]], 1))
            count += len(first)
            built.append(Family(nodes, lengths, edge, torch.zeros(len(nodes), dtype=torch.bool)))
        edges = torch.cat(all_edges) if all_edges else torch.empty(0, 2, dtype=torch.int64)
        return assemble(num_nodes, edges, built)

    @staticmethod
    def join(graphs: Sequence[Graph]) -> Graph:
        """The families of all graphs over the same nodes; edges follow one another.

        Example:
            >>> rows = Graph.from_chains(4, [[[0, 1], [2, 3]]])
            >>> columns = Graph.from_chains(4, [[[0, 2], [1, 3]]])
            >>> Graph.join([rows, columns]).num_families
            2
        """
        graphs = _checked_graphs(graphs)
        sizes = {g.num_nodes for g in graphs}
        if len(sizes) > 1:
            raise ValueError(
                f"graphs to join must have the same nodes, but they have {sorted(sizes)}; "
                f"Graph.disjoint sets graphs side by side"
            )
        families, offset = [], 0
        for g in graphs:
            families += [f._replace(edge=shift(f.edge, offset)) for f in _families_of(g)]
            offset += g.num_edges
        return assemble(graphs[0].num_nodes, torch.cat([g.edges for g in graphs]), families)

    @staticmethod
    def disjoint(graphs: Sequence[Graph]) -> Graph:
        """Graphs side by side, nodes and edges one graph after the other: how a batch of differing graphs is run as one.

        Example:
            >>> Graph.disjoint([dualcrf.grid(2), dualcrf.grid(3)]).edges.tolist()
            [[0, 1], [2, 3], [3, 4]]
        """
        graphs = _checked_graphs(graphs)
        families: list[list[Family]] = [[] for _ in range(max(g.num_families for g in graphs))]
        all_edges, nodes, edges = [], 0, 0
        for g in graphs:
            for f, family in enumerate(_families_of(g)):
                families[f].append(family._replace(nodes=family.nodes + nodes, edge=shift(family.edge, edges)))
            all_edges.append(g.edges + nodes)
            nodes += g.num_nodes
            edges += g.num_edges
        merged = [Family(*(torch.cat(columns) for columns in zip(*family, strict=True))) for family in families]
        return assemble(nodes, torch.cat(all_edges), merged)

    def split(self, unary: Tensor) -> Tensor:
        """Share every node's scores out evenly over its chains: [..., N, L] -> [..., S, L]."""
        if unary.ndim < 2 or unary.shape[-2] != self.num_nodes:
            raise ValueError(f"unary has shape {tuple(unary.shape)}, expected [..., {self.num_nodes} nodes, labels]")
        layout = self.layout(unary.device)
        return (unary / layout.count.unsqueeze(-1)).index_select(-2, layout.node)

    def gather(self, places: Tensor) -> Tensor:
        """Sum the values of a node's chains: [..., S, L] -> [..., N, L]. The way back from `split`."""
        if places.ndim < 2 or places.shape[-2] != self.num_places:
            raise ValueError(f"places has shape {tuple(places.shape)}, expected [..., {self.num_places} places, labels]")
        layout = self.layout(places.device)
        out = places.new_zeros(*places.shape[:-2], self.num_nodes, places.shape[-1])
        # Family by family no node comes twice, so the sum has one order on every device.
        for first, last in pairwise(layout.family_places):
            out = out.index_add(-2, layout.node[first:last], places[..., first:last, :])
        return out

    def layout(self, device: torch.device) -> ChainLayout:
        """The chains as the operations read them, on a device; copied there once."""
        key = str(device)
        if key not in self._layouts:
            here = self._layouts["cpu"]
            self._layouts[key] = ChainLayout._make(v.to(device) if isinstance(v, Tensor) else v for v in here)
        return self._layouts[key]


def grid(*shape: int, strides: Sequence[int] = (1,), diagonals: bool = False) -> Graph:
    """A grid of one, two or three dimensions with its chains along the axes: the paper's families, for any strides.

    Nodes are in raster order. The families are, for each stride, those of the last axis first: (horizontal, s), (vertical, s)
    on an image, and after all of them, with `diagonals`, the two diagonals of each stride. Within a family edges are in raster
    order of their first node. A stride as long as an axis has no edge there: its family stays, empty. A node that no edge
    touches gets a chain of its own, in the first family.

    Args:
        shape: nodes along each axis, one to three numbers: a sequence, an image (height, width), a volume.
        strides: lengths of the edges, each once.
        diagonals: also join diagonal neighbours (two dimensions only).

    Example:
        >>> dualcrf.grid(33, 33, strides=(1, 2))
        Graph(num_nodes=1089, num_edges=4158, num_chains=198, num_families=4)
    """
    if not 1 <= len(shape) <= 3 or any(not isinstance(n, int) or n < 1 for n in shape):
        raise ValueError(f"grid shape {shape}: expected one to three positive whole numbers, such as grid(height, width)")
    if not strides or any(not isinstance(s, int) or s < 1 for s in strides) or len(set(strides)) < len(strides):
        raise ValueError(f"strides={tuple(strides)}: expected different positive whole numbers, such as (1, 2)")
    if diagonals and len(shape) != 2:
        raise ValueError(f"diagonals need a grid of two dimensions, and this one has {len(shape)}")
    axes = [tuple(int(a == axis) for a in range(len(shape))) for axis in reversed(range(len(shape)))]
    steps = [tuple(s * d for d in axis) for s in strides for axis in axes]
    if diagonals:
        steps += [(s, sign * s) for s in strides for sign in (1, -1)]
    families, edges, count = [], [], 0
    for step in steps:
        family, pairs = grid_family(shape, step, count)
        families.append(family)
        edges.append(pairs)
        count += len(pairs)
    return assemble(torch.Size(shape).numel(), torch.cat(edges), families)


def assemble(num_nodes: int, edges: Tensor, families: Sequence[Family]) -> Graph:
    """A graph from families of chains; those without an edge go, and bare nodes get a chain of their own."""
    covered = cover(num_nodes, families)
    family_start = [0]
    for family in covered:
        family_start.append(family_start[-1] + len(family.lengths))
    nodes, lengths, edge, flip = (torch.cat(columns) for columns in zip(*covered, strict=True))
    chain_start = _starts(lengths)
    layout = _layout(num_nodes, edges, nodes, edge, flip, chain_start, tuple(family_start))
    return Graph(num_nodes, edges, nodes, edge, flip, chain_start, tuple(family_start), {"cpu": layout})


def _starts(counts: Tensor) -> Tensor:
    """Where each of several runs begins, and the end of the last."""
    start = torch.zeros(len(counts) + 1, dtype=torch.int64)
    start[1:] = counts.cumsum(0)
    return start


def _layout(
    num_nodes: int,
    edges: Tensor,
    place_node: Tensor,
    place_edge: Tensor,
    place_flip: Tensor,
    chain_start: Tensor,
    family_start: tuple[int, ...],
) -> ChainLayout:
    leads = (place_edge >= 0).nonzero().squeeze(1)
    place = torch.empty(len(edges), dtype=torch.int64)
    place[place_edge[leads]] = leads
    incident = []
    for nodes in edges.T.contiguous():
        incident += [_starts(torch.bincount(nodes, minlength=num_nodes)), torch.argsort(nodes, stable=True)]
    count = torch.bincount(place_node, minlength=num_nodes)
    node, edge, start, *rest = (t.to(torch.int32) for t in (place_node, place_edge, chain_start, place, *incident, count))
    return ChainLayout(
        node,
        edge,
        place_flip,
        start,
        *rest,
        families=family_start,
        family_places=tuple(chain_start[list(family_start)].tolist()),
        has_flips=bool(place_flip.any()),
    )


def _families_of(graph: Graph) -> list[Family]:
    """The way back from `assemble`."""
    families = []
    for first, last in pairwise(graph.family_start):
        places = slice(int(graph.chain_start[first]), int(graph.chain_start[last]))
        families.append(
            Family(
                graph.place_node[places],
                graph.chain_lengths[first:last],
                graph.place_edge[places],
                graph.place_flip[places],
            )
        )
    return families


def _check_num_nodes(num_nodes: int) -> None:
    if not isinstance(num_nodes, int) or num_nodes < 1:
        raise ValueError(f"num_nodes={num_nodes!r}: a graph has at least one node")


def _check_range(nodes: Tensor, num_nodes: int, what: str) -> None:
    outside = ((nodes < 0) | (nodes >= num_nodes)).nonzero()
    if len(outside):
        raise ValueError(f"{what} names node {nodes[tuple(outside[0])]}, but the nodes are 0 to {num_nodes - 1}")


def _index_vector(values: Tensor | Sequence[int], what: str) -> Tensor:
    vector = torch.as_tensor(values).cpu()
    if vector.ndim != 1 or (vector.numel() and (vector.is_floating_point() or vector.dtype == torch.bool)):
        raise ValueError(
            f"{what} is of shape {tuple(vector.shape)} and {vector.dtype}, expected a list of whole numbers: the nodes along it"
        )
    return vector.to(torch.int64)


def _checked_edges(num_nodes: int, edges: Tensor | Sequence[tuple[int, int]]) -> Tensor:
    _check_num_nodes(num_nodes)
    pairs = torch.as_tensor(edges).cpu()
    if pairs.numel() == 0:
        return torch.empty(0, 2, dtype=torch.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.is_floating_point() or pairs.dtype == torch.bool:
        raise ValueError(f"edges are of shape {tuple(pairs.shape)} and {pairs.dtype}, expected whole numbers of shape [E, 2]")
    pairs = pairs.to(torch.int64)
    _check_range(pairs, num_nodes, "an edge")
    loops = (pairs[:, 0] == pairs[:, 1]).nonzero()
    if len(loops):
        e = int(loops[0])
        raise ValueError(f"edge {e} joins node {int(pairs[e, 0])} to itself; add its score to that node's unary scores")
    return pairs


def _checked_graphs(graphs: Sequence[Graph]) -> Sequence[Graph]:
    if not graphs or not all(isinstance(g, Graph) for g in graphs):
        raise ValueError(f"expected a list of at least one Graph, got {graphs!r}")
    return graphs


def _first_repeat(values: Tensor) -> int | None:
    """The first index whose value stands at an earlier index too."""
    ordered, order = values.sort(stable=True)
    again = order[1:][ordered[1:] == ordered[:-1]]
    return int(again.min()) if len(again) else None
