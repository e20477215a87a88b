"""Random models, enumeration, and the rule by which a kernel is judged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import dualcrf
from dualcrf import Graph, Pairwise

KINDS = ("dense", "additive", "weighted", "potts")
_CLASSES = {"dense": dualcrf.Dense, "additive": dualcrf.Additive, "weighted": dualcrf.Weighted, "potts": dualcrf.Potts}


def graphs() -> dict[str, Graph]:
    """Small graphs that between them have all that a chain can have: strides, flipped edges, single nodes, turns."""
    return {
        "grid": dualcrf.grid(3, 4, strides=(1, 2)),
        "diagonals": dualcrf.grid(3, 3, diagonals=True),
        "flips": Graph.from_edges(6, [(0, 1), (2, 1), (2, 3), (3, 0), (0, 2), (4, 3)]),
        "turns": Graph.from_chains(5, [[[4, 0, 2], [1]], [[2, 3, 1, 0]]]),
        "nodes": dualcrf.grid(1),
    }


def parameters(
    kind: str, graph: Graph, labels: int, batch: Sequence[int] = (), *, scale: float = 1.0, forbid: float = 0.0
) -> list[Tensor]:
    """Normal parameters in float64; a share `forbid` of the table entries is -inf."""
    e, n = graph.num_edges, graph.num_nodes
    shapes = {
        "dense": [(*batch, e, labels, labels)],
        "additive": [(*batch, n, labels, labels), (n, labels, labels)],
        "weighted": [(*batch, e), (labels, labels)],
        "potts": [(*batch, e)],
    }[kind]
    made = [torch.randn(shape, dtype=torch.float64) * scale for shape in shapes]
    if forbid and kind != "potts":
        tables = made[-1 if kind == "weighted" else 0]
        tables.masked_fill_(torch.rand(tables.shape) < forbid, -torch.inf)
    return made


def pairwise(kind: str, values: Sequence[Tensor]) -> Pairwise:
    return _CLASSES[kind](*values)


def chain_labellings(graph: Graph, chain: int, labels: int) -> tuple[list[int], list[tuple[int, bool]], Tensor]:
    """A chain's places, its edges with their flips, and all labellings of its places [labels^n, n]."""
    places = list(range(int(graph.chain_start[chain]), int(graph.chain_start[chain + 1])))
    edges = [(int(graph.place_edge[s]), bool(graph.place_flip[s])) for s in places[:-1]]
    return places, edges, torch.tensor(list(itertools.product(range(labels), repeat=len(places))))


def enumerate_chains(psi: Tensor, tables: Tensor, graph: Graph, gamma: float) -> tuple[Tensor, Tensor]:
    """Max-marginals [S, L] and energies [C] by writing out every labelling of every chain, in float64."""
    labels = psi.shape[-1]
    mu, energy = torch.empty(psi.shape, dtype=torch.float64), torch.empty(graph.num_chains, dtype=torch.float64)

    def soft(values: Tensor) -> Tensor:
        return gamma * torch.logsumexp(values / gamma, 0) if gamma else values.max()

    for chain in range(graph.num_chains):
        places, edges, labellings = chain_labellings(graph, chain, labels)
        score = torch.stack([psi[s].double()[labellings[:, k]] for k, s in enumerate(places)]).sum(0)
        for k, (edge, flip) in enumerate(edges):
            a, b = labellings[:, k], labellings[:, k + 1]
            score = score + (tables[edge][b, a] if flip else tables[edge][a, b])
        energy[chain] = soft(score)
        for k, s in enumerate(places):
            for label in range(labels):
                mu[s, label] = soft(score[labellings[:, k] == label])
    return mu, energy


def assert_as_accurate(
    kernel: Sequence[Tensor], reference: Sequence[Tensor], truth: Sequence[Tensor], eps: float, floor: float = 1.0
) -> None:
    """Each output's error is at most twice that of the reference in the same precision, plus rounding of its own size.

    Errors and sizes are Euclidean norms. A number that sums terms of both signs may come out much smaller than they are:
    `floor` is then the size that counts.
    """
    for k, (got, same, exact) in enumerate(zip(kernel, reference, truth, strict=True)):
        assert got.shape == exact.shape, f"output {k}: shape {got.shape}, expected {exact.shape}"
        assert not got.isnan().any(), f"output {k} has NaN"
        finite = exact.isfinite()
        assert torch.equal(got.double()[~finite], exact[~finite]), f"output {k}: infinities differ"
        size = max(exact[finite].norm().item(), floor)
        error = (got.double() - exact)[finite].norm().item()
        allowed = 2 * (same.double() - exact)[finite].norm().item() + 4 * eps * size
        assert error <= allowed, f"output {k}: error {error:.3g}, allowed {allowed:.3g} (size {size:.3g})"


def outputs_and_gradients(
    run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """What `run` returns, and the gradients of its inputs for fixed output weights (forbidden outputs count for nothing)."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = run(*leaves)
    parts = [(torch.where(out.isfinite(), out, 0) * w.to(out.dtype)).sum() for out, w in zip(outputs, weights, strict=True)]
    loss = torch.stack(parts).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [*(out.detach() for out in outputs), *grads]
