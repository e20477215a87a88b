"""What every kernel that follows the node order needs: the graph node by node, and edges that are made ready once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.kernels.numba import edges
from dualcrf.kernels.numba.chain import _numpy, _parameters
from dualcrf.kernels.numba.threads import chunks
from dualcrf.kernels.numba.vector import LANES, jit, padded
from dualcrf.kernels.order import SweepOrder

# Tiles of all edges of an item are kept if all pieces of work together need no more than this.
_TILE_BYTES = 1 << 27


class Sweep(NamedTuple):
    """The nodes in the order in which they are visited, and their places."""

    visit: np.ndarray  # [N]
    place_start: np.ndarray  # [N + 1]
    place: np.ndarray  # [S]
    node: np.ndarray  # [S], and so on as in ChainLayout
    edge: np.ndarray
    flip: np.ndarray


class Tiles(NamedTuple):
    """Where the edges' tables lie once they are ready; edges with the same table share a tile."""

    slot: np.ndarray  # [B or 1, E] the tile of every edge
    kept: bool  # there is a tile for each; otherwise one for all, by turns
    count: int
    size: int


class Work(NamedTuple):
    """A model and the memory to work on it."""

    params: Any
    sweep: Sweep
    tiles: Tiles
    memory: np.ndarray  # [pieces, ...]
    ready: np.ndarray  # [pieces, tiles] bool


@jit
def copy(values, out, count):
    """out = values."""
    for k in range(count):
        out[k] = values[k]


@jit
def leads_on(sweep, place, backwards):
    """Whether the chain goes on from a place."""
    return place > 0 and sweep.edge[place - 1] >= 0 if backwards else sweep.edge[place] >= 0


@jit
def tile_of(work, scratch, edge, labels, gamma):
    """The slot in which the edge is ready."""
    tiles, ready = work.tiles, work.ready[edge.chunk]
    if not tiles.kept:
        edges.prepare(work.params, edge, scratch, 0, labels, gamma)
        return 0
    slot = np.int64(tiles.slot[edge.batch if tiles.slot.shape[0] > 1 else 0, edge.index])
    if not ready[slot]:
        edges.prepare(work.params, edge, scratch, slot, labels, gamma)
        ready[slot] = True
    return slot


@jit
def scratch_of(work, chunk, labels, lanes):
    """The scratch of a piece of work, its sources -inf behind the labels."""
    scratch = edges.scratch_in(work.memory[chunk], work.tiles.count, work.tiles.size, 0, labels, lanes)
    scratch.ahead.source[:] = -np.inf
    scratch.back.source[:] = -np.inf
    return scratch


def make_work(
    parameters: Sequence[Tensor], layout: ChainLayout, order: SweepOrder, kind: str, unary: Tensor, passes: int
) -> Work:
    """Arrays and memory for kernels over the items of a batch that go over all edges so many times."""
    labels, pieces = unary.shape[2], max(chunks(unary.shape[0]), 1)
    dtype = _numpy(unary).dtype
    size = int(padded((0 if kind == "potts" else labels * labels) + LANES))
    slot, count = _slots(parameters, len(layout.place), kind)
    few = count < slot.shape[1]
    kept = kind != "potts" and (few or passes > 1) and pieces * count * size * dtype.itemsize <= _TILE_BYTES
    tiles = Tiles(slot, kept, count if kept else 1, size)
    length = int(padded(edges.scratch_size(tiles.count, size, 0, padded(labels))))
    memory = np.zeros(pieces * length + LANES, dtype)
    skip = -memory.ctypes.data % (LANES * dtype.itemsize) // dtype.itemsize
    visit = np.arange(len(order.node), dtype=np.int32) if order.by_number else _numpy(order.node)
    index = (_numpy(t) for t in (order.place_start, order.place, layout.node, layout.edge, layout.flip))
    return Work(
        _parameters(kind, parameters),
        Sweep(visit, *index),
        tiles,
        memory[skip : skip + pieces * length].reshape(pieces, length),
        np.zeros((pieces, tiles.count), np.bool_),
    )


def _slots(parameters: Sequence[Tensor], count: int, kind: str) -> tuple[np.ndarray, int]:
    """A number for every edge's table, [B or 1, E], the same where the tables are, and how many there are."""
    if kind == "weighted":
        values, number = np.unique(_numpy(parameters[0]), return_inverse=True)
        if len(values) < count:
            return number.reshape(parameters[0].shape).astype(np.int32), len(values)
    return np.arange(count, dtype=np.int32)[None], max(count, 1)
