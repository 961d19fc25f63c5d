"""One decode step of the whole model, composed of operators.

The residual wiring (AttnRes over saved blocks, a running residual that restarts at every block) is the
official model's; a step of q tokens a request is a plain step for q = 1 and a verify step for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..kernels import InputError
from ..kernels.collectives import Collectives
from .caches import DecodeCache
from .kda_slots import KdaSlots
from .operators import Operators
from .weights import KdaAttention, MoeMlp, RankWeights

MAX_ROWS = 64
"""Token rows of one step."""
MAX_VERIFY = 8
"""Tokens a request in one step."""

Range = Callable[[str], AbstractContextManager[object]]
"""Marks a stretch of the step for a profiler."""


Tap = Callable[[int, Tensor], None]
"""Called with a layer and the running residual after it, [n, H]: what a drafter reads."""


def no_range(_name: str) -> AbstractContextManager[object]:
    """Marks nothing."""
    return nullcontext()


def forward(
    weights: RankWeights,
    cache: DecodeCache,
    ids: Tensor,
    slots: Tensor,
    operators: Operators,
    comm: Collectives,
    *,
    q_len: int,
    mark: Range = no_range,
    tap: Tap | None = None,
    tokens: bool = False,
) -> Tensor:
    """The device side of a step: no allocation of cache blocks, no checks; can be captured in a graph.

    Args:
        weights: This rank's.
        cache: This rank's; gains rows, and snapshots after every token. ``accept`` makes them count.
        ids: Token ids [requests * q_len], request-major, int64.
        slots: Cache slot of every request, int64 [requests].
        operators: The backend.
        comm: The tensor-parallel group.
        q_len: Tokens a request.
        mark: Profiler ranges, called with ``layer 3`` and the like.
        tap: Sees the residual after every layer.
        tokens: Whether the likeliest tokens are all that is asked for.

    Returns:
        Logits [n, V] in the model's dtype: row i scores the token that follows ``ids[i]``. With ``tokens`` the likeliest
        one of each row, whole numbers [n].
    """
    card = weights.card
    # before any kernel with a programmatic edge: KDA and MLA kernels read these before they wait
    context, table = cache.context[slots], cache.block_table[slots]
    places = cache.kda_places(slots, min(q_len, cache.max_verify))
    with mark("embed"):
        prefix = operators.embed(ids, weights.embed, comm)
        blocks: list[Tensor] = []
        x = operators.attn_res(blocks, prefix, weights.layers[0].attention_mix)
    last = len(weights.layers) - 1
    for index, layer in enumerate(weights.layers):
        with mark(f"layer {index}"):
            # x has seen the residual as it was; from here on it is a saved block and the sum restarts
            restarts = card.starts_block(index)
            if restarts:
                blocks.append(prefix)
            proj = operators.attention_projection(x, layer.attention)
            if isinstance(layer.attention, KdaAttention):
                out = operators.kda(proj, layer.attention, KdaSlots(cache, index, slots, places), q_len)
            else:
                out = operators.mla(proj, layer.attention, cache.mla[index], table, context, q_len)
            prefix, mlp_input = operators.output_projection(
                out, layer.attention, None if restarts else prefix, blocks, layer.mlp_mix, comm
            )
            final = index == last
            following = weights.output_mix if final else weights.layers[index + 1].attention_mix
            if isinstance(layer.mlp, MoeMlp):
                chosen, expert_weights, latent = operators.router(mlp_input, layer.mlp, comm)
                routed, shared = operators.experts(latent, chosen, expert_weights, mlp_input, layer.mlp)
                prefix, x = operators.moe_tail(routed, shared, layer.mlp, prefix, blocks, following, comm, final=final)
            else:
                prefix = operators.dense(mlp_input, layer.mlp, prefix, comm)
                x = operators.attn_res(blocks, prefix, following, final=final)
            if tap is not None:
                tap(index, prefix)
    with mark("head"):
        return (operators.next_token if tokens else operators.lm_head)(x, weights.lm_head, comm)


def check_tokens(ids: Tensor, requests: int, vocabulary: int) -> int:
    """Tokens a request of ids [requests, q_len]; see :func:`step` for what is refused."""
    if ids.dim() != 2 or ids.shape[0] != requests or ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"ids must be whole numbers [{requests} requests, q], not {list(ids.shape)} {ids.dtype}")
    q_len = ids.shape[1]
    if not 1 <= q_len <= MAX_VERIFY:
        raise InputError(f"{q_len} tokens a request; a step takes 1 (plain) to {MAX_VERIFY} (verify)")
    if not 1 <= requests * q_len <= MAX_ROWS:
        raise InputError(
            f"{requests} requests of {q_len} tokens are {requests * q_len} rows; a step takes 1 to {MAX_ROWS}"
        )
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise InputError(f"token ids must lie in 0..{vocabulary - 1}, got {int(ids.min())}..{int(ids.max())}")
    return q_len


def check_group(weights: RankWeights, cache: DecodeCache, comm: Collectives) -> None:
    """Raise InputError unless weights, cache and group are of one rank of one model."""
    if (weights.rank, weights.tp) != (comm.rank, comm.size):
        raise InputError(
            f"the weights are those of rank {weights.rank} of {weights.tp}, the group has this as rank {comm.rank} of {comm.size}"
        )
    if cache.dcp not in (1, weights.tp):
        raise InputError(f"context parallelism over {cache.dcp} ranks; it is 1 or TP, {weights.tp}")
    if (cache.tp, cache.card) != (weights.tp, weights.card):
        raise InputError(
            f"the cache is for {cache.card.name} at TP {cache.tp}, the weights are for {weights.card.name} at TP {weights.tp}"
        )


def check_contexts(cache: DecodeCache, operators: Operators) -> None:
    """Raise InputError for operators that share contexts (DCP) over other ranks than the cache was made for."""
    group = getattr(operators, "context_group", None)
    if (size := group.size if group else 1) != cache.dcp:
        raise InputError(f"the cache is for contexts over {cache.dcp} ranks, operators {operators.name} for {size}")


@torch.inference_mode()
def step(
    weights: RankWeights,
    cache: DecodeCache,
    ids: Tensor,
    slots: Sequence[int],
    operators: Operators,
    comm: Collectives,
    *,
    mark: Range = no_range,
    tap: Tap | None = None,
    tokens: bool = False,
) -> Tensor:
    """A whole step: checks, cache blocks, :func:`forward`. Call ``cache.accept`` before the next one.

    Args:
        weights: This rank's.
        cache: This rank's, with a request in every slot.
        ids: [requests, q_len]: the tokens to append, in order.
        slots: Cache slot of every request.
        operators: The backend.
        comm: The tensor-parallel group.
        mark: Profiler ranges.
        tap: Sees the residual after every layer.

    Returns:
        Logits [requests, q_len, V]; with ``tokens``, where the likeliest ones are all that is asked for, those: int64
        [requests, q_len].

    Raises:
        InputError: shapes, row count, token ids, slots, a full cache, or parts of different ranks or models.
    """
    check_group(weights, cache, comm)
    check_contexts(cache, operators)
    q_len = check_tokens(ids, len(slots), weights.card.vocab_size)
    cache.begin(slots, q_len)
    where = torch.tensor(list(slots), device=weights.device)
    flat = ids.reshape(-1).long().to(weights.device)
    try:
        out = forward(weights, cache, flat, where, operators, comm, q_len=q_len, mark=mark, tap=tap, tokens=tokens)
    except BaseException:
        cache.spoil(slots)
        raise
    return out.long().view(len(slots), q_len) if tokens else out.view(len(slots), q_len, -1)
