"""The family's work in PyTorch operators, as a user would write it: capturable in a graph, no value read on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..contract import Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from .family import Mla


def chain(problem: Mla) -> Callable[[Tensors], Tensors]:
    """From inputs to outputs, the new rows written to the cache; what torch.compile is given."""
    import torch
    from torch.nn.functional import linear

    heads, latent, v_dim, size = problem.heads, problem.kv_lora, problem.v_dim, problem.block_size
    requests, tokens, width = problem.requests, problem.q_len, problem.width

    def norm(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + problem.eps) * w.float()).to(x.dtype)

    def run(t: Tensors) -> Tensors:
        device = t["proj"].device
        scale = t["k_scale"] if problem.fp8 else torch.ones(1, device=device)
        parts = [problem.q_lora, latent, problem.rope, heads * v_dim]
        qa, kvc, kpe, gate = t["proj"].split(parts, dim=-1)
        q = linear(norm(qa, t["q_a_norm"]), t["q_b"]).view(problem.rows, heads, -1)
        absorbed = torch.bmm(q[..., : problem.nope].transpose(0, 1), t["w_uk"]).transpose(0, 1)
        query = torch.cat([absorbed, q[..., problem.nope :]], dim=-1)
        new = torch.cat([norm(kvc, t["kv_a_norm"]), kpe], dim=-1)
        cache, table = t["cache"], t["block_table"].long()
        at = t["context"].long()[:, None] + torch.arange(tokens, device=device)
        where = (table.gather(1, at // size) * size + at % size).flatten()
        if problem.fp8:
            new = (new.float() / scale).clamp(-448, 448).to(cache.dtype)
            query = query.float().clamp(-448, 448).to(cache.dtype).to(query.dtype)
            # indexed writes know no FP8: the bytes are the same
            cache.view(torch.uint8).flatten(0, 1)[where] = new.view(torch.uint8)
            keys = cache.view(torch.uint8)[table].view(cache.dtype).flatten(1, 2).to(query.dtype)
        else:
            cache.flatten(0, 1)[where] = new
            keys = cache[table].flatten(1, 2)
        query = query.reshape(requests, tokens * heads, width)
        scores = torch.bmm(query, keys.transpose(1, 2)).float() * scale * (problem.nope + problem.rope) ** -0.5
        hidden = torch.arange(keys.shape[1], device=device) > at[..., None]
        scores = scores.view(requests, tokens, heads, -1).masked_fill(hidden[:, :, None], float("-inf"))
        weight = scores.softmax(-1).to(query.dtype).view(requests, tokens * heads, -1)
        mixed = (torch.bmm(weight, keys[..., :latent]).float() * scale).to(query.dtype).view(-1, heads, latent)
        value = torch.bmm(mixed.transpose(0, 1), t["w_uv"].transpose(1, 2)).transpose(0, 1).flatten(1)
        return {"out": (value.float() * torch.sigmoid(gate.float())).to(gate.dtype)}

    return run


def chain_call(problem: Mla, tensors: Tensors) -> Callable[[], None]:
    """A call on fixed tensors."""
    run = chain(problem)

    def call() -> None:
        tensors["out"].copy_(run(tensors)["out"])

    return call
