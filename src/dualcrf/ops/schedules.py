"""The schedules' sweeps on flat tensors: where an implementation is chosen and the kernels plug in.

State tensors are updated in place; every function returns the dual after each of its iterations, [B, iterations]
float64. A label is forbidden where its unary score is -inf. The callers see to it that every other label is possible on
each of its chains; a message of -inf is therefore one into a forbidden label and is stored as 0, so that no difference
becomes NaN.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.kernels.order import SweepOrder
from dualcrf.ops import schedules_reference


def wavefront_sweeps(
    unary: Tensor,
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    order: SweepOrder,
    kind: str,
    gamma: Tensor | None,
    forward: Tensor,
    backward: Tensor,
    sweeps: int,
    reverse: bool,
    impl: str,
) -> Tensor:
    """Sweeps over the levels, there and back in turn: each node's exact (smoothed) block update, Lemma 1 at full step.

    With h = unary + Σ (forward + backward) over a node's n places, a forward sweep sends h/n - backward over every
    outgoing edge, a backward sweep h/n - forward over every incoming one. A message may be shifted by a constant over
    its labels; messages are normalised to a maximum of 0 over the allowed labels, and the dual after a sweep is the sum
    of the normalisers of this sweep's messages and of the (smoothed) maxima of h/n at the chains' last places (forward
    sweep) or first ones (backward sweep), in float64.

    Args:
        unary: [B, N, L].
        parameters: the potential's own, each [B or 1, ...].
        layout: chains that all run towards higher levels of `order`.
        gamma: [B], positive, a smoothing for every item; or None for the hard max.
        forward: [B, S, L] messages into every place from the one before, 0 where a chain begins; overwritten.
        backward: [B, S, L] the same from the place after. Those against the direction of the first sweep must be exact
            for some feasible multipliers, the others are not read.
        reverse: whether the first sweep runs from the last level to the first.
    """
    return _implementation(impl).wavefront_sweeps(
        unary, parameters, layout, order, kind, gamma, forward, backward, sweeps, reverse
    )


def handover_sweeps(
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    kind: str,
    scores: Tensor,
    handed: Tensor,
    sweeps: int,
    reverse: bool,
    impl: str,
) -> Tensor:
    """Family after family, all chains of a family at once, each hands over what it has too much of.

    The multipliers are scores/n - handed. On one chain: its messages from one end; then from the other end back, with
    mu the max-marginals of what is left, m = (mu - max mu) / 2 is taken out (handed += m) and given to the node (scores
    += m) once the pass is through. A forbidden label hands over nothing. Every chain's energy is taken when its family
    is visited; later visits only lower it, so the dual at a sweep's end is at most the sum that is returned.

    Args:
        parameters: the potential's own, each [B or 1, ...].
        scores: [B, N, L] the unary scores and all that has been handed over; overwritten.
        handed: [B, S, L] what every place has handed over; overwritten.
        reverse: whether the first sweep takes out from the chains' first places on (its messages then come from the
            last ones); sweeps alternate.
    """
    return _implementation(impl).handover_sweeps(parameters, layout, kind, scores, handed, sweeps, reverse)


def decode_labels(
    scores: Tensor,
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    order: SweepOrder,
    kind: str,
    reverse: bool,
    impl: str,
) -> Tensor:
    """Sequential conditional decoding: every node in turn takes the best label given those before it, [B, N] int64.

    A node's value of a label is its score and those of the edges to the nodes already labelled; the first of equal ones
    wins.

    Args:
        scores: [B, N, L] unary scores plus the messages from the nodes not yet labelled.
        parameters: the potential's own, each [B or 1, ...].
        layout: chains that all run towards higher levels of `order`.
        reverse: whether the last level comes first.
    """
    return _implementation(impl).decode_labels(scores, parameters, layout, order, kind, reverse)


def improve_labels(
    labels: Tensor,
    unary: Tensor,
    parameters: Sequence[Tensor],
    layout: ChainLayout,
    order: SweepOrder,
    kind: str,
    parent: Tensor,
    reverse: bool,
    impl: str,
) -> None:
    """Give the nodes of a forest their best labels, all at once and exactly, given those of all other nodes; in place.

    One pass from the leaves to the roots sums up: a node's total is its unary score, the scores of its edges to nodes
    outside the forest given their labels, and its children's messages. One pass back takes the best label given the
    parent's.

    Args:
        labels: [B, N] int64.
        unary: [B, N, L].
        parameters: the potential's own, each [B or 1, ...].
        layout: chains that all run towards higher levels of `order`.
        parent: [N] int32, the place from which the edge between a node and its parent leads on; -1 at a root, -2
            outside the forest. All edges inside the forest are such edges.
        reverse: whether parents are on higher levels than their children, rather than lower.
    """
    _implementation(impl).improve_labels(labels, unary, parameters, layout, order, kind, parent, reverse)


def _implementation(impl: str) -> Any:
    if impl == "reference":
        return schedules_reference
    if impl == "cpu":
        from dualcrf.kernels.numba import schedules
    else:
        from dualcrf.kernels.triton import schedules
    return schedules
