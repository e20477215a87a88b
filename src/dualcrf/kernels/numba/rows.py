"""Products of label tiles and vectors, sums or maxima, 16 labels at a time.

A tile is `labels` rows of `labels` numbers without a gap, read `lanes` at a time: the lanes behind a row's end are the next
row's, and what comes of them is ignored or neutralised by the caller. So a tile has `LANES` spare elements behind it.

Loops down the rows are written in LLVM's vectors: in Numba's own the result goes to memory and back for every row, behind a
check that the arrays do not overlap, and takes five times as long.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dualcrf.kernels.numba.vector import LANES, NO_NAN, jit, number, smaller

_I32 = ir.IntType(32)


class _Rows:
    """The code of a loop over the blocks of 16 labels and, within each, over the rows of a tile."""

    def __init__(self, context: Any, builder: Any, arrays: Sequence[tuple[Any, Any]], labels: Any, lanes: Any) -> None:
        self.builder, self.labels, self.lanes = builder, labels, lanes
        self.data = [context.make_array(kind)(context, builder, value).data for kind, value in arrays]
        self.number = context.get_value_type(arrays[0][0].dtype)
        self.vector = ir.VectorType(self.number, LANES)
        self._align = context.get_abi_sizeof(self.number)
        self._suffix = f"f{8 * self._align}"

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

    def within(self, block: Any) -> Any:
        """Which lanes of a block are labels."""
        index = [ir.Constant(self.labels.type, k) for k in range(LANES)]
        lanes = ir.VectorType(self.labels.type, LANES)
        room = self.builder.sub(self.labels, block)
        undefined = ir.Constant(lanes, ir.Undefined)
        first = self.builder.insert_element(undefined, room, ir.Constant(_I32, 0))
        spread = self.builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))
        return self.builder.icmp_signed("<", ir.Constant(lanes, index), spread)

    def load_labels(self, array: int, block: Any) -> Any:
        """A block of a row in memory that ends with its labels; 0 behind them."""
        pointer = self._at(array, block)
        mask = ir.VectorType(ir.IntType(1), LANES)
        kind = ir.FunctionType(self.vector, [pointer.type, _I32, mask, self.vector])
        name = f"llvm.masked.load.v{LANES}{self._suffix}.p0"
        load = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(load, [pointer, ir.Constant(_I32, self._align), self.within(block), self.constant(0.0)])

    def store_labels(self, value: Any, array: int, block: Any) -> None:
        """Store a block to a row in memory that ends with its labels."""
        pointer = self._at(array, block)
        mask = ir.VectorType(ir.IntType(1), LANES)
        kind = ir.FunctionType(ir.VoidType(), [self.vector, pointer.type, _I32, mask])
        name = f"llvm.masked.store.v{LANES}{self._suffix}.p0"
        store = cgutils.get_or_insert_function(self.builder.module, kind, name)
        self.builder.call(store, [value, pointer, ir.Constant(_I32, self._align), self.within(block)])

    def store_number(self, value: Any, array: int, index: Any) -> None:
        self.builder.store(value, self.builder.gep(self.data[array], [index]))

    def reduced(self, reduction: str, value: Any, flags: Sequence[str]) -> Any:
        """A vector's lanes added up (fadd) or their largest (fmax)."""
        start = [ir.Constant(self.number, -0.0)] if reduction == "fadd" else []
        kind = ir.FunctionType(self.number, [*(s.type for s in start), self.vector])
        name = f"llvm.vector.reduce.{reduction}.v{LANES}{self._suffix}"
        reduce = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(reduce, [*start, value], fastmath=flags)

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


def _max(code: _Rows) -> None:
    builder, best = code.builder, code.variable()
    with code.blocks() as (block, _):
        builder.store(code.constant(float("-inf")), best)
        with code.rows() as row:
            cell, score = code.load(0, code.place(row.index, block)), code.spread(1, row.index)
            builder.store(_larger_sum(builder, builder.load(best), cell, score), best)
        code.store(builder.load(best), 2, block)


def _outer(code: _Rows) -> None:
    builder = code.builder
    with code.rows() as row, code.blocks() as (block, _):
        place = code.place(row.index, block)
        first = builder.fmul(code.spread(1, row.index), code.load(2, block))
        second = builder.fmul(code.spread(3, row.index), code.load(4, block), flags=["contract"])
        factor = builder.fadd(first, second, flags=["contract"])
        code.store(builder.fmul(code.load(0, place), factor), 5, place)


def _columns(start: float, combine: Callable[[Any, Any, Any, Any], Any], reduction: str, flags: Sequence[str]) -> Any:
    def reduce(code: _Rows) -> None:
        builder, result = code.builder, code.variable()
        with code.rows() as row:
            builder.store(code.constant(start), result)
            with code.blocks() as (block, _):
                cell, weight = code.load(0, code.place(row.index, block)), code.load(1, block)
                builder.store(combine(builder, builder.load(result), cell, weight), result)
            code.store_number(code.reduced(reduction, builder.load(result), flags), 2, row.index)

    return reduce


def _add_product(builder: Any, result: Any, cell: Any, weight: Any) -> Any:
    return builder.fadd(result, builder.fmul(cell, weight, flags=["contract"]), flags=["contract"])


def _larger_sum(builder: Any, result: Any, cell: Any, score: Any) -> Any:
    candidate = builder.fadd(cell, score)
    better = builder.fcmp_ordered(">", candidate, result, flags=NO_NAN)
    return builder.select(better, candidate, result, flags=NO_NAN)


def _add(rows: int, fill: float) -> Callable[[_Rows], None]:
    """Add `rows` rows and one vector, or only the rows; the result is a vector."""

    def add(code: _Rows) -> None:
        with code.blocks() as (block, _):
            parts = [code.load_labels(k, block) for k in range(rows)]
            parts += [code.load(rows, block)] if rows == 1 else []
            values = functools.reduce(code.builder.fadd, parts)
            code.store(code.builder.select(code.within(block), values, code.constant(fill)), 2, block)

    return add


def _keep(code: _Rows) -> None:
    with code.blocks() as (block, _):
        code.store_labels(code.load(0, block), 1, block)


def _keep_total(code: _Rows) -> None:
    with code.blocks() as (block, _):
        code.store_labels(code.builder.fadd(code.load(0, block), code.load(1, block)), 2, block)


_sum_columns = _row_loop(3, _columns(0.0, _add_product, "fadd", ["reassoc"]))
_max_columns = _row_loop(3, _columns(float("-inf"), _larger_sum, "fmax", NO_NAN))
_add_source, _add_gradient = _row_loop(3, _add(1, float("-inf"))), _row_loop(3, _add(1, 0.0))
_add_rows, _keep_labels = _row_loop(3, _add(2, float("-inf"))), _row_loop(2, _keep)
_keep_total_labels = _row_loop(3, _keep_total)
_sum_rows, _max_rows, _best_rows = _row_loop(3, _sum), _row_loop(3, _max), _row_loop(4, _best)
_outer_rows = _row_loop(6, _outer)


@jit
def add_source(row, values, out, labels, lanes):
    """out = row + values, -inf behind the labels; `row` lies in memory without lanes to spare.

    Vectors are written and read 16 at a time throughout: what is written in smaller pieces cannot be read on before it has
    reached the cache.
    """
    _add_source((row, values, out, labels, lanes))


@jit
def add_gradient(row, values, out, labels, lanes):
    """out = row + values, 0 behind the labels."""
    _add_gradient((row, values, out, labels, lanes))


@jit
def add_rows(first, second, out, labels, lanes):
    """out = first + second, two rows in memory; -inf behind the labels."""
    _add_rows((first, second, out, labels, lanes))


@jit
def keep_total(first, second, row, labels, lanes):
    """Write the labels' values of first + second to a row in memory."""
    _keep_total_labels((first, second, row, labels, lanes))


@jit
def keep(values, row, labels, lanes):
    """Write the labels' values to a row in memory."""
    _keep_labels((values, row, labels, lanes))


@jit
def sum_rows(tile, weights, out, labels, lanes):
    """out[l] = Σ_j weights[j] · tile[j, l]."""
    _sum_rows((tile, weights, out, labels, lanes))


@jit
def max_rows(tile, scores, out, labels, lanes):
    """out[l] = max_j scores[j] + tile[j, l]."""
    _max_rows((tile, scores, out, labels, lanes))


@jit
def best_rows(tile, scores, best, origin, labels, lanes):
    """best[l] = max_j scores[j] + tile[j, l], and the first such j as a float."""
    _best_rows((tile, scores, best, origin, labels, lanes))


@jit
def outer_rows(tile, down, across, back, up, out, labels, lanes):
    """out[j, l] = tile[j, l] · (down[j] · across[l] + back[j] · up[l])."""
    _outer_rows((tile, down, across, back, up, out, labels, lanes))


@jit
def sum_columns(tile, weights, out, labels, lanes):
    """out[j] = Σ_l tile[j, l] · weights[l]; weights are 0 in the lanes behind the labels."""
    _sum_columns((tile, weights, out, labels, lanes))


@jit
def max_columns(tile, scores, out, labels, lanes):
    """out[j] = max_l tile[j, l] + scores[l]; scores are -inf in the lanes behind the labels."""
    _max_columns((tile, scores, out, labels, lanes))


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
