"""Where a bench runs: all ranks as threads on the CPU, or this process' rank, on the CPU or on a GPU; both backends one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...kernels import ModelCard
from ...kernels.collectives import Collectives
from ..backends import Backend, backend_of
from ..choices import Choice, Finder
from ..group import Group
from ..launches import counted
from ..letters import letters
from ..operators import ReferenceOperators
from ..packing import pack
from ..random_weights import random_rank_weights, random_tensors, random_weights
from ..run_options import RunOptions
from ..scope import StepShape
from ..sharding import ModelTensors, shard
from ..weights import MoeMlp, RankWeights
from .batches import Finished, Timing, rounds, seen
from .layers import by_kind
from .loops import cache_of, loop_of, prompts_of

if TYPE_CHECKING:
    from ..auto import AutoOperators

Say = Callable[[str, int, int], None]
Keep = Callable[[str, Finished], None]
"""Called with a backend's name and a request of it that ended."""


@dataclass(frozen=True)
class Wanted:
    """What a rank is to run."""

    card: ModelCard
    options: RunOptions
    names: tuple[str, ...]
    """Backends, in their order."""
    rounds: int
    samples: int
    """Of each graph of layers."""
    keep: Keep
    say: Say


def run_here(wanted: Wanted, group: Group | None, bundle: Finder | None, choices: tuple[Choice, ...], planned: Mapping[str, int]) -> dict[str, Any]:  # fmt: skip
    """Run; backend to what came of it, as data.

    Args:
        wanted: what.
        group: this rank's; None: all ranks are threads of this process.
        bundle: of the tuned path.
        choices: made from it, those that can be launched here.
        planned: launches a step of every tuned kernel.
    """
    from ...kernels.collectives import run_virtual_ranks

    if group is not None:
        made: dict[str, Any] = group.together(
            "the bench", lambda: _rank(wanted, group.comm, group, bundle, choices, planned)
        )
        if group.host:
            mine = {name: one["seen"]["tokens_digest"] for name, one in made.items()}
            _same(letters(mine, group.host, 256, "what was put out"))
        return made
    options = wanted.options
    whole = None if options.checkpoint else random_tensors(wanted.card, seed=options.seed, dtype=torch.bfloat16)
    timeout = 240 + 60.0 * wanted.rounds * (options.tokens + options.rows * options.prompt)
    own, *others = run_virtual_ranks(
        options.tp, lambda comm: _rank(wanted, comm, None, bundle, choices, planned, whole), timeout_s=timeout
    )
    _same([{name: one["seen"]["tokens_digest"] for name, one in made.items()} for made in (own, *others)])
    return own


def _same(told: Sequence[Mapping[str, str]]) -> None:
    """Raise RuntimeError unless every rank has put out the tokens of rank 0, by their digests, on every backend."""
    for name, digest in told[0].items():
        if any(other[name] != digest for other in told):
            raise RuntimeError(f"ranks disagree: another rank chose other tokens than rank 0 on {name}")


def _rank(
    wanted: Wanted, comm: Collectives, group: Group | None, bundle: Finder | None, choices: tuple[Choice, ...],
    planned: Mapping[str, int], whole: ModelTensors | None = None,
) -> dict[str, Any]:  # fmt: skip
    tells = comm.rank == 0 or (group is not None and group.alone)
    say: Say = wanted.say if tells else lambda _what, _done, _of: None
    weights = weights_here(wanted.card, wanted.options, comm, group, say, whole)
    made = {}
    for name in wanted.names:
        backend, options = backend_here(wanted.card, wanted.options, name, weights, comm, group, bundle, choices)
        keep = partial(wanted.keep, name) if tells else _unkept
        made[name] = _run(wanted, name, options, weights, comm, group, backend, planned, keep, say)
    return made


def _unkept(_one: Finished) -> None:
    """Another rank keeps it."""


def weights_here(
    card: ModelCard, options: RunOptions, comm: Collectives, group: Group | None, say: Say, whole: ModelTensors | None = None
) -> RankWeights:  # fmt: skip
    """This rank's, loaded or random; ``whole``: what the threads of this process cut theirs from."""
    from ..checkpoint.load import load_rank

    where = f"cuda:{group.device.index}" if group and group.device else "cpu"
    own: dict[str, Any] = {"tp": options.tp, "rank": comm.rank, "device": where}
    if options.checkpoint:
        told = lambda done, of: say("weights, MB", done // 10**6, of // 10**6)  # noqa: E731
        return load_rank(options.checkpoint, card=card, progress=told, **own)
    if whole is not None:
        return pack(shard(whole, card, tp=options.tp, rank=comm.rank), card, tp=options.tp, rank=comm.rank)
    if group is not None and group.host is not None:  # ranks that answer each other hold slices of one model
        return random_weights(card, seed=options.seed, dtype=torch.bfloat16, **own)
    told = lambda done, of: say("weights", done, of)  # noqa: E731
    return random_rank_weights(card, seed=options.seed, dtype=torch.bfloat16, progress=told, **own)


def backend_here(
    card: ModelCard, options: RunOptions, name: str, weights: RankWeights, comm: Collectives, group: Group | None,
    bundle: Finder | None, choices: tuple[Choice, ...],
) -> tuple[Backend, RunOptions]:  # fmt: skip
    """Operators of a backend, and the options of its dispatcher; without a GPU PyTorch on the CPU, or the twins for the tuned path.

    Args:
        card: the model.
        options: of the run.
        name: of the backend.
        weights: this rank's; its experts are brought into the layout that the backend reads.
        comm: its collectives.
        group: this rank's; None: a thread of this process.
        bundle: of the tuned path.
        choices: made from it.
    """
    from ..auto import AutoOperators
    from ..context_parallel import context_group
    from ..expert_memory import release
    from ..lone import lone_peers

    if group is None or group.device is None:
        alone = group is not None and group.alone
        peers = lone_peers(card, tp=options.tp, rows=options.step_rows, device="cpu") if alone else None
        shared = context_group(comm, options.dcp)
        used: Any = ReferenceOperators(card, context_group=shared)
        if name == "auto":
            used = AutoOperators(card, dtype=weights.dtype, device="cpu", peers=peers, context_group=shared)
        return Backend(used, used, None), replace(options, backend="auto")
    if name == "auto":  # a layer's experts as the checkpoint has them, whoever ran before
        for layer in weights.layers:
            if isinstance(layer.mlp, MoeMlp):
                release(layer.mlp)
        bundle, choices = None, ()
    options = replace(options, backend=name)
    return backend_of(card, options, choices, weights, group, bundle), options


def _run(
    wanted: Wanted, name: str, options: RunOptions, weights: RankWeights, comm: Collectives, group: Group | None, backend: Backend,
    planned: Mapping[str, int], keep: Callable[[Finished], None], say: Say,
) -> dict[str, Any]:  # fmt: skip
    from ..graphs import kernel_names

    shape = StepShape((options.drafts,) * options.rows)
    operators: AutoOperators = backend.of(shape) if backend.scope else backend.used
    cache, part = cache_of(weights, options), weights.embed.shape[0] if group is not None and group.alone else None
    dispatcher = backend.dispatcher(weights, cache, comm, options, say)
    loop, timing, ended = loop_of(dispatcher, operators, options), Timing(), list[Finished]()
    total = wanted.rounds * options.rows

    def prompts(number: int) -> Sequence[Sequence[int]]:
        return prompts_of(options, weights.card.vocab_size, comm, part=part, number=number)

    def served(requests: int) -> None:
        if backend.scope:
            dispatcher.tally.note(backend.scope.judge(StepShape((options.drafts,) * requests)))

    for one in rounds(
        loop,
        prompts,
        options.tokens,
        wanted.rounds,
        timing=timing,
        seed=options.seed,
        check=operators.check,
        served=served,
    ):
        ended.append(one)
        keep(one)
        say(f"{name} requests", len(ended), total)
    graphs = loop.capture.graphs
    chip = group.device.card if group and group.device else None
    return {
        "seen": seen(ended, timing), "each": [one.to_json() for one in ended], "operators": operators.name,
        "weight_bytes": weights.bytes,
        "steps": dispatcher.tally.to_json() if backend.scope else None,
        "launches": counted(backend.planned(planned, options), kernel_names(graphs[-1])) if graphs else None,
        "layers": by_kind(weights, comm, operators, options, name, chip, samples=wanted.samples, say=say) if chip else None,
    }  # fmt: skip
