"""From multipliers to labellings: two ways, a polish, and for small models a search, of which the best is kept."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dualcrf.ops.schedules import decode_labels, improve_labels
from dualcrf.solver.certificate import flat_energy
from dualcrf.solver.problem import Problem
from dualcrf.solver.schedules import Schedule

_POLISH, _POLISH_FORESTS = 2, 16  # so many forests of nodes are relabelled after every decoding, of so many in turn
# The search at the end: so many runs of so many forests each, as far as so many entries of edge tables allow.
_RUNS, _FORESTS, _ENTRIES = 32, 200, 2**27
_HEATS = 1, 4  # the first and the last run's noise at its start, as powers of two times the gap per node


def decode(schedule: Schedule, polish: bool, number: int) -> tuple[Tensor, Tensor]:
    """The best labelling found for every item, [B, N] int64, and its score, [B] float64.

    One candidate is the paper's, at each node the best label of the summed max-marginals; the other visits the nodes in
    order and takes the best label given those already chosen. A polish relabels forests of nodes.
    """
    problem = schedule.problem
    sums, scores, reverse = schedule.decoding()
    model = problem.parameters, problem.sweep_layout, problem.order, problem.kind
    labels = sums.argmax(2)
    value = flat_energy(labels, problem.unary, problem.parameters, problem.layout, problem.kind)
    labels, value = better(problem, labels, value, decode_labels(scores, *model, reverse, problem.impl))
    if polish:
        polished = labels.clone()
        for k in range(_POLISH):
            _relabel(polished, problem, problem.unary, (_POLISH * number + k) % _POLISH_FORESTS)
        labels, value = better(problem, labels, value, polished)
    return labels, value


def search_labels(problem: Problem, labels: Tensor, gap: Tensor) -> Tensor:
    """A labelling [B, N] that is at least as good, from runs that relabel random forests of nodes again and again.

    The scores are disturbed at first, by noise of the size of the gap per node, and less and less. Items are searched
    one by one, each with the same noise, so that none depends on the others.
    """
    entries = max(1, problem.graph.num_edges * problem.unary.shape[2] ** 2)
    runs = min(_RUNS, _ENTRIES // entries // _FORESTS)
    found = labels.clone()
    for item in range(len(labels) if runs else 0):
        one = problem.take(torch.tensor([item], device=labels.device))
        many = replace(one, unary=one.unary.expand(runs, -1, -1))
        generator = torch.Generator().manual_seed(0)
        current = labels[item].repeat(runs, 1)
        best, value = current, flat_energy(current, many.unary, many.parameters, many.layout, many.kind)
        heat = torch.logspace(*_HEATS, runs, base=2, dtype=torch.float64) * float(gap[item]) / problem.graph.num_nodes
        for number in range(_FORESTS):
            noise = torch.rand(many.unary.shape, generator=generator, dtype=torch.float64)
            noise = -(-noise.clamp(min=1e-12).log()).log()  # Gumbel's: with it, the best label is a sample
            noise *= heat[:, None, None] * max(0.0, 1 - number / (0.9 * _FORESTS))
            _relabel(current, many, many.unary + noise.to(many.unary), number)
            best, value = better(many, best, value, current)
        found[item] = best[value.argmax()]
    return found


def better(problem: Problem, labels: Tensor, value: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """For every item the better one of two labellings, and its score; `value` is the first one's."""
    other = flat_energy(others, problem.unary, problem.parameters, problem.layout, problem.kind)
    return torch.where((other > value)[:, None], others, labels), torch.maximum(value, other)


def _relabel(labels: Tensor, problem: Problem, unary: Tensor, number: int) -> None:
    parent, reverse = problem.sweep.forest(number, labels.device)
    improve_labels(
        labels, unary, problem.parameters, problem.sweep_layout, problem.order, problem.kind, parent, reverse,
        problem.impl
    )  # fmt: skip
