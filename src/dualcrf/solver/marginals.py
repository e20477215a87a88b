"""Marginals and the log partition function: exact without cycles, otherwise at the optimum of the smoothed dual."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from dualcrf.graph import Graph
from dualcrf.ops.edges import EDGE_KINDS
from dualcrf.potentials import Pairwise
from dualcrf.solver.forest import Forest, beliefs, edge_tables, forest_of
from dualcrf.solver.problem import Problem, make_problem
from dualcrf.solver.schedules import SCHEDULES

_STEP = 8  # iterations between two looks at the dual's progress


def log_partition_bound(
    unary: Tensor,
    pairwise: Pairwise,
    graph: Graph,
    *,
    gamma: float = 1.0,
    schedule: str = "wavefront",
    iterations: int = 200,
    tol: float = 1e-7,
    impl: str = "auto",
) -> Tensor:
    """The smoothed dual at its optimum, an upper bound on gamma · log Σ exp(score / gamma) over all labellings.

    At gamma = 1 that is the log partition function. On a graph without cycles it is exact. The wavefront splits chains
    that turn in the node order, and bounds with the pieces; "parallel" takes the chains as they are.

    Args:
        unary: [..., N, L] scores of the nodes.
        pairwise: scores of the edges; its batch axes broadcast against those of `unary`.
        gamma: the strength of the smoothing, positive.
        schedule: "wavefront" or "parallel".
        iterations: the most sweeps or updates.
        tol: stop where 8 iterations lower the dual by at most `tol` times its size.

    Returns:
        [...] float64.

    Example:
        >>> dualcrf.log_partition_bound(torch.zeros(4, 2), dualcrf.Potts(torch.zeros(3)), dualcrf.grid(4))  # log 2⁴
        tensor(2.7726, dtype=torch.float64)
    """
    _check_smoothed(gamma, schedule)
    problem, batch = make_problem(unary, pairwise, graph, impl)
    forest = _forest(graph)
    if forest is not None:
        return beliefs(problem, forest, gamma).energy.view(batch)
    return _minimise(_as_swept(problem, schedule), gamma, schedule, iterations, tol)[1].view(batch)


@overload
def marginals(
    unary: Tensor, pairwise: Pairwise, graph: Graph, *, gamma: float = ..., edges: Literal[False] = ...,
    schedule: str = ..., iterations: int = ..., tol: float = ..., impl: str = ...,
) -> Tensor: ...  # fmt: skip
@overload
def marginals(
    unary: Tensor, pairwise: Pairwise, graph: Graph, *, gamma: float = ..., edges: Literal[True],
    schedule: str = ..., iterations: int = ..., tol: float = ..., impl: str = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def marginals(
    unary: Tensor,
    pairwise: Pairwise,
    graph: Graph,
    *,
    gamma: float = 1.0,
    edges: bool = False,
    schedule: str = "wavefront",
    iterations: int = 200,
    tol: float = 1e-7,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Pseudo-marginals at the optimum of the smoothed dual; the marginals themselves on a graph without cycles.

    Args:
        unary: [..., N, L] scores of the nodes.
        pairwise: scores of the edges; its batch axes broadcast against those of `unary`.
        gamma: the temperature: probabilities are proportional to exp(score / gamma).
        edges: also return those of the edges' label pairs.
        schedule: "wavefront" or "parallel".
        iterations: the most sweeps or updates.
        tol: stop where 8 iterations lower the dual by at most `tol` times its size.

    Returns:
        [..., N, L] probabilities of the nodes' labels; with `edges` also [..., E, L, L] of (label at edges[e, 0], label
        at edges[e, 1]).

    Example:
        >>> dualcrf.marginals(torch.tensor([[0.0, 1.0]]), dualcrf.Potts(torch.zeros(0)), dualcrf.grid(1))
        tensor([[0.2689, 0.7311]])
    """
    _check_smoothed(gamma, schedule)
    problem, batch = make_problem(unary, pairwise, graph, impl)
    forest = _forest(graph)
    if forest is not None:
        nodes, pairs = _forest_marginals(problem, forest, gamma, edges)
    else:
        problem = _as_swept(problem, schedule)
        places, _ = _minimise(problem, gamma, schedule, iterations, tol)
        nodes, pairs = _chain_marginals(problem, places, gamma, edges)
    nodes = nodes.view(*batch, *nodes.shape[1:])
    return nodes if pairs is None else (nodes, pairs.view(*batch, *pairs.shape[1:]))


def _check_smoothed(gamma: float, schedule: str) -> None:
    if not 0 < gamma < math.inf:
        raise ValueError(f"gamma={gamma}: expected a positive number; the bound for gamma = 0 is that of dualcrf.solve")
    if schedule not in ("wavefront", "parallel"):
        raise ValueError(f"schedule={schedule!r}: expected 'wavefront' or 'parallel', the ones that lower a smoothed dual")


def _forest(graph: Graph) -> Forest | None:
    """The order for exact passes; None also where no two chains meet, whose own passes are exact already."""
    return None if graph.num_places == graph.num_nodes else forest_of(graph)


def _as_swept(problem: Problem, schedule: str) -> Problem:
    """The problem on the pieces of the chains that turn: it is their dual that the wavefront lowers."""
    return replace(problem, graph=problem.sweep.graph) if schedule == "wavefront" else problem


def _minimise(problem: Problem, gamma: float, name: str, iterations: int, tol: float) -> tuple[Tensor, Tensor]:
    """Multipliers [B, S, L] at which the smoothed dual has stopped to fall, and that dual [B] float64."""
    items = torch.arange(len(problem.unary), device=problem.unary.device)
    places = problem.graph.split(problem.unary)
    schedule = SCHEDULES[name](problem, places, gamma)
    dual = schedule.dual.clone()
    while iterations > 0 and len(items):
        before = schedule.dual
        schedule.run(min(_STEP, iterations))
        iterations -= _STEP
        places[items], dual[items] = schedule.multipliers(), schedule.dual
        stays = (before - schedule.dual > tol * schedule.dual.abs()).nonzero().squeeze(1)
        items = items[stays]
        schedule.take(stays)
    return places, dual


def _chain_marginals(problem: Problem, places: Tensor, gamma: float, edges: bool) -> tuple[Tensor, Tensor | None]:
    graph, layout = problem.graph, problem.layout
    forward, backward, _ = problem.messages(places, gamma)
    scores = (places + (forward + backward)) / gamma
    nodes = graph.gather(scores.softmax(2)) / layout.count.unsqueeze(1)
    if not edges:
        return nodes, None
    first, second = (graph.edges[:, end].to(places.device) for end in (0, 1))
    place, flip = layout.place, layout.flip[layout.place]
    everywhere = torch.arange(graph.num_edges, device=places.device)
    tables = EDGE_KINDS[problem.kind].scores(problem.parameters, everywhere, first, second, places.shape[2])
    near, far = (places + forward)[:, place], (places + backward)[:, place + 1]
    turned = flip[:, None]
    pairs = tables + torch.where(turned, far, near).unsqueeze(3) + torch.where(turned, near, far).unsqueeze(2)
    return nodes, (pairs / gamma).flatten(2).softmax(2).view(pairs.shape)


def _forest_marginals(problem: Problem, forest: Forest, gamma: float, edges: bool) -> tuple[Tensor, Tensor | None]:
    found = beliefs(problem, forest, gamma)
    nodes = (found.belief / gamma).softmax(2).to(problem.unary.dtype)
    if not edges:
        return nodes, None
    batch, _, labels = found.belief.shape
    out = nodes.new_empty(batch, problem.graph.num_edges, labels, labels)
    for branch in forest.branches:
        above = found.belief[:, branch.parent] - found.up[:, branch.edge]
        pairs = edge_tables(problem, branch) + found.total[:, branch.child].unsqueeze(3) + above.unsqueeze(2)
        pairs = (pairs / gamma).flatten(2).softmax(2).view(pairs.shape)
        turned = problem.graph.edges[branch.edge, 0] != branch.child
        out[:, branch.edge] = torch.where(turned[:, None, None].to(pairs.device), pairs.mT, pairs).to(out.dtype)
    return nodes, out
