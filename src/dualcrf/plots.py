"""Figures; matplotlib is loaded when one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualcrf.solver.solution import Solution

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_convergence(solution: Solution, axes: Axes | None = None) -> Axes:
    """Draw the course of the bound and of the best labelling's score; one pair of lines for every item of a batch.

    Args:
        solution: of `dualcrf.solve(..., history=True)`.
        axes: where to draw; a new figure if None.

    Example:
        >>> solution = dualcrf.solve(unary, pairwise, graph, history=True)
        >>> dualcrf.plot_convergence(solution).figure.savefig("convergence.png")
    """
    if solution.history is None:
        raise ValueError("this solution has no history; ask for it by dualcrf.solve(..., history=True)")
    axes = axes or _new_axes()
    for name, values, style in (("dual", solution.history.dual, "-"), ("primal", solution.history.primal, "--")):
        for item, course in enumerate(values.flatten(0, -2).cpu() if values.ndim > 1 else [values.cpu()]):
            axes.plot(course.numpy(), style, color=f"C{item}", label=name if item == 0 else None)
    axes.set_xlabel("iterations")
    axes.set_ylabel("score")
    axes.legend()
    return axes


def _new_axes() -> Axes:
    import matplotlib.pyplot as plt

    return plt.figure(layout="constrained").add_subplot()
