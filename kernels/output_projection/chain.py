"""The family's work in PyTorch operators, as a user would write it, with the exchange in one GPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..contract import Tensors
from ..transports import loopback_factors

if TYPE_CHECKING:
    from torch import Tensor

    from .family import OutputProjection


def rest(eps: float, tensors: Tensors, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the slots [ranks, rows, hidden], residual, AttnRes and norm; rounded where the twin rounds."""
    import torch

    delta = slots.sum(0, dtype=torch.float32).to(slots.dtype)
    prefix = tensors["prefix"] + delta if "prefix" in tensors else delta
    sources = torch.cat([tensors["blocks"], prefix[None]]).float()
    query = tensors["res_norm"].float() * tensors["res_proj"][0].float()
    scores = (sources @ query) * torch.rsqrt(sources.square().mean(-1) + eps)
    mix = torch.einsum("sr,srh->rh", scores.softmax(0), sources)
    norm = torch.rsqrt(mix.square().mean(-1, keepdim=True) + eps)
    return prefix, (mix * norm * tensors["norm_w"].float()).to(prefix.dtype)


def chain(problem: OutputProjection) -> Callable[[Tensors], Tensors]:
    """From inputs to outputs; what torch.compile is given."""
    import torch

    def run(tensors: Tensors) -> Tensors:
        partial = torch.mm(tensors["x"], tensors["w_o"].T)
        ranks = torch.arange(problem.tp, device=partial.device) - problem.tp // 2
        slots = partial * torch.exp2(ranks.to(partial.dtype))[:, None, None]
        prefix, mlp_input = rest(problem.eps, tensors, slots)
        return {"prefix_out": prefix, "mlp_input": mlp_input}

    return run


def chain_call(problem: OutputProjection, tensors: Tensors) -> Callable[[], None]:
    """A call on fixed tensors, capturable in a graph; the factors of the slots are made before it."""
    import torch

    inputs = {name: tensor for name, tensor in tensors.items() if name not in ("prefix_out", "mlp_input")}
    x, weight = inputs["x"], inputs["w_o"].T
    factors = torch.tensor(loopback_factors(problem.tp), dtype=x.dtype, device=x.device)[:, None, None]
    partial = torch.empty(problem.rows, problem.hidden, dtype=x.dtype, device=x.device)
    slots = torch.empty(problem.tp, problem.rows, problem.hidden, dtype=x.dtype, device=x.device)

    def call() -> None:
        torch.mm(x, weight, out=partial)
        torch.mul(partial, factors, out=slots)
        prefix, mlp_input = rest(problem.eps, inputs, slots)
        tensors["prefix_out"].copy_(prefix)
        tensors["mlp_input"].copy_(mlp_input)

    return call
