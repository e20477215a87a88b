"""Exact, certified, differentiable inference in conditional random fields, on PyTorch."""

from dualcrf.chains import chain_max_marginals
from dualcrf.graph import Graph, grid
from dualcrf.potentials import Additive, Dense, Pairwise, Potts, Weighted

__all__ = ["Additive", "Dense", "Graph", "Pairwise", "Potts", "Weighted", "chain_max_marginals", "grid"]
__version__ = "0.1.0"
