"""`solve`: brute force, trees, batches, stopping, certificates, and the benchmark models."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualcrf.files import read_model
from dualcrf.graph import Graph, grid
from dualcrf.plots import plot_convergence
from dualcrf.potentials import Dense, Potts
from dualcrf.solver.certificate import dual_bound, energy
from dualcrf.solver.problem import make_problem
from dualcrf.solver.schedules import Wavefront
from dualcrf.solver.search import Progress
from dualcrf.solver.solution import Solution
from dualcrf.solver.solve import solve
from tests.solver_models import (
    GRAPHS,
    KINDS,
    all_energies,
    mrf_file,
    random_graph,
    random_pairwise,
    random_tree,
    random_unary,
)

seeds = st.integers(0, 10**6)
names = st.sampled_from(sorted(GRAPHS))
kinds = st.sampled_from(KINDS)
schedules = st.sampled_from(["wavefront", "handover", "parallel"])


def run(unary, pairwise, graph, **options) -> Solution:
    return solve(unary, pairwise, graph, impl="reference", **options)


def check_certificate(solution: Solution, unary, pairwise, graph) -> None:
    """Everything the solution claims, computed again from labels and multipliers."""
    assert torch.allclose(solution.primal, energy(solution.labels, unary, pairwise, graph), atol=1e-12)
    bound = dual_bound(solution.multipliers, pairwise, graph)
    assert torch.allclose(solution.dual, bound, rtol=1e-14, atol=1e-12)
    assert torch.allclose(graph.gather(solution.multipliers), unary.double().expand_as(graph.gather(solution.multipliers)))
    assert (solution.gap >= 0).all()


@given(names, kinds, seeds, schedules)
@settings(max_examples=40, deadline=None)
def test_primal_and_dual_enclose_the_best_labelling(name: str, kind: str, seed: int, schedule: str):
    graph = random_graph(name, seed)
    unary, pairwise = random_unary(graph, 2, seed), random_pairwise(kind, graph, 2, seed)
    solution = run(unary, pairwise, graph, schedule=schedule, iterations=24, polish=False)
    best = all_energies(unary, pairwise, graph).max()
    assert solution.primal <= best + 1e-12
    assert best <= solution.dual + 1e-12
    check_certificate(solution, unary, pairwise, graph)


@given(names, kinds, seeds)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_small_models_are_solved(name: str, kind: str, seed: int):
    graph = random_graph(name, seed)
    unary, pairwise = random_unary(graph, 2, seed), random_pairwise(kind, graph, 2, seed)
    assert torch.allclose(run(unary, pairwise, graph).primal, all_energies(unary, pairwise, graph).max())


@given(names, kinds, seeds, st.sampled_from(["wavefront", "parallel"]), st.sampled_from([0.1, 2.0]))
@settings(max_examples=20, deadline=None)
def test_a_smoothed_run_certifies_too(name: str, kind: str, seed: int, schedule: str, gamma: float):
    graph = random_graph(name, seed)
    unary, pairwise = random_unary(graph, 2, seed), random_pairwise(kind, graph, 2, seed)
    solution = run(unary, pairwise, graph, schedule=schedule, gamma=gamma, iterations=16, polish=False)
    assert all_energies(unary, pairwise, graph).max() <= solution.dual + 1e-12
    check_certificate(solution, unary, pairwise, graph)


@given(st.integers(1, 12), kinds, seeds)
@settings(max_examples=30, deadline=None)
def test_trees_are_solved_exactly(nodes: int, kind: str, seed: int):
    graph = random_tree(nodes, seed)
    unary, pairwise = random_unary(graph, 2, seed), random_pairwise(kind, graph, 2, seed)
    solution = run(unary, pairwise, graph)
    assert solution.gap <= 1e-12 * solution.dual.abs().clamp(min=1)
    assert solution.converged
    assert solution.agreement.all()
    assert torch.allclose(solution.primal, all_energies(unary, pairwise, graph).max(), atol=1e-12)
    check_certificate(solution, unary, pairwise, graph)


@pytest.mark.parametrize("schedule", ["wavefront", "handover", "parallel"])
def test_chains_alone_are_solved_exactly_even_with_ties(schedule: str):
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(9, generator=generator)
        graph = Graph.from_chains(9, [order.split(6)])
        unary = torch.randint(3, (9, 3), generator=generator).double()
        pairwise = Potts(torch.randint(-2, 3, (graph.num_edges,), generator=generator).double())
        solution = run(unary, pairwise, graph, schedule=schedule)
        assert solution.gap == 0
        assert solution.primal == all_energies(unary, pairwise, graph).max()


def test_trees_with_ties_are_solved_exactly():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        graph = random_tree(9, seed)
        unary = torch.randint(3, (9, 3), generator=generator).double()
        pairwise = Potts(torch.randint(-2, 3, (graph.num_edges,), generator=generator).double())
        solution = run(unary, pairwise, graph)
        assert solution.primal == solution.dual == all_energies(unary, pairwise, graph).max()


@pytest.mark.parametrize("schedule", ["wavefront", "handover", "parallel"])
@pytest.mark.parametrize("name", ["strides", "covers"])
def test_a_batch_equals_its_single_runs(name: str, schedule: str):
    graph = random_graph(name, 3)
    unary, pairwise = random_unary(graph, 3, 3, batch=(2, 3)), random_pairwise("dense", graph, 3, 3, batch=(3,))
    polish = schedule == "wavefront"
    together = run(unary, pairwise, graph, schedule=schedule, polish=polish)
    assert together.labels.shape == (2, 3, graph.num_nodes)
    for i in range(2):
        for j in range(3):
            alone = run(unary[i, j], Dense(pairwise.parameters["table"][j]), graph, schedule=schedule, polish=polish)
            assert torch.allclose(together.primal[i, j], alone.primal)
            assert torch.allclose(together.dual[i, j], alone.dual)
            assert torch.equal(together.labels[i, j], alone.labels)
            assert together.iterations[i, j] == alone.iterations
            assert np.asarray(together.status)[i, j] == alone.status


def test_annealing_frees_block_descent():
    graph = grid(20, 20)
    unary, pairwise = random_unary(graph, 8, 0), random_pairwise("dense", graph, 8, 0)
    problem, _ = make_problem(unary, pairwise, graph, "reference")
    caught = Wavefront(problem, graph.split(problem.unary), 0.0).run(400)[0, -1]
    assert run(unary, pairwise, graph, polish=False).dual < caught - 4


def test_an_empty_batch():
    graph = grid(3, 3)
    solution = run(torch.zeros(0, 9, 2), Potts(torch.ones(graph.num_edges)), graph, history=True)
    assert solution.labels.shape == (0, 9)
    assert solution.gap.shape == (0,)
    assert solution.history is not None


def test_one_label_and_one_node():
    assert run(torch.zeros(4, 1), Potts(torch.ones(4)), grid(2, 2)).primal == 4
    assert run(torch.tensor([[1.0, 3.0]]), Potts(torch.zeros(0)), grid(1)).labels.tolist() == [1]


def test_history_is_monotone_and_ends_at_the_solution():
    graph = grid(5, 5)
    unary, pairwise = random_unary(graph, 3, 0, batch=(4,)), random_pairwise("dense", graph, 3, 0, batch=(4,))
    solution = run(unary, pairwise, graph, history=True, polish=False)
    history = solution.history
    assert history is not None
    assert history.dual.shape == (4, int(solution.iterations.max()) + 1)
    assert (history.dual.diff(dim=1) <= 1e-12).all()
    assert (history.primal.diff(dim=1) >= 0).all()
    assert torch.allclose(history.dual[:, -1], solution.dual)
    assert torch.allclose(history.primal[:, -1], solution.primal)


def test_infeasible_models_say_so():
    graph = grid(2, 2)
    unary = torch.zeros(2, 4, 2)
    unary[1, 2] = -torch.inf
    solution = run(unary, Potts(torch.ones(graph.num_edges)), graph)
    assert solution.status[1] == "infeasible"
    assert solution.status[0] != "infeasible"
    assert solution.primal[1] == solution.dual[1] == -torch.inf
    table = torch.full((1, 2, 2), -torch.inf)
    assert run(torch.zeros(2, 2), Dense(table), grid(2)).status == "infeasible"


def test_impossible_labels_are_found_before_the_search():
    graph = grid(3, 3)
    table = torch.where(torch.eye(2, dtype=torch.bool), 0.0, -torch.inf).expand(graph.num_edges, 2, 2).contiguous()
    unary = torch.randn(9, 2)
    unary[4, 0] = -torch.inf
    solution = run(unary, Dense(table), graph)
    assert solution.labels.tolist() == [1] * 9
    assert torch.allclose(solution.dual, unary[:, 1].double().sum())


def test_status_names_the_budget():
    graph = grid(12, 12)
    unary, pairwise = random_unary(graph, 6, 0), random_pairwise("dense", graph, 6, 0)
    few = run(unary, pairwise, graph, iterations=3, polish=False)
    assert few.status == "iterations"
    assert few.iterations == 3
    assert not few.converged
    begun = time.monotonic()
    hurried = run(unary, pairwise, graph, iterations=10**6, tol=0.0, time_limit=0.3)
    assert hurried.status in ("time", "progress")
    assert time.monotonic() - begun < 5
    start = run(unary, pairwise, graph, iterations=0, polish=False)
    assert torch.allclose(start.dual, dual_bound(graph.split(unary), pairwise, graph))


def test_an_interrupt_gives_the_best_so_far():
    graph = grid(8, 8)
    unary, pairwise = random_unary(graph, 4, 0), random_pairwise("dense", graph, 4, 0)
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 4:
            raise KeyboardInterrupt

    solution = run(unary, pairwise, graph, callback=interrupt)
    assert solution.status == "interrupted"
    assert not solution.converged
    assert solution.iterations == seen[-1].iterations == 4
    assert torch.allclose(solution.dual, seen[-1].dual)
    assert torch.allclose(solution.primal, seen[-1].primal)
    check_certificate(solution, unary, pairwise, graph)


def test_float32_models_are_certified_in_float64():
    graph = grid(10, 10)
    unary = random_unary(graph, 4, 0, dtype=torch.float32)
    pairwise = random_pairwise("potts", graph, 4, 0, dtype=torch.float32)
    solution = run(unary, pairwise, graph)
    assert solution.primal.dtype == solution.dual.dtype == torch.float64
    check_certificate(solution, unary, pairwise, graph)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "diagonal"}, "'wavefront', 'parallel', 'handover'"),
        ({"gamma": -1.0}, "gamma=-1.0"),
        ({"iterations": -1}, "iterations=-1"),
        ({"schedule": "handover", "gamma": 1.0}, "hard max alone"),
        ({"step": 0.5}, "schedule='parallel'"),
        ({"impl": "fpga"}, "impl='fpga'"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str):
    graph = grid(2, 2)
    with pytest.raises(ValueError, match=message):
        solve(torch.zeros(4, 2), Potts(torch.ones(4)), graph, **{"impl": "reference", **options})


def test_wrong_scores_are_named():
    graph = grid(2, 2)
    with pytest.raises(ValueError, match="unary has nan at"):
        run(torch.full((4, 2), torch.nan), Potts(torch.ones(4)), graph)
    with pytest.raises(ValueError, match="weight has inf at"):
        run(torch.zeros(4, 2), Potts(torch.full((4,), torch.inf)), graph)
    with pytest.raises(ValueError, match="4 nodes"):
        run(torch.zeros(5, 2), Potts(torch.ones(4)), graph)


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("Grids_11", 387.894789),
        ("Grids_12", 695.824870),
        ("Segmentation_11", -56.036789),
        ("Segmentation_12", -24.233552),
        ("ObjectDetection_11", -241.359037),
    ],
)
def test_benchmark_models_are_solved(name: str, best: float):
    model = read_model(mrf_file(f"{name}.uai"))
    solution = run(model.unary, model.pairwise, model.graph)
    assert solution.primal == pytest.approx(best, abs=1e-6)
    assert solution.dual >= best - 1e-6


def test_the_course_is_drawn():
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib").use("agg")
    graph = grid(4, 4)
    unary, pairwise = random_unary(graph, 3, 0, batch=(2,)), random_pairwise("potts", graph, 3, 0)
    axes = plot_convergence(run(unary, pairwise, graph, history=True))
    assert len(axes.lines) == 4
    with pytest.raises(ValueError, match="history=True"):
        plot_convergence(run(unary, pairwise, graph))
