"""The places a decode run can happen: all ranks as threads on the CPU, or this process' rank, on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kernels import ModelCard
from ..kernels.device import Device
from ..kernels.mla.family import BLOCK_SIZE
from .choices import Choice, Finder
from .run_options import RunOptions
from .scope import StepShape

if TYPE_CHECKING:
    import torch

    from ..kernels.collectives import Collectives
    from .caches import DecodeCache
    from .greedy import Decoded, Prepare
    from .group import Group
    from .operators import Operators
    from .speculate_run import Speculated
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
    launches: dict[str, Any] | None = None
    """Of the captured step, against the plan."""
    backend_steps: dict[str, Any] | None = None
    """Steps that the specialised backend served, and why it left the others to auto."""


def _prompts(options: RunOptions, vocabulary: int, device: str, first: int = 0) -> torch.Tensor:
    """Random ids [rows, prompt] among ``vocabulary`` from ``first`` on."""
    import torch

    generator = torch.Generator().manual_seed(options.seed)
    return first + torch.randint(0, vocabulary, (options.rows, options.prompt), generator=generator).to(device)


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


@dataclass(frozen=True)
class _Made:
    eager: Decoded
    graph: Decoded | None
    told: dict[str, Any]
    kernels: list[str]


def _speculated(
    weights: RankWeights, options: RunOptions, prompts: torch.Tensor, comm: Collectives, operators: Operators, say: Progress,
    **more: Any,
) -> _Made:  # fmt: skip
    from .greedy import Decoded
    from .speculate_run import speculate

    made: Speculated = speculate(weights, options, prompts, comm, operators, say, **more)
    graph = Decoded(made.graph_tokens, made.graph_step_ns) if made.graph_tokens is not None else None
    return _Made(Decoded(made.tokens, made.step_ns), graph, made.told, made.kernels)


def run_cpu(card: ModelCard, options: RunOptions, say: Progress, group: Group | None = None) -> Outcome:
    """On the twins: all ranks as threads of this process, or the one rank that this process is in a group."""
    import torch

    from ..kernels.collectives import run_virtual_ranks
    from .caches import DecodeCache
    from .context_parallel import context_group
    from .greedy import decode_eager
    from .operators import ReferenceOperators
    from .packing import pack
    from .random_weights import random_rank_weights, random_tensors
    from .sharding import shard

    dtype = torch.bfloat16
    alone = group is not None and group.alone
    whole = None if options.checkpoint or alone else random_tensors(card, seed=options.seed, dtype=dtype)
    part = card.vocab_size // options.tp

    def rank(comm: Collectives) -> tuple[Decoded, dict[str, Any] | None, int]:
        tell = say if comm.rank == 0 or alone else _silent
        if options.checkpoint:
            own = _loaded(card, options, comm.rank, "cpu", say)
        elif whole is None:
            own = random_rank_weights(card, seed=options.seed, dtype=dtype, tp=options.tp, rank=comm.rank)
        else:
            own = pack(shard(whole, card, tp=comm.size, rank=comm.rank), card, tp=comm.size, rank=comm.rank)
        prompts = _prompts(options, *((part, "cpu", comm.rank * part) if alone else (card.vocab_size, "cpu")))
        operators = ReferenceOperators(card, context_group=context_group(comm, options.dcp))
        if options.drafts:
            made = _speculated(own, options, prompts, comm, operators, tell)
            return made.eager, made.told, own.bytes
        cache = DecodeCache(
            card,
            tp=comm.size,
            max_requests=options.rows,
            max_context=options.context,
            dtype=dtype,
            dcp=options.dcp,
            cache_dtype=options.cache_dtype,
        )
        prepare = _preparation(options, own, cache, prompts, comm, tell)
        decoded = decode_eager(
            own, cache, prompts[:, -1], options.tokens, operators, comm,
            lambda done, of: tell("step", done, of), prepare,
        )  # fmt: skip
        return decoded, None, own.bytes

    if group is not None:
        comm = group.comm
        decoded, told, weight_bytes = group.together("decoding", lambda: rank(comm))
        _same_tokens(group, decoded)
        return Outcome(decoded, None, group.words, "reference (twins)", weight_bytes, told)
    # generous, but bounded: a 16-rank step of the small model takes a few seconds on one core
    timeout = 120 + 30.0 * (options.tokens + options.rows * options.prompt)
    results = run_virtual_ranks(options.tp, rank, timeout_s=timeout)
    decoded, told, weight_bytes = results[0]
    different = [index for index, (other, *_) in enumerate(results) if other.tokens != decoded.tokens]
    if different:
        raise RuntimeError(f"ranks disagree: rank {different[0]} chose other tokens than rank 0")
    words = f"{options.tp} ranks as threads of this process"
    return Outcome(decoded, None, words, "reference (twins)", weight_bytes, told)


def _same_tokens(group: Group, decoded: Decoded) -> None:
    """Raise RuntimeError unless every process chose the same tokens."""
    import torch

    if group.host is None:
        return
    mine = torch.tensor(decoded.tokens, dtype=torch.int64)[None]
    for rank, theirs in enumerate(group.host.all_gather(mine, 0)):
        if not torch.equal(theirs, mine[0]):
            raise RuntimeError(f"ranks disagree: rank {rank} chose other tokens than rank {group.rank}")


def run_gpu(
    card: ModelCard,
    options: RunOptions,
    choices: tuple[Choice, ...],
    group: Group,
    say: Progress,
    recorder: AbstractContextManager[object] | None,
    bundle: Finder | None = None,
    planned: Mapping[str, int] | None = None,
) -> Outcome:
    """This process' rank on its GPU: eagerly, then from a captured graph; ``recorder`` sees the graph's replays.

    Args:
        card: the model.
        options: what to run.
        choices: of the bundle, those that can be launched here.
        group: this rank's, with its GPU.
        say: is told how far it is.
        recorder: what records a device trace, or None.
        bundle: what the choices were made from.
        planned: launches a step of every tuned kernel.
    """
    import torch

    from .backends import backend_of
    from .caches import DecodeCache
    from .graphs import kernel_names
    from .greedy import GraphDecoder, decode_dispatched
    from .launches import counted
    from .prefill import fill_context
    from .random_weights import random_rank_weights, random_weights
    from .ranges import profiler_range

    assert group.device
    comm, where, dtype = group.comm, f"cuda:{group.device.index}", torch.bfloat16
    if options.checkpoint:
        weights = _loaded(card, options, group.rank, where, say)
    elif group.host is not None:  # ranks that answer each other hold slices of one model
        weights = random_weights(card, seed=options.seed, dtype=dtype, device=where, tp=options.tp, rank=group.rank)
    else:
        weights = random_rank_weights(
            card, seed=options.seed, dtype=dtype, device=where, tp=options.tp, rank=group.rank,
            progress=lambda done, of: say("weights", done, of),
        )  # fmt: skip
    part = weights.embed.shape[0]
    prompts = _prompts(options, part, where, group.rank * part) if group.alone else _prompts(options, card.vocab_size, where)  # fmt: skip
    backend = backend_of(card, options, choices, weights, group, bundle)
    if options.drafts:
        made = group.together("decoding with drafts", lambda: _speculated(
            weights, options, prompts, comm, backend.auto, say, scope=backend.scope,
            specialized=(lambda _rows: backend.used) if backend.scope else None, captured=True, recorder=recorder,
        ))  # fmt: skip
        launches = counted(backend.planned(planned, options), made.kernels) if made.kernels else None
        return Outcome(made.eager, made.graph, group.words, backend.used.name, weights.bytes, made.told, launches)
    sizes: dict[str, Any] = {
        "tp": options.tp, "max_requests": options.rows, "max_context": options.context, "dtype": dtype, "device": where,
        "block_size": BLOCK_SIZE, "padding": True, "dcp": options.dcp, "cache_dtype": options.cache_dtype,
    }  # fmt: skip
    cache = DecodeCache(card, **sizes)
    dispatcher = backend.dispatcher(weights, cache, comm, options, say, mark=profiler_range)

    def fill(slots: Sequence[int]) -> None:
        fill_context(cache, slots, options.fill, seed=options.seed)

    eager = group.together("eager steps", lambda: decode_dispatched(
        dispatcher, prompts, options.tokens, backend.check, lambda done, of: say("eager step", done, of),
        fill if options.fill else None,
    ))  # fmt: skip
    prepare = _preparation(options, weights, cache, prompts, comm, say)
    operators = backend.of(StepShape((0,) * options.rows))

    def replayed() -> tuple[Decoded, list[str]]:
        decoder = GraphDecoder(weights, cache, options.rows, operators, comm, prepare)
        graph = decoder.decode(prompts[:, -1], options.tokens)
        say("graph step", options.tokens, options.tokens)
        if recorder is not None:
            with recorder:
                group.meet()  # profilers start at leisure
                decoder.decode(prompts[:, -1], options.tokens)
        decoder.close()
        return graph, kernel_names(decoder.capture.graphs[0])

    graph, names = group.together("captured steps", replayed)
    _same_tokens(group, graph)
    tally = dispatcher.tally.to_json() if backend.scope else None
    launches = counted(backend.planned(planned, options), names)
    return Outcome(eager, graph, group.words, backend.used.name, weights.bytes, None, launches, tally)
