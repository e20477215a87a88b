"""Random models on every kind of graph, and brute force over their labellings."""

import itertools
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dualcrf.graph import Graph, grid
from dualcrf.potentials import Additive, Dense, Pairwise, Potts, Weighted

KINDS = ("dense", "additive", "weighted", "potts")


def random_edges(nodes: int, count: int, generator: torch.Generator) -> list[tuple[int, int]]:
    pairs = torch.tensor(list(itertools.combinations(range(nodes), 2)))
    chosen = pairs[torch.randperm(len(pairs), generator=generator)[:count]]
    turned = torch.rand(len(chosen), generator=generator) < 0.5
    return [tuple(pair) for pair in torch.where(turned[:, None], chosen.flip(1), chosen).tolist()]


def random_covers(nodes: int, families: int, generator: torch.Generator) -> Graph:
    """Chains through all nodes in orders of their own, each family cut in two."""
    orders = [torch.randperm(nodes, generator=generator) for _ in range(families)]
    return Graph.from_chains(nodes, [order.split(nodes - nodes // 3) for order in orders])


GRAPHS = {
    "sequence": lambda g: grid(8, strides=(1, 3)),
    "image": lambda g: grid(3, 3),
    "strides": lambda g: grid(3, 4, strides=(1, 2)),
    "diagonals": lambda g: grid(3, 3, diagonals=True),
    "volume": lambda g: grid(2, 3, 2),
    "sparse": lambda g: Graph.from_edges(9, random_edges(9, 14, g)),
    "covers": lambda g: random_covers(9, 3, g),
    "joined": lambda g: Graph.join([grid(3, 3), random_covers(9, 1, g)]),
    "side by side": lambda g: Graph.disjoint([grid(2, 3), random_covers(4, 2, g)]),
}


def random_graph(name: str, seed: int) -> Graph:
    return GRAPHS[name](torch.Generator().manual_seed(seed))


def random_pairwise(
    kind: str, graph: Graph, labels: int, seed: int, batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float64
) -> Pairwise:
    generator = torch.Generator().manual_seed(seed + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    if kind == "dense":
        return Dense(normal(*batch, graph.num_edges, labels, labels))
    if kind == "additive":
        return Additive(*(normal(*batch, graph.num_nodes, labels, labels) for _ in range(2)))
    if kind == "weighted":
        return Weighted(normal(*batch, graph.num_edges), normal(labels, labels))
    return Potts(normal(*batch, graph.num_edges))


def random_unary(
    graph: Graph, labels: int, seed: int, batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float64
) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 2)
    return torch.randn(*batch, graph.num_nodes, labels, generator=generator, dtype=torch.float64).to(dtype)


def random_tree(nodes: int, seed: int) -> Graph:
    generator = torch.Generator().manual_seed(seed)
    names = torch.randperm(nodes, generator=generator).tolist()
    edges = [(names[i], names[int(torch.randint(i, (), generator=generator))]) for i in range(1, nodes)]
    return Graph.from_edges(nodes, edges)


def labellings(graph: Graph, labels: int) -> Tensor:
    """[labels ** nodes, nodes]"""
    return torch.cartesian_prod(*[torch.arange(labels)] * graph.num_nodes).view(-1, graph.num_nodes)


def all_energies(unary: Tensor, pairwise: Pairwise, graph: Graph) -> Tensor:
    """The score of every labelling of one model, written down as the definition says."""
    every = labellings(graph, unary.shape[-1])
    total = unary.double()[torch.arange(graph.num_nodes), every].sum(1)
    for e, (i, j) in enumerate(graph.edges.tolist()):
        a, b = every[:, i], every[:, j]
        if isinstance(pairwise, Dense):
            total += pairwise.table[e, a, b]
        elif isinstance(pairwise, Additive):
            total += pairwise.source[i, a, b].double() + pairwise.target[j, a, b]
        elif isinstance(pairwise, Weighted):
            total += pairwise.weight[e].double() * pairwise.compat[a, b]
        elif isinstance(pairwise, Potts):
            total += torch.where(a == b, pairwise.weight[e], 0.0)
    return total


def mrf_file(name: str) -> Path:
    """A benchmark model of the shared data, or a skip."""
    shared = Path(os.environ.get("DUALCRF_SHARED", Path(__file__).parents[2] / "shared"))
    path = shared / "data" / "mrf" / name
    if not path.exists():
        pytest.skip(f"{name} is not there: set DUALCRF_SHARED to the folder that holds data/mrf/{name}")
    return path
