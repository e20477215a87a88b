"""Independent solvers: the exact optimum by toulbar2, and the local polytope's linear program by HiGHS."""

import numpy as np
import pytest
import torch
from torch import Tensor

from dualcrf.graph import Graph, grid
from dualcrf.potentials import Dense
from dualcrf.solver.solve import solve
from tests.solver_models import random_graph, random_pairwise, random_unary

pytestmark = pytest.mark.optional


def dense_model(name: str, labels: int, seed: int) -> tuple[Tensor, Dense, Graph]:
    graph = grid(6, 6) if name == "grid" else random_graph(name, seed)
    pairwise = random_pairwise("dense", graph, labels, seed)
    assert isinstance(pairwise, Dense)
    return random_unary(graph, labels, seed), pairwise, graph


def local_polytope(unary: Tensor, pairwise: Dense, graph: Graph) -> float:
    """The maximum of the scores over all node and edge distributions that agree with each other."""
    optimize = pytest.importorskip("scipy.optimize", reason="the linear program needs SciPy")
    sparse = pytest.importorskip("scipy.sparse")
    nodes, labels = unary.shape
    cost = -torch.cat([unary.flatten(), pairwise.table.flatten()]).numpy()
    rows, columns, values, rights = [], [], [], []

    def constrain(variables: list[int], factors: list[float], right: float) -> None:
        rows.extend([len(rights)] * len(variables))
        columns.extend(variables)
        values.extend(factors)
        rights.append(right)

    for i in range(nodes):
        constrain([i * labels + a for a in range(labels)], [1.0] * labels, 1.0)
    for e, (i, j) in enumerate(graph.edges.tolist()):
        base = nodes * labels + e * labels * labels
        for a in range(labels):
            row = [base + a * labels + b for b in range(labels)]
            column = [base + b * labels + a for b in range(labels)]
            constrain([*row, i * labels + a], [1.0] * labels + [-1.0], 0.0)
            constrain([*column, j * labels + a], [1.0] * labels + [-1.0], 0.0)
    matrix = sparse.csr_array((values, (rows, columns)), shape=(len(rights), len(cost)))
    return -optimize.linprog(cost, A_eq=matrix, b_eq=np.array(rights), bounds=(0, None), method="highs").fun


def exact_optimum(unary: Tensor, pairwise: Dense, graph: Graph) -> float:
    toulbar2 = pytest.importorskip("pytoulbar2", reason="the exact optimum needs pytoulbar2")
    digits = 6
    problem = toulbar2.CFN(ubinit=1e6, resolution=digits)
    nodes, labels = unary.shape
    names = [problem.AddVariable(f"x{i}", range(labels)) for i in range(nodes)]
    shift = 0.0
    for scope, table in [([i], unary[i]) for i in range(nodes)] + [
        ([i, j], pairwise.table[e]) for e, (i, j) in enumerate(graph.edges.tolist())
    ]:
        shift += float(table.max())
        problem.AddFunction([names[v] for v in scope], (table.max() - table).flatten().tolist())
    _, cost, _ = problem.Solve()
    return shift - cost


@pytest.mark.parametrize("name", ["image", "strides", "sparse", "covers", "grid"])
def test_the_bound_is_never_below_the_local_polytope(name: str):
    for seed in range(4):
        unary, pairwise, graph = dense_model(name, 3, seed)
        value = local_polytope(unary, pairwise, graph)
        for schedule in ("wavefront", "handover", "parallel"):
            solution = solve(unary, pairwise, graph, schedule=schedule, polish=False, impl="reference")
            assert solution.dual >= value - 1e-7
            if schedule == "wavefront":
                assert solution.dual <= value + 2e-3 * abs(value)


@pytest.mark.parametrize("name", ["strides", "sparse", "covers", "grid"])
def test_the_exact_optimum_is_reached_and_bounded(name: str):
    for seed in range(4):
        unary, pairwise, graph = dense_model(name, 4, seed)
        best = exact_optimum(unary, pairwise, graph)
        solution = solve(unary, pairwise, graph, impl="reference")
        assert solution.primal <= best + 1e-4
        assert best <= solution.dual + 1e-4
        assert solution.primal == pytest.approx(best, abs=1e-4)
