"""How fast the smoothed dual falls: the paper's parallel update, larger steps with backtracking, and the wavefront.

    python benchmarks/bench_convergence.py [--iterations N]

A batch of 16 models of 33×33 nodes, 21 labels, strides 1 and 2, Gaussian potentials, gamma = 1, in float32 on this
machine's CPU. Prints what each schedule needs to come close to the optimum (all models together; relative to the
dual), and draws docs/convergence.png.
"""

import argparse
import math
import time
from functools import partial

import torch
from torch import Tensor

import dualcrf
from common import ROOT, report
from dualcrf.solver.problem import Problem, make_problem
from dualcrf.solver.schedules import Parallel, Schedule, Wavefront

BATCH, SHAPE, LABELS, STRIDES, GAMMA = 16, (33, 33), 21, (1, 2), 1.0
RUNS = {
    "parallel, step 1/33 (the paper's)": (partial(Parallel), 1.0),
    "parallel, step 1/4, backtracking": (partial(Parallel, step=0.25), 0.5),
    "parallel, step 1, backtracking": (partial(Parallel, step=1.0), 0.25),
    "wavefront": (Wavefront, 0.1),
}  # and the part of the iterations that it is given
CLOSE = (1e-3, 1e-4, 1e-5)
# In float32 the dual itself is not known more closely than that.
ROUNDING = 1e-7


def random_problem() -> Problem:
    generator = torch.Generator().manual_seed(0)
    graph = dualcrf.grid(*SHAPE, strides=STRIDES)
    unary = torch.randn(BATCH, graph.num_nodes, LABELS, generator=generator)
    table = torch.randn(BATCH, graph.num_edges, LABELS, LABELS, generator=generator)
    return make_problem(unary, dualcrf.Dense(table), graph, "cpu")[0]


def optimum(problem: Problem) -> float:
    """The sum of the models' smoothed duals where the wavefront, in float64, has come to rest."""
    exact = make_problem(problem.unary.double(), dualcrf.Dense(problem.parameters[0].double()), problem.graph, "cpu")[0]
    return float(Wavefront(exact, exact.graph.split(exact.unary), GAMMA).run(40)[:, -1].sum())


def course(make: partial[Schedule] | type[Schedule], problem: Problem, iterations: int) -> tuple[list[float], list[float]]:
    """Dual and seconds after every iteration, the start's first."""
    warm = make(problem, problem.graph.split(problem.unary), GAMMA)
    warm.run(1)
    begun = time.perf_counter()
    run = make(problem, problem.graph.split(problem.unary), GAMMA)
    duals, seconds = [total(run.dual)], [time.perf_counter() - begun]
    for _ in range(iterations):
        duals.append(total(run.run(1)[:, 0]))
        seconds.append(time.perf_counter() - begun)
    return duals, seconds


def total(dual: Tensor) -> float:
    return float(dual.sum())


def rows_of(name: str, duals: list[float], seconds: list[float], best: float) -> dict[str, object]:
    row: dict[str, object] = {"schedule": name, "iterations": len(duals) - 1}
    for close in CLOSE:
        at = next((k for k, dual in enumerate(duals) if dual - best <= close * abs(best)), None)
        row[f"iterations to {close:g}"] = "-" if at is None else at
        row[f"s to {close:g}"] = "-" if at is None else seconds[at]
    row["end"] = (duals[-1] - best) / abs(best)
    return row


def draw(courses: dict[str, tuple[list[float], list[float]]], best: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for name, (duals, seconds) in courses.items():
        excess = [max((dual - best) / abs(best), ROUNDING) for dual in duals]
        end = next((k for k, value in enumerate(excess) if value <= ROUNDING), len(excess) - 1) + 1
        axes[0].plot(range(1, end + 1), excess[:end], label=name)
        axes[1].plot(seconds[:end], excess[:end], label=name)
    for axis, label in zip(axes, ("passes over all chains, the start's first", "seconds"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("excess over the optimal dual, relative")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(courses), frameon=False)
    models = f"{BATCH} models, {SHAPE[0]}×{SHAPE[1]}, {LABELS} labels, strides {' and '.join(map(str, STRIDES))}"
    figure.suptitle(f"Smoothed dual at γ = {GAMMA:g}: {models}", fontsize="medium")
    path = ROOT / "docs" / "convergence.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"drawn: {path.relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=250, help="of the paper's schedule")
    iterations = parser.parse_args().iterations
    problem = random_problem()
    best = optimum(problem)
    courses = {name: course(make, problem, math.ceil(part * iterations)) for name, (make, part) in RUNS.items()}
    report("convergence", [rows_of(name, *each, best) for name, each in courses.items()])
    draw(courses, best)


if __name__ == "__main__":
    main()
