"""Bringing a request to a context: its prompt in chunks, or made-up caches for timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels import InputError
from ..kernels.collectives import Collectives
from .caches import DecodeCache
from .context_parallel import context_group
from .prefill_operators import PrefillOperators
from .step import Range, Tap, check_contexts, check_group, forward, no_range
from .weights import RankWeights

CHUNK = 512
"""Tokens of a chunk: each reads the weights once."""
FILLED_BLOCKS = 4096
"""Cache blocks that are made up at once."""
Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens)."""


@torch.inference_mode()
def prefill(
    weights: RankWeights,
    cache: DecodeCache,
    slot: int,
    ids: Tensor,
    operators: PrefillOperators,
    comm: Collectives,
    *,
    chunk: int = CHUNK,
    mark: Range = no_range,
    tap: Tap | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Append a prompt to a request: MLA rows, KDA state and history are then what as many decode steps leave.

    The request may have a context already. All of it counts at once or, where it fails, nothing: the request is then
    spoilt and must be forgotten or released.

    Args:
        weights: This rank's.
        cache: This rank's.
        slot: The request.
        ids: [tokens], int.
        operators: Of the model.
        comm: The tensor-parallel group; every rank calls with the same ids and chunk.
        chunk: Tokens at a time.
        mark: Profiler ranges.
        tap: As in :func:`~k3lab.decode.step.forward`, called chunk by chunk.
        progress: Called after every chunk.

    Returns:
        Logits [V] that score the token after the last one.

    Raises:
        InputError: no tokens, ids that are none, a chunk below 1, a full cache, an unaccepted step, or operators for
            contexts over another number of ranks.
    """
    check_group(weights, cache, comm)
    check_contexts(cache, operators)
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64) or not ids.numel():
        raise InputError(f"a prompt is one or more whole numbers [tokens], not {list(ids.shape)} {ids.dtype}")
    if not 0 <= int(ids.min()) <= int(ids.max()) < weights.card.vocab_size:
        raise InputError(
            f"token ids must lie in 0..{weights.card.vocab_size - 1}, got {int(ids.min())}..{int(ids.max())}"
        )
    if chunk < 1:
        raise InputError(f"chunk is {chunk}; a chunk has one or more tokens")
    total, done = ids.numel(), 0
    cache.begin_prefill(slot, total)
    where = torch.tensor([slot], device=weights.device)
    logits = None
    try:
        for part in ids.long().to(weights.device).split(chunk):
            with mark(f"prefill {done}"):
                logits = forward(weights, cache, part, where, operators, comm, q_len=part.numel(), mark=mark, tap=tap)
            done += part.numel()
            cache.prefilled(slot, part.numel())
            if progress:
                progress(done, total)
    except BaseException:
        cache.spoil([slot])
        raise
    assert logits is not None
    return logits[0]


@torch.inference_mode()
def fill_context(cache: DecodeCache, slots: Sequence[int], tokens: int, *, seed: int = 0) -> None:
    """Give requests a context of ``tokens`` random rows and a random state, of the size real ones have.

    For timing alone: what is decoded after it means nothing, and whoever shows it must say so.

    Raises:
        InputError: a request that has a context, or a cache that is too small.
    """
    for slot in slots:
        if cache.length(slot):
            raise InputError(
                f"request {slot} has a context of {cache.length(slot)} tokens; only an empty one is filled"
            )
    if tokens < 1:
        raise InputError(f"a context of {tokens} tokens cannot be filled; give 1 or more")
    cache.reserve(slots, tokens)
    device = cache.context.device
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)

    def draw(shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (torch.randn(shape, generator=generator, dtype=wide, device=device) * scale).to(dtype)

    for slot in slots:
        # some blocks at a time: a long context is never there twice
        for blocks in torch.tensor(cache.blocks_of(slot), device=device).split(FILLED_BLOCKS):
            for pages in cache.mla.values():
                made = draw((len(blocks), *pages.shape[1:]), pages.dtype)
                if pages.dtype == torch.float8_e4m3fn:  # indexed writes know no FP8: the bytes are the same
                    pages.view(torch.uint8)[blocks] = made.view(torch.uint8)
                else:
                    pages[blocks] = made
        for layer, states in cache.kda_states.items():
            # a state of unit keys: a fraction of the values it was written with
            states[slot, 0] = draw(states.shape[2:], states.dtype, 0.1)
            convs = cache.kda_convs[layer]
            convs[slot, 0] = draw(convs.shape[2:], convs.dtype)
        cache.begin_prefill(slot, tokens)
        cache.prefilled(slot, tokens)


def preparation(
    weights: RankWeights,
    cache: DecodeCache,
    prompts: Tensor,
    comm: Collectives,
    *,
    fill: int = 0,
    chunk: int = CHUNK,
    seed: int = 0,
    progress: Progress | None = None,
) -> Callable[[Sequence[int]], None]:
    """What brings empty requests to a context: made-up rows, then all but the last token of their prompts.

    Args:
        weights: This rank's.
        cache: This rank's.
        prompts: [requests, tokens].
        comm: The tensor-parallel group.
        fill: Tokens of the made-up context; 0: none.
        chunk: Of the prefill.
        seed: Of what is made up.
        progress: Called with (tokens done, tokens), of all requests.
    """
    before = prompts[:, :-1]

    def prepare(slots: Sequence[int]) -> None:
        if fill:
            fill_context(cache, slots, fill, seed=seed)
        if not before.shape[1]:
            return
        operators = PrefillOperators(
            weights.card, dtype=weights.dtype, device=weights.device, context_group=context_group(comm, cache.dcp)
        )
        for request, (slot, ids) in enumerate(zip(slots, before, strict=True)):
            done = request * before.shape[1]
            told = (lambda now, _of, done=done: progress(done + now, before.numel())) if progress else None
            prefill(weights, cache, slot, ids, operators, comm, chunk=chunk, progress=told)

    return prepare
