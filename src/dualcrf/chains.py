"""`chain_max_marginals`: exact, differentiable inference on every chain of a graph."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dualcrf.graph import Graph
from dualcrf.ops.chain import chain_messages, choose_implementation
from dualcrf.potentials import Pairwise


def chain_max_marginals(
    psi: Tensor, pairwise: Pairwise, graph: Graph, *, gamma: float | Tensor = 0.0, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Exact (smoothed) max-marginals at every place of every chain, and every chain's (smoothed) max-energy.

    `mu[s, l]` is the best score of the chain through place s among the labellings that give s the label l; for `gamma > 0`,
    gamma · log Σ exp(score / gamma) over them. Differentiable with respect to `psi`, the potentials and a tensor `gamma`; at
    gamma = 0 the sub-gradient follows one best labelling, the first of equal ones.

    Arithmetic is in float32 (float64 if any input is float64); 16-bit potentials are read as they are. Scores of -inf forbid
    a label or a pair; a chain on which everything is forbidden has energy -inf and gradient 0. NaN and +inf are an error on the
    CPU; on other devices, where looking would cost a synchronisation, they make the chain's energy NaN or +inf.

    Args:
        psi: [..., S, L] scores of the places; `graph.split(unary)` makes them from scores of the nodes.
        pairwise: scores of the edges; its batch axes broadcast against those of `psi`.
        gamma: 0 for the hard max, or the strength of the smoothing: a number, or a 0-dim tensor to learn it.
        impl: "auto" (by device), "reference", "cpu" or "triton".

    Returns:
        mu [..., S, L] and energy [..., C].

    Example:
        >>> graph = dualcrf.grid(33, 33, strides=(1, 2))
        >>> unary, table = torch.randn(16, 1089, 21), torch.randn(16, graph.num_edges, 21, 21)
        >>> mu, energy = dualcrf.chain_max_marginals(graph.split(unary), dualcrf.Dense(table), graph, gamma=2.0)
        >>> scores = graph.gather(mu)  # [16, 1089, 21]
    """
    if psi.ndim < 2 or psi.shape[-2] != graph.num_places or not psi.is_floating_point():
        raise ValueError(
            f"psi is of shape {tuple(psi.shape)} and {psi.dtype}, expected floats of shape "
            f"[..., {graph.num_places} places, labels] for {graph}; graph.split(unary) makes them"
        )
    places, labels = psi.shape[-2:]
    if labels < 1:
        raise ValueError("psi has no labels: its last axis is empty")
    pairwise.check(graph, labels, psi.device)
    impl = choose_implementation(impl, psi.device)
    dtypes = {psi.dtype, *(p.dtype for p in pairwise.parameters.values())}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    strength = _checked_gamma(gamma, dtype, psi.device)

    batch = torch.broadcast_shapes(psi.shape[:-2], pairwise.batch_shape)
    flat = psi.to(dtype).expand(*batch, places, labels).reshape(-1, places, labels).contiguous()
    parameters = pairwise.flat_parameters(batch)
    forward, backward, energy = chain_messages(flat, parameters, graph.layout(psi.device), pairwise.kind, strength, impl)
    if psi.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_finite(energy, psi, pairwise)
    mu = (forward + backward).add_(flat)
    return mu.view(*batch, places, labels), energy.view(*batch, graph.num_chains)


def _checked_gamma(gamma: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    if isinstance(gamma, Tensor):
        if gamma.ndim or not gamma.is_floating_point():
            raise ValueError(f"gamma is of shape {tuple(gamma.shape)} and {gamma.dtype}, expected one floating-point number")
        if gamma.device.type == "cpu" and not torch.compiler.is_compiling() and not 0 < gamma.item() < math.inf:
            raise ValueError(f"gamma is a tensor of value {gamma.item()}, expected a positive one; gamma=0.0 is the hard max")
        return gamma.to(dtype=dtype, device=device)
    if not 0 <= gamma < math.inf:
        raise ValueError(f"gamma={gamma}: expected 0 for the hard max or a positive number")
    return torch.full((), gamma, dtype=dtype, device=device) if gamma > 0 else None


def _check_finite(energy: Tensor, psi: Tensor, pairwise: Pairwise) -> None:
    """Every NaN and +inf reaches its chain's energy, which is small to look at; only then is the culprit searched."""
    if (energy < torch.inf).all():
        return
    named = {"psi": psi, **{f"{type(pairwise).__name__}.{k}": v for k, v in pairwise.parameters.items()}}
    for name, value in named.items():
        bad = (~(value < torch.inf)).nonzero()
        if len(bad):
            where = tuple(bad[0].tolist())
            raise ValueError(f"{name} has {value[where].item()} at {where} ({len(bad)} such values); scores are finite or -inf")
    raise ValueError("a chain's energy overflows: scale the scores down, or pass float64")
