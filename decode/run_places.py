"""The two places a decode run can happen: all ranks as threads on the CPU, or one rank on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kernels import ModelCard
from ..kernels.device import Device
from .choices import Choice, Finder
from .run_options import RunOptions
from .scope import group_scope, here

if TYPE_CHECKING:
    import torch

    from ..kernels.collectives import Collectives
    from .auto import AutoOperators
    from .caches import DecodeCache
    from .greedy import Decoded, Prepare
    from .operators import Operators
    from .weights import RankWeights

Progress = Callable[[str, int, int], None]
"""Called with (what, done, of)."""


def known_gpu(options: RunOptions, device: Device | None) -> str:
    """Whose bundle entries are meant: the GPU's here, else the one that was named."""
    return device.card.name if device and device.card else options.gpu


@dataclass(frozen=True)
class Outcome:
    """What ran."""

    eager: Decoded
    graph: Decoded | None
    ranks: str
    operators: str
    weight_bytes: int
    speculation: dict[str, Any] | None = None


def _prompts(options: RunOptions, vocabulary: int, device: str) -> torch.Tensor:
    """Random ids [rows, prompt]."""
    import torch

    generator = torch.Generator().manual_seed(options.seed)
    return torch.randint(0, vocabulary, (options.rows, options.prompt), generator=generator).to(device)


def _loaded(card: ModelCard, options: RunOptions, rank: int, device: str, say: Progress) -> RankWeights:
    """One rank of the checkpoint; rank 0 tells how far it is."""
    from .checkpoint.load import load_rank

    assert options.checkpoint
    told = (lambda done, of: say("weights, MB", done // 10**6, of // 10**6)) if rank == 0 else None
    return load_rank(options.checkpoint, tp=options.tp, rank=rank, device=device, card=card, progress=told)


def _silent(_what: str, _done: int, _of: int) -> None:
    """Another rank tells."""


def _preparation(
    options: RunOptions, weights: RankWeights, cache: DecodeCache, prompts: torch.Tensor, comm: Collectives, say: Progress
) -> Prepare:  # fmt: skip
    from .prefill import preparation

    return preparation(
        weights, cache, prompts, comm, fill=options.fill, chunk=options.chunk, seed=options.seed,
        progress=lambda done, of: say("prefilled token", done, of),
    )  # fmt: skip


def _speculated(
    weights: RankWeights, options: RunOptions, prompts: torch.Tensor, comm: Collectives, operators: Operators, say: Progress,
    **more: Any,
) -> tuple[Decoded, dict[str, Any]]:  # fmt: skip
    from .greedy import Decoded
    from .speculate_run import speculate

    made = speculate(weights, options, prompts, comm, operators, say, **more)
    return Decoded(made.tokens, made.step_ns), made.told


def run_cpu(card: ModelCard, options: RunOptions, say: Progress) -> Outcome:
    """All ranks as threads of this process, by the twins; they must agree on every token."""
    import torch

    from ..kernels.collectives import SingleRank, run_virtual_ranks
    from .caches import DecodeCache
    from .greedy import decode_eager
    from .operators import ReferenceOperators
    from .packing import pack
    from .random_weights import random_tensors
    from .sharding import shard

    dtype = torch.bfloat16
    whole = None if options.checkpoint else random_tensors(card, seed=options.seed, dtype=dtype)
    prompts = _prompts(options, card.vocab_size, "cpu")

    def rank(comm: Collectives) -> tuple[Decoded, dict[str, Any] | None, int]:
        if whole is None:
            own = _loaded(card, options, comm.rank, "cpu", say)
        else:
            own = pack(shard(whole, card, tp=comm.size, rank=comm.rank), card, tp=comm.size, rank=comm.rank)
        tell = say if comm.rank == 0 else _silent
        if options.drafts:
            return *_speculated(own, options, prompts, comm, ReferenceOperators(card), tell), own.bytes
        cache = DecodeCache(card, tp=comm.size, max_requests=options.rows, max_context=options.context, dtype=dtype)
        prepare = _preparation(options, own, cache, prompts, comm, tell)
        decoded = decode_eager(
            own, cache, prompts[:, -1], options.tokens, ReferenceOperators(card), comm,
            lambda done, of: tell("step", done, of), prepare,
        )  # fmt: skip
        return decoded, None, own.bytes

    # generous, but bounded: a 16-rank step of the small model takes a few seconds on one core
    timeout = 120 + 30.0 * (options.tokens + options.rows * options.prompt)
    results = [rank(SingleRank())] if options.tp == 1 else run_virtual_ranks(options.tp, rank, timeout_s=timeout)
    decoded, told, weight_bytes = results[0]
    different = [index for index, (other, *_) in enumerate(results) if other.tokens != decoded.tokens]
    if different:
        raise RuntimeError(f"ranks disagree: rank {different[0]} chose other tokens than rank 0")
    ranks = "one rank" if options.tp == 1 else f"{options.tp} ranks as threads of this process"
    return Outcome(decoded, None, ranks, "reference (twins)", weight_bytes, told)


def _gpu_operators(
    card: ModelCard, options: RunOptions, choices: tuple[Choice, ...], weights: RankWeights
) -> AutoOperators:
    if options.backend == "auto":
        from .auto import AutoOperators

        return AutoOperators(card, dtype=weights.dtype, device=weights.device)
    from .tuned import TunedOperators

    return TunedOperators(card, choices, dtype=weights.dtype, device=weights.device)


def run_gpu(
    card: ModelCard,
    options: RunOptions,
    choices: tuple[Choice, ...],
    device: Device,
    say: Progress,
    recorder: AbstractContextManager[object] | None,
    bundle: Finder | None = None,
) -> Outcome:
    """Rank 0 alone on the GPU: eagerly, then from a captured graph; ``recorder`` sees the graph's replays.

    Args:
        card: the model.
        options: what to run.
        choices: of the bundle, those that can be launched here.
        device: the GPU.
        say: is told how far it is.
        recorder: what records a device trace, or None.
        bundle: what the choices were made from.
    """
    import torch

    from ..kernels.collectives import SingleRank, StandIn
    from .auto import AutoOperators
    from .caches import DecodeCache
    from .greedy import GraphDecoder, decode_eager
    from .random_weights import random_rank_weights

    where, dtype = f"cuda:{device.index}", torch.bfloat16
    comm: Collectives = SingleRank() if options.tp == 1 else StandIn(0, options.tp)
    if options.checkpoint:
        weights = _loaded(card, options, 0, where, say)
    else:
        weights = random_rank_weights(
            card, seed=options.seed, dtype=dtype, device=where, tp=options.tp,
            progress=lambda done, of: say("weights", done, of),
        )  # fmt: skip
    prompts = _prompts(options, weights.embed.shape[0], where)
    ranks = "one rank" if options.tp == 1 else f"rank 0 of {options.tp} alone, stand-in collectives"
    if options.drafts:
        auto = AutoOperators(card, dtype=dtype, device=where)
        scope = None
        if options.backend != "auto":  # one rank alone, and steps with drafts are captured in no graph yet
            scope = group_scope([here(card, device, bundle, tp=options.tp, graph_rows=0)])
        tuned = (lambda _rows: _gpu_operators(card, options, choices, weights)) if scope else None
        eager, told = _speculated(weights, options, prompts, comm, auto, say, scope=scope, specialized=tuned)
        return Outcome(eager, None, ranks, auto.name, weights.bytes, told)
    operators = _gpu_operators(card, options, choices, weights)
    cache = DecodeCache(
        card, tp=options.tp, max_requests=options.rows, max_context=options.context, dtype=dtype, device=where
    )
    first, prepare = prompts[:, -1], _preparation(options, weights, cache, prompts, comm, say)
    eager = decode_eager(
        weights, cache, first, options.tokens, operators, comm, lambda done, of: say("eager step", done, of), prepare
    )
    decoder = GraphDecoder(weights, cache, options.rows, operators, comm, prepare)
    graph = decoder.decode(first, options.tokens)
    say("graph step", options.tokens, options.tokens)
    if recorder is not None:
        with recorder:
            decoder.decode(first, options.tokens)
    decoder.close()
    return Outcome(eager, graph, ranks, operators.name, weights.bytes)
