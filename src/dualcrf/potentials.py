"""Pairwise potentials: what users hand over for the edges of a graph. How each kind acts is said in `ops/edges.py`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from dualcrf.graph import Graph
from dualcrf.ops.edges import EDGE_KINDS


@dataclass(frozen=True, eq=False, repr=False)
class Pairwise:
    """Scores for the label pairs of every edge; the kinds are `Dense`, `Additive`, `Weighted` and `Potts`."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for name, axes in EDGE_KINDS[self.kind].parameters.items():
            value = getattr(self, name)
            if not isinstance(value, Tensor) or not value.is_floating_point():
                given = f"a {value.dtype} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise TypeError(f"{self._name}: {name} is {given}, expected a floating-point torch.Tensor")
            if value.ndim < len(axes):
                raise ValueError(f"{self._name}: {name} has shape {tuple(value.shape)}, expected [..., {', '.join(axes)}]")

    @property
    def _name(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        shapes = ", ".join(f"{f.name}={list(getattr(self, f.name).shape)}" for f in fields(self))
        return f"{self._name}({shapes})"

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The potential's tensors by name, in the order in which the operations take them."""
        return {name: getattr(self, name) for name in EDGE_KINDS[self.kind].parameters}

    @property
    def batch_shape(self) -> torch.Size:
        """The common shape of the parameters' batch axes."""
        axes = EDGE_KINDS[self.kind].parameters
        return torch.broadcast_shapes(*(p.shape[: p.ndim - len(axes[name])] for name, p in self.parameters.items()))

    def flat_parameters(self, batch: torch.Size) -> list[Tensor]:
        """Each parameter contiguous, with one batch axis: 1 where all items of `batch` share it, their number otherwise."""
        flat = []
        for name, axes in EDGE_KINDS[self.kind].parameters.items():
            value = getattr(self, name)
            own, event = value.shape[: value.ndim - len(axes)], value.shape[value.ndim - len(axes) :]
            shared = own.numel() == 1
            value = value.reshape(1, *event) if shared else value.expand(*batch, *event).reshape(batch.numel(), *event)
            flat.append(value.contiguous())
        return flat

    def check(self, graph: Graph, num_labels: int, device: torch.device) -> None:
        """Raise a ValueError unless the parameters fit the graph, the labels and the device."""
        sizes = {"edges": graph.num_edges, "nodes": graph.num_nodes, "labels": num_labels}
        for name, axes in EDGE_KINDS[self.kind].parameters.items():
            value = getattr(self, name)
            wanted = tuple(sizes[axis] for axis in axes)
            if tuple(value.shape[value.ndim - len(axes) :]) != wanted:
                described = ", ".join(f"{sizes[axis]} {axis}" for axis in axes)
                raise ValueError(
                    f"{self._name}: {name} has shape {tuple(value.shape)}, expected [..., {described}] for {graph}"
                )
            if value.device != device:
                raise ValueError(f"{self._name}: {name} is on {value.device}, the scores are on {device}; move one of them")


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Pairwise):
    """A table of its own for every edge.

    Args:
        table: [..., E, L, L], score of (label at `edges[e, 0]`, label at `edges[e, 1]`).

    Example:
        >>> Dense(torch.randn(graph.num_edges, 21, 21))
        Dense(table=[4158, 21, 21])
    """

    kind: ClassVar[str] = "dense"
    table: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Additive(Pairwise):
    """An edge's table is the sum of one that its first node brings and one that its second node brings.

    The paper's pairwise head, a linear layer on the two nodes' features; the sums are never stored.

    Args:
        source: [..., N, L, L], brought by `edges[e, 0]`.
        target: [..., N, L, L], brought by `edges[e, 1]`.

    Example:
        >>> Additive(source=torch.randn(1089, 21, 21), target=torch.randn(1089, 21, 21))
        Additive(source=[1089, 21, 21], target=[1089, 21, 21])
    """

    kind: ClassVar[str] = "additive"
    source: Tensor
    target: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Weighted(Pairwise):
    """One table for all edges, times a weight for each: contrast-dependent, truncated linear, or learned.

    Args:
        weight: [..., E].
        compat: [L, L]; -inf forbids a pair on every edge, whatever its weight.

    Example:
        >>> distance = (torch.arange(16)[:, None] - torch.arange(16)).abs()
        >>> Weighted(torch.full((graph.num_edges,), 20.0), -distance.clamp(max=2).float())
        Weighted(weight=[4158], compat=[16, 16])
    """

    kind: ClassVar[str] = "weighted"
    weight: Tensor
    compat: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compat.ndim != 2:
            raise ValueError(
                f"Weighted: compat has shape {tuple(self.compat.shape)}, expected [labels, labels] without a batch"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Potts(Pairwise):
    """A weight that an edge adds where its two labels agree; messages cost O(L).

    Args:
        weight: [..., E].

    Example:
        >>> Potts(torch.ones(graph.num_edges))
        Potts(weight=[4158])
    """

    kind: ClassVar[str] = "potts"
    weight: Tensor
