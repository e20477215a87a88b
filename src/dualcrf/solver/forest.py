"""Graphs without cycles: exact inference by one pass towards the roots and one back."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dualcrf.graph import Graph
from dualcrf.ops.edges import EDGE_KINDS
from dualcrf.ops.reference import smooth_max
from dualcrf.solver.problem import Problem


class Branches(NamedTuple):
    """Nodes that hang on their parents, all children of theirs in earlier branches."""

    child: Tensor
    edge: Tensor
    parent: Tensor


class Forest(NamedTuple):
    """An order for passes over a graph without cycles."""

    branches: list[Branches]  # from the leaves to the roots
    roots: Tensor


class Beliefs(NamedTuple):
    """What the passes found, all in float64."""

    up: Tensor  # [B, E, L] message over every edge into its parent
    total: Tensor  # [B, N, L] a node's scores and the messages from its children
    belief: Tensor  # [B, N, L] the same with the message from its parent: exact (smoothed) max-marginals
    energy: Tensor  # [B] the (smoothed) maximum over all labellings


@lru_cache(maxsize=64)
def forest_of(graph: Graph) -> Forest | None:
    """The order of the passes, or None if the graph has a cycle. Leaves are picked in rounds."""
    if graph.num_edges >= graph.num_nodes:
        return None
    numbers = torch.arange(graph.num_edges)
    degree = torch.bincount(graph.edges.flatten(), minlength=graph.num_nodes)
    # A leaf's only edge is the sum of its edges.
    edge_sum = torch.zeros(graph.num_nodes, dtype=torch.int64)
    edge_sum.index_add_(0, graph.edges[:, 0], numbers).index_add_(0, graph.edges[:, 1], numbers)
    leaves = (degree == 1).nonzero().squeeze(1)
    branches, picked = [], 0
    while len(leaves):
        edge = edge_sum[leaves]
        parent = graph.edges[edge].sum(1) - leaves
        hangs = (degree[parent] > 1) | (leaves < parent)  # of two leaves on one edge the first is the child
        child, edge, parent = leaves[hangs], edge[hangs], parent[hangs]
        branches.append(Branches(child, edge, parent))
        picked += len(child)
        degree[child] = 0
        degree.index_add_(0, parent, torch.full_like(parent, -1))
        edge_sum.index_add_(0, parent, -edge)
        leaves = parent[degree[parent] == 1].unique()
    if picked < graph.num_edges:
        return None
    is_child = torch.zeros(graph.num_nodes, dtype=torch.bool)
    for branch in branches:
        is_child[branch.child] = True
    return Forest(branches, (~is_child).nonzero().squeeze(1))


def beliefs(problem: Problem, forest: Forest, gamma: float) -> Beliefs:
    """Both passes, hard or smoothed."""
    smoothing = problem.unary.new_full((), gamma, dtype=torch.float64) if gamma else None
    total = problem.unary.double()
    up = total.new_zeros(len(total), problem.graph.num_edges, total.shape[2])
    for branch in forest.branches:
        message = smooth_max(total[:, branch.child].unsqueeze(3) + edge_tables(problem, branch), smoothing, dim=2)
        # Where the model forbids the label itself, nothing has to be subtracted again.
        up[:, branch.edge] = message.nan_to_num(neginf=0.0)
        total = total.index_add(1, branch.parent, up[:, branch.edge])
    belief = total.clone()
    for branch in reversed(forest.branches):
        above = belief[:, branch.parent] - up[:, branch.edge]
        down = smooth_max(edge_tables(problem, branch) + above.unsqueeze(2), smoothing, dim=3)
        belief[:, branch.child] += down.nan_to_num(neginf=0.0)
    return Beliefs(up, total, belief, smooth_max(total[:, forest.roots], smoothing, dim=2).sum(1))


def solve_forest(problem: Problem, forest: Forest) -> tuple[Tensor, Tensor]:
    """A best labelling [B, N] and multipliers [B, S, L] float64 whose hard-max dual is its score."""
    found = beliefs(problem, forest, 0.0)
    return _best_labels(problem, forest, found), _multipliers(problem, forest, found)


def _best_labels(problem: Problem, forest: Forest, found: Beliefs) -> Tensor:
    """[B, N] a best labelling, from the roots to the leaves; among equal ones it is consistent."""
    labels = found.total.argmax(2)
    for branch in reversed(forest.branches):
        tables = edge_tables(problem, branch).expand(len(labels), -1, -1, -1)
        given = labels[:, branch.parent, None, None].expand(-1, -1, tables.shape[2], 1)
        rows = tables.gather(3, given).squeeze(3)
        labels[:, branch.child] = (found.total[:, branch.child] + rows).argmax(2)
    return labels


def _multipliers(problem: Problem, forest: Forest, found: Beliefs) -> Tensor:
    """[B, S, L] scores of the places with which the chains' max-energies sum to the maximum itself.

    At every node the chain towards its parent takes all, and gives each other chain what makes that one worth 0.
    """
    graph = problem.graph
    device = problem.unary.device
    parent = torch.empty(graph.num_edges, dtype=torch.int64)
    for branch in forest.branches:
        parent[branch.edge] = branch.parent
    out = found.up.new_zeros(len(found.up), graph.num_places, found.up.shape[2])
    main = graph.place_node.new_full((graph.num_nodes,), -1)
    main[graph.place_node.flip(0)] = torch.arange(graph.num_places).flip(0)
    leads = (graph.place_edge >= 0).nonzero().squeeze(1)
    for ends in (leads, leads + 1):  # every edge as seen from the place before it, and from the one after it
        edge = graph.place_edge[leads]
        into = parent[edge] == graph.place_node[ends]
        out.index_add_(1, ends[into].to(device), -found.up[:, edge[into].to(device)])
        main[graph.place_node[ends[~into]]] = ends[~into]
    out[:, main.to(device)] += found.total
    return out


def edge_tables(problem: Problem, branch: Branches) -> Tensor:
    """[B or 1, n, L, L] scores of (label at the child, label at the parent), in float64."""
    device = problem.unary.device
    ends = problem.graph.edges[branch.edge]
    parameters = [p.double() for p in problem.parameters]
    tables = EDGE_KINDS[problem.kind].scores(
        parameters, branch.edge.to(device), ends[:, 0].to(device), ends[:, 1].to(device), problem.unary.shape[2]
    )
    turned = (ends[:, 0] != branch.child).to(device)
    return torch.where(turned[:, None, None], tables.mT, tables)
