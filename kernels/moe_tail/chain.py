"""The family's work in PyTorch operators, as a user would write it, with the exchanges in one GPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..contract import Tensors
from ..output_projection.chain import rest
from ..transports import loopback_factors

if TYPE_CHECKING:
    from torch import Tensor

    from .family import MoeTail

OUTPUTS = ("prefix_out", "next_input")


def columns(problem: MoeTail, tensors: Tensors, latents: Tensor, shares: Tensor) -> Tensor:
    """This rank's columns [rows, hidden/T] from the slots [ranks, rows, latent] and [ranks, rows, hidden/T]; rounded where the
    twin rounds.
    """
    import torch

    latent = latents.sum(0, dtype=torch.float32).to(latents.dtype).float()
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + problem.eps)
    normed = (latent * tensors["latent_norm"].float()).to(latents.dtype)
    return torch.mm(normed, tensors["w_up"].T) + shares.sum(0, dtype=torch.float32).to(shares.dtype)


def _run(problem: MoeTail, tensors: Tensors, factors: Tensor) -> tuple[Tensor, Tensor]:
    latents = tensors["latent_partial"] * factors
    shares = tensors["shared_partial"].unflatten(-1, (problem.tp, -1)).transpose(0, 1) * factors
    mine = columns(problem, tensors, latents, shares)
    delta = (mine * factors).transpose(0, 1).flatten(1)
    return rest(problem.eps, tensors, delta[None])


def chain(problem: MoeTail) -> Callable[[Tensors], Tensors]:
    """From inputs to outputs; what torch.compile is given."""
    import torch

    def run(tensors: Tensors) -> Tensors:
        ranks = torch.arange(problem.tp, device=tensors["prefix"].device) - problem.tp // 2
        factors = torch.exp2(ranks.to(tensors["prefix"].dtype))[:, None, None]
        return dict(zip(OUTPUTS, _run(problem, tensors, factors), strict=True))

    return run


def chain_call(problem: MoeTail, tensors: Tensors) -> Callable[[], None]:
    """A call on fixed tensors, capturable in a graph; the factors of the slots are made before it."""
    import torch

    inputs = {name: tensor for name, tensor in tensors.items() if name not in OUTPUTS}
    made = loopback_factors(problem.tp)
    factors = torch.tensor(made, dtype=inputs["prefix"].dtype, device=inputs["prefix"].device)[:, None, None]

    def call() -> None:
        for name, value in zip(OUTPUTS, _run(problem, inputs, factors), strict=True):
            tensors[name].copy_(value)

    return call
