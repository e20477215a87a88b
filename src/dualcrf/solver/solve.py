"""`solve`: the best labelling of a pairwise model, with a proof of how far from optimal it can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dualcrf.graph import Graph
from dualcrf.potentials import Pairwise
from dualcrf.solver.certificate import feasible, flat_dual_and_loss, flat_energy
from dualcrf.solver.forest import forest_of, solve_forest
from dualcrf.solver.problem import Problem, make_problem
from dualcrf.solver.schedules import SCHEDULES
from dualcrf.solver.search import STATUSES, Limits, Progress, Search
from dualcrf.solver.solution import History, Solution

# A node agrees with a chain if its label costs the chain at most this part of what a node is worth on average.
_AGREEMENT = 1e-5


def solve(
    unary: Tensor,
    pairwise: Pairwise,
    graph: Graph,
    *,
    gamma: float = 0.0,
    schedule: str = "wavefront",
    iterations: int = 400,
    tol: float = 1e-6,
    time_limit: float | None = None,
    step: float | None = None,
    polish: bool = True,
    history: bool = False,
    callback: Callable[[Progress], None] | None = None,
    impl: str = "auto",
) -> Solution:
    """Find the labelling with the highest score, and a bound that no labelling exceeds.

    The schedules lower the dual: "wavefront" (Lemma 1 at full step over the levels of the node order, the default),
    "handover" (family after family; hard max only), "parallel" (the paper's Theorem 1). Where the hard-max wavefront is
    caught above the optimum, it is freed by smoothing (annealing) without any setting. A labelling is decoded again and
    again, and the best is kept. A graph without cycles is solved exactly.

    Args:
        unary: [..., N, L] scores of the nodes; -inf forbids a label.
        pairwise: scores of the edges; its batch axes broadcast against those of `unary`.
        gamma: 0 for the hard max; otherwise the (smoothed) dual of this gamma is lowered. The bound is the hard-max one
            always.
        iterations: the most updates of the multipliers ("parallel") or sweeps (the others).
        tol: stop an item when its gap, or the dual's progress in 8 iterations, is at most `tol` times the score's size.
        time_limit: seconds after which to return the best so far.
        step: of "parallel", 1 / (nodes on the longest chain) if None; a larger one is halved for an item whose dual it
            raises.
        polish: whether to improve every decoded labelling locally, and to search on for small models whose gap stays
            open.
        history: also return the course of dual and primal; every iteration is then decoded.
        callback: called after every decoding. KeyboardInterrupt, from it or from the keyboard, ends the run with the
            best so far.
        impl: "auto" (by device), "reference", "cpu" or "triton".

    Example:
        >>> graph = dualcrf.grid(20, 20)
        >>> solution = dualcrf.solve(torch.randn(400, 8), dualcrf.Potts(torch.ones(graph.num_edges)), graph)
        >>> solution.labels, solution.primal, solution.dual, solution.status
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: expected one of {', '.join(map(repr, SCHEDULES))}")
    if not 0 <= gamma < math.inf:
        raise ValueError(f"gamma={gamma}: expected 0 for the hard max or a positive number")
    if iterations < 0 or tol < 0:
        raise ValueError(f"iterations={iterations}, tol={tol}: neither may be negative")
    if step is not None and (schedule != "parallel" or step <= 0):
        raise ValueError(f"step={step} with schedule={schedule!r}: a positive step belongs to schedule='parallel'")
    problem, batch = make_problem(unary, pairwise, graph, impl)
    search = Search(problem, Limits(iterations, tol, time_limit, polish), history, callback)
    # Where no two chains meet, the first messages are exact already.
    forest = None if graph.num_places == graph.num_nodes else forest_of(graph)
    if forest is not None:
        search.finish(*solve_forest(problem, forest))
    else:
        make = partial(SCHEDULES[schedule], gamma=gamma, **({} if step is None else {"step": step}))
        search.run(make, anneals=schedule == "wavefront" and not gamma)
    return _solution(search, batch)


def _solution(search: Search, batch: torch.Size) -> Solution:
    problem: Problem = search.problem
    model = problem.parameters, problem.layout, problem.kind
    places = feasible(search.places, problem.unary, problem.graph)
    primal = flat_energy(search.labels, problem.unary, *model)
    dual, loss = flat_dual_and_loss(search.labels, places, *model)
    # The bound is at least the primal; where both are the same, rounding may put it below.
    dual = torch.maximum(dual, primal)
    size = torch.maximum(primal.abs(), dual.abs()).unsqueeze(1) / problem.graph.num_nodes
    agreement = loss <= _AGREEMENT * size
    closed = search.status == STATUSES.index("gap")
    search.stop((closed & agreement.all(1)).nonzero().squeeze(1), "agreement")
    by_itself = torch.tensor([s in ("exact", "agreement", "gap", "progress", "infeasible") for s in STATUSES])
    status = np.array(STATUSES)[search.status.cpu().numpy()].reshape(batch)
    return Solution(
        labels=search.labels.view(*batch, problem.graph.num_nodes),
        primal=primal.view(batch),
        dual=dual.view(batch),
        agreement=agreement.view(*batch, problem.graph.num_nodes),
        iterations=search.iterations.view(batch),
        converged=by_itself.to(search.status.device)[search.status].view(batch),
        status=status if batch else str(status),
        multipliers=places.view(*batch, *places.shape[1:]),
        history=_history(search, batch),
    )


def _history(search: Search, batch: torch.Size) -> History | None:
    if search.course is None:
        return None
    course = torch.stack(search.course, 2)
    # An item that has stopped keeps its last values.
    known = torch.where(course.isnan(), 0, torch.arange(course.shape[2], device=course.device)).cummax(2)[0]
    dual, primal, objective = course.gather(2, known).view(3, *batch, course.shape[2])
    return History(dual, primal, objective)
