"""No schedule ever raises its dual, and its multipliers always sum to the unary scores."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualcrf.graph import Graph, grid
from dualcrf.ops.reference import chain_messages
from dualcrf.potentials import Dense, Pairwise
from dualcrf.solver.problem import Problem, make_problem
from dualcrf.solver.schedules import SCHEDULES, HandOver, Parallel, Schedule, Wavefront
from tests.solver_models import GRAPHS, KINDS, random_graph, random_pairwise, random_unary

seeds = st.integers(0, 10**6)
names = st.sampled_from(sorted(GRAPHS))
kinds = st.sampled_from(KINDS)
gammas = st.sampled_from([0.0, 0.05, 1.0])


def start(name: str, unary: Tensor, pairwise: Pairwise, graph: Graph, gamma: float = 0.0, **options: float) -> Schedule:
    problem, _ = make_problem(unary, pairwise, graph, "reference")
    return SCHEDULES[name](problem, graph.split(problem.unary), gamma, **options)


def exact_dual(problem: Problem, places: Tensor, gamma: float) -> Tensor:
    smoothing = torch.tensor(gamma, dtype=places.dtype) if gamma else None
    return chain_messages(places, problem.parameters, problem.layout, problem.kind, smoothing)[2].sum(1)


def falls(duals: Tensor) -> bool:
    return bool((duals.diff(dim=1) <= 1e-13 * duals.abs().amax(1, keepdim=True) + 1e-13).all())


@given(names, kinds, seeds, gammas, st.sampled_from(["wavefront", "parallel"]))
@settings(max_examples=100, deadline=None)
def test_the_dual_never_rises(name: str, kind: str, seed: int, gamma: float, schedule: str):
    graph = random_graph(name, seed)
    unary, pairwise = random_unary(graph, 3, seed, batch=(2,)), random_pairwise(kind, graph, 3, seed, batch=(2,))
    run = start(schedule, unary, pairwise, graph, gamma)
    before = run.dual.clone()
    duals = torch.cat([before.unsqueeze(1), run.run(5), run.run(2)], 1)
    assert falls(duals)
    places = run.multipliers()
    assert torch.allclose(graph.gather(places), unary, atol=1e-11)
    found = exact_dual(run.problem, places, gamma)
    if run.problem.sweep.origin is None or schedule == "parallel":
        assert torch.allclose(found, duals[:, -1], atol=1e-10)
    else:  # a chain is worth at most the sum of the pieces it was cut into
        assert (found <= duals[:, -1] + 1e-10).all()


@given(names, kinds, seeds)
@settings(max_examples=60, deadline=None)
def test_handing_over_never_raises_the_dual(name: str, kind: str, seed: int):
    graph = random_graph(name, seed)
    unary, pairwise = random_unary(graph, 3, seed, batch=(2,)), random_pairwise(kind, graph, 3, seed, batch=(2,))
    run = start("handover", unary, pairwise, graph)
    exact, reported = [run.dual.clone()], [run.dual.clone()]
    for _ in range(6):
        reported.append(run.run(1)[:, 0])
        exact.append(exact_dual(run.problem, run.multipliers(), 0.0))
        assert (exact[-1] <= reported[-1] + 1e-11).all()
        assert torch.allclose(graph.gather(run.multipliers()), unary, atol=1e-11)
    assert falls(torch.stack(exact, 1))
    assert falls(torch.stack(reported, 1))


def test_the_papers_step_lowers_the_dual_of_a_thousand_models():
    for seed in range(100):
        graph = random_graph(sorted(GRAPHS)[seed % len(GRAPHS)], seed)
        unary = random_unary(graph, 3, seed, batch=(10,))
        pairwise = random_pairwise(KINDS[seed % 4], graph, 3, seed, batch=(10,))
        run = start("parallel", unary, pairwise, graph, gamma=(0.0, 1.0)[seed % 2])
        assert falls(torch.cat([run.dual.unsqueeze(1), run.run(8)], 1))


@given(names, seeds, gammas, st.sampled_from([0.5, 1.0, 4.0, 100.0]))
@settings(max_examples=40, deadline=None)
def test_a_large_step_is_guarded(name: str, seed: int, gamma: float, step: float):
    graph = random_graph(name, seed)
    unary, pairwise = random_unary(graph, 3, seed, batch=(2,)), random_pairwise("dense", graph, 3, seed)
    run = start("parallel", unary, pairwise, graph, gamma, step=step)
    duals = torch.cat([run.dual.unsqueeze(1), run.run(30)], 1)
    assert falls(duals)
    assert run.multipliers().isfinite().all()
    assert torch.allclose(graph.gather(run.multipliers()), unary, atol=1e-9)


def test_a_full_step_smoothed_is_far_faster_than_the_papers():
    graph = grid(10, 10, strides=(1, 2))
    unary, pairwise = random_unary(graph, 4, 0), random_pairwise("dense", graph, 4, 0)
    slow, fast = (start("parallel", unary, pairwise, graph, 1.0, **o) for o in ({}, {"step": 1.0}))
    assert fast.run(10)[0, -1] < slow.run(50)[0, -1]


def test_six_smoothed_sweeps_reach_the_optimum_of_the_papers_size():
    graph = grid(33, 33, strides=(1, 2))
    unary, pairwise = random_unary(graph, 21, 0), random_pairwise("dense", graph, 21, 0)
    run = start("wavefront", unary, pairwise, graph, 1.0)
    after_six = run.run(6)[0, -1]
    optimum = run.run(12)[0, -1]
    assert after_six - optimum < 1e-5 * optimum


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_forbidden_labels_and_pairs(name: str):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        graph = random_graph("covers" if seed % 2 else "image", seed)
        unary = random_unary(graph, 4, seed)
        unary[torch.rand(unary.shape, generator=generator) < 0.2] = -torch.inf
        unary[:, 0] = 0  # keeps the model possible
        table = torch.randn(graph.num_edges, 4, 4, generator=generator, dtype=torch.float64)
        table[torch.rand(table.shape, generator=generator) < 0.3] = -torch.inf
        table[:, 0, 0] = 0
        for gamma in (0.0, 0.5) if name != "handover" else (0.0,):
            run = start(name, unary, Dense(table), graph, gamma)
            duals = torch.cat([run.dual.unsqueeze(1), run.run(6)], 1)
            assert duals.isfinite().all()
            assert falls(duals)
            places = run.multipliers()
            allowed = run.problem.unary[0] > -torch.inf
            assert torch.allclose(graph.gather(places)[0][allowed], unary[allowed], atol=1e-10)


@pytest.mark.parametrize("make", [Wavefront, HandOver, Parallel])
def test_taking_items_leaves_them_as_they_are(make: type[Schedule]):
    graph = random_graph("covers", 0)
    unary, pairwise = random_unary(graph, 3, 0, batch=(3,)), random_pairwise("dense", graph, 3, 0, batch=(3,))
    problem, _ = make_problem(unary, pairwise, graph, "reference")
    whole, part = (make(problem, graph.split(unary), 0.0) for _ in range(2))
    whole.run(2)
    part.run(2)
    part.take(torch.tensor([2, 0]))
    assert torch.allclose(whole.run(3)[[2, 0]], part.run(3))
    assert torch.allclose(whole.multipliers()[[2, 0]], part.multipliers())


def test_handing_over_is_for_the_hard_max():
    graph = grid(2, 2)
    with pytest.raises(ValueError, match="hard max alone"):
        start("handover", torch.zeros(4, 2), random_pairwise("potts", graph, 2, 0), graph, gamma=1.0)
