"""The course of a run: which schedule runs on which items of a batch for how long, and what is kept of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from time import monotonic

import torch
from torch import Tensor

from dualcrf.solver.certificate import feasible, flat_dual, flat_energy
from dualcrf.solver.decode import better, decode, search_labels
from dualcrf.solver.problem import Problem
from dualcrf.solver.schedules import Schedule, Wavefront

STATUSES = ("running", "exact", "agreement", "gap", "progress", "iterations", "time", "interrupted", "infeasible")

# Labels are decoded, and the stopping rules looked at, after these numbers of iterations and then always after the last
# one.
_FIRST_STEPS, _STEP = (0, 1, 1, 2, 4), 8
# Block descent is caught where a step closes less than this part of the gap. A smoothing of about the gap per node
# frees it; it is then lowered stage by stage, by a factor of 128 in all, and each annealing is given twice the sweeps
# of the last one.
_CAUGHT = 0.01
_FIRST_GAMMA, _DECAY, _STAGES, _SWEEPS = 1.5, 2**-0.5, 15, 4

# Seconds that a solution's certificate takes for every pair of labels of every edge.
_CLOSING = 2.5e-9


@dataclass(frozen=True)
class Limits:
    """When to stop, and how much to spend on each labelling."""

    iterations: int
    tol: float
    time_limit: float | None
    polish: bool


@dataclass(frozen=True, eq=False)
class Progress:
    """What a callback is told: how far the batch is, its axes flattened into one.

    Attributes:
        iterations: the most iterations that any item has had.
        seconds: since the start.
        dual: [B] float64, the lowest bound so far in the arithmetic of the run; the solution's is computed anew.
        primal: [B] float64, the highest score so far.
    """

    iterations: int
    seconds: float
    dual: Tensor
    primal: Tensor


class Search:
    """The best of every item so far, and the loops that improve it."""

    def __init__(self, problem: Problem, limits: Limits, history: bool, callback: Callable[[Progress], None] | None) -> None:
        batch, device = len(problem.unary), problem.unary.device
        self.problem, self.limits, self.callback = problem, limits, callback
        self.started = monotonic()
        self.deadline = math.inf
        self.places = problem.graph.split(problem.unary)
        self.labels = problem.unary.argmax(2)
        self.primal = torch.full((batch,), -torch.inf, dtype=torch.float64, device=device)
        self.dual = torch.full_like(self.primal, torch.inf)
        self.iterations = torch.zeros(batch, dtype=torch.int64, device=device)
        self.status = torch.zeros_like(self.iterations)
        self.course = [self._no_course()] if history else None
        self.stop(problem.infeasible.nonzero().squeeze(1), "infeasible")
        if limits.time_limit is not None:
            closing = min(self._closing_seconds(), limits.time_limit / 2)
            self.deadline = self.started + limits.time_limit - closing

    def running(self) -> Tensor:
        """The numbers of the items that have not stopped."""
        return (self.status == 0).nonzero().squeeze(1)

    def stop(self, items: Tensor, status: str) -> None:
        """Note why some items have stopped."""
        self.status[items] = STATUSES.index(status)

    def run(self, make: Callable[[Problem, Tensor], Schedule], anneals: bool) -> None:
        """Let every item run until it stops; anneal those that are caught, while that closes their gap."""
        try:
            items = self.running()
            sweeps = _SWEEPS if anneals else 0
            self._descend(items, make(self.problem.take(items), self.places[items]), sweeps)
            while len(items := self.running()):
                gap = self.dual[items] - self.primal[items]
                places = self._anneal(items, sweeps)
                sweeps *= 2
                self._descend(items, Wavefront(self.problem.take(items), places, 0.0), sweeps)
                closed = gap - (self.dual[items] - self.primal[items])
                self.stop(items[(self.status[items] == 0) & ~(closed > self._slack(items, self.dual[items]))], "progress")
            self._search_labels()
        except KeyboardInterrupt:
            self.stop(self.running(), "interrupted")

    def _search_labels(self) -> None:
        """Look for better labellings of the items whose gap is open."""
        open_ends = torch.tensor([STATUSES.index("progress"), STATUSES.index("iterations")], device=self.status.device)
        items = torch.isin(self.status, open_ends).nonzero().squeeze(1)
        if self.limits.polish and len(items) and not self._out_of_time():
            problem, gap = self.problem.take(items), self.dual[items] - self.primal[items]
            gap = torch.where(gap < torch.inf, gap, self.dual[items].abs())
            found = search_labels(problem, self.labels[items], gap)
            self.labels[items], self.primal[items] = better(problem, self.labels[items], self.primal[items], found)

    def finish(self, labels: Tensor, places: Tensor) -> None:
        """Take what an exact method found for all items."""
        items = self.running()
        model = self.problem.parameters, self.problem.layout, self.problem.kind
        self.labels[items], self.places[items] = labels[items], places[items].to(self.places.dtype)
        self.primal[items] = flat_energy(labels, self.problem.unary, *model)[items]
        self.dual[items] = self.primal[items]
        self.stop(items, "exact")
        if self.course is not None:
            self._write_course(items, self.dual[items], self.dual[items])

    def _descend(self, items: Tensor, schedule: Schedule, sweeps: int) -> None:
        """Run a schedule until every item has stopped or is caught; the next annealing would need `sweeps` a stage."""
        if not len(items):
            return
        bound = schedule.dual
        try:
            for number, step in enumerate(chain(_FIRST_STEPS, repeat(_STEP))):
                before = schedule.dual
                bound = self._advance(items, schedule, step, number, smoothed=False)
                progress = before - schedule.dual if step == _STEP else torch.full_like(before, torch.inf)
                leaves = self._leave(items, schedule, bound, progress, sweeps)
                self._keep(items[leaves], schedule.multipliers()[leaves], bound[leaves])
                if leaves.all():
                    return
                if leaves.any():
                    items, stays = items[~leaves], (~leaves).nonzero().squeeze(1)
                    schedule.take(stays)
        except KeyboardInterrupt:
            self._keep(items, schedule.multipliers(), bound)
            raise

    def _anneal(self, items: Tensor, sweeps: int) -> Tensor:
        """Multipliers that a smoothing took out of where block descent was caught, [b, S, L]."""
        schedule = Wavefront(self.problem.take(items), self.places[items], 0.0)
        gap = self.dual[items] - self.primal[items]
        gap = torch.where(gap < torch.inf, gap, self.dual[items].abs())
        gamma = (_FIRST_GAMMA * gap / self.problem.graph.num_nodes).to(schedule.forward.dtype)
        for stage in range(_STAGES):
            schedule.gamma = gamma * _DECAY**stage
            self._advance(items, schedule, sweeps, stage, smoothed=True)
            if self._out_of_time():
                break
        return schedule.multipliers()

    def _advance(self, items: Tensor, schedule: Schedule, step: int, number: int, smoothed: bool) -> Tensor:
        """Some iterations and a decoding; the hard-max bound, or where that is dear (`smoothed`) an earlier one."""
        step = min(step, int((self.limits.iterations - self.iterations[items]).min()))
        bound = self.dual[items]
        for part in [1] * step if step and self.course is not None else [step]:
            if part:
                schedule.run(part)
            if not smoothed:
                bound = schedule.hard_dual()
            labels, value = decode(schedule, self.limits.polish, number)
            better = value > self.primal[items]
            self.labels[items[better]], self.primal[items[better]] = labels[better], value[better]
            self.iterations[items] += part
            lowest = torch.minimum(bound, self.dual[items])
            if self.course is not None:
                self._write_course(items, lowest, schedule.dual)
            if self.callback is not None:
                dual = self.dual.index_copy(0, items, lowest)
                seconds = monotonic() - self.started
                self.callback(Progress(int(self.iterations.max()), seconds, dual, self.primal.clone()))
        return bound

    def _leave(self, items: Tensor, schedule: Schedule, bound: Tensor, progress: Tensor, sweeps: int) -> Tensor:
        """Which items leave the descent, [b] bool: those that stop, and those that are caught."""
        slack = self._slack(items, bound)
        gap = bound - self.primal[items]
        closed = gap <= slack
        if closed.any():
            closed[closed.clone()] = self._certified_gap(items, schedule, closed) <= slack[closed]
        stuck = progress <= slack
        spent = self.iterations[items] >= self.limits.iterations
        caught = torch.zeros_like(closed)
        if sweeps:
            caught = stuck | (progress < _CAUGHT * gap)
            caught &= self.iterations[items] + _STAGES * sweeps + _STEP <= self.limits.iterations
        if self._out_of_time():
            self.stop(items, "time")
        self.stop(items[stuck & ~caught], "progress")
        self.stop(items[spent], "iterations")
        self.stop(items[closed], "gap")
        return caught | (self.status[items] > 0)

    def _certified_gap(self, items: Tensor, schedule: Schedule, chosen: Tensor) -> Tensor:
        problem = self.problem.take(items[chosen])
        places = feasible(schedule.multipliers()[chosen], problem.unary, problem.graph)
        bound = flat_dual(places, problem.parameters, problem.layout, problem.kind)
        return bound - self.primal[items[chosen]]

    def _slack(self, items: Tensor, bound: Tensor) -> Tensor:
        """[b] the gap that counts as none."""
        size = torch.maximum(self.primal[items].abs(), bound.abs())
        return self.limits.tol * torch.where(size < torch.inf, size, 0)

    def _keep(self, items: Tensor, places: Tensor, bound: Tensor) -> None:
        lower = bound <= self.dual[items]
        self.places[items[lower]], self.dual[items[lower]] = places[lower], bound[lower]

    def _closing_seconds(self) -> float:
        """About how long the certificate of the solution will take."""
        batch, _, labels = self.problem.unary.shape
        return _CLOSING * batch * self.problem.graph.num_edges * labels ** (1 if self.problem.kind == "potts" else 2)

    def _out_of_time(self) -> bool:
        return monotonic() >= self.deadline

    def _no_course(self) -> Tensor:
        return torch.full((3, len(self.primal)), torch.nan, dtype=torch.float64, device=self.primal.device)

    def _write_course(self, items: Tensor, dual: Tensor, objective: Tensor) -> None:
        assert self.course is not None
        at = self.iterations[items]
        while len(self.course) <= int(at.max()):
            self.course.append(self._no_course())
        values = torch.stack([dual, self.primal[items], objective])
        for column in at.unique().tolist():
            here = at == column
            self.course[column][:, items[here]] = values[:, here]
