"""The family's work in PyTorch operators, as a user would write it; what other ranks publish comes from the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..contract import Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from .family import LmHead


def likeliest(problem: LmHead, logits: Tensor, peers: Tensor) -> dict[str, Tensor]:
    """The token of all ranks; where logits are equal torch's argmax leaves open which."""
    import torch

    from .peers import own_slot

    best, ids = logits.max(-1)
    theirs, tokens = peers[..., 0].view(torch.float32).clone(), peers[..., 1].clone()
    theirs[own_slot(problem.tp)] = best.float()
    tokens[own_slot(problem.tp)] = ids.to(torch.int32)
    found, rank = theirs.max(0)
    return {"ids": tokens.gather(0, rank[None])[0], "best": found}


def chain(problem: LmHead) -> Callable[[Tensors], Tensors]:
    """From inputs to outputs; what torch.compile is given."""
    import torch

    def rows(tensors: Tensors) -> Tensors:
        mine = tensors["tokens"] < problem.vocab
        own = tensors["table"][tensors["tokens"].clamp(max=problem.vocab - 1)]
        return {"x": torch.where(mine[:, None], own, tensors["peers"])}

    def run(tensors: Tensors) -> Tensors:
        logits = torch.mm(tensors["h"], tensors["w"].T)
        return {"logits": logits} if problem.kind == "shard" else likeliest(problem, logits, tensors["peers"])

    return rows if problem.kind == "embed" else run


def chain_call(problem: LmHead, tensors: Tensors) -> Callable[[], None]:
    """A call on fixed tensors, capturable in a graph; logits go where they belong without a copy."""
    import torch

    if problem.kind == "embed":
        rows = chain(problem)

        def look_up() -> None:
            tensors["x"].copy_(rows(tensors)["x"])

        return look_up
    h, weight = tensors["h"], tensors["w"].T
    shard = problem.kind == "shard"
    shape = (problem.rows, problem.vocab)
    logits = tensors["logits"] if shard else torch.empty(shape, dtype=h.dtype, device=h.device)

    def call() -> None:
        torch.mm(h, weight, out=logits)
        if not shard:
            for name, value in likeliest(problem, logits, tensors["peers"]).items():
                tensors[name].copy_(value)

    return call
