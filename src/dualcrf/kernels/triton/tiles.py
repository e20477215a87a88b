"""Tiles of label pairs, and maxima, sums and exponentials over one of their two labels.

A tile has three axes, [rows, columns / PIECE, PIECE]: of a warp's lanes eight lie along a piece of the columns, which
they read at once, and four along the rows, so that sums over the rows (forward messages) and over the columns
(backward ones) both take few shuffles. A vector over the rows is in *row form* [n, 1, 1], one over the columns in
*column form* [1, n / PIECE, PIECE].
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (kernels are Triton's language, which only looks like Python)

import triton
import triton.language as tl
from triton import knobs

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NONE = tl.constexpr(2**31 - 1)
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


def tile_blocks(num_labels: int) -> dict[str, int]:
    """Sizes of a tile, LABELS source labels times CHUNK target labels, and the warps that hold it.

    Up to 64 labels go in one chunk with at most 64 elements a thread; more in several chunks with 32 a thread. On an
    H200 that was the fastest at 64 (against one to eight warps) and at 256 labels (against tiles of a quarter and of
    half the size).
    """
    size = max(8, 1 << (num_labels - 1).bit_length())
    chunk = size if size <= 64 else max(1, 8192 // size)
    warps = max(1, size * chunk // 2048) if size <= 64 else 8
    piece = 32 if num_labels % 32 == 0 else 8  # where rows are aligned a lane reads 16 bytes
    return {"LABELS": size, "CHUNK": chunk, "PIECE": piece, "num_warps": warps}


@triton.jit
def labels(SIZE: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """0 … SIZE - 1 in row form or in column form."""
    WIDTH: tl.constexpr = PIECE if PIECE < SIZE else SIZE
    if ROWS:
        label = tl.arange(0, SIZE)[:, None, None]
    else:
        label = tl.arange(0, SIZE // WIDTH)[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    return label


@triton.jit
def max_over(x, ROWS: tl.constexpr):
    """Maximum over the rows or over the columns; NaN is dropped."""
    return tl.max(x, 0, keep_dims=True) if ROWS else tl.max(tl.max(x, 1, keep_dims=True), 2, keep_dims=True)


@triton.jit
def sum_over(x, ROWS: tl.constexpr):
    """Sum over the rows or over the columns."""
    return tl.sum(x, 0, keep_dims=True) if ROWS else tl.sum(tl.sum(x, 1, keep_dims=True), 2, keep_dims=True)


@triton.jit
def first_over(chosen, label, ROWS: tl.constexpr):
    """The first label among the chosen ones, one past all labels where there is none."""
    return -max_over(-tl.where(chosen, label, NONE), ROWS)


@triton.jit
def nan_over(x, ROWS: tl.constexpr):
    """NaN where there is one, 0 elsewhere."""
    return sum_over(tl.where(x != x, x, 0), ROWS)


@triton.jit
def finite(peak):
    """The maximum to subtract before exponentiating: 0 where all is forbidden, so that -inf stays -inf."""
    return tl.where(peak == -float("inf"), 0, peak)


@triton.jit
def log2(x):
    """Base-2 logarithm of a sum of exponentials."""
    # The hardware's logarithm errs by 2^-22, which is rounding beside the maximum it is added to; the exact one takes
    # thirty instructions, a third of a forward step.
    if x.dtype == tl.float32 and not INTERPRETED:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def smooth_max(x, gamma, ROWS: tl.constexpr, HARD: tl.constexpr):
    """gamma · log Σ exp(x / gamma), or the maximum; -inf where all is forbidden, NaN and +inf where they come in."""
    if HARD:
        m = max_over(x, ROWS) + nan_over(x, ROWS)
    else:
        peak = finite(max_over(x, ROWS))
        total = sum_over(tl.exp2((x - peak) * (LOG2E / gamma)), ROWS)
        m = peak + gamma * LN2 * log2(total)
    return m


@triton.jit
def soft_weights(x, peak, gamma, ROWS: tl.constexpr, ENTROPY: tl.constexpr):
    """exp((x - peak) / gamma), their sum, and the entropy of the weights (0 unless asked for, or where all is
    forbidden)."""
    d = (x - peak) * (LOG2E / gamma)
    e = tl.exp2(d)
    total = sum_over(e, ROWS)
    entropy = tl.zeros_like(total)
    if ENTROPY:
        mean = sum_over(tl.where(e > 0, e * d, 0), ROWS)
        entropy = tl.where(total > 0, LN2 * (log2(total) - mean / total), 0)
    return e, total, entropy


@triton.jit
def energy_adjoint(f, label, grad, gamma, ROWS: tl.constexpr, HARD: tl.constexpr, ENTROPY: tl.constexpr):
    """Gradients of grad · smooth_max(f) with respect to f, and to gamma (0 unless asked for)."""
    top = max_over(f, ROWS)
    if HARD:
        first = first_over((f == top) & (f > -float("inf")), label, ROWS)
        adjoint, entropy = tl.where(label == first, grad, tl.zeros_like(f)), tl.zeros_like(top)
    else:
        e, total, entropy = soft_weights(f, finite(top), gamma, ROWS, ENTROPY)
        adjoint = e * tl.where(total > 0, grad / total, 0)
    return adjoint, entropy * grad
