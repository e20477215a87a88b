"""The schedules' Triton kernels against the reference: on a GPU natively, elsewhere in Triton's interpreter in a process of
its own."""

import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

import dualcrf
from dualcrf.graph import Graph
from dualcrf.ops import schedules_reference as reference
from dualcrf.solver.problem import Problem, make_problem
from dualcrf.solver.schedules import SCHEDULES
from tests.models import KINDS, assert_as_accurate, graphs, pairwise, parameters
from tests.solver_models import GRAPHS, random_graph
from tests.test_triton import DEVICE, INTERPRETED, NATIVE, kernel_test, mended_interpreter  # noqa: F401

pytest.importorskip("triton")
from dualcrf.kernels.triton import schedules as kernels

GAMMAS = (None, (0.05, 1.0))


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_in_the_interpreter():
    # Triton decides when a kernel is defined whether it is interpreted, so this takes a process of its own.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def graph_of(name: str) -> Graph:
    return random_graph(name, 3) if name in GRAPHS else graphs()[name]


def random_problem(
    kind: str,
    graph: Graph,
    labels: int = 4,
    *,
    shared: bool = False,
    forbid: float = 0.0,
    dtype: torch.dtype = torch.float64,
    batch: int = 2,
) -> Problem:
    torch.manual_seed(labels)
    values = parameters(kind, graph, labels, () if shared else (batch,), forbid=forbid)
    unary = torch.randn(batch, graph.num_nodes, labels, dtype=torch.float64)
    unary[..., 1:].masked_fill_(torch.rand(batch, graph.num_nodes, labels - 1) < forbid, -torch.inf)
    if forbid and kind in ("dense", "additive"):
        values[0][..., 0, :], values[0][..., :, 0] = 1, 1  # the first label stays possible everywhere
    given = pairwise(kind, [v.to(DEVICE, dtype) for v in values])
    return make_problem(unary.to(DEVICE, dtype), given, graph, "reference")[0]


def wavefront(ops: ModuleType, problem: Problem, gamma: tuple[float, ...] | None, reverse: bool, sweeps: int) -> list[Tensor]:
    """The dual after each sweep, and the messages after the last."""
    places = problem.sweep.split(problem.graph.split(problem.unary), problem.graph)
    smoothing = None if gamma is None else problem.unary.new_tensor(gamma)
    messages = [problem.take(torch.tensor([b], device=DEVICE)).sweep_messages(places[b : b + 1], gamma[b] if gamma else 0.0)
                for b in range(len(places))]  # fmt: skip
    forward, backward = (torch.cat([m[side] for m in messages]) for side in range(2))
    # What lies in the sweep's own direction is not read.
    start, unread = problem.sweep_layout.start, backward if reverse else forward
    unread.fill_(torch.nan)
    unread[:, start[1:] - 1 if reverse else start[:-1]] = 0
    duals = ops.wavefront_sweeps(
        problem.unary, problem.parameters, problem.sweep_layout, problem.order, problem.kind, smoothing,
        forward, backward, sweeps, reverse,
    )  # fmt: skip
    return [duals, forward, backward]


def handover(ops: ModuleType, problem: Problem, reverse: bool, sweeps: int) -> list[Tensor]:
    scores, handed = problem.unary.clone(), torch.zeros_like(problem.graph.split(problem.unary))
    duals = ops.handover_sweeps(problem.parameters, problem.layout, problem.kind, scores, handed, sweeps, reverse)
    return [duals, scores, handed]


def decoded(ops: ModuleType, problem: Problem, reverse: bool) -> Tensor:
    model = problem.parameters, problem.sweep_layout, problem.order, problem.kind
    return ops.decode_labels(problem.unary, *model, reverse)


def improved(ops: ModuleType, problem: Problem, number: int) -> Tensor:
    parent, reverse = problem.sweep.forest(number, problem.unary.device)
    labels = problem.unary.argmax(2)
    model = problem.parameters, problem.sweep_layout, problem.order, problem.kind
    ops.improve_labels(labels, problem.unary, *model, parent, reverse)
    return labels


def assert_equal_sweeps(problem: Problem, reverse: bool = False, sweeps: int = 2) -> None:
    for gamma in GAMMAS:
        torch.testing.assert_close(
            wavefront(kernels, problem, gamma, reverse, sweeps), wavefront(reference, problem, gamma, reverse, sweeps),
            rtol=1e-9, atol=1e-11,
        )  # fmt: skip
    torch.testing.assert_close(
        handover(kernels, problem, reverse, sweeps), handover(reference, problem, reverse, sweeps), rtol=1e-9, atol=1e-11
    )


def assert_equal_labels(problem: Problem) -> None:
    for reverse in (False, True):
        assert torch.equal(decoded(kernels, problem, reverse), decoded(reference, problem, reverse))
    for number in range(2):
        assert torch.equal(improved(kernels, problem, number), improved(reference, problem, number))


TINY = Graph.from_edges(4, [(0, 1), (2, 1), (2, 3), (3, 0)])


@kernel_test
@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_small(self, kind):
        assert_equal_sweeps(random_problem(kind, TINY))

    def test_forbidden_labels_and_pairs(self, kind):
        problem = random_problem(kind, TINY, forbid=0.3)
        assert_equal_sweeps(problem, reverse=True, sweeps=1)
        assert_equal_labels(problem)

    def test_chains_that_turn(self, kind):
        problem = random_problem(kind, graphs()["turns"], 3, shared=True)
        assert_equal_sweeps(problem, sweeps=1)
        assert_equal_labels(problem)

    def test_labels_in_chunks(self, kind):
        problem = random_problem(kind, Graph.from_edges(3, [(0, 1), (2, 1)]), 70)
        assert_equal_sweeps(problem)
        assert_equal_labels(problem)

    def test_one_label(self, kind):
        problem = random_problem(kind, dualcrf.grid(2), 1)
        assert_equal_sweeps(problem)
        assert_equal_labels(problem)

    def test_an_empty_batch(self, kind):
        problem = random_problem(kind, TINY).take(torch.tensor([], dtype=torch.int64, device=DEVICE))
        empty = torch.zeros(0, problem.sweep_layout.node.shape[0], 4, dtype=torch.float64, device=DEVICE)
        model = problem.parameters, problem.sweep_layout, problem.order, kind
        assert kernels.wavefront_sweeps(problem.unary, *model, None, empty, empty.clone(), 3, False).shape == (0, 3)
        assert handover(kernels, problem, False, 3)[0].shape == (0, 3)
        assert decoded(kernels, problem, False).shape == (0, 4)
        assert improved(kernels, problem, 0).shape == (0, 4)


@kernel_test
def test_an_expanded_batch():
    problem = random_problem("potts", TINY, batch=1)
    many = Problem(problem.graph, problem.kind, problem.unary.expand(2, -1, -1), problem.parameters, "reference")
    assert_equal_labels(many)


@kernel_test
def test_more_places_of_a_node_than_rows():
    star = Graph.from_chains(5, [[[0, k]] for k in range(1, 5)] * 3)
    assert_equal_sweeps(random_problem("potts", star, 2, batch=2), sweeps=1)


native_test = pytest.mark.skipif(not NATIVE, reason="no GPU")


@pytest.mark.gpu
@native_test
@pytest.mark.parametrize("forbid", [0.0, 0.25])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(GRAPHS) + sorted(graphs()))
def test_every_graph(name: str, kind: str, forbid: float):
    problem = random_problem(kind, graph_of(name), 5, forbid=forbid)
    assert_equal_sweeps(problem, reverse=False)
    assert_equal_sweeps(problem, reverse=True)
    assert_equal_labels(problem)


@pytest.mark.gpu
@native_test
@pytest.mark.parametrize("labels", [2, 21, 33, 64, 129, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_as_accurate_as_the_reference(kind: str, labels: int):
    graph = dualcrf.grid(9, 17, strides=(1, 2))
    problem = random_problem(kind, graph, labels, dtype=torch.float32)
    values = [p[0].double() if kind == "weighted" and p.ndim == 3 else p.double() for p in problem.parameters]
    truth, _ = make_problem(problem.unary.double(), pairwise(kind, values), graph, "reference")
    for gamma in GAMMAS:
        ours, same, exact = (
            wavefront(ops, p, gamma, False, 3) for ops, p in ((kernels, problem), (reference, problem), (reference, truth))
        )
        assert_as_accurate(ours, same, exact, torch.finfo(torch.float32).eps)
    ours, same, exact = (
        handover(ops, p, False, 3) for ops, p in ((kernels, problem), (reference, problem), (reference, truth))
    )
    assert_as_accurate(ours, same, exact, torch.finfo(torch.float32).eps)


@pytest.mark.gpu
@native_test
@pytest.mark.parametrize("batch", [1, 7, 3000])
def test_batches_of_any_size(batch: int):
    gamma = tuple(0.5 + k % 3 for k in range(batch))
    problem = random_problem("dense", dualcrf.grid(9, 8, strides=(1, 2)), 3, batch=batch, shared=True)
    places = problem.graph.split(problem.unary)
    runs = []
    for ops in (kernels, kernels, reference):
        forward, backward = torch.zeros_like(places), torch.zeros_like(places)
        model = problem.parameters, problem.sweep_layout, problem.order, problem.kind, problem.unary.new_tensor(gamma)
        runs.append([ops.wavefront_sweeps(problem.unary, *model, forward, backward, 3, False), forward, backward])
    assert all(torch.equal(once, again) for once, again in zip(*runs[:2], strict=True))
    torch.testing.assert_close(runs[0], runs[2], rtol=1e-9, atol=1e-11)


@pytest.mark.gpu
@native_test
@pytest.mark.parametrize("kind", KINDS)
def test_the_dual_never_rises(kind: str):
    problem = random_problem(kind, dualcrf.grid(20, 21, strides=(1, 3)), 5)
    problem = Problem(problem.graph, kind, problem.unary, problem.parameters, "triton")
    for schedule, gamma in (("wavefront", 0.0), ("wavefront", 1.0), ("handover", 0.0)):
        run = SCHEDULES[schedule](problem, problem.graph.split(problem.unary), gamma)
        duals = torch.cat([run.dual.unsqueeze(1), run.run(4), run.run(3)], 1)
        assert (duals.diff(dim=1) <= 1e-12 * duals.abs().amax(1, keepdim=True)).all()
        assert torch.allclose(problem.graph.gather(run.multipliers()), problem.unary, atol=1e-11)


@pytest.mark.gpu
@native_test
@pytest.mark.parametrize("kind", ["dense", "potts"])
def test_in_a_cuda_graph(kind: str):
    problem = random_problem(kind, dualcrf.grid(9, 17), 21)
    model = problem.parameters, problem.sweep_layout, problem.order, kind
    wanted = kernels.decode_labels(problem.unary, *model, False)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        labels = kernels.decode_labels(problem.unary, *model, False)
    captured.replay()
    assert torch.equal(labels, wanted)
