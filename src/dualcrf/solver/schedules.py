"""The schedules as objects: each holds multipliers of a batch of problems and lowers their (smoothed) dual."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dualcrf.ops.schedules import handover_sweeps, wavefront_sweeps
from dualcrf.solver.problem import Problem


class Schedule(Protocol):
    """Multipliers on their way down; `problem` is the batch they belong to."""

    problem: Problem
    dual: Tensor  # [B] float64, the (smoothed) dual of the multipliers, or a bound on it

    def __init__(self, problem: Problem, places: Tensor, gamma: float) -> None:
        """Start from multipliers [B, S, L] that sum to the unary scores."""
        ...

    def run(self, iterations: int) -> Tensor:
        """Go on for some iterations: the dual after each of them, [B, iterations]."""
        ...

    def hard_dual(self) -> Tensor:
        """[B] float64, the hard-max dual of the multipliers, in the arithmetic of the run."""
        ...

    def multipliers(self) -> Tensor:
        """[B, S, L] scores of the chains' places; a node's sum to its unary scores."""
        ...

    def decoding(self) -> tuple[Tensor, Tensor, bool]:
        """What labels are decoded from.

        Unary scores plus all messages [B, N, L]; unary scores plus the messages from the nodes that come later when
        they are visited one by one [B, N, L]; and whether that is from the last to the first.
        """
        ...

    def take(self, items: Tensor) -> None:
        """Go on with some items of the batch alone."""
        ...


class Wavefront:
    """Lemma 1 at full step, level after level of the node order, there and back in turn."""

    def __init__(self, problem: Problem, places: Tensor, gamma: float) -> None:
        self.problem = problem
        self.gamma = places.new_full((len(places),), gamma) if gamma else None
        places = problem.sweep.split(places, problem.graph)
        # The messages that the first sweep meets must be exact, or it could raise the dual.
        _, self.backward, energy = problem.sweep_messages(places, gamma)
        self.forward = torch.zeros_like(self.backward)
        self.dual = energy.sum(1, dtype=torch.float64)
        self.reverse = False
        self._start: Tensor | None = places

    def run(self, iterations: int) -> Tensor:
        """Go on for some iterations."""
        problem = self.problem
        duals = wavefront_sweeps(
            problem.unary, problem.parameters, problem.sweep_layout, problem.order, problem.kind, self.gamma,
            self.forward, self.backward, iterations, self.reverse, problem.impl,
        )  # fmt: skip
        self.reverse ^= iterations % 2 == 1
        self._start = None
        self.dual = duals[:, -1]
        return duals

    def hard_dual(self) -> Tensor:
        """[B] the hard-max dual."""
        return self.dual if self.gamma is None else _hard_dual(self.problem, self.multipliers())

    def multipliers(self) -> Tensor:
        """[B, S, L] scores of the places."""
        sweep, messages = self.problem.sweep, self.forward + self.backward
        if self._start is None:
            places = sweep.graph.split(self.problem.unary + sweep.graph.gather(messages)) - messages
        else:
            places = self._start
        return sweep.merge(places, self.problem.graph)

    def decoding(self) -> tuple[Tensor, Tensor, bool]:
        """What labels are decoded from."""
        graph = self.problem.sweep.graph
        sums = self.problem.unary + graph.gather(self.forward + self.backward)
        # The next sweep's direction: towards it, every message is exact.
        scores = self.problem.unary + graph.gather(self.forward if self.reverse else self.backward)
        return sums, scores, self.reverse

    def take(self, items: Tensor) -> None:
        """Go on with some items alone."""
        self.problem = self.problem.take(items)
        self.forward, self.backward, self.dual = self.forward[items], self.backward[items], self.dual[items]
        self.gamma = None if self.gamma is None else self.gamma[items]
        self._start = None if self._start is None else self._start[items]


class HandOver:
    """Family after family, all chains of a family at once; hard max."""

    def __init__(self, problem: Problem, places: Tensor, gamma: float) -> None:
        if gamma:
            raise ValueError(
                f"schedule='handover' works for the hard max alone, and gamma={gamma}: use 'wavefront' or 'parallel'"
            )
        self.problem = problem
        self.reverse = False
        self._share(places)
        self.dual = problem.messages(places, 0.0)[2].sum(1, dtype=torch.float64)

    def _share(self, places: Tensor) -> None:
        self.scores = self.problem.unary.clone()
        shares = self.problem.graph.split(self.problem.unary)
        self.handed = (shares - places).masked_fill(shares == -torch.inf, 0)

    def run(self, iterations: int) -> Tensor:
        """Go on for some iterations."""
        problem = self.problem
        # What all chains of a node have handed over alike only grows, and would cost digits.
        self._share(self.multipliers())
        duals = handover_sweeps(
            problem.parameters, problem.layout, problem.kind, self.scores, self.handed, iterations, self.reverse,
            problem.impl
        )  # fmt: skip
        self.reverse ^= iterations % 2 == 1
        self.dual = duals[:, -1]
        return duals

    def hard_dual(self) -> Tensor:
        """[B] the hard-max dual."""
        return self.dual

    def multipliers(self) -> Tensor:
        """[B, S, L] scores of the places."""
        return self.problem.graph.split(self.scores) - self.handed

    def decoding(self) -> tuple[Tensor, Tensor, bool]:
        """What labels are decoded from."""
        return _decoding(self.problem, self.multipliers(), 0.0)

    def take(self, items: Tensor) -> None:
        """Go on with some items alone."""
        self.problem = self.problem.take(items)
        self.scores, self.handed, self.dual = self.scores[items], self.handed[items], self.dual[items]


class Parallel:
    """Theorem 1: all nodes at once, with step 1/max|V^t|, or a larger one that is halved where it raises the dual."""

    def __init__(self, problem: Problem, places: Tensor, gamma: float, step: float | None = None) -> None:
        self.problem = problem
        self.gamma = gamma
        self.places = places
        self.safe = 1 / float(problem.graph.chain_lengths.max())
        self.step = places.new_full((len(places),), self.safe if step is None else step)
        self.marginals, self.dual = self._pass(places)

    def _pass(self, places: Tensor) -> tuple[Tensor, Tensor]:
        forward, backward, energy = self.problem.messages(places, self.gamma)
        return places + (forward + backward), energy.sum(1, dtype=torch.float64)

    def run(self, iterations: int) -> Tensor:
        """Go on for some iterations."""
        return torch.stack([self._update() for _ in range(iterations)], 1)

    def _update(self) -> Tensor:
        graph = self.problem.graph
        finite = self.marginals.masked_fill(self.places == -torch.inf, 0)
        excess = finite - graph.split(graph.gather(finite))
        # A part of the step that is the same for all labels changes no dual, but a large step would let it grow.
        excess -= _label_mean(excess, self.places > -torch.inf)
        places = self.places - self.step[:, None, None] * excess
        marginals, dual = self._pass(places)
        worse = (dual > self.dual) & (self.step > self.safe)
        self.step = torch.where(worse, (self.step / 2).clamp(min=self.safe), self.step)
        kept = worse[:, None, None]
        self.places = torch.where(kept, self.places, places)
        self.marginals = torch.where(kept, self.marginals, marginals)
        self.dual = torch.where(worse, self.dual, dual)
        return self.dual

    def hard_dual(self) -> Tensor:
        """[B] the hard-max dual."""
        return _hard_dual(self.problem, self.places) if self.gamma else self.dual

    def multipliers(self) -> Tensor:
        """[B, S, L] scores of the places."""
        return self.places

    def decoding(self) -> tuple[Tensor, Tensor, bool]:
        """What labels are decoded from."""
        return _decoding(self.problem, self.places, self.gamma)

    def take(self, items: Tensor) -> None:
        """Go on with some items alone."""
        self.problem = self.problem.take(items)
        self.places, self.marginals = self.places[items], self.marginals[items]
        self.step, self.dual = self.step[items], self.dual[items]


def _hard_dual(problem: Problem, places: Tensor) -> Tensor:
    return problem.messages(places, 0.0)[2].sum(1, dtype=torch.float64)


def _label_mean(values: Tensor, allowed: Tensor) -> Tensor:
    return values.where(allowed, 0).sum(2, keepdim=True) / allowed.sum(2, keepdim=True)


def _decoding(problem: Problem, places: Tensor, gamma: float) -> tuple[Tensor, Tensor, bool]:
    sweep = problem.sweep
    forward, backward, _ = problem.sweep_messages(sweep.split(places, problem.graph), gamma)
    later = problem.unary + sweep.graph.gather(backward)
    return later + sweep.graph.gather(forward), later, False


SCHEDULES: dict[str, type[Schedule]] = {"wavefront": Wavefront, "parallel": Parallel, "handover": HandOver}
