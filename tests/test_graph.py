"""Graphs: families, chains and places are what the contract says, for every way to make them."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualcrf
from dualcrf import Graph
from tests.models import graphs


def chains(graph: Graph, family: int) -> list[list[int]]:
    bounds = graph.chain_start.tolist()
    return [
        graph.place_node[bounds[c] : bounds[c + 1]].tolist()
        for c in range(graph.family_start[family], graph.family_start[family + 1])
    ]


def check(graph: Graph) -> None:
    """What holds for every graph."""
    start = graph.chain_start.tolist()
    assert start[0] == 0
    assert start[-1] == graph.num_places
    assert graph.family_start[-1] == graph.num_chains
    assert set(graph.place_node.tolist()) == set(range(graph.num_nodes)), "every node is on a chain"
    assert sorted(graph.place_edge[graph.place_edge >= 0].tolist()) == list(range(graph.num_edges)), "every edge is on one"
    for c in range(graph.num_chains):
        for s in range(start[c], start[c + 1] - 1):
            ends = graph.place_node[s : s + 2].tolist()
            given = graph.edges[graph.place_edge[s]].tolist()
            assert ends == (given[::-1] if graph.place_flip[s] else given)
        assert graph.place_edge[start[c + 1] - 1] == -1
    for f in range(graph.num_families):
        nodes = [node for chain in chains(graph, f) for node in chain]
        assert len(nodes) == len(set(nodes)), "chains of a family share no node"
    lone = graph.chain_lengths == 1
    touched = torch.zeros(graph.num_nodes, dtype=torch.bool)
    touched[graph.edges.flatten()] = True
    assert not touched[graph.place_node[graph.chain_start[:-1][lone]]].any(), "a chain without an edge only where needed"


@pytest.mark.parametrize("name", graphs())
def test_invariants(name):
    check(graphs()[name])


def test_paper_grid():
    graph = dualcrf.grid(33, 33, strides=(1, 2))
    assert graph.num_families == 4
    assert graph.chain_lengths.bincount()[[16, 17, 33]].tolist() == [66, 66, 66]
    assert graph.chains_per_node.unique().tolist() == [4]


def test_families_of_an_image():
    graph = dualcrf.grid(2, 5, strides=(1, 2))
    assert chains(graph, 0) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert chains(graph, 1) == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]
    assert chains(graph, 2) == [[0, 2, 4], [1, 3], [5, 7, 9], [6, 8]]
    assert chains(graph, 3) == []
    assert graph.edges[:8].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4], [5, 6], [6, 7], [7, 8], [8, 9]]
    assert graph.edges[13:].tolist() == [[0, 2], [1, 3], [2, 4], [5, 7], [6, 8], [7, 9]]


def test_diagonals():
    graph = dualcrf.grid(2, 3, diagonals=True)
    assert chains(graph, 2) == [[0, 4], [1, 5]]
    assert chains(graph, 3) == [[1, 3], [2, 4]]


def test_volume():
    graph = dualcrf.grid(2, 2, 2)
    assert [chains(graph, f)[0] for f in range(3)] == [[0, 1], [0, 2], [0, 4]]


@pytest.mark.parametrize(("shape", "count"), [((1, 7), 1), ((7, 1), 1), ((7,), 1), ((1, 1), 1), ((1,), 1)])
def test_a_line_is_one_chain(shape, count):
    graph = dualcrf.grid(*shape)
    check(graph)
    assert graph.num_chains == count


def test_a_stride_longer_than_the_grid_has_an_empty_family():
    graph = dualcrf.grid(3, 3, strides=(1, 9))
    check(graph)
    assert graph.num_families == 4
    assert graph.num_edges == dualcrf.grid(3, 3).num_edges
    middle = dualcrf.grid(3, 3, strides=(2,))
    check(middle)
    assert chains(middle, 0)[-1] == [4]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_from_edges(data):
    n = data.draw(st.integers(1, 9))
    pairs = [(a, b) for a in range(n) for b in range(a)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    edges = [pair[::-1] if data.draw(st.booleans()) else pair for pair in chosen]
    graph = Graph.from_edges(n, edges)
    check(graph)
    assert graph.edges.tolist() == [list(e) for e in edges]
    for c in range(graph.num_chains):
        nodes = graph.place_node[graph.chain_start[c] : graph.chain_start[c + 1]]
        assert (nodes.diff() > 0).all(), "chains run upwards"


def test_from_edges_finds_rows_and_columns():
    grid = dualcrf.grid(20, 30)
    order = torch.randperm(grid.num_edges, generator=torch.Generator().manual_seed(0))
    graph = Graph.from_edges(600, grid.edges[order])
    assert graph.num_chains <= grid.num_chains
    runs = [c for f in range(graph.num_families) for c in chains(graph, f)]
    for row in range(20):
        nodes = list(range(30 * row + 1, 30 * row + 29))
        assert any(c[k : k + 28] == nodes for c in runs for k in range(len(c))), "straight on inside the grid"


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_from_chains_join_disjoint(data):
    n = data.draw(st.integers(1, 8))

    def family():
        nodes = data.draw(st.permutations(range(n)))
        cuts = sorted(data.draw(st.sets(st.integers(1, n))))
        return [nodes[a:b] for a, b in zip([0, *cuts], [*cuts, n], strict=True)]

    a, b = (Graph.from_chains(n, [family() for _ in range(data.draw(st.integers(1, 3)))]) for _ in range(2))
    joined, side = Graph.join([a, b]), Graph.disjoint([a, b])
    for graph in (a, b, joined, side):
        check(graph)
    assert joined.edges.tolist() == a.edges.tolist() + b.edges.tolist()
    assert side.edges.tolist() == a.edges.tolist() + (b.edges + n).tolist()
    assert joined.num_nodes == n
    assert side.num_nodes == 2 * n


@pytest.mark.parametrize("name", graphs())
def test_split_and_gather(name):
    graph = graphs()[name]
    unary = torch.randn(2, graph.num_nodes, 3, dtype=torch.float64)
    unary[0, 0, 1] = -torch.inf
    torch.testing.assert_close(graph.gather(graph.split(unary)), unary, rtol=1e-15, atol=1e-15)
    places = torch.randn(2, graph.num_places, 3, dtype=torch.float64)
    expected = torch.zeros_like(unary)
    for s, node in enumerate(graph.place_node):
        expected[:, node] += places[:, s]
    torch.testing.assert_close(graph.gather(places), expected)


def test_graphs_are_shared_by_copies_and_pickle():
    graph = dualcrf.grid(3, 3)
    graph.layout(torch.device("cpu"))
    assert copy.deepcopy(graph) is graph
    assert torch.equal(pickle.loads(pickle.dumps(graph)).edges, graph.edges)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dualcrf.grid(), "one to three"),
        (lambda: dualcrf.grid(2, 0), "positive"),
        (lambda: dualcrf.grid(2, 2, strides=(1, 1)), "different"),
        (lambda: dualcrf.grid(2, 2, 2, diagonals=True), "two dimensions"),
        (lambda: Graph.from_edges(0, []), "at least one node"),
        (lambda: Graph.from_edges(2, [(0, 2)]), "names node 2"),
        (lambda: Graph.from_edges(2, [(-1, 0)]), "names node -1"),
        (lambda: Graph.from_edges(2, [(1, 1)]), "to itself"),
        (lambda: Graph.from_edges(2, [(0, 1), (1, 0)]), "second time"),
        (lambda: Graph.from_edges(2, torch.tensor([[0.0, 1.0]])), "whole numbers"),
        (lambda: Graph.from_chains(3, [[[0, 1], [1, 2]]]), "twice in family 0"),
        (lambda: Graph.from_chains(2, [[[0, 2]]]), "names node 2"),
        (lambda: Graph.join([dualcrf.grid(2), dualcrf.grid(3)]), "same nodes"),
        (lambda: Graph.join([]), "at least one Graph"),
        (lambda: dualcrf.grid(2, 2).split(torch.zeros(3, 2)), "4 nodes"),
        (lambda: dualcrf.grid(2, 2).gather(torch.zeros(3, 2)), "8 places"),
    ],
)
def test_errors_say_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()
