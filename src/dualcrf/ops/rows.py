"""One row of an edge's table: the scores of the labels at one end, given the label at the other. In plain torch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dualcrf.ops.edges import weigh


def _items(parameter: Tensor) -> Tensor:
    """The batch index of a parameter, to stand beside [B, n] indices."""
    return torch.arange(parameter.shape[0], device=parameter.device).unsqueeze(1)


def _row(tables: Tensor, at: Tensor, label: Tensor, given_first: Tensor) -> Tensor:
    """Rows of tables [B or 1, n', L, L] where the first label is given, columns elsewhere."""
    given_first = given_first[:, None]
    return torch.where(given_first, tables[_items(tables), at, label], tables.mT[_items(tables), at, label])


def _dense(parameters, edge, first, second, label, given_first, labels):
    return _row(parameters[0], edge, label, given_first)


def _additive(parameters, edge, first, second, label, given_first, labels):
    source, target = parameters
    return _row(source, first, label, given_first) + _row(target, second, label, given_first)


def _weighted(parameters, edge, first, second, label, given_first, labels):
    weight, compat = parameters
    given_first = given_first[:, None]
    return weigh(weight[:, edge].unsqueeze(-1), torch.where(given_first, compat[0, label], compat[0].mT[label]))


def _potts(parameters, edge, first, second, label, given_first, labels):
    agree = label.unsqueeze(-1) == torch.arange(labels, device=label.device)
    return torch.where(agree, parameters[0][:, edge].unsqueeze(-1), 0)


# By kind: (parameters [B or 1, ...], edge [n], first [n], second [n], label [B or 1, n], given_first [n] bool, L) ->
# [B or 1, n, L]: the scores of the labels at the edge's second node given `label` at its first one, where
# `given_first`; those of the labels at its first node given `label` at its second one elsewhere.
EDGE_ROWS: dict[str, Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]] = {
    "dense": _dense,
    "additive": _additive,
    "weighted": _weighted,
    "potts": _potts,
}
