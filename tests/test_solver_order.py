"""The levels, the chains split where they turn, and the random forests."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualcrf.graph import Graph, grid
from dualcrf.order import sweep_of
from dualcrf.solver.forest import forest_of
from tests.solver_models import GRAPHS, random_graph, random_tree

CPU = torch.device("cpu")
graphs = st.builds(random_graph, st.sampled_from(sorted(GRAPHS)), st.integers(0, 10**6))


def test_levels_of_an_image_are_its_anti_diagonals():
    row, column = torch.meshgrid(torch.arange(4), torch.arange(6), indexing="ij")
    assert torch.equal(sweep_of(grid(4, 6, strides=(1, 2))).level.view(4, 6), row + column)
    assert torch.equal(sweep_of(grid(4, 6, diagonals=True)).level.view(4, 6), 2 * row + column)


def test_grids_keep_their_chains():
    graph = grid(3, 4, strides=(1, 2), diagonals=True)
    assert sweep_of(graph).graph is graph


@given(graphs)
@settings(max_examples=60, deadline=None)
def test_every_chain_ascends_and_every_edge_is_kept(graph: Graph):
    sweep = sweep_of(graph)
    split, leads = sweep.graph, (sweep.graph.place_edge >= 0).nonzero().squeeze(1)
    here, there = split.place_node[leads], split.place_node[leads + 1]
    assert (sweep.level[here] < sweep.level[there]).all()
    flip = split.place_flip[leads]
    ends = torch.stack([torch.where(flip, there, here), torch.where(flip, here, there)], 1)
    assert torch.equal(ends, graph.edges[split.place_edge[leads]])
    assert torch.equal(split.place_edge[leads].sort()[0], torch.arange(graph.num_edges))
    if sweep.origin is not None:
        assert torch.equal(graph.place_node[sweep.origin], split.place_node)
        assert torch.equal(sweep.origin.unique(), torch.arange(graph.num_places))


@given(graphs)
@settings(max_examples=60, deadline=None)
def test_the_chains_of_a_family_share_no_node_after_the_split(graph: Graph):
    split = sweep_of(graph).graph
    places = split.chain_start[list(split.family_start)].tolist()
    for first, last in pairwise(places):
        assert len(split.place_node[first:last].unique()) == last - first


@given(graphs)
@settings(max_examples=60, deadline=None)
def test_splitting_and_merging_give_the_scores_back(graph: Graph):
    sweep = sweep_of(graph)
    scores = torch.randn(2, graph.num_places, 3, dtype=torch.float64)
    split = sweep.split(scores, graph)
    assert torch.allclose(sweep.merge(split, graph), scores)
    assert torch.allclose(sweep.graph.gather(split), graph.gather(scores))


@given(graphs)
@settings(max_examples=60, deadline=None)
def test_the_order_lists_every_node_and_place_once(graph: Graph):
    sweep = sweep_of(graph)
    order = sweep.order(CPU)
    assert torch.equal(order.node.sort()[0], torch.arange(graph.num_nodes, dtype=torch.int32))
    assert order.levels == tuple(order.start.tolist())
    for depth, (first, last) in enumerate(pairwise(order.levels)):
        assert (sweep.level[order.node[first:last]] == depth).all()
    for node in range(graph.num_nodes):
        places = order.place[order.place_start[node] : order.place_start[node + 1]]
        assert (sweep.graph.place_node[places] == node).all()
    if order.by_number:
        leads = (sweep.graph.place_edge >= 0).nonzero().squeeze(1)
        assert (sweep.graph.place_node[leads] < sweep.graph.place_node[leads + 1]).all()


@given(graphs, st.integers(0, 31))
@settings(max_examples=60, deadline=None)
def test_a_random_forest_has_no_other_edges_than_those_to_parents(graph: Graph, number: int):
    sweep = sweep_of(graph)
    parent, reverse = sweep.forest(number, CPU)
    free = parent > -2
    inside = free[graph.edges].all(1).nonzero().squeeze(1)
    hanging = (parent >= 0).nonzero().squeeze(1)
    places = parent[hanging].long()
    assert torch.equal(sweep.graph.place_edge[places].sort()[0], inside)
    children = sweep.graph.place_node[places if reverse else places + 1]
    assert torch.equal(children, hanging)


def test_a_forest_is_recognised_and_a_cycle_too():
    assert forest_of(grid(3, 3)) is None
    assert forest_of(Graph.from_chains(2, [[[0, 1]], [[1, 0]]])) is None
    assert forest_of(Graph.from_edges(3, [(0, 1), (1, 2), (2, 0)])) is None
    for seed in range(20):
        tree = random_tree(12, seed)
        found = forest_of(tree)
        assert found is not None
        assert len(found.roots) == 1
        assert sum(len(branch.child) for branch in found.branches) == 11


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
def test_the_smallest_graphs(shape: tuple[int, int]):
    sweep = sweep_of(grid(*shape))
    assert sweep.level.tolist() == list(range(max(shape)))


def test_a_large_grid_takes_no_loop_over_nodes():
    assert len(sweep_of(grid(257, 257, strides=(1, 3, 9, 27))).order(CPU).levels) == 514
