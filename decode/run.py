"""Running a model of the Kimi K3 structure for some tokens, on either backend, here and now.

Without a GPU the twins run, eagerly, all ranks of the group as threads. On a GPU one rank runs: alone
for TP 1, else rank 0 with stand-in collectives; eagerly and from a CUDA graph, whose tokens must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernels import Evidence, InputError, ModelCard
from ..kernels.device import Device, discover
from .choices import Choice, Fallback, Finder, Tuned, choose, without_gpu
from .cures import model_word
from .memory import check_memory, peak_memory, watch_memory
from .plan import AUTO_NOTE, TUNED_FAMILIES
from .report import RunReport
from .run_options import RunOptions
from .unused import unused_entries

if TYPE_CHECKING:
    import torch

    from ..kernels.collectives import Collectives
    from .auto import AutoOperators
    from .caches import DecodeCache
    from .greedy import Decoded, Prepare
    from .weights import RankWeights

Progress = Callable[[str, int, int], None]
"""Called with (what, done, of)."""
Recorder = Callable[[Path], AbstractContextManager[object]]
"""What records the block under it to a file, and says at the call if it cannot: ``k3lab.traces.capture.recording``."""


def _gpu(options: RunOptions, device: Device | None) -> str:
    return device.card.name if device and device.card else options.gpu


def _wanted(card: ModelCard, options: RunOptions, bundle: Finder | None, device: Device | None) -> tuple[Choice, ...]:
    """What the bundle offers for this GPU, or for ``options.gpu`` where there is none."""
    if options.backend == "auto":
        if bundle is not None:
            raise InputError("backend auto uses no bundle; --backend latency_specialized does")
        return ()
    known = _gpu(options, device)
    model = [] if options.checkpoint else ["--model", options.model or model_word(card)]
    command = ["run", *model, *options.again]
    command += ["--gpu", known] if device is None else []
    command += ["--trace", str(options.trace)] if options.trace else []
    return choose(
        card,
        tp=options.tp,
        rows=options.rows,
        gpu=known,
        bundle=bundle,
        only=TUNED_FAMILIES,
        objective="measured" if device and device.card else "predicted",
        model=options.model,
        command=tuple(command),
    )


def _usable(wanted: tuple[Choice, ...], options: RunOptions, device: Device | None) -> tuple[Choice, ...]:
    """What of it can be launched here."""
    if device is None:
        return without_gpu(wanted, "no GPU here: the twin runs", f"run it on a {options.gpu}")
    if device.card is None:
        return without_gpu(wanted, f"no GPU card for {device.name}", "add its card to kernels/gpu_cards.py")
    return wanted


def _head(options: RunOptions, wanted: tuple[Choice, ...], device: Device | None) -> tuple[str, ...]:
    gpu = _gpu(options, device)
    lines = [AUTO_NOTE] if options.backend == "auto" else []
    lines += [
        f"{one.evidence} only, never measured on a {gpu}: {one.label}, engine {one.engine}"
        for one in wanted
        if isinstance(one, Tuned) and one.evidence != Evidence.MEASURED
    ]
    if device is None:
        lines.append("no GPU: the twins run on the CPU; times say nothing about kernels")
    elif options.tp > 1:
        lines.append(
            f"one rank of {options.tp} alone: collectives are stand-ins, tokens and step times are not those of the group"
        )
    if options.fill:
        lines.append(
            f"a context of {options.fill} tokens is made up (--fill-context): caches hold random numbers, the tokens mean nothing"
        )
    if options.checkpoint is None:
        lines.append(f"random weights (seed {options.seed}): the tokens mean nothing")
    return tuple(lines)


def run(
    card: ModelCard,
    options: RunOptions,
    *,
    bundle: Finder | None = None,
    progress: Progress | None = None,
    record: Recorder | None = None,
) -> RunReport:
    """Decode ``options.tokens`` tokens for ``options.rows`` requests with random weights.

    Args:
        card: the model.
        options: what to run.
        bundle: for ``latency_specialized``; entries that are only predicted count if it was loaded so.
        progress: called as the run gets on.
        record: what writes ``options.trace``.

    Raises:
        InputError: something in ``options`` cannot be run here; nothing was run.
    """
    options.check(card)
    if options.trace and record is None:
        raise InputError("a trace needs what records it: record=k3lab.traces.capture.recording")
    recorder = record(options.trace) if options.trace and record else None
    device = discover()
    if options.trace and device is None:
        raise InputError("--trace records device kernels and needs an NVIDIA GPU, and none is visible here")
    wanted = _wanted(card, options, bundle, device)
    choices = _usable(wanted, options, device)
    check_memory(
        card, options.tp, device, whole=options.checkpoint is None, requests=options.rows, context=options.context
    )
    watch_memory(device)
    say = progress or (lambda _what, _done, _of: None)
    decoded = (
        _run_cpu(card, options, say) if device is None else _run_gpu(card, options, choices, device, say, recorder)
    )
    return RunReport(
        head=_head(options, wanted, device),
        model=card.name,
        tp=options.tp,
        ranks=decoded.ranks,
        rows=options.rows,
        tokens_per_request=options.tokens,
        prompt_tokens=options.prompt,
        filled_context=options.fill,
        backend=options.backend,
        device=device.name if device else "cpu",
        dtype="bfloat16",
        operators=decoded.operators,
        weight_bytes=decoded.weight_bytes,
        peak_memory_bytes=peak_memory(device),
        tokens=decoded.eager.tokens,
        step_ns=decoded.eager.step_ns,
        graph_step_ns=decoded.graph.step_ns if decoded.graph else None,
        graph_agrees=decoded.graph.tokens == decoded.eager.tokens if decoded.graph else None,
        tuned=tuple(one for one in choices if isinstance(one, Tuned)),
        fallbacks=tuple(one for one in choices if isinstance(one, Fallback)),
        trace=options.trace,
        unused=unused_entries(card, wanted, bundle.entries, tp=options.tp, rows=options.rows, gpu=_gpu(options, device))
        if bundle
        else (),
    )


@dataclass(frozen=True)
class _Outcome:
    eager: Decoded
    graph: Decoded | None
    ranks: str
    operators: str
    weight_bytes: int


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


def _run_cpu(card: ModelCard, options: RunOptions, say: Progress) -> _Outcome:
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

    def rank(comm: Collectives) -> tuple[Decoded, int]:
        if whole is None:
            own = _loaded(card, options, comm.rank, "cpu", say)
        else:
            own = pack(shard(whole, card, tp=comm.size, rank=comm.rank), card, tp=comm.size, rank=comm.rank)
        cache = DecodeCache(card, tp=comm.size, max_requests=options.rows, max_context=options.context, dtype=dtype)
        tell = say if comm.rank == 0 else _silent
        prepare = _preparation(options, own, cache, prompts, comm, tell)
        decoded = decode_eager(
            own, cache, prompts[:, -1], options.tokens, ReferenceOperators(card), comm,
            lambda done, of: tell("step", done, of), prepare,
        )  # fmt: skip
        return decoded, own.bytes

    # generous, but bounded: a 16-rank step of the small model takes a few seconds on one core
    timeout = 120 + 30.0 * (options.tokens + options.rows * options.prompt)
    results = [rank(SingleRank())] if options.tp == 1 else run_virtual_ranks(options.tp, rank, timeout_s=timeout)
    decoded, weight_bytes = results[0]
    different = [index for index, (other, _) in enumerate(results) if other.tokens != decoded.tokens]
    if different:
        raise RuntimeError(f"ranks disagree: rank {different[0]} chose other tokens than rank 0")
    ranks = "one rank" if options.tp == 1 else f"{options.tp} ranks as threads of this process"
    return _Outcome(decoded, None, ranks, "reference (twins)", weight_bytes)


def _gpu_operators(
    card: ModelCard, options: RunOptions, choices: tuple[Choice, ...], weights: RankWeights
) -> AutoOperators:
    if options.backend == "auto":
        from .auto import AutoOperators

        return AutoOperators(card, dtype=weights.dtype, device=weights.device)
    from .tuned import TunedOperators

    return TunedOperators(card, choices, dtype=weights.dtype, device=weights.device)


def _run_gpu(
    card: ModelCard,
    options: RunOptions,
    choices: tuple[Choice, ...],
    device: Device,
    say: Progress,
    recorder: AbstractContextManager[object] | None,
) -> _Outcome:
    import torch

    from ..kernels.collectives import SingleRank, StandIn
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
    operators = _gpu_operators(card, options, choices, weights)
    cache = DecodeCache(
        card, tp=options.tp, max_requests=options.rows, max_context=options.context, dtype=dtype, device=where
    )
    prompts = _prompts(options, weights.embed.shape[0], where)
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
    ranks = "one rank" if options.tp == 1 else f"rank 0 of {options.tp} alone, stand-in collectives"
    return _Outcome(eager, graph, ranks, operators.name, weights.bytes)
