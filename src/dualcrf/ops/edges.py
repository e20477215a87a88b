"""How a message crosses an edge: the definition of every kind of pairwise potential, in plain torch.

A kind is its parameters and the [L, L] scores they give an edge. The kernels hold the same kinds in
`kernels/numba/edges.py` and `kernels/triton/edges.py`; DESIGN.md says what a new one needs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class EdgeKind(NamedTuple):
    """One kind of pairwise potential."""

    # Each parameter's name and what its axes after the batch count: "edges", "nodes" or "labels".
    parameters: dict[str, tuple[str, ...]]
    # (parameters [B or 1, ...], edge [n], first [n], second [n], L) -> [B or 1, n, L, L]: the scores of
    # (label at the edge's first node, label at its second node).
    scores: Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, int], Tensor]


def weigh(weight: Tensor, compat: Tensor) -> Tensor:
    """weight · compat, and -inf where compat is: a forbidden pair is forbidden whatever an edge weighs."""
    forbidden = compat == -torch.inf
    # One pass over the edges' tables: beside them, what is done to compat costs nothing.
    penalty = torch.where(forbidden, compat.detach(), 0)
    return torch.addcmul(penalty, weight, compat.masked_fill(forbidden, 0))


def _dense(parameters: Sequence[Tensor], edge: Tensor, first: Tensor, second: Tensor, labels: int) -> Tensor:
    return parameters[0].index_select(1, edge)


def _additive(parameters: Sequence[Tensor], edge: Tensor, first: Tensor, second: Tensor, labels: int) -> Tensor:
    source, target = parameters
    return source.index_select(1, first) + target.index_select(1, second)


def _weighted(parameters: Sequence[Tensor], edge: Tensor, first: Tensor, second: Tensor, labels: int) -> Tensor:
    weight, compat = parameters
    return weigh(weight.index_select(1, edge)[..., None, None], compat[:, None])


def _potts(parameters: Sequence[Tensor], edge: Tensor, first: Tensor, second: Tensor, labels: int) -> Tensor:
    agree = torch.eye(labels, dtype=torch.bool, device=edge.device)
    return torch.where(agree, parameters[0].index_select(1, edge)[..., None, None], 0)


EDGE_KINDS = {
    "dense": EdgeKind({"table": ("edges", "labels", "labels")}, _dense),
    "additive": EdgeKind({"source": ("nodes", "labels", "labels"), "target": ("nodes", "labels", "labels")}, _additive),
    "weighted": EdgeKind({"weight": ("edges",), "compat": ("labels", "labels")}, _weighted),
    "potts": EdgeKind({"weight": ("edges",)}, _potts),
}
