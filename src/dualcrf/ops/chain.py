"""The operation all else stands on: exact (smoothed) messages along every chain, and the chains' (smoothed) max-energies.

One operation, three implementations: `reference` (plain torch), `cpu` (Numba) and `triton` (CUDA, or the CPU in Triton's
interpreter). The kernels store the messages alone; their backward pass recomputes every weight from them.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualcrf.kernels.layout import ChainLayout
from dualcrf.ops import reference

IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")


def choose_implementation(impl: str, device: torch.device) -> str:
    """The implementation that runs on a device: by the device for "auto", otherwise the one asked for or an error."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r}: expected one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    if impl == "auto":
        return {"cpu": "cpu", "cuda": "triton"}.get(device.type, "reference")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu"
    if (impl == "cpu" and device.type != "cpu") or (impl == "triton" and device.type != "cuda" and not interpreted):
        needed = {"cpu": "tensors on the CPU", "triton": "tensors on a CUDA device"}[impl]
        raise ValueError(f"impl={impl!r} needs {needed}, these are on {device}; move them, or leave impl='auto'")
    return impl


def chain_messages(
    psi: Tensor, parameters: Sequence[Tensor], layout: ChainLayout, kind: str, gamma: Tensor | None, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.chain_messages`; `impl` is one of "reference", "cpu", "triton"."""
    if impl == "reference":
        return reference.chain_messages(psi, parameters, layout, kind, gamma)
    return _messages(psi, parameters, gamma, *_flat(layout), kind, impl)


def _flat(layout: ChainLayout) -> tuple[list[Tensor], list[int], list[int], bool]:
    return layout.tensors(), list(layout.families), list(layout.family_places), layout.has_flips


def _layout(index: Sequence[Tensor], families: Sequence[int], family_places: Sequence[int], has_flips: bool) -> ChainLayout:
    return ChainLayout._make([*index, tuple(families), tuple(family_places), has_flips])


def _kernels(impl: str) -> Any:
    if impl == "cpu":
        from dualcrf.kernels.numba import chain
    else:
        from dualcrf.kernels.triton import chain
    return chain


@torch.library.custom_op("dualcrf::chain_messages", mutates_args=())
def _messages(
    psi: Tensor,
    parameters: Sequence[Tensor],
    gamma: Tensor | None,
    index: Sequence[Tensor],
    families: Sequence[int],
    family_places: Sequence[int],
    has_flips: bool,
    kind: str,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = _layout(index, families, family_places, has_flips)
    return _kernels(impl).messages(psi, parameters, layout, kind, gamma)


@_messages.register_fake
def _(psi, parameters, gamma, index, families, family_places, has_flips, kind, impl):
    return torch.empty_like(psi), torch.empty_like(psi), psi.new_empty(psi.shape[0], families[-1])


@torch.library.custom_op("dualcrf::chain_messages_backward", mutates_args=())
def _messages_backward(
    grad_forward: Tensor,
    grad_backward: Tensor,
    grad_energy: Tensor,
    psi: Tensor,
    forward: Tensor,
    backward: Tensor,
    energy: Tensor,
    parameters: Sequence[Tensor],
    gamma: Tensor | None,
    index: Sequence[Tensor],
    families: Sequence[int],
    family_places: Sequence[int],
    has_flips: bool,
    kind: str,
    impl: str,
    needs_parameters: bool,
    needs_gamma: bool,
) -> list[Tensor]:
    """Gradients of psi, then of the parameters if needed, then of gamma if needed."""
    layout = _layout(index, families, family_places, has_flips)
    grads = (grad_forward, grad_backward, grad_energy)
    saved = (psi, forward, backward, energy)
    return _kernels(impl).messages_backward(grads, saved, parameters, layout, kind, gamma, needs_parameters, needs_gamma)


@_messages_backward.register_fake
def _(
    grad_forward, grad_backward, grad_energy, psi, forward, backward, energy, parameters, gamma,
    index, families, family_places, has_flips, kind, impl, needs_parameters, needs_gamma,
):  # fmt: skip
    grads = [torch.empty_like(psi)]
    grads += [torch.empty_like(p) for p in parameters] if needs_parameters else []
    return grads + ([psi.new_empty(())] if needs_gamma else [])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    psi, parameters, gamma, index, *ctx.plain = inputs
    ctx.counts = len(parameters), len(index)
    ctx.save_for_backward(psi, *output, gamma, *parameters, *index)


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    psi, forward, backward, energy, gamma, *rest = ctx.saved_tensors
    split = ctx.counts[0]
    parameters, index = rest[:split], rest[split:]
    _, needs_parameters, needs_gamma, *_ = ctx.needs_input_grad
    needs_parameters = any(needs_parameters)
    grad_psi, *others = _messages_backward(
        *(g.contiguous() for g in grads), psi, forward, backward, energy, parameters, gamma, index,
        *ctx.plain, needs_parameters, needs_gamma,
    )  # fmt: skip
    grad_parameters = others[:split] if needs_parameters else [None] * split
    grad_gamma = others[-1] if needs_gamma else None
    return grad_psi, grad_parameters, grad_gamma, [None] * ctx.counts[1], *(None for _ in ctx.plain)


torch.library.register_autograd(_messages, _differentiate, setup_context=_save)
