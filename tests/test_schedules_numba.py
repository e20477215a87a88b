"""The schedules' kernels on the CPU against the reference, and their dual, which never rises."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dualcrf
from dualcrf.graph import Graph
from dualcrf.kernels.numba import schedules as kernels
from dualcrf.ops import schedules_reference as reference
from dualcrf.solver.problem import Problem, make_problem
from dualcrf.solver.schedules import SCHEDULES
from tests.models import assert_as_accurate, graphs, pairwise, parameters
from tests.solver_models import GRAPHS, KINDS, random_graph

NAMES = sorted(GRAPHS) + sorted(graphs())
GAMMAS = (None, (0.05, 1.0, 3.0))


def graph_of(name: str) -> Graph:
    return random_graph(name, 3) if name in GRAPHS else graphs()[name]


def random_problem(
    kind: str,
    graph: Graph,
    labels: int = 5,
    *,
    batch: int = 3,
    shared: bool = False,
    forbid: float = 0.0,
    dtype: torch.dtype = torch.float64,
    table: torch.dtype | None = None,
) -> Problem:
    values = parameters(kind, graph, labels, () if shared else (batch,), forbid=forbid)
    unary = torch.randn(batch, graph.num_nodes, labels, dtype=torch.float64)
    unary[..., 1:].masked_fill_(torch.rand(batch, graph.num_nodes, labels - 1) < forbid, -torch.inf)
    if forbid and kind in ("dense", "additive"):
        values[0][..., 0, :], values[0][..., :, 0] = 1, 1  # the first label stays possible everywhere
    given = pairwise(kind, [v.to(table or dtype) for v in values])
    return make_problem(unary.to(dtype), given, graph, "reference")[0]


def in_float64(problem: Problem) -> Problem:
    return replace(problem, unary=problem.unary.double(), parameters=[p.double() for p in problem.parameters])


def wavefront(
    ops: ModuleType, problem: Problem, gamma: tuple[float, ...] | None, reverse: bool, sweeps: int = 3
) -> list[Tensor]:
    """The dual after each sweep, and the messages after the last."""
    smoothing = None if gamma is None else problem.unary.new_tensor(gamma)
    forward, backward = exact_messages(in_float64(problem), gamma)
    forward, backward = forward.to(problem.unary.dtype), backward.to(problem.unary.dtype)
    # What lies in the first sweep's own direction is not read, but where a chain begins it is 0.
    start, into = problem.sweep_layout.start, backward if reverse else forward
    into.fill_(torch.nan)
    into[:, start[1:] - 1 if reverse else start[:-1]] = 0
    duals = ops.wavefront_sweeps(
        problem.unary, problem.parameters, problem.sweep_layout, problem.order, problem.kind, smoothing,
        forward, backward, sweeps, reverse,
    )  # fmt: skip
    return [duals, forward, backward]


def exact_messages(problem: Problem, gamma: tuple[float, ...] | None) -> tuple[Tensor, Tensor]:
    places = problem.sweep.split(problem.graph.split(problem.unary), problem.graph)
    items = torch.arange(len(places)).split(1)
    each = [problem.take(b).sweep_messages(places[b], gamma[b] if gamma else 0.0) for b in items]
    return torch.cat([forward for forward, _, _ in each]), torch.cat([backward for _, backward, _ in each])


def handover(ops: ModuleType, problem: Problem, reverse: bool) -> list[Tensor]:
    scores, handed = problem.unary.clone(), torch.zeros_like(problem.graph.split(problem.unary))
    duals = ops.handover_sweeps(problem.parameters, problem.layout, problem.kind, scores, handed, 3, reverse)
    return [duals, scores, handed]


def decoded(ops: ModuleType, problem: Problem, reverse: bool) -> Tensor:
    model = problem.parameters, problem.sweep_layout, problem.order, problem.kind
    return ops.decode_labels(problem.unary, *model, reverse)


def improved(ops: ModuleType, problem: Problem, number: int) -> Tensor:
    parent, reverse = problem.sweep.forest(number, torch.device("cpu"))
    labels = problem.unary.argmax(2)
    model = problem.parameters, problem.sweep_layout, problem.order, problem.kind
    ops.improve_labels(labels, problem.unary, *model, parent, reverse)
    return labels


def assert_equal_sweeps(problem: Problem) -> None:
    for reverse in (False, True):
        for gamma in GAMMAS:
            torch.testing.assert_close(
                wavefront(kernels, problem, gamma, reverse), wavefront(reference, problem, gamma, reverse),
                rtol=1e-9, atol=1e-11,
            )  # fmt: skip
        torch.testing.assert_close(
            handover(kernels, problem, reverse), handover(reference, problem, reverse), rtol=1e-9, atol=1e-11
        )
        assert torch.equal(decoded(kernels, problem, reverse), decoded(reference, problem, reverse))
    for number in range(6):
        assert torch.equal(improved(kernels, problem, number), improved(reference, problem, number))


@pytest.mark.parametrize("forbid", [0.0, 0.25])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_graph(name: str, kind: str, forbid: float):
    torch.manual_seed(0)
    assert_equal_sweeps(random_problem(kind, graph_of(name), forbid=forbid))


@pytest.mark.parametrize("labels", [1, 2, 16, 21, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_labels_and_shared_parameters(kind: str, labels: int):
    torch.manual_seed(labels)
    assert_equal_sweeps(random_problem(kind, dualcrf.grid(3, 4, strides=(1, 2)), labels, shared=True))


@pytest.mark.parametrize("table", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["strides", "flips", "covers"])
def test_as_accurate_as_the_reference(name: str, kind: str, table: torch.dtype):
    torch.manual_seed(1)
    problem = random_problem(kind, graph_of(name), 21, dtype=torch.float32, table=table)
    truth, eps = in_float64(problem), torch.finfo(torch.float32).eps
    for gamma in GAMMAS:
        runs = [wavefront(ops, p, gamma, False) for ops, p in ((kernels, problem), (reference, problem), (reference, truth))]
        assert_as_accurate(runs[0], runs[1], runs[2], eps)
    runs = [handover(ops, p, False) for ops, p in ((kernels, problem), (reference, problem), (reference, truth))]
    assert_as_accurate(runs[0], runs[1], runs[2], eps)


def test_equal_weights_share_a_tile():
    torch.manual_seed(2)
    graph = dualcrf.grid(4, 5)
    unary, weight = torch.randn(2, 20, 6, dtype=torch.float64), torch.randint(3, (2, graph.num_edges)).double()
    problem, _ = make_problem(unary, dualcrf.Weighted(weight, torch.randn(6, 6, dtype=torch.float64)), graph, "reference")
    problem = problem.take(torch.tensor([0, 1, 1]))
    assert_equal_sweeps(problem)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_is_its_items(threads: int):
    torch.manual_seed(3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        problem = random_problem("dense", dualcrf.grid(4, 4, strides=(1, 2)), batch=3)
        for run in (lambda p: wavefront(kernels, p, None, False), lambda p: handover(kernels, p, False)):
            whole = run(problem)
            for b in range(3):
                alone = run(problem.take(torch.tensor([b])))
                for one, many in zip(alone, whole, strict=True):
                    assert torch.equal(one[0], many[b])
    finally:
        torch.set_num_threads(before)


def test_an_expanded_batch():
    torch.manual_seed(4)
    problem = random_problem("potts", dualcrf.grid(3, 3), batch=1)
    many = Problem(problem.graph, problem.kind, problem.unary.expand(4, -1, -1), problem.parameters, "cpu")
    for number in range(4):
        assert torch.equal(improved(kernels, many, number), improved(reference, many, number))
    assert torch.equal(decoded(kernels, many, False), decoded(reference, many, False))


def test_an_empty_batch():
    problem = random_problem("dense", dualcrf.grid(3, 3)).take(torch.tensor([], dtype=torch.int64))
    assert wavefront_shape(problem) == (0, 3)
    assert handover(kernels, problem, False)[0].shape == (0, 3)
    assert decoded(kernels, problem, False).shape == (0, 9)
    assert improved(kernels, problem, 0).shape == (0, 9)


def wavefront_shape(problem: Problem) -> tuple[int, ...]:
    empty = torch.zeros(0, problem.sweep_layout.node.shape[0], problem.unary.shape[2], dtype=problem.unary.dtype)
    return tuple(kernels.wavefront_sweeps(
        problem.unary, problem.parameters, problem.sweep_layout, problem.order, problem.kind, None,
        empty, empty.clone(), 3, False,
    ).shape)  # fmt: skip


@given(st.sampled_from(sorted(GRAPHS)), st.sampled_from(KINDS), st.integers(0, 10**6), st.sampled_from([0.0, 0.05, 1.0]))
@settings(max_examples=60, deadline=None)
def test_the_dual_never_rises(name: str, kind: str, seed: int, gamma: float):
    torch.manual_seed(seed)
    graph = random_graph(name, seed)
    values = parameters(kind, graph, 4, (2,))
    unary = torch.randn(2, graph.num_nodes, 4, dtype=torch.float64)
    problem, _ = make_problem(unary, pairwise(kind, values), graph, "cpu")
    for schedule in ("wavefront", "handover") if gamma == 0 else ("wavefront",):
        run = SCHEDULES[schedule](problem, graph.split(problem.unary), gamma)
        duals = torch.cat([run.dual.unsqueeze(1), run.run(4), run.run(3)], 1)
        assert (duals.diff(dim=1) <= 1e-12 * duals.abs().amax(1, keepdim=True)).all()
        assert torch.allclose(graph.gather(run.multipliers()), unary, atol=1e-11)
