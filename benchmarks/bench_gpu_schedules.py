"""Times of the schedules on one NVIDIA GPU: sweeps of the wavefront and of hand-over, and how soon the optimum is near.

python benchmarks/bench_gpu_schedules.py
"""

from __future__ import annotations

import torch
from torch import Tensor

import dualcrf
from common import report
from dualcrf.solver.problem import Problem, make_problem
from dualcrf.solver.schedules import HandOver, Wavefront

SWEEPS = 6


def dense(batch: int) -> Problem:
    """Models of the paper's size with Gaussian potentials."""
    graph = dualcrf.grid(33, 33, strides=(1, 2))
    table = torch.randn(batch, graph.num_edges, 21, 21, device="cuda")
    return make_problem(torch.randn(batch, graph.num_nodes, 21, device="cuda"), dualcrf.Dense(table), graph, "triton")[0]


def images(batch: int) -> Problem:
    """Potts grids of 257×257 with long strides."""
    graph = dualcrf.grid(257, 257, strides=(1, 3, 9, 27))
    weight = torch.rand(batch, graph.num_edges, device="cuda")
    return make_problem(torch.randn(batch, graph.num_nodes, 21, device="cuda"), dualcrf.Potts(weight), graph, "triton")[0]


def median_ms(schedule: Wavefront | HandOver, sweeps: int, repeat: int = 9) -> float:
    """Milliseconds of one call of `sweeps` sweeps."""
    times = []
    for _ in range(repeat + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        schedule.run(sweeps)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[2:])[repeat // 2]


def excess(duals: Tensor) -> list[float]:
    """By how much the sum of the duals lies above its last value after each sweep, relative to it."""
    course = duals.sum(0)
    return ((course - course[-1]) / course[-1].abs()).tolist()


def main() -> None:
    torch.manual_seed(0)
    rows = []
    for batch in (16, 64, 128):
        problem = dense(batch)
        start = problem.graph.split(problem.unary)
        for gamma in (1.0, 0.0):
            course = excess(Wavefront(problem, start, gamma).run(40))
            near = next((k + 1 for k, value in enumerate(course) if value <= 1e-5), None) if gamma else None
            row = {"model": f"dense {batch}×33²×21", "schedule": "wavefront", "gamma": gamma}
            row["ms a sweep"] = median_ms(Wavefront(problem, start, gamma), SWEEPS) / SWEEPS
            rows.append(
                row
                | ({"sweeps to 1e-5": near, "ms to 1e-5": median_ms(Wavefront(problem, start, gamma), near)} if near else {})
            )
    problem = images(8)
    start = problem.graph.split(problem.unary)
    for schedule in (Wavefront, HandOver):
        duals = schedule(problem, start, 0.0).run(4).mean(0)
        row = {"model": "Potts 8×257²×21", "schedule": schedule.__name__.lower(), "gamma": 0.0}
        row["ms a sweep"] = median_ms(schedule(problem, start, 0.0), SWEEPS) / SWEEPS
        rows.append(row | {f"dual after {k + 1}": float(d) for k, d in enumerate(duals)})
    report("gpu_schedules", rows)


if __name__ == "__main__":
    main()
