"""The Triton kernels against the float64 reference: on a GPU natively, elsewhere in Triton's interpreter in a process
of its own."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor

from dualcrf import Graph, grid
from dualcrf.ops.chain import chain_messages
from dualcrf.ops.edges import EDGE_KINDS

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NATIVE = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if NATIVE else "cpu")
needs_kernels = [
    pytest.mark.skipif(not (NATIVE or INTERPRETED), reason="runs on a GPU, or in test_in_the_interpreter"),
    *([pytest.mark.gpu] if NATIVE else []),
]
KINDS = list(EDGE_KINDS)

# Chains of one to four nodes; edges that run against their chains; chains of differing lengths in several families.
LINES = Graph.from_chains(8, [[[0, 1, 2, 3], [4, 5, 6], [7]], [[2, 0]]])
FLIPS = Graph.from_edges(6, [(1, 0), (1, 2), (3, 2), (0, 4), (5, 4), (2, 5), (4, 1)])


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


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch: pytest.MonkeyPatch):
    """Triton 3.6 turns arrays of one element into loop bounds, which NumPy 2.5 refuses; 3.9 spreads a boolean as an int32."""
    if INTERPRETED:
        from triton.runtime import interpreter

        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of -inf and NaN
        patch, splat = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_splat

        def patched(tensor, *scope):
            patch(tensor, *scope)
            tensor.__index__ = lambda self: int(self.handle.data.item())

        def splatted(self, block, scalar):
            spread = splat(self, block, scalar)
            spread.data = spread.data.astype(scalar.data.dtype)
            return spread

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_splat", splatted)


class Problem:
    """Random scores and incoming gradients for a graph; `run` gives the operation's outputs and all its gradients."""

    def __init__(
        self,
        kind: str,
        graph: Graph,
        num_labels: int,
        gamma: float | None,
        *,
        batch: int = 2,
        shared: bool = False,
        dtype: torch.dtype = torch.float32,
        parameter_dtype: torch.dtype | None = None,
        scale: float = 1.0,
        forbidden: float = 0.0,
        whole: bool = False,
    ):
        self.kind, self.graph, self.dtype = kind, graph, dtype
        self.generator = torch.Generator().manual_seed(num_labels)
        sizes = {"edges": graph.num_edges, "nodes": graph.num_nodes, "labels": num_labels}
        shapes = {
            name: (1 if shared or name == "compat" else batch, *(sizes[axis] for axis in axes))
            for name, axes in EDGE_KINDS[kind].parameters.items()
        }
        self.psi = self._draw(batch, graph.num_places, num_labels, whole=whole) * scale
        self.psi[torch.rand(self.psi.shape, generator=self.generator) < forbidden] = -torch.inf
        self.parameters = [self._draw(*shape, whole=whole) * scale for shape in shapes.values()]
        if kind in ("dense", "additive", "potts"):
            first = self.parameters[0]
            first[torch.rand(first.shape, generator=self.generator) < forbidden] = -torch.inf
        self.grads = [self._draw(batch, graph.num_places, num_labels, whole=whole) for _ in range(2)]
        self.grads.append(self._draw(batch, graph.num_chains, whole=whole))
        self.gamma = None if gamma is None else torch.tensor(gamma)
        self.psi, self.grads = self.psi.to(dtype), [g.to(dtype) for g in self.grads]
        self.parameters = [p.to(parameter_dtype or dtype) for p in self.parameters]
        self.names = ["forward", "backward", "energy", "grad psi", *(f"grad {name}" for name in shapes)]
        self.names += [] if gamma is None else ["grad gamma"]

    def _draw(self, *shape: int, whole: bool) -> Tensor:
        if whole:
            return torch.randint(-1, 2, shape, generator=self.generator).double()
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def run(
        self, impl: str, dtype: torch.dtype | None = None, *, absolute: bool = False, gradients: bool = True
    ) -> list[Tensor]:
        def input_like(x: Tensor, as_dtype: torch.dtype | None) -> Tensor:
            return x.to(DEVICE, as_dtype or x.dtype, copy=True).requires_grad_()

        psi = input_like(self.psi, dtype)
        parameters = [input_like(p, dtype) for p in self.parameters]
        gamma = None if self.gamma is None else input_like(self.gamma, dtype or self.dtype)
        outputs = chain_messages(psi, parameters, self.graph.layout(DEVICE), self.kind, gamma, impl)
        if not gradients:
            return list(outputs)
        inputs = [psi, *parameters, *([] if gamma is None else [gamma])]
        grads = [(g.abs() if absolute else g).to(DEVICE, dtype) for g in self.grads]
        found = torch.autograd.grad(outputs, inputs, grads, materialize_grads=True)
        return [out.detach() for out in outputs] + list(found)

    def check(self) -> list[Tensor]:
        """The kernels err at most twice as much as the reference in the same dtype, and rounding."""
        ours, theirs, truth = (
            self.run("triton"),
            self.run("reference", self.dtype),
            self.run("reference", torch.float64),
        )
        dtypes = {f"grad {name}": p.dtype for name, p in zip(EDGE_KINDS[self.kind].parameters, self.parameters, strict=True)}
        # A gradient is a sum of terms linear in the incoming gradients: it rounds like the sum of the terms' sizes.
        sizes = truth[:3] + self.run("reference", torch.float64, absolute=True)[3:]
        for name, our, their, true, size in zip(self.names, ours, theirs, truth, sizes, strict=True):
            assert our.shape == true.shape, name
            assert our.dtype == dtypes.get(name, self.dtype), name
            rounding = 8 * torch.finfo(our.dtype).eps * largest(size)
            assert error(our, true) <= 2 * error(their.to(our.dtype), true) + rounding, name
        return ours


def error(values: Tensor, truth: Tensor) -> float:
    """Largest difference; infinite where one is infinite or NaN and the other is not the same."""
    difference = torch.where(values.double() == truth, 0, (values.double() - truth).abs())
    return largest(torch.where(difference.isfinite(), difference, torch.finfo(torch.float64).max))


def largest(values: Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def kernel_test(function):
    for mark in needs_kernels:
        function = mark(function)
    return function


@kernel_test
@pytest.mark.parametrize("gamma", [None, 1.0], ids=["hard", "soft"])
@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    @pytest.mark.parametrize(("graph", "num_labels"), [(LINES, 5), (FLIPS, 2), (FLIPS, 1)], ids=["lines", "flips", "label"])
    def test_small(self, kind, gamma, graph, num_labels):
        Problem(kind, graph, num_labels, gamma).check()

    def test_more_labels_than_a_warp_has_lanes(self, kind, gamma):
        Problem(kind, FLIPS, 33, gamma, batch=1).check()

    def test_labels_in_chunks(self, kind, gamma):
        Problem(kind, Graph.from_edges(3, [(0, 1), (2, 1)]), 70, gamma, batch=1).check()

    def test_shared_parameters(self, kind, gamma):
        Problem(kind, FLIPS, 5, gamma, shared=True, batch=3).check()

    def test_float64(self, kind, gamma):
        Problem(kind, FLIPS, 5, gamma, dtype=torch.float64, batch=1).check()

    def test_bfloat16_parameters(self, kind, gamma):
        Problem(kind, FLIPS, 5, gamma, parameter_dtype=torch.bfloat16, batch=1).check()

    def test_forbidden_labels_and_pairs(self, kind, gamma):
        Problem(kind, FLIPS, 4, gamma, forbidden=0.3, batch=1).check()

    def test_a_forbidden_chain_has_no_gradient(self, kind, gamma):
        problem = Problem(kind, LINES, 3, gamma, batch=1)
        problem.psi[:, 1] = -torch.inf
        ours = dict(zip(problem.names, problem.check(), strict=True))
        assert (ours["energy"][:, 0] == -torch.inf).all()
        assert all(gradient.isfinite().all() for name, gradient in ours.items() if "grad" in name)
        problem.grads[0].zero_()
        problem.grads[1].zero_()
        assert (problem.run("triton")[3][:, :4] == 0).all()

    def test_large_scores(self, kind, gamma):
        Problem(kind, FLIPS, 5, None if gamma is None else 0.01, scale=1e4, batch=1).check()

    def test_nothing_is_left_unwritten(self, kind, gamma, monkeypatch):
        problem = Problem(kind, LINES, 5, gamma, batch=1)
        clean = problem.run("triton")

        def poisoned(allocate):
            def allocated(*args, **kwargs):
                values = allocate(*args, **kwargs)
                return values.fill_(torch.nan if values.is_floating_point() else 2**30)

            return allocated

        monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
        for once, again in zip(clean, problem.run("triton"), strict=True):
            assert torch.equal(once, again)

    def test_empty_batch(self, kind, gamma):
        for shared in (False, True):
            problem = Problem(kind, FLIPS, 3, gamma, batch=0, shared=shared)
            for ours, theirs in zip(problem.run("triton"), problem.run("reference"), strict=True):
                assert ours.shape == theirs.shape
                assert torch.equal(ours, theirs)

    def test_nan_and_inf_reach_the_energy(self, kind, gamma):
        for bad, place in [(torch.nan, 0), (torch.nan, 3), (torch.inf, 2)]:
            problem = Problem(kind, LINES, 5, gamma)
            problem.psi[0, place, 1] = bad
            _, _, energy = problem.run("triton", gradients=False)
            assert not energy[0, 0] < torch.inf
            assert (energy[1] < torch.inf).all()

    def test_nan_in_a_parameter_reaches_the_energy(self, kind, gamma):
        problem = Problem(kind, LINES, 5, gamma)
        problem.parameters[0][0, 1] = torch.nan
        assert not problem.run("triton", gradients=False)[2][0, 0] < torch.inf


@kernel_test
@pytest.mark.parametrize(("kind", "gamma"), [("additive", 1.0), ("potts", None)])
def test_opcheck(kind, gamma):
    problem = Problem(kind, FLIPS, 3, gamma)
    layout = problem.graph.layout(DEVICE)
    inputs = (
        problem.psi.to(DEVICE).requires_grad_(),
        [p.to(DEVICE).requires_grad_() for p in problem.parameters],
        None if problem.gamma is None else problem.gamma.to(DEVICE).requires_grad_(),
        layout.tensors(), list(layout.families), list(layout.family_places), layout.has_flips, kind, "triton",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.dualcrf.chain_messages, inputs)


@kernel_test
@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_the_first_label(kind):
    # Whole scores and gradients: everything is exact, and nearly every maximum is tied.
    problem = Problem(kind, FLIPS, 5, None, whole=True)
    for ours, theirs in zip(problem.run("triton"), problem.run("reference"), strict=True):
        assert torch.equal(ours, theirs)


@kernel_test
def test_the_hard_maximum_is_the_limit_of_the_smoothed_one():
    hard, soft = Problem("potts", FLIPS, 5, None), Problem("potts", FLIPS, 5, 1e-3)
    for h, s in zip(hard.run("triton")[:3], soft.run("triton")[:3], strict=True):
        assert torch.allclose(h, s, atol=1e-3 * 20)


@kernel_test
@pytest.mark.parametrize("weight", [-300.0, -1.0, 0.0, 1.0, 300.0])
def test_potts_weights_of_any_size(weight):
    problem = Problem("potts", FLIPS, 5, 1.0, batch=1)
    problem.parameters[0].fill_(weight)
    problem.check()


@kernel_test
def test_same_result_every_time():
    problem = Problem("weighted", FLIPS, 5, 1.0, shared=True)
    for once, again in zip(problem.run("triton"), problem.run("triton"), strict=True):
        assert torch.equal(once, again)


@pytest.mark.gpu
@pytest.mark.skipif(not NATIVE, reason="no GPU")
@pytest.mark.parametrize("num_labels", [21, 64, 129, 300])
@pytest.mark.parametrize("gamma", [None, 2.0], ids=["hard", "soft"])
@pytest.mark.parametrize("kind", KINDS)
def test_grids(kind, gamma, num_labels):
    Problem(kind, grid(9, 17, strides=(1, 2)), num_labels, gamma, batch=3).check()


@pytest.mark.gpu
@pytest.mark.skipif(not NATIVE, reason="no GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_cuda_graph(kind):
    problem = Problem(kind, grid(5, 9), 21, 2.0)
    wanted = problem.run("triton")
    psi = problem.psi.to(DEVICE).requires_grad_()
    parameters = [p.to(DEVICE).requires_grad_() for p in problem.parameters]
    gamma, grads = torch.tensor(2.0, device=DEVICE).requires_grad_(), [g.to(DEVICE) for g in problem.grads]
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        outputs = chain_messages(psi, parameters, problem.graph.layout(DEVICE), kind, gamma, "triton")
        gradients = torch.autograd.grad(outputs, [psi, *parameters, gamma], grads)
    captured.replay()
    for ours, expected in zip([*outputs, *gradients], wanted, strict=True):
        assert torch.equal(ours, expected)
