"""Chain max-marginals: the reference against enumeration, the CPU kernels against the reference in float64."""

import math
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dualcrf
from dualcrf import chain_max_marginals
from dualcrf.ops import chain as ops
from tests.models import (
    KINDS,
    assert_as_accurate,
    enumerate_chains,
    graphs,
    outputs_and_gradients,
    pairwise,
    parameters,
)

GAMMAS = (0.0, 0.7)


def full_table(kind, values, graph, labels):
    """[E, L, L], written from the contract's words."""
    first, second = graph.edges.T
    if kind == "dense":
        return values[0]
    if kind == "additive":
        return values[0][first] + values[1][second]
    if kind == "weighted":
        product = values[0][:, None, None] * values[1].masked_fill(values[1] == -math.inf, 0)
        return product.masked_fill(values[1] == -math.inf, -math.inf)
    return values[0][:, None, None] * torch.eye(labels, dtype=torch.float64)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", graphs())
def test_enumeration(name, kind, gamma, impl):
    torch.manual_seed(0)
    graph = graphs()[name]
    for labels in (1, 2, 3):
        for forbid in (0.0, 0.2):
            values = parameters(kind, graph, labels, forbid=forbid)
            psi = torch.randn(graph.num_places, labels, dtype=torch.float64)
            psi.masked_fill_(torch.rand(psi.shape) < forbid, -math.inf)
            mu, energy = chain_max_marginals(psi, pairwise(kind, values), graph, gamma=gamma, impl=impl)
            expected = enumerate_chains(psi, full_table(kind, values, graph, labels), graph, gamma)
            torch.testing.assert_close((mu, energy), expected, rtol=1e-12, atol=1e-12)


def compare(kind, graph, labels, batch, gamma, impl, *, shared=False, scale=1.0, forbid=0.0, dtype=torch.float32, table=None):
    """Outputs and all gradients of `impl` in `dtype` (potentials in `table`) against the reference in float64."""
    values = parameters(kind, graph, labels, () if shared else (batch,), scale=scale, forbid=forbid)
    psi = torch.randn(batch, graph.num_places, labels, dtype=torch.float64) * scale
    psi.masked_fill_(torch.rand(psi.shape) < forbid, -math.inf)
    weights = torch.randn(psi.shape, dtype=torch.float64), torch.randn(batch, graph.num_chains, dtype=torch.float64)
    inputs = [psi.to(dtype), *(v.to(table or dtype) for v in values)]
    if gamma:
        inputs.append(torch.tensor(gamma, dtype=dtype))

    def run(impl):
        def chains(psi, *rest):
            potentials, strength = (rest[:-1], rest[-1]) if gamma else (rest, 0.0)
            return chain_max_marginals(psi, pairwise(kind, potentials), graph, gamma=strength, impl=impl)

        return chains

    kernel = outputs_and_gradients(run(impl), inputs, weights)
    same = outputs_and_gradients(run("reference"), inputs, weights)
    truth = outputs_and_gradients(run("reference"), [x.double() for x in inputs], weights)
    if dtype == torch.float64:  # nothing is more exact to judge by
        torch.testing.assert_close(kernel, same, rtol=1e-12, atol=1e-12)
        return
    if table is not None:  # gradients in 16 bits: rounded once from what float32 gave
        kernel, same, truth = ([x.double() for x in out] for out in (kernel, same, truth))
    eps = torch.finfo(table or dtype).eps
    if gamma:  # one number, summed over all places
        everything = sum(w.abs().sum().item() for w in weights) * math.log(labels + 1)
        assert_as_accurate(kernel[-1:], same[-1:], truth[-1:], eps, floor=everything)
        kernel, same, truth = kernel[:-1], same[:-1], truth[:-1]
    assert_as_accurate(kernel, same, truth, eps)


@pytest.mark.parametrize("labels", [1, 2, 21, 33, 64, 129])
@pytest.mark.parametrize("gamma", [0.0, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_labels(kind, gamma, labels):
    torch.manual_seed(labels)
    compare(kind, dualcrf.grid(2, 3), labels, 2, gamma, "cpu")


@pytest.mark.parametrize("length", [1, 2, 3, 17, 33, 64])
@pytest.mark.parametrize("gamma", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths(kind, gamma, length):
    torch.manual_seed(length)
    # A long chain's error is mostly that of its offset, one number a chain: a batch of 32, so that chance does not decide.
    compare(kind, dualcrf.grid(length), 5, 32, gamma, "cpu")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("forbid", [0.0, 0.25])
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", graphs())
def test_graphs(name, kind, gamma, forbid, shared):
    torch.manual_seed(1)
    compare(kind, graphs()[name], 5, 3, gamma, "cpu", forbid=forbid, shared=shared)


@pytest.mark.parametrize("gamma", [0.01, 1.0])
@pytest.mark.parametrize("scale", [30.0, 1e4])
@pytest.mark.parametrize("kind", KINDS)
def test_large_scores(kind, scale, gamma):
    """Exponentials underflow everywhere: the step in the log domain has to take over."""
    torch.manual_seed(2)
    compare(kind, dualcrf.grid(4, 5), 7, 2, gamma, "cpu", scale=scale)
    compare(kind, dualcrf.grid(4, 5), 7, 2, gamma, "cpu", scale=scale, forbid=0.2)


@pytest.mark.parametrize("table", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gamma", [0.0, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_potentials_in_16_bits(kind, gamma, table):
    torch.manual_seed(3)
    compare(kind, dualcrf.grid(3, 4), 6, 2, gamma, "cpu", table=table)


@pytest.mark.parametrize("kind", KINDS)
def test_float64(kind):
    torch.manual_seed(4)
    compare(kind, dualcrf.grid(3, 4, strides=(1, 2)), 6, 2, 0.5, "cpu", dtype=torch.float64)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(5)
        for kind in KINDS:
            compare(kind, dualcrf.grid(6, 7, strides=(1, 3)), 5, 3, 1.0, "cpu")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, gamma, impl):
    torch.manual_seed(6)
    graph = dualcrf.Graph.from_edges(4, [(0, 1), (2, 1), (2, 3), (3, 0)])
    psi = torch.randn(2, graph.num_places, 3, dtype=torch.float64)
    strength = [torch.tensor(gamma, dtype=torch.float64)] if gamma else []
    inputs = [x.requires_grad_() for x in [psi, *parameters(kind, graph, 3, (2,)), *strength]]

    def run(psi, *rest):
        potentials, strength = (rest[:-1], rest[-1]) if gamma else (rest, 0.0)
        return chain_max_marginals(psi, pairwise(kind, potentials), graph, gamma=strength, impl=impl)

    assert torch.autograd.gradcheck(run, inputs)
    if impl == "reference" and gamma:
        assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_the_first_label(kind):
    """Whole numbers tie often: all implementations follow the same labelling."""
    torch.manual_seed(7)
    graph = dualcrf.grid(4, 5, strides=(1, 2))
    values = [v.round() for v in parameters(kind, graph, 4, (2,))]
    psi = torch.randn(2, graph.num_places, 4, dtype=torch.float64).round()
    weights = torch.randn(psi.shape), torch.randn(2, graph.num_chains)
    results = [
        outputs_and_gradients(
            lambda psi, *v, impl=impl: chain_max_marginals(psi, pairwise(kind, v), graph, impl=impl),
            [psi, *values],
            weights,
        )
        for impl in ("reference", "cpu")
    ]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forbidden_chain(kind, gamma):
    """Energy -inf, gradient 0, and the other chains are untouched."""
    graph = dualcrf.grid(2, 3)
    for impl in ("reference", "cpu"):
        psi = torch.randn(graph.num_places, 2)
        psi[1] = -math.inf
        values = [v.float() for v in parameters(kind, graph, 2)]
        mu, energy, grad, *rest = outputs_and_gradients(
            lambda psi, *v, impl=impl: chain_max_marginals(psi, pairwise(kind, v), graph, gamma=gamma, impl=impl),
            [psi, *values],
            [torch.ones(graph.num_places, 2), torch.ones(graph.num_chains)],
        )
        assert energy[0] == -math.inf
        assert energy[1:].isfinite().all()
        assert (mu[:3] == -math.inf).all()
        assert (grad[:3] == 0).all()
        assert all(g.isfinite().all() for g in [grad, *rest])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_are_named(kind, gamma, impl, value):
    graph = dualcrf.grid(3, 3)
    for spoiled in range(len(parameters(kind, graph, 3)) + 1):
        inputs = [torch.randn(graph.num_places, 3), *(v.float() for v in parameters(kind, graph, 3))]
        inputs[spoiled].view(-1)[inputs[spoiled].numel() // 2] = value
        with pytest.raises(ValueError, match=f"has {value}"):
            chain_max_marginals(inputs[0], pairwise(kind, inputs[1:]), graph, gamma=gamma, impl=impl)


def test_batches():
    """Empty ones, several axes, shared and broadcast parameters, memory with holes."""
    torch.manual_seed(8)
    graph = dualcrf.grid(3, 4)
    psi = torch.randn(2, 3, graph.num_places, 4, dtype=torch.float64)
    dense = torch.randn(3, graph.num_edges, 4, 4, dtype=torch.float64)
    mu, energy = chain_max_marginals(psi, dualcrf.Dense(dense), graph, gamma=1.0)
    for i in range(2):
        for j in range(3):
            single = chain_max_marginals(psi[i, j], dualcrf.Dense(dense[j]), graph, gamma=1.0)
            torch.testing.assert_close((mu[i, j], energy[i, j]), single, rtol=1e-14, atol=1e-14)
    holes = torch.randn(4, graph.num_places, 3, 2, dtype=torch.float64).permute(3, 2, 1, 0)
    strided = torch.randn(4, 4, graph.num_edges, dtype=torch.float64).permute(2, 1, 0)
    torch.testing.assert_close(
        chain_max_marginals(holes, dualcrf.Dense(strided), graph),
        chain_max_marginals(holes.contiguous(), dualcrf.Dense(strided.contiguous()), graph),
    )
    empty = torch.randn(0, graph.num_places, 4, requires_grad=True)
    for kind in KINDS:
        values = [v.float().requires_grad_() for v in parameters(kind, graph, 4)]
        mu, energy = chain_max_marginals(empty, pairwise(kind, values), graph, gamma=1.0)
        assert mu.shape == (0, graph.num_places, 4)
        assert energy.shape == (0, graph.num_chains)
        grads = torch.autograd.grad(mu.sum() + energy.sum(), [empty, *values])
        assert all((g == 0).all() for g in grads)


@pytest.mark.optional
def test_torch_struct():
    """An independent implementation of the linear chain."""
    struct = pytest.importorskip("torch_struct")
    torch.manual_seed(13)
    batch, length, labels = 3, 7, 4
    graph = dualcrf.grid(length)
    psi = torch.randn(batch, length, labels, dtype=torch.float64)
    table = torch.randn(batch, length - 1, labels, labels, dtype=torch.float64, requires_grad=True)
    edges = table.mT + psi[:, 1:].unsqueeze(-1)  # theirs: [b, n, next label, label]
    edges = torch.cat([edges[:, :1] + psi[:, :1].unsqueeze(-2), edges[:, 1:]], 1)
    oracle = struct.LinearChainCRF(edges, lengths=torch.full((batch,), length))
    for impl in ("reference", "cpu"):
        soft = chain_max_marginals(psi, dualcrf.Dense(table), graph, gamma=1.0, impl=impl)[1]
        hard = chain_max_marginals(psi, dualcrf.Dense(table), graph, impl=impl)[1]
        torch.testing.assert_close(soft.squeeze(1), oracle.partition)
        torch.testing.assert_close(hard.squeeze(1), oracle.max)
        (marginals,) = torch.autograd.grad(soft.sum(), table)
        torch.testing.assert_close(marginals, oracle.marginals.mT)


def test_two_threads_and_a_fork():
    """Users call from threads of their own, and data loaders fork."""
    torch.manual_seed(14)
    graph = dualcrf.grid(6, 6)
    psi, potential = torch.randn(2, graph.num_places, 3), dualcrf.Potts(torch.rand(graph.num_edges))
    expected = chain_max_marginals(psi, potential, graph, gamma=1.0)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: chain_max_marginals(psi, potential, graph, gamma=1.0), range(32)):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
    queue = multiprocessing.get_context("fork").Queue()
    child = multiprocessing.get_context("fork").Process(
        target=lambda: queue.put(chain_max_marginals(psi, potential, graph, gamma=1.0)[1].tolist())
    )
    child.start()
    assert queue.get(timeout=60) == expected[1].tolist()
    child.join()


def test_gamma_tends_to_the_hard_max():
    torch.manual_seed(9)
    graph = dualcrf.grid(5, 5)
    psi, values = torch.randn(graph.num_places, 3, dtype=torch.float64), parameters("dense", graph, 3)
    hard = chain_max_marginals(psi, pairwise("dense", values), graph)
    soft = chain_max_marginals(psi, pairwise("dense", values), graph, gamma=1e-3)
    torch.testing.assert_close(soft, hard, rtol=0, atol=1e-3 * 5 * math.log(3))
    assert (soft[1] >= hard[1] - 1e-12).all()


@pytest.mark.parametrize("gamma", [None, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind, gamma):
    torch.manual_seed(10)
    graph = dualcrf.grid(2, 3)
    psi = torch.randn(2, graph.num_places, 3, requires_grad=True)
    potential = pairwise(kind, [v.float().requires_grad_() for v in parameters(kind, graph, 3, (2,))])
    flat = potential.flat_parameters(torch.Size([2]))
    strength = None if gamma is None else torch.tensor(gamma, requires_grad=True)
    layout = ops._flat(graph.layout(psi.device))
    torch.library.opcheck(ops._messages, (psi, flat, strength, *layout, kind, "cpu"))
    with torch.no_grad():
        saved = ops._messages(psi, flat, strength, *layout, kind, "cpu")
    grads = [torch.randn_like(s) for s in saved]
    detached = [p.detach() for p in flat]
    torch.library.opcheck(
        ops._messages_backward,
        (
            *grads,
            psi.detach(),
            *saved,
            detached,
            None if strength is None else strength.detach(),
            *layout,
            kind,
            "cpu",
            True,
            gamma is not None,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("kind", KINDS)
def test_compile(kind, gamma):
    torch.manual_seed(11)
    graph = dualcrf.grid(2, 3)

    def run(psi, *values):
        places = graph.split(psi)
        mu, energy = chain_max_marginals(places, pairwise(kind, values), graph, gamma=gamma)
        return graph.gather(mu), energy

    inputs = [torch.randn(2, 6, 3), *(v.float() for v in parameters(kind, graph, 3, (2,)))]
    weights = torch.randn(2, 6, 3), torch.randn(2, graph.num_chains)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outputs_and_gradients(compiled, inputs, weights), outputs_and_gradients(run, inputs, weights))


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_autocast_leaves_the_arithmetic_in_float32(impl):
    torch.manual_seed(12)
    graph = dualcrf.grid(3, 3)
    psi, dense = torch.randn(graph.num_places, 4).bfloat16(), torch.randn(graph.num_edges, 4, 4).bfloat16()
    expected = chain_max_marginals(psi.float(), dualcrf.Dense(dense.float()), graph, gamma=1.0, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        got = chain_max_marginals(psi, dualcrf.Dense(dense), graph, gamma=1.0, impl=impl)
    assert got[0].dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"psi": torch.zeros(5, 3)}, "24 places"),
        ({"psi": torch.zeros(24, 0)}, "no labels"),
        ({"psi": torch.zeros(24, 3, dtype=torch.int64)}, "int64"),
        ({"pairwise": dualcrf.Potts(torch.zeros(3))}, "17 edges"),
        ({"pairwise": dualcrf.Dense(torch.zeros(17, 3, 2))}, "3 labels"),
        ({"pairwise": dualcrf.Potts(torch.zeros(17, device="meta"))}, "meta"),
        ({"gamma": -1.0}, "gamma=-1.0"),
        ({"gamma": math.nan}, "gamma=nan"),
        ({"gamma": torch.tensor(0.0)}, "positive"),
        ({"gamma": torch.zeros(2)}, "one floating-point number"),
        ({"impl": "fast"}, "'reference', 'cpu', 'triton'"),
        ({"impl": "triton"}, "CUDA"),
    ],
)
def test_errors_say_what_is_wrong(change, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    graph = dualcrf.grid(3, 4)
    given = {"psi": torch.zeros(24, 3), "pairwise": dualcrf.Potts(torch.zeros(17)), "graph": graph} | change
    with pytest.raises(ValueError, match=message):
        chain_max_marginals(**given)


def test_potentials_refuse_what_they_cannot_use():
    with pytest.raises(TypeError, match="int64"):
        dualcrf.Potts(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="list"):
        dualcrf.Potts([1.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="labels"):
        dualcrf.Dense(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="without a batch"):
        dualcrf.Weighted(torch.zeros(3), torch.zeros(1, 2, 2))
    assert repr(dualcrf.Potts(torch.zeros(2, 3))) == "Potts(weight=[2, 3])"
