"""Energies and bounds against the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualcrf.graph import Graph, grid
from dualcrf.ops.reference import chain_messages
from dualcrf.potentials import Dense, Potts
from dualcrf.solver.certificate import dual_bound, energy, feasible, flat_dual_and_loss
from tests.solver_models import GRAPHS, KINDS, all_energies, labellings, random_graph, random_pairwise, random_unary

seeds = st.integers(0, 10**6)
names = st.sampled_from(sorted(GRAPHS))
kinds = st.sampled_from(KINDS)


@given(names, kinds, seeds)
@settings(max_examples=40, deadline=None)
def test_energy_is_the_sum_of_all_scores(name: str, kind: str, seed: int):
    graph = random_graph(name, seed)
    unary, pairwise = random_unary(graph, 2, seed), random_pairwise(kind, graph, 2, seed)
    found = energy(labellings(graph, 2), unary, pairwise, graph)
    assert torch.allclose(found, all_energies(unary, pairwise, graph), atol=1e-12)


@given(names, kinds, seeds)
@settings(max_examples=40, deadline=None)
def test_the_bound_is_the_sum_of_the_chains_maxima(name: str, kind: str, seed: int):
    graph = random_graph(name, seed)
    pairwise = random_pairwise(kind, graph, 3, seed, batch=(2,))
    places = torch.randn(2, graph.num_places, 3, dtype=torch.float64)
    parameters = pairwise.flat_parameters(torch.Size([2]))
    _, _, chains = chain_messages(places, parameters, graph.layout(places.device), kind, None)
    assert torch.allclose(dual_bound(places, pairwise, graph), chains.sum(1), atol=1e-12)


@given(names, kinds, seeds)
@settings(max_examples=40, deadline=None)
def test_loss_is_the_distance_to_the_max_marginals(name: str, kind: str, seed: int):
    graph = random_graph(name, seed)
    pairwise = random_pairwise(kind, graph, 3, seed)
    places = torch.randn(1, graph.num_places, 3, dtype=torch.float64)
    labels = torch.randint(3, (1, graph.num_nodes))
    layout, parameters = graph.layout(places.device), pairwise.flat_parameters(torch.Size([1]))
    forward, backward, _ = chain_messages(places, parameters, layout, kind, None)
    marginals = (places + forward + backward)[0]
    loss = torch.zeros(graph.num_nodes, dtype=torch.float64)
    for place, node in enumerate(graph.place_node.tolist()):
        loss[node] = max(loss[node], marginals[place].max() - marginals[place, labels[0, node]])
    dual, found = flat_dual_and_loss(labels, places, parameters, layout, kind)
    assert torch.allclose(found[0], loss, atol=1e-12)
    assert torch.allclose(dual, dual_bound(places, pairwise, graph), atol=1e-12)


@given(names, seeds)
@settings(max_examples=40, deadline=None)
def test_feasible_scores_sum_to_the_unary_ones(name: str, seed: int):
    graph = random_graph(name, seed)
    unary = random_unary(graph, 3, seed).masked_fill(torch.rand(graph.num_nodes, 3) < 0.2, -torch.inf)
    places = torch.randn(graph.num_places, 3).masked_fill(torch.rand(graph.num_places, 3) < 0.1, -torch.inf)
    fixed = feasible(places.nan_to_num(neginf=-3.0), unary, graph)
    assert fixed.dtype == torch.float64
    assert torch.allclose(graph.gather(fixed), unary, rtol=0, atol=1e-14)


@given(names, kinds, seeds)
@settings(max_examples=40, deadline=None)
def test_any_feasible_scores_bound_every_labelling(name: str, kind: str, seed: int):
    graph = random_graph(name, seed)
    unary, pairwise = random_unary(graph, 2, seed), random_pairwise(kind, graph, 2, seed)
    places = feasible(graph.split(unary) + torch.randn(graph.num_places, 2), unary, graph)
    assert dual_bound(places, pairwise, graph) >= all_energies(unary, pairwise, graph).max() - 1e-12


def test_batches_broadcast():
    graph = grid(2, 3)
    unary = torch.randn(4, 1, 6, 3)
    pairwise = Dense(torch.randn(5, graph.num_edges, 3, 3))
    labels = torch.randint(3, (4, 5, 6))
    found = energy(labels, unary, pairwise, graph)
    assert found.shape == (4, 5)
    single = energy(labels[2, 3], unary[2, 0], Dense(pairwise.table[3]), graph)
    assert torch.allclose(found[2, 3], single)
    bound = dual_bound(graph.split(unary), pairwise, graph)
    assert torch.allclose(bound[2, 3], dual_bound(graph.split(unary[2, 0]), Dense(pairwise.table[3]), graph))
    assert energy(labels[:0], unary[:0], pairwise, graph).shape == (0, 5)


def test_forbidden_labels_and_pairs_are_worth_minus_infinity():
    graph = grid(2)
    table = torch.zeros(1, 2, 2)
    table[0, 0, 1] = -torch.inf
    unary = torch.tensor([[0.0, 1.0], [0.0, -torch.inf]])
    every = labellings(graph, 2)
    assert energy(every, unary, Dense(table), graph).tolist() == [0, -torch.inf, 1, -torch.inf]
    assert dual_bound(graph.split(unary), Dense(table), graph) == 1


def test_large_tables_are_never_whole_in_memory():
    graph = grid(40, 40)
    labels = 256
    unary, pairwise = torch.randn(graph.num_nodes, labels), Potts(torch.rand(graph.num_edges))
    assert dual_bound(graph.split(unary), pairwise, graph) >= energy(unary.argmax(1), unary, pairwise, graph)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(4), "whole numbers"),
        (torch.zeros(3, dtype=torch.int64), "4 nodes"),
        (torch.tensor([0, 2, 0, 0]), "label 2 at"),
        (torch.tensor([0, -1, 0, 0]), "label -1 at"),
    ],
)
def test_wrong_labels_are_named(labels: torch.Tensor, message: str):
    graph = Graph.from_edges(4, [(0, 1), (2, 3)])
    with pytest.raises((ValueError, TypeError), match=message):
        energy(labels, torch.zeros(4, 2), Potts(torch.zeros(2)), graph)
