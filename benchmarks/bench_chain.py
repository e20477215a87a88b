"""`chain_max_marginals` against eager PyTorch with autograd: time, peak memory, and the floor, one read of the table.

python benchmarks/bench_chain.py            the sizes of the table in benchmarks/README.md
python benchmarks/bench_chain.py --growth   growth in batch, grid and labels, as docs/growth.png
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dualcrf
from common import ROOT, best_of, peak_memory, report
from eager import groups, log_sum_exp, matrix_products, potts, step_scores, step_tables


class Size(NamedTuple):
    batch: int
    side: int
    labels: int
    strides: Sequence[int] = (1, 2)
    kind: str = "dense"
    gamma: float = 2.0

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.batch}×{self.side}²×{self.labels}, strides {','.join(map(str, self.strides))}, γ {self.gamma:g}"
        )


SIZES = [
    Size(16, 33, 21),
    Size(16, 33, 21, gamma=0.0),
    Size(16, 33, 21, kind="additive"),
    Size(1, 33, 21),
    Size(1, 128, 21),
    Size(1, 33, 64),
    Size(1, 257, 21, (1, 3, 9, 27), "potts", 1.0),
]


class Inputs(NamedTuple):
    graph: dualcrf.Graph
    psi: Tensor
    parameters: list[Tensor]
    upstream: Tensor

    def run(self, size: Size, gradients: bool) -> Any:
        """One pass of ours, both directions, and its gradients."""
        kinds = {"dense": dualcrf.Dense, "additive": dualcrf.Additive, "potts": dualcrf.Potts}
        mu, energy = dualcrf.chain_max_marginals(self.psi, kinds[size.kind](*self.parameters), self.graph, gamma=size.gamma)
        return torch.autograd.grad(mu, [self.psi, *self.parameters], self.upstream) if gradients else (mu, energy)


def inputs(size: Size) -> Inputs:
    torch.manual_seed(0)
    graph = dualcrf.grid(size.side, size.side, strides=size.strides)
    b, l = size.batch, size.labels
    psi = torch.randn(b, graph.num_places, l)
    shapes = {
        "dense": [(b, graph.num_edges, l, l)],
        "additive": [(b, graph.num_nodes, l, l)] * 2,
        "potts": [(b, graph.num_edges)],
    }
    parameters = [torch.rand(shape) if size.kind == "potts" else torch.randn(shape) for shape in shapes[size.kind]]
    return Inputs(graph, psi.requires_grad_(), [p.requires_grad_() for p in parameters], torch.randn_like(psi))


def eager_runs(size: Size, given: Inputs) -> dict[str, Callable[[bool], Any]]:
    """The rivals on the same model, their tables laid out beforehand."""
    psi = given.psi.detach()
    if size.kind == "additive":
        source, target = (p.detach() for p in given.parameters)
        table = source[:, given.graph.edges[:, 0]] + target[:, given.graph.edges[:, 1]]
    else:
        table = given.parameters[0].detach()
    parts = []
    for group in groups(given.graph):
        laid = table[:, group.edges].movedim(2, 0).flatten(1) if size.kind == "potts" else step_tables(table, group)
        scores = step_scores(psi, group)
        parts.append((scores.requires_grad_(), laid.contiguous().requires_grad_(), step_scores(given.upstream, group)))

    def rival(through: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[[bool], Any]:
        def run(gradients: bool) -> Any:
            with torch.set_grad_enabled(gradients):
                out = [through(scores, laid, size.gamma) for scores, laid, _ in parts]
            if gradients:
                leaves = [leaf for scores, laid, _ in parts for leaf in (scores, laid)]
                return torch.autograd.grad(out, leaves, [upstream for *_, upstream in parts])
            return out

        return run

    if size.kind == "potts":
        return {"eager": rival(potts)}
    products = {"eager bmm": rival(matrix_products)} if size.gamma else {}
    return {"eager": rival(log_sum_exp), **products}


def compare(size: Size, repeat: int) -> dict[str, Any]:
    given = inputs(size)
    moved = sum(p.numel() * p.element_size() for p in given.parameters) / 1e9
    row: dict[str, Any] = {"size": str(size), "table GB": moved}
    if size.kind != "potts":
        row["read ms"] = 1e3 * best_of(lambda: [p.detach().sum() for p in given.parameters], repeat)
    with torch.no_grad():
        row["forward ms"] = 1e3 * best_of(lambda: given.run(size, False), repeat)
    row["both ms"] = 1e3 * best_of(lambda: given.run(size, True), repeat)
    row["peak GB"] = peak_memory(lambda: given.run(size, True))
    for name, run in eager_runs(size, given).items():
        forward, both = best_of(lambda run=run: run(False), 2), best_of(lambda run=run: run(True), 2)
        row |= {
            f"{name} forward ms": 1e3 * forward,
            f"{name} both ms": 1e3 * both,
            f"{name} GB": peak_memory(lambda run=run: run(True)),
        }
        row |= {f"{name} / ours forward": 1e3 * forward / row["forward ms"], f"{name} / ours both": 1e3 * both / row["both ms"]}
    return row


def growth(repeat: int) -> None:
    """Time of forward and backward together per edge and table entry: flat means linear."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = pyplot.subplots(1, 3, figsize=(12, 3.6), sharey=False)[1]
    sweeps = {
        "batch": [(b, Size(b, 33, 21)) for b in (1, 2, 4, 8, 16, 32)],
        "grid side": [(n, Size(1, n, 21)) for n in (8, 16, 33, 65, 129, 200)],
        "labels": [(n, Size(1, 33, n)) for n in (2, 4, 8, 16, 21, 32, 48, 64, 96, 128)],
    }
    rows = []
    for panel, (name, sizes) in zip(axes, sweeps.items(), strict=True):
        for kind, colour in (("dense", "tab:blue"), ("potts", "tab:orange")):
            points = []
            for value, size in sizes:
                size = size._replace(kind=kind)
                given = inputs(size)
                seconds = best_of(lambda given=given, size=size: given.run(size, True), repeat)
                entries = size.batch * given.graph.num_edges * size.labels ** (2 if kind == "dense" else 1)
                points.append((value, 1e9 * seconds / entries))
                rows.append(
                    {"growth in": name, "value": value, "kind": kind, "ms": 1e3 * seconds, "ns an entry": points[-1][1]}
                )
            panel.loglog(
                *zip(*points, strict=True),
                "o-",
                color=colour,
                label=f"{kind}: ns per edge and " + ("label pair" if kind == "dense" else "label"),
            )
        panel.set(xlabel=name, ylim=(0.3, 300))
        panel.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("forward + backward, ns an entry")
    axes[0].legend()
    pyplot.tight_layout()
    (ROOT / "docs").mkdir(exist_ok=True)
    pyplot.savefig(ROOT / "docs" / "growth.png", dpi=110)
    report("chain_growth", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--repeat", type=int, default=7)
    given = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    if given.growth:
        growth(given.repeat)
        return
    for size in SIZES:
        row = compare(size, given.repeat)
        report("chain", [row])


if __name__ == "__main__":
    main()
