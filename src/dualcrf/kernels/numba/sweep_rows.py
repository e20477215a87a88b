"""What a sweep does with the messages at a node's places, 16 labels at a time.

A vector has `lanes` elements and holds -inf behind the labels; a row lies in memory and ends with its labels.
"""

from dualcrf.kernels.numba.rows import _row_loop, _Rows
from dualcrf.kernels.numba.vector import NO_NAN, jit


def _add_both(code: _Rows) -> None:
    with code.blocks() as (block, _):
        both = code.builder.fadd(code.load_labels(1, block), code.load_labels(2, block))
        code.store(code.builder.fadd(code.load(0, block), both), 0, block)


def _without(code: _Rows) -> None:
    with code.blocks() as (block, _):
        code.store(code.builder.fsub(code.load(0, block), code.load_labels(1, block)), 2, block)


def _normalise(code: _Rows) -> None:
    builder, best = code.builder, code.variable()
    lowest = code.constant(float("-inf"))

    def allowed(block):
        return builder.and_(code.within(block), builder.fcmp_ordered(">", code.load_labels(1, block), lowest))

    builder.store(lowest, best)
    with code.blocks() as (block, _):
        value = builder.select(allowed(block), code.load(0, block), lowest)
        better = builder.fcmp_ordered(">", value, builder.load(best), flags=NO_NAN)
        builder.store(builder.select(better, value, builder.load(best), flags=NO_NAN), best)
    peak = code.reduced("fmax", builder.load(best), NO_NAN)
    code.store_number(peak, 3, code.labels.type(0))
    with code.blocks() as (block, _):
        value = builder.fsub(code.load(0, block), code.spread_number(peak))
        code.store_labels(builder.select(allowed(block), value, code.constant(0.0)), 2, block)


_add_both_rows, _without_row, _normalise_row = _row_loop(3, _add_both), _row_loop(3, _without), _row_loop(4, _normalise)


@jit
def add_both(total, ahead, back, labels, lanes):
    """Add two rows to a vector."""
    _add_both_rows((total, ahead, back, labels, lanes))


@jit
def without(share, row, out, labels, lanes):
    """out = share - row, vectors but for the row."""
    _without_row((share, row, out, labels, lanes))


@jit
def keep_normalised(message, target, row, peak, labels, lanes):
    """Write a message to a row, normalised over the labels that `target` allows, 0 at the others; peak[0] is taken off."""
    _normalise_row((message, target, row, peak, labels, lanes))
