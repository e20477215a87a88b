"""The operation in plain torch: any device, any float, differentiable as often as one likes. The kernels are held to it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.ops.edges import EDGE_KINDS


def smooth_max(values: Tensor, gamma: Tensor | None, dim: int) -> Tensor:
    """gamma · log Σ exp(values / gamma) along `dim`, the maximum for gamma None; -inf where all values are.

    The maximum has its sub-gradient at the first of equal values. Where all values are -inf the gradient is 0, not NaN.
    """
    peak, _ = values.max(dim)
    none = peak == -torch.inf
    if gamma is None:
        return peak.masked_fill(none, -torch.inf)
    shifted = values - peak.detach().masked_fill(none, 0).unsqueeze(dim)
    forbidden = shifted == -torch.inf
    weights = (shifted.masked_fill(forbidden, 0) / gamma).exp().masked_fill(forbidden, 0)
    total = weights.sum(dim).masked_fill(none, 1)
    return (peak.detach().masked_fill(none, 0) + gamma * total.log()).masked_fill(none, -torch.inf)


def chain_messages(
    psi: Tensor, parameters: Sequence[Tensor], layout: ChainLayout, kind: str, gamma: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Messages into every place from the place before and the place after it, and every chain's (smoothed) max-energy.

    Args:
        psi: [B, S, L] scores of the places.
        parameters: the potential's own, each [B or 1, ...].
        gamma: 0-dim, or None for the hard max.

    Returns:
        forward [B, S, L], backward [B, S, L] (0 where a chain begins, where it ends) and energy [B, C].
    """
    length = layout.start.diff()
    order = length.argsort(descending=True, stable=True)
    begin, end = layout.start[:-1][order], layout.start[1:][order] - 1
    running = [int(n) for n in (length.unsqueeze(1) > torch.arange(int(length.max()), device=psi.device)).sum(0)]

    def scan(first: Tensor, step: int) -> Tensor:
        messages, places = [torch.zeros_like(psi[:, : len(first)])], [first]
        score = psi.index_select(1, first)
        for t, n in enumerate(running[1:], start=1):
            place = first[:n] + step * t
            table = oriented_scores(psi.shape[-1], parameters, layout, kind, place - max(step, 0))
            into = smooth_max(score[:, :n].unsqueeze(-1) + (table if step > 0 else table.mT), gamma, dim=2)
            messages.append(into)
            places.append(place)
            score = psi.index_select(1, place) + into
        return torch.cat(messages, 1).index_select(1, torch.cat(places).argsort())

    forward, backward = scan(begin, 1), scan(end, -1)
    last = layout.start[1:] - 1
    energy = smooth_max(psi.index_select(1, last) + forward.index_select(1, last), gamma, dim=2)
    return forward, backward, energy


def oriented_scores(labels: int, parameters: Sequence[Tensor], layout: ChainLayout, kind: str, place: Tensor) -> Tensor:
    """[B or 1, n, L, L] scores of (label at each place, label at the next place on its chain)."""
    flip = layout.flip[place]
    here, there = layout.node[place], layout.node[place + 1]
    first, second = torch.where(flip, there, here), torch.where(flip, here, there)
    scores = EDGE_KINDS[kind].scores(parameters, layout.edge[place], first, second, labels)
    return torch.where(flip[:, None, None], scores.mT, scores) if layout.has_flips else scores
