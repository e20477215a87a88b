"""One row of an edge's table (the scores at one end, given the label at the other) or one entry, in plain torch."""

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


def _dense_entry(parameters, edge, first, second, a, b):
    table = parameters[0]
    return table[_items(table), edge, a, b].double()


def _additive_entry(parameters, edge, first, second, a, b):
    source, target = parameters
    return source[_items(source), first, a, b].double() + target[_items(target), second, a, b].double()


def _weighted_entry(parameters, edge, first, second, a, b):
    weight, compat = parameters
    return weigh(weight[:, edge].double(), compat[0, a, b].double())


def _potts_entry(parameters, edge, first, second, a, b):
    return torch.where(a == b, parameters[0][:, edge].double(), 0)


# By kind: (parameters [B or 1, ...], edge [n], first [n], second [n], a [B, n], b [B, n]) -> [B, n] float64: the scores of
# label `a` at the edge's first node and `b` at its second one.
EDGE_ENTRIES: dict[str, Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "dense": _dense_entry,
    "additive": _additive_entry,
    "weighted": _weighted_entry,
    "potts": _potts_entry,
}
