"""Products of label tiles and vectors, sums or maxima, 16 labels at a time.

A tile is `labels` rows of `labels` numbers without a gap, read `lanes` at a time: the lanes behind a row's end are the next
row's, and what comes of them is ignored or neutralised by the caller. So a tile has `LANES` spare elements behind it.

Loops down the rows are written in LLVM's vectors: in Numba's own the result goes to memory and back for every row, behind a
check that the arrays do not overlap, and takes five times as long.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dualcrf.kernels.numba.vector import LANES, NO_NAN, jit, jit_sum, larger, number, smaller

_I32 = ir.IntType(32)


class _Rows:
    """The code of a loop over the blocks of 16 labels and, within each, over the rows of a tile."""

    def __init__(self, context: Any, builder: Any, arrays: Sequence[tuple[Any, Any]], labels: Any, lanes: Any) -> None:
        self.builder, self.labels, self.lanes = builder, labels, lanes
        self.data = [context.make_array(kind)(context, builder, value).data for kind, value in arrays]
        self.number = context.get_value_type(arrays[0][0].dtype)
        self.vector = ir.VectorType(self.number, LANES)
        self._align = context.get_abi_sizeof(self.number)

    def constant(self, value: float) -> Any:
        return ir.Constant(self.vector, [ir.Constant(self.number, value)] * LANES)

    def variable(self) -> Any:
        return cgutils.alloca_once(self.builder, self.vector)

    def _at(self, array: int, index: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(self.data[array], [index]), self.vector.as_pointer())

    def load(self, array: int, index: Any) -> Any:
        loaded = self.builder.load(self._at(array, index))
        loaded.align = self._align
        return loaded

    def store(self, value: Any, array: int, index: Any) -> None:
        self.builder.store(value, self._at(array, index)).align = self._align

    def spread(self, array: int, index: Any) -> Any:
        return self.spread_number(self.builder.load(self.builder.gep(self.data[array], [index])))

    def spread_number(self, value: Any) -> Any:
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))

    def blocks(self) -> Any:
        kind = self.labels.type
        zero, width = ir.Constant(kind, 0), ir.Constant(kind, LANES)
        return cgutils.for_range_slice(self.builder, zero, self.lanes, width, kind)

    def rows(self) -> Any:
        return cgutils.for_range(self.builder, self.labels)

    def place(self, row: Any, block: Any) -> Any:
        return self.builder.add(self.builder.mul(row, self.labels), block)


def _row_loop(arrays: int, body: Callable[[_Rows], None]) -> Any:
    """An intrinsic of so many arrays, then `labels` and `lanes`."""

    @intrinsic
    def loop(context, args):
        def generate(context, builder, signature, packed):
            kinds = signature.args[0]
            values = [builder.extract_value(packed[0], k) for k in range(len(kinds))]
            body(_Rows(context, builder, list(zip(kinds, values, strict=True))[:arrays], *values[arrays:]))
            return context.get_dummy_value()

        return types.void(args), generate

    return loop


def _sum(code: _Rows) -> None:
    builder, result = code.builder, code.variable()
    with code.blocks() as (block, _):
        builder.store(code.constant(0.0), result)
        with code.rows() as row:
            product = builder.fmul(code.spread(1, row.index), code.load(0, code.place(row.index, block)), flags=["contract"])
            builder.store(builder.fadd(builder.load(result), product, flags=["contract"]), result)
        code.store(builder.load(result), 2, block)


def _best(code: _Rows) -> None:
    builder, best, origin = code.builder, code.variable(), code.variable()
    with code.blocks() as (block, _):
        builder.store(code.constant(float("-inf")), best)
        builder.store(code.constant(0.0), origin)
        with code.rows() as row:
            score = builder.fadd(code.spread(1, row.index), code.load(0, code.place(row.index, block)))
            better = builder.fcmp_ordered(">", score, builder.load(best), flags=NO_NAN)
            here = code.spread_number(builder.sitofp(row.index, code.number))
            builder.store(builder.select(better, score, builder.load(best), flags=NO_NAN), best)
            builder.store(builder.select(better, here, builder.load(origin)), origin)
        code.store(builder.load(best), 2, block)
        code.store(builder.load(origin), 3, block)


def _outer(code: _Rows) -> None:
    builder = code.builder
    with code.rows() as row, code.blocks() as (block, _):
        place = code.place(row.index, block)
        first = builder.fmul(code.spread(1, row.index), code.load(2, block))
        second = builder.fmul(code.spread(3, row.index), code.load(4, block), flags=["contract"])
        factor = builder.fadd(first, second, flags=["contract"])
        code.store(builder.fmul(code.load(0, place), factor), 5, place)


_sum_rows, _best_rows, _outer_rows = _row_loop(3, _sum), _row_loop(4, _best), _row_loop(6, _outer)


@jit
def sum_rows(tile, weights, out, labels, lanes):
    """out[l] = Σ_j weights[j] · tile[j, l]."""
    _sum_rows((tile, weights, out, labels, lanes))


@jit
def best_rows(tile, scores, best, origin, labels, lanes):
    """best[l] = max_j scores[j] + tile[j, l], and the first such j as a float."""
    _best_rows((tile, scores, best, origin, labels, lanes))


@jit
def outer_rows(tile, down, across, back, up, out, labels, lanes):
    """out[j, l] = tile[j, l] · (down[j] · across[l] + back[j] · up[l])."""
    _outer_rows((tile, down, across, back, up, out, labels, lanes))


@jit_sum
def sum_columns(tile, weights, out, labels, lanes):
    """out[j] = Σ_l tile[j, l] · weights[l]; weights are 0 in the lanes behind the labels."""
    for j in range(labels):
        row = j * labels
        result = number(0, weights[0])
        for k in range(lanes):
            result += tile[row + k] * weights[k]
        out[j] = result


@jit
def max_columns(tile, scores, out, labels, lanes):
    """out[j] = max_l tile[j, l] + scores[l]; scores are -inf in the lanes behind the labels."""
    for j in range(labels):
        row = j * labels
        best = tile[row] + scores[0]
        for k in range(lanes):
            best = larger(best, tile[row + k] + scores[k])
        out[j] = best


@jit
def best_columns(tile, scores, best, origin, labels, lanes):
    """best[j] = max_l tile[j, l] + scores[l], and the first such l as a float."""
    max_columns(tile, scores, best, labels, lanes)
    for j in range(labels):
        row, peak = j * labels, best[j]
        first = number(labels - 1, peak)
        for k in range(labels):
            first = smaller(first, number(k, peak) if tile[row + k] + scores[k] == peak else first)
        origin[j] = first
