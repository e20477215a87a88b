"""How a message crosses an edge, on the GPU: each kind's scores, and what of an edge's gradient each parameter gets.

This is the only Triton file that names the kinds with an [L, L] tile; Potts, which has none, is in `potts.py`. A kind's
parameters arrive as `one` and `two` (the same tensor where there is a single one), and `one_batch`, `two_batch` are the
elements from one batch item to the next, 0 where all items share the parameter.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout


@triton.jit
def in_table(rows, cols, L: tl.constexpr):
    """Where label pairs stand in an [L, L] table."""
    # Triton lays out loads and stores by the axes' contiguity: after a piece of a row are to come the rows.
    ROWS: tl.constexpr = 4 if rows.shape[0] >= 4 else rows.shape[0]
    return tl.max_contiguous(rows * L + cols, [ROWS, 1, cols.shape[2]])


@triton.jit
def scores(
    one, two, one_batch, two_batch, edge, node, flip, b, s, exists, rows, cols,
    L: tl.constexpr, KIND: tl.constexpr, HAS_FLIPS: tl.constexpr, ALONG: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Scores of label pairs on the edge from place s to place s + 1, if it exists; -inf outside the table.

    With ALONG rows are labels at place s and columns labels at place s + 1; without, rows are labels at the edge's
    first node and columns labels at its second.
    """
    inside = (rows < L) & (cols < L) & exists
    e = tl.load(edge + s, mask=exists, other=0).to(tl.int64)
    at = in_table(rows, cols, L)
    if HAS_FLIPS:
        against = tl.load(flip + s, mask=exists, other=0)
        if ALONG:
            at = tl.where(against, rows + cols * L, at)
    if KIND == "dense":
        x = tl.load(one + b * one_batch + e * (L * L) + at, mask=inside, other=-float("inf")).to(DTYPE)
    elif KIND == "additive":
        first = tl.load(node + s, mask=exists, other=0).to(tl.int64)
        second = tl.load(node + s + 1, mask=exists, other=0).to(tl.int64)
        if HAS_FLIPS:
            first, second = tl.where(against, second, first), tl.where(against, first, second)
        x = tl.load(one + b * one_batch + first * (L * L) + at, mask=inside, other=-float("inf")).to(DTYPE)
        x += tl.load(two + b * two_batch + second * (L * L) + at, mask=inside, other=0).to(DTYPE)
    else:
        tl.static_assert(KIND == "weighted")
        weight = tl.load(one + b * one_batch + e, mask=exists, other=0).to(DTYPE)
        compat = tl.load(two + at, mask=inside, other=0).to(DTYPE)
        x = tl.where(inside & (compat != -float("inf")), weight * compat, -float("inf"))
    return x


@triton.jit
def crossed(
    one, two, one_batch, two_batch, edge, node, flip, b, s, source, target,
    L: tl.constexpr, KIND: tl.constexpr, HAS_FLIPS: tl.constexpr, FORWARD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The scores that a message from place s crosses, forward or backward along its chain."""
    rows, cols = source, target
    if not FORWARD:
        s -= 1
        rows, cols = target, source
    return scores(one, two, one_batch, two_batch, edge, node, flip, b, s, True, rows, cols, L, KIND, HAS_FLIPS, True, DTYPE)


def batch_strides(parameters: Sequence[Tensor]) -> list[int]:
    """Elements from one batch item to the next, 0 where all items share the parameter."""
    return [p.stride(0) if p.shape[0] > 1 else 0 for p in parameters]


class Share(NamedTuple):
    """How one parameter's gradient is gathered: program `unit` sums the tiles of its own edges and gives back the sum.

    The edges of a unit are `edges[start[unit] : start[unit + 1]]`, or without such lists unit, unit + units, …
    (`edge_range`).
    """

    name: str
    units: int
    start: Tensor | None = None
    edges: Tensor | None = None


# Programs that share out the edges of the one table that all edges have in common.
COMPAT_UNITS = 2048


def shares(kind: str, layout: ChainLayout) -> list[Share]:
    """One `Share` for each of the kind's parameters, in their order."""
    num_edges, num_nodes = layout.place.shape[0], layout.count.shape[0]
    if kind == "dense":
        return [Share("table", num_edges)]
    if kind == "additive":
        return [
            Share("source", num_nodes, layout.out_start, layout.out_edge),
            Share("target", num_nodes, layout.in_start, layout.in_edge),
        ]
    return [Share("weight", num_edges), Share("compat", min(num_edges, COMPAT_UNITS))]


def new_gradient(share: Share, parameter: Tensor, chunks: int, accumulator: Tensor) -> Tensor:
    """What the programs of a share write: the gradient itself, or parts that `collect` sums."""
    if share.name == "weight":
        return accumulator.new_empty(parameter.shape[0], share.units, chunks)
    if share.name == "compat":
        return accumulator.new_empty(share.units, *parameter.shape[1:])
    return parameter.new_empty(parameter.shape)


def collect(share: Share, written: Tensor, parameter: Tensor) -> Tensor:
    """The parameter's gradient from what the programs wrote."""
    if share.name == "weight":
        return written.sum(-1).to(parameter.dtype)
    if share.name == "compat":
        return written.sum(0, keepdim=True).to(parameter.dtype)
    return written


@triton.jit
def edge_range(start, E, unit, units, NAME: tl.constexpr):
    """First, last + 1 and step of a unit's positions in `edges`, or of its edges themselves."""
    first, last, step = unit, unit + 1, 1
    if NAME == "compat":
        last, step = E, units
    elif start is not None:
        first, last = tl.load(start + unit), tl.load(start + unit + 1)
    return first, last, step


@triton.jit
def contribution(tile, one, one_batch, b, e, NAME: tl.constexpr):
    """What the gradient of one edge's scores adds to a unit's sum."""
    if NAME == "compat":
        tile *= tl.load(one + b * one_batch + e).to(tile.dtype)
    return tile


@triton.jit
def give_back(out, two, total, item, unit, units, chunk, chunks, rows, cols, L: tl.constexpr, NAME: tl.constexpr):
    """Write a unit's sum to the parameter's gradient, for one batch item of the parameter."""
    inside = (rows < L) & (cols < L)
    at = in_table(rows, cols, L)
    unit += item * units
    if NAME == "weight":
        compat = tl.load(two + at, mask=inside, other=0).to(total.dtype)
        allowed = compat > -float("inf")  # a forbidden pair has gradient 0, and 0 · inf would be NaN
        tl.store(out + unit * chunks + chunk, tl.sum(tl.where(allowed, total * compat, 0)))
    else:
        tl.store(out + unit * (L * L) + at, total.to(out.dtype.element_ty), mask=inside)
