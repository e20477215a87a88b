"""Marginals and the log partition function against enumeration."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualcrf.files import read_model
from dualcrf.graph import Graph, grid
from dualcrf.potentials import Pairwise, Potts
from dualcrf.solver.marginals import log_partition_bound, marginals
from tests.solver_models import (
    GRAPHS,
    KINDS,
    all_energies,
    labellings,
    mrf_file,
    random_graph,
    random_pairwise,
    random_tree,
    random_unary,
)

seeds = st.integers(0, 10**6)
kinds = st.sampled_from(KINDS)


def exact(unary: Tensor, pairwise: Pairwise, graph: Graph, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    labels = unary.shape[1]
    scores = all_energies(unary, pairwise, graph) / gamma
    chosen = torch.nn.functional.one_hot(labellings(graph, labels), labels).double()
    probability = scores.softmax(0)
    nodes = torch.einsum("k,knl->nl", probability, chosen)
    first, second = (chosen[:, graph.edges[:, end]] for end in (0, 1))
    return gamma * scores.logsumexp(0), nodes, torch.einsum("k,kea,keb->eab", probability, first, second)


def check_exact(graph: Graph, kind: str, seed: int, gamma: float) -> None:
    unary, pairwise = random_unary(graph, 2, seed), random_pairwise(kind, graph, 2, seed)
    log_partition, nodes, pairs = exact(unary, pairwise, graph, gamma)
    options = {"gamma": gamma, "impl": "reference"}
    assert torch.allclose(log_partition_bound(unary, pairwise, graph, **options), log_partition, atol=1e-10)
    found_nodes, found_pairs = marginals(unary, pairwise, graph, edges=True, **options)
    assert torch.allclose(found_nodes, nodes, atol=1e-10)
    assert torch.allclose(found_pairs, pairs, atol=1e-10)
    assert torch.equal(found_nodes, marginals(unary, pairwise, graph, **options))


@given(st.integers(1, 10), kinds, seeds, st.sampled_from([0.2, 1.0]))
@settings(max_examples=40, deadline=None)
def test_trees_are_exact(nodes: int, kind: str, seed: int, gamma: float):
    check_exact(random_tree(nodes, seed), kind, seed, gamma)


@given(kinds, seeds, st.sampled_from([0.2, 1.0]))
@settings(max_examples=20, deadline=None)
def test_chains_are_exact(kind: str, seed: int, gamma: float):
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    check_exact(Graph.from_chains(9, [order.split([4, 4, 1])]), kind, seed, gamma)


@given(st.sampled_from(sorted(GRAPHS)), kinds, seeds, st.sampled_from(["wavefront", "parallel"]))
@settings(max_examples=30, deadline=None)
def test_the_bound_is_one(name: str, kind: str, seed: int, schedule: str):
    graph = random_graph(name, seed)
    unary, pairwise = random_unary(graph, 2, seed), random_pairwise(kind, graph, 2, seed)
    bound = log_partition_bound(unary, pairwise, graph, schedule=schedule, impl="reference")
    assert bound >= exact(unary, pairwise, graph, 1.0)[0] - 1e-10


@given(st.sampled_from(sorted(GRAPHS)), kinds, seeds)
@settings(max_examples=15, deadline=None)
def test_nodes_and_edges_agree_at_the_optimum(name: str, kind: str, seed: int):
    graph = random_graph(name, seed)
    unary, pairwise = random_unary(graph, 2, seed), random_pairwise(kind, graph, 2, seed)
    nodes, pairs = marginals(unary, pairwise, graph, edges=True, iterations=400, tol=0.0, impl="reference")
    assert torch.allclose(nodes.sum(1), torch.ones(graph.num_nodes, dtype=nodes.dtype))
    assert torch.allclose(pairs.sum(2), nodes[graph.edges[:, 0]], atol=1e-6)
    assert torch.allclose(pairs.sum(1), nodes[graph.edges[:, 1]], atol=1e-6)


def test_the_marginals_are_the_bounds_gradient():
    graph = grid(3, 3)
    unary, pairwise = random_unary(graph, 3, 0), random_pairwise("dense", graph, 3, 0)
    options = {"iterations": 1000, "tol": 0.0, "impl": "reference"}
    nodes = marginals(unary, pairwise, graph, **options)
    step = 1e-5
    for node, label in ((0, 0), (4, 2), (8, 1)):
        moved = unary.clone()
        moved[node, label] += step
        higher = log_partition_bound(moved, pairwise, graph, **options)
        moved[node, label] -= 2 * step
        slope = (higher - log_partition_bound(moved, pairwise, graph, **options)) / (2 * step)
        assert slope == pytest.approx(nodes[node, label].item(), abs=1e-6)


def test_batches_equal_single_runs():
    graph = grid(3, 4)
    unary, pairwise = random_unary(graph, 3, 0, batch=(2, 2)), random_pairwise("potts", graph, 3, 0, batch=(2,))
    bound = log_partition_bound(unary, pairwise, graph, impl="reference")
    nodes, pairs = marginals(unary, pairwise, graph, edges=True, impl="reference")
    assert nodes.shape == (2, 2, 12, 3)
    assert pairs.shape == (2, 2, graph.num_edges, 3, 3)
    alone = Potts(pairwise.parameters["weight"][1])
    assert torch.allclose(bound[0, 1], log_partition_bound(unary[0, 1], alone, graph, impl="reference"))
    assert torch.allclose(nodes[0, 1], marginals(unary[0, 1], alone, graph, impl="reference"))


def test_forbidden_labels_have_no_probability():
    tree = random_tree(6, 0)
    for graph in (tree, grid(2, 3)):
        unary = random_unary(graph, 3, 0)
        unary[2, 1] = -torch.inf
        nodes = marginals(unary, random_pairwise("dense", graph, 3, 0), graph, impl="reference")
        assert nodes[2, 1] == 0
        assert nodes.isfinite().all()


@pytest.mark.parametrize(
    ("name", "log_partition"),
    [
        ("Grids_11", 390.077166),
        ("Grids_12", 697.881206),
        ("Segmentation_11", -55.253044),
        ("Segmentation_12", -23.687207),
        ("ObjectDetection_11", -172.418405),
    ],
)
def test_benchmark_models_are_bounded(name: str, log_partition: float):
    model = read_model(mrf_file(f"{name}.uai"))
    assert log_partition_bound(model.unary, model.pairwise, model.graph, impl="reference") > log_partition


@pytest.mark.parametrize("options", [{"gamma": 0.0}, {"schedule": "handover"}])
def test_wrong_options_are_named(options: dict):
    with pytest.raises(ValueError, match=next(iter(options))):
        marginals(torch.zeros(4, 2), Potts(torch.ones(4)), grid(2, 2), **options)
