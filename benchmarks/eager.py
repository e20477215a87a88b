"""The rival: chain inference in eager PyTorch with autograd, given its tables in the layout it likes best.

Chains of equal length run as one batch, so a pass takes as few steps as the longest chains have nodes; a step's tables are
contiguous. `log_sum_exp` is the operation as the paper writes it; `matrix_products` is the fastest eager form we know, in the
exponential domain, which underflows where `dualcrf` does not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dualcrf import Graph


class Group(NamedTuple):
    """All chains of one length."""

    places: Tensor  # [C, n]
    edges: Tensor  # [C, n - 1]


def groups(graph: Graph) -> list[Group]:
    """The chains of a graph without flips, by length."""
    found = []
    for length in graph.chain_lengths.unique().tolist():
        first = graph.chain_start[:-1][graph.chain_lengths == length]
        places = first[:, None] + torch.arange(length)
        found.append(Group(places, graph.place_edge[places[:, :-1]]))
    return found


def step_tables(table: Tensor, group: Group) -> Tensor:
    """[n - 1, B · C, L, L] from [B, E, L, L]."""
    labels = table.shape[-1]
    return table[:, group.edges].movedim(2, 0).reshape(group.edges.shape[1], -1, labels, labels).contiguous()


def step_scores(psi: Tensor, group: Group) -> Tensor:
    """[n, B · C, L] from [B, S, L]."""
    return psi[:, group.places].movedim(2, 0).reshape(group.places.shape[1], -1, psi.shape[-1]).contiguous()


def log_sum_exp(psi: Tensor, table: Tensor, gamma: float) -> Tensor:
    """Max-marginals [n, M, L] of M chains; `gamma` 0 is the hard max."""
    scores, tables = psi.unbind(0), table.unbind(0)

    def soft(values: Tensor, dim: int) -> Tensor:
        return gamma * torch.logsumexp(values / gamma, dim) if gamma else values.max(dim).values

    ahead, back = [torch.zeros_like(scores[0])], [torch.zeros_like(scores[0])]
    for k, edge in enumerate(tables):
        ahead.append(soft((scores[k] + ahead[-1]).unsqueeze(2) + edge, 1))
    for k in range(len(tables) - 1, -1, -1):
        back.append(soft((scores[k + 1] + back[-1]).unsqueeze(1) + tables[k], 2))
    return psi + torch.stack(ahead) + torch.stack(back[::-1])


def matrix_products(psi: Tensor, table: Tensor, gamma: float) -> Tensor:
    """The same for gamma > 0, a batched matrix product a step."""
    scores, tables = psi.unbind(0), (table / gamma).exp().unbind(0)

    def through(score: Tensor, edge: Tensor) -> Tensor:
        peak = score.amax(1, keepdim=True).detach()
        return peak + gamma * torch.bmm(((score - peak) / gamma).exp().unsqueeze(1), edge).squeeze(1).log()

    ahead, back = [torch.zeros_like(scores[0])], [torch.zeros_like(scores[0])]
    for k, edge in enumerate(tables):
        ahead.append(through(scores[k] + ahead[-1], edge))
    for k in range(len(tables) - 1, -1, -1):
        back.append(through(scores[k + 1] + back[-1], tables[k].mT))
    return psi + torch.stack(ahead) + torch.stack(back[::-1])


def potts(psi: Tensor, weight: Tensor, gamma: float) -> Tensor:
    """Max-marginals through Potts edges [n - 1, M] in O(labels) a message, for weights >= 0 and gamma > 0."""
    scores, factors = psi.unbind(0), (weight / gamma).expm1().unsqueeze(-1).unbind(0)

    def through(score: Tensor, factor: Tensor) -> Tensor:
        peak = score.amax(1, keepdim=True).detach()
        shares = ((score - peak) / gamma).exp()
        return peak + gamma * (shares.sum(1, keepdim=True) + factor * shares).log()

    ahead, back = [torch.zeros_like(scores[0])], [torch.zeros_like(scores[0])]
    for k, factor in enumerate(factors):
        ahead.append(through(scores[k] + ahead[-1], factor))
    for k in range(len(factors) - 1, -1, -1):
        back.append(through(scores[k + 1] + back[-1], factors[k]))
    return psi + torch.stack(ahead) + torch.stack(back[::-1])
