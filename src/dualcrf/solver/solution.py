"""What `solve` returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, eq=False)
class History:
    """The course of a run, one column per iteration; an item that had stopped keeps its last values.

    Attributes:
        dual: [..., K] float64, the lowest hard-max bound so far.
        primal: [..., K] float64, the highest score of a labelling so far.
        objective: [..., K] float64, what the schedule lowers: the dual at its own gamma.
    """

    dual: Tensor
    primal: Tensor
    objective: Tensor


@dataclass(frozen=True, eq=False)
class Solution:
    """The best labelling found, and the proof of how far from optimal it can be.

    Attributes:
        labels: [..., N] int64.
        primal: [...] float64, the labelling's score.
        dual: [...] float64, the hard-max bound of `multipliers`: no labelling scores more.
        agreement: [..., N] bool, whether the node's label is a best one on every chain through it.
        iterations: [...] int64, updates or sweeps made.
        converged: [...] bool, whether the run ended by itself rather than by a budget.
        status: why it ended: "exact" (no cycles), "agreement" or "gap" (the gap is below `tol`; with or without all
            nodes in agreement), "progress" (the dual's progress is), "iterations", "time", "interrupted", or
            "infeasible". An array of these for a batch.
        multipliers: [..., S, L] float64 scores of the places of all chains; a node's sum to its unary scores (a label
            that the edges make impossible is -inf everywhere).
        history: the course of the run if it was asked for.
    """

    labels: Tensor
    primal: Tensor
    dual: Tensor
    agreement: Tensor
    iterations: Tensor
    converged: Tensor
    status: str | np.ndarray
    multipliers: Tensor
    history: History | None

    @property
    def gap(self) -> Tensor:
        """[...] float64, dual - primal: no labelling is better than `labels` by more than that."""
        return (self.dual - self.primal).nan_to_num(nan=0.0, posinf=float("inf"))

    def __repr__(self) -> str:
        shape = list(self.labels.shape)
        if self.primal.ndim:
            return f"Solution(labels={shape}, largest gap={float(self.gap.max()) if self.gap.numel() else 0.0:.6g})"
        return (
            f"Solution(labels={shape}, primal={float(self.primal):.10g}, dual={float(self.dual):.10g}, "
            f"gap={float(self.gap):.4g}, iterations={int(self.iterations)}, status={self.status!r})"
        )
