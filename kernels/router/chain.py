"""The family's work in PyTorch operators, as a user would write it; the other ranks' words come from the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..contract import Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from .family import Router


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """FP32 result of BF16 operands."""
    import torch

    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return x.float() @ weight.float().T


def chosen(logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> dict[str, Tensor]:
    """Experts and weights."""
    import torch

    scores = logits.sigmoid()
    ids = (scores + bias).topk(top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scaling
    return {"ids": ids.to(torch.int32), "weights": weights}


def chain(problem: Router) -> Callable[[Tensors], Tensors]:
    """From inputs to outputs; what torch.compile is given."""
    import torch

    from .profiles import from_words, own_slot

    slot, width, columns = own_slot(problem.tp), problem.experts, problem.latent

    def run(tensors: Tensors) -> Tensors:
        if problem.kind == "choice":
            return chosen(tensors["all_logits"], tensors["bias"], problem.top_k, problem.scaling)
        logits = _product(tensors["x"], tensors["w_router"])
        latent = torch.mm(tensors["x"], tensors["w_down"].T)
        if problem.kind == "front":
            return {"logits": logits, "latent": latent}
        theirs, others = from_words(tensors["peers"], width)
        theirs[:, slot * width : (slot + 1) * width] = logits
        others[:, slot * columns : (slot + 1) * columns] = latent
        return {"logits": theirs, "latent": others, **chosen(theirs, tensors["bias"], problem.top_k, problem.scaling)}

    return run


def chain_call(problem: Router, tensors: Tensors) -> Callable[[], None]:
    """A call on fixed tensors, capturable in a graph."""
    run = chain(problem)

    def call() -> None:
        for name, value in run(tensors).items():
            if name in tensors:
                tensors[name].copy_(value)

    return call
