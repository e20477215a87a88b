"""Exact, certified, differentiable inference in conditional random fields, on PyTorch."""

from dualcrf.chains import chain_max_marginals
from dualcrf.files import read_model, write_grid, write_uai
from dualcrf.graph import Graph, grid
from dualcrf.plots import plot_convergence
from dualcrf.potentials import Additive, Dense, Pairwise, Potts, Weighted
from dualcrf.solver.certificate import dual_bound, energy
from dualcrf.solver.marginals import log_partition_bound, marginals
from dualcrf.solver.solution import Solution
from dualcrf.solver.solve import solve

__all__ = [
    "Additive",
    "Dense",
    "Graph",
    "Pairwise",
    "Potts",
    "Solution",
    "Weighted",
    "chain_max_marginals",
    "dual_bound",
    "energy",
    "grid",
    "log_partition_bound",
    "marginals",
    "plot_convergence",
    "read_model",
    "solve",
    "write_grid",
    "write_uai",
]
__version__ = "0.1.0"
