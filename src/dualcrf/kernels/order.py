"""What the sweeping kernels know of the order of the nodes, on one device."""

from typing import NamedTuple

from torch import Tensor


class SweepOrder(NamedTuple):
    """The nodes level by level, for a layout whose chains all run towards higher levels.

    The nodes of a level share neither a chain nor an edge, and every chain visits them in the order of the levels, so a
    sweep may follow `node` level by level or one by one. All tensors are int32.
    """

    node: Tensor  # [N] nodes, level after level, ascending inside a level
    start: Tensor  # [D + 1] the first position in `node` of every level, and N
    place_start: Tensor  # [N + 1] places of node i: place[place_start[i] : place_start[i + 1]]
    place: Tensor  # [S]
    levels: tuple[int, ...]  # [D + 1] `start` for the host
    by_number: bool  # all chains run towards higher node numbers too, so a sweep may follow 0, 1, 2, … one by one
