"""What all parts of the solver work on: one checked model, with one batch axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dualcrf.graph import Graph
from dualcrf.kernels.layout import ChainLayout
from dualcrf.kernels.order import SweepOrder
from dualcrf.ops.chain import chain_messages, choose_implementation
from dualcrf.order import Sweep, sweep_of
from dualcrf.potentials import Pairwise


@dataclass(frozen=True, eq=False)
class Problem:
    """A batch of models over one graph.

    Attributes:
        unary: [B, N, L], float32 or float64; -inf also at the labels that the edges make impossible.
        parameters: the pairwise potential's own, each [B or 1, ...], as given.
    """

    graph: Graph
    kind: str
    unary: Tensor
    parameters: Sequence[Tensor]
    impl: str

    @property
    def layout(self) -> ChainLayout:
        """The chains."""
        return self.graph.layout(self.unary.device)

    @property
    def sweep(self) -> Sweep:
        """The order of the nodes, with chains that follow it."""
        return sweep_of(self.graph)

    @property
    def sweep_layout(self) -> ChainLayout:
        """The chains that follow the order."""
        return self.sweep.graph.layout(self.unary.device)

    @property
    def order(self) -> SweepOrder:
        """The levels of the order."""
        return self.sweep.order(self.unary.device)

    @property
    def infeasible(self) -> Tensor:
        """[B] bool: the items in which every label of some node is impossible."""
        return (self.unary == -torch.inf).all(2).any(1)

    def take(self, items: Tensor) -> Problem:
        """Some items of the batch, by their numbers."""
        return replace(self, unary=self.unary[items], parameters=[p[items] if len(p) > 1 else p for p in self.parameters])

    def messages(self, places: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
        """Exact (smoothed) messages, forward and backward [B, S, L], and the chains' energies [B, C]."""
        return self._messages(places, gamma, self.layout)

    def sweep_messages(self, places: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
        """The same for the places of `sweep.graph`."""
        return self._messages(places, gamma, self.sweep_layout)

    def _messages(self, places: Tensor, gamma: float, layout: ChainLayout) -> tuple[Tensor, Tensor, Tensor]:
        smoothing = places.new_full((), gamma) if gamma else None
        forward, backward, energy = chain_messages(places, self.parameters, layout, self.kind, smoothing, self.impl)
        # A message of -inf is one into a forbidden label; as 0 it can be subtracted from another score.
        return forward.nan_to_num(neginf=0.0), backward.nan_to_num(neginf=0.0), energy


def make_problem(unary: Tensor, pairwise: Pairwise, graph: Graph, impl: str) -> tuple[Problem, torch.Size]:
    """Check a model and give it one batch axis; its batch shape comes back beside it."""
    if unary.ndim < 2 or unary.shape[-2] != graph.num_nodes or not unary.is_floating_point():
        raise ValueError(
            f"unary is of shape {tuple(unary.shape)} and {unary.dtype}, expected floats of shape "
            f"[..., {graph.num_nodes} nodes, labels] for {graph}"
        )
    labels = unary.shape[-1]
    if labels < 1:
        raise ValueError("unary has no labels: its last axis is empty")
    pairwise.check(graph, labels, unary.device)
    impl = choose_implementation(impl, unary.device)
    for name, value in {"unary": unary, **pairwise.parameters}.items():
        bad = (~(value < torch.inf)).nonzero()
        if len(bad):
            where = tuple(bad[0].tolist())
            raise ValueError(f"{name} has {value[where].item()} at {where}; scores are finite or -inf")
    dtypes = {unary.dtype, *(p.dtype for p in pairwise.parameters.values())}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    batch = torch.broadcast_shapes(unary.shape[:-2], pairwise.batch_shape)
    flat = unary.detach().to(dtype).expand(*batch, -1, -1).reshape(-1, graph.num_nodes, labels).contiguous()
    parameters = [p.detach() for p in pairwise.flat_parameters(batch)]
    problem = Problem(graph, pairwise.kind, flat, parameters, impl)
    if any((p == -torch.inf).any() for p in parameters):
        problem = _forbid_impossible(problem)
    return problem, batch


def _forbid_impossible(problem: Problem) -> Problem:
    """Forbid every label that some chain cannot give its node, again and again until no more fall.

    No labelling is lost, and afterwards each allowed label is possible on all chains whatever the multipliers are.
    """
    while True:
        marginals = problem.graph.split(problem.unary)
        forward, backward, _ = chain_messages(marginals, problem.parameters, problem.layout, problem.kind, None, problem.impl)
        possible = marginals + forward + backward > -torch.inf
        impossible = problem.graph.gather((~possible).to(marginals.dtype)) > 0
        if (problem.unary[impossible] == -torch.inf).all():
            return problem
        problem = replace(problem, unary=problem.unary.masked_fill(impossible, -torch.inf))
