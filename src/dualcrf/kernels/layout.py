"""What operations and kernels know of a graph: where every chain lies, on one device."""

from typing import NamedTuple

from torch import Tensor


class ChainLayout(NamedTuple):
    """The places of all chains, one chain after the other; a place is one node on one chain.

    Families follow each other, and the chains of one family share no node. All index tensors are int32.
    """

    node: Tensor  # [S] the node at every place
    edge: Tensor  # [S] the edge from a place to the next one on its chain; -1 at the chain's end
    flip: Tensor  # [S] bool: that edge runs against its chain (edges[e, 0] is the later place)
    start: Tensor  # [C + 1] first place of every chain, and S
    place: Tensor  # [E] the place from which an edge leads to the next one
    out_start: Tensor  # [N + 1] edges with edges[e, 0] = i: out_edge[out_start[i] : out_start[i + 1]]
    out_edge: Tensor  # [E]
    in_start: Tensor  # [N + 1] the same for edges[e, 1] = i
    in_edge: Tensor  # [E]
    count: Tensor  # [N] the number of chains through every node
    families: tuple[int, ...]  # [F + 1] first chain of every family, and C
    family_places: tuple[int, ...]  # [F + 1] first place of every family, and S
    has_flips: bool

    def tensors(self) -> list[Tensor]:
        """The index tensors alone, in the order of the fields."""
        return [value for value in self if isinstance(value, Tensor)]
