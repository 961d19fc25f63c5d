"""A bench of a file of sessions: agent traffic through both backends in one run, with or without drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels import InputError, ModelCard
from ...kernels.collectives import StandIn
from ...kernels.device import Device, discover
from ...kernels.mla.family import BLOCK_SIZE
from ..choices import Choice, Finder, StepForm, choose
from ..evaluation.compare import NO_GPU
from ..fitting import fitting_here
from ..group import Group, join
from ..memory import check_memory, peak_memory
from ..plan import AUTO_NOTE, TUNED_FAMILIES
from ..run_options import RunOptions, check_context
from ..run_places import known_gpu
from ..sharding import check_holds
from ..traffic.both import MEASURES, Turns, replay_backend
from ..traffic.seen import measured
from ..traffic.sessions import Traffic
from .measures import BY_LAYER
from .presets import Preset
from .reports import Folder, between, bundled, conditions, drafting, evidence, named
from .run import BOTH, check_bundle, transport_of, write_reports

if TYPE_CHECKING:
    from ..backends import Backend
    from ..dispatch import Dispatcher
    from ..dspark.weights import DraftWeights
    from ..traffic.steps import Steps
    from .places import Say

MANY = "a replay's steps have many shapes: `decode bench` without a workload measures one"


@dataclass(frozen=True)
class Handling:
    """What is done with contexts and pauses."""

    keep_gb: float = 16.0
    """Host memory for contexts between turns."""
    reuse: bool = True
    """Contexts are put back; else computed again in every turn."""
    real_pauses: bool = False
    """Time in which nothing runs is waited for; else only counted."""

    def check(self) -> None:
        """Raise InputError for memory that cannot be."""
        if not 0 <= self.keep_gb < 1e6:
            raise InputError(f"keep-gb is {self.keep_gb:g}; memory for contexts is 0 or more")

    @property
    def words(self) -> str:
        """For the conditions."""
        reuse = "" if self.reuse else " no reuse"
        return f"keep {self.keep_gb:g} GB{reuse}{' real pauses' if self.real_pauses else ''}"


def _choices(
    card: ModelCard, options: RunOptions, traffic: Traffic, bundle: Finder | None, device: Device | None
) -> tuple[Choice, ...]:  # fmt: skip
    return choose(
        card, tp=options.tp, rows=options.step_rows, gpu=known_gpu(options, device), bundle=bundle, only=TUNED_FAMILIES,
        objective="measured" if device and device.card else "predicted", model=options.model,
        form=StepForm(options.drafts + 1, options.kv_dtype, traffic.context + options.drafts, options.dcp),
    )  # fmt: skip


def _steps(
    card: ModelCard, options: RunOptions, backend: Backend, made: list[DraftWeights]
) -> Callable[[Dispatcher], Steps]:
    """Captured ones of a backend; the drafter's weights are ``made`` or loaded once for all backends."""
    from ..scope import StepShape
    from ..traffic.captured import CapturedDraftedSteps, CapturedPlainSteps, Served

    def shape(requests: int) -> StepShape:
        return StepShape((options.drafts,) * requests)

    def steps(dispatcher: Dispatcher) -> Steps:
        def note(requests: int) -> None:
            if backend.scope:
                dispatcher.tally.note(backend.scope.judge(shape(requests)))

        served = Served(options.rows, lambda requests: backend.of(shape(requests)), note)
        if not options.drafts:
            return CapturedPlainSteps(dispatcher, served)
        from ..dspark.acceptance import acceptance
        from ..dspark.drafter import Drafter
        from ..speculate_run import drafter_weights, fitted_card

        if not made:
            made.append(drafter_weights(fitted_card(card), dispatcher.weights, options))
        drafter = Drafter(made[0], dispatcher.weights, dispatcher.cache, dispatcher.comm)
        accepts = acceptance(options.drafts, options.temperature, options.acceptance_length)
        return CapturedDraftedSteps(
            dispatcher, drafter, accepts, served, drafts=options.drafts, temperature=options.temperature
        )

    return steps


WARM_TOKENS = 64


def _warm(dispatcher: Dispatcher) -> None:
    """A prompt that is nobody's: what is made at a first prefill is no user's wait."""
    from ..dispatch import StepWork

    cache, comm = dispatcher.cache, dispatcher.comm
    # one that a rank alone embeds; ranks of a group are all given the same
    slot, token = cache.add(), comm.rank * dispatcher.weights.embed.shape[0] if isinstance(comm, StandIn) else 0
    dispatcher.run(StepWork(prompts={slot: [token] * min(WARM_TOKENS, cache.max_context)}))
    cache.release(slot)


def check_traffic(
    card: ModelCard, options: RunOptions, traffic: Traffic, handling: Handling, group: Group | None
) -> None:
    """Raise InputError for traffic that cannot be replayed by this process' rank, alone or one of torchrun's; nothing was made."""
    if group is None:
        raise InputError(
            f"sessions are replayed by a process a rank: torchrun --nproc-per-node {options.tp} -m k3lab.cli.main decode bench,"
            " or one rank alone with --rank and --of"
        )
    handling.check()
    if group.alone:
        first = min(one.system_tokens + one.turns[0].prompt for one in traffic.sessions)
        check_holds(group.rank, options.dcp, first, "a session's first prompt must be longer")
    check_context(card, traffic.context + options.drafts)
    if options.drafts:
        from ..speculate_run import check_drafter

        check_drafter(card, options, group.rank if group.alone else None)
    check_memory(
        card, options.tp, group.device, whole=options.checkpoint is None, requests=options.rows,
        context=-(-(traffic.context + options.drafts) // options.dcp), verify=options.drafts + 1, one_rank=group.alone,
    )  # fmt: skip


def run_traffic(
    card: ModelCard, options: RunOptions, traffic: Traffic, *, names: Sequence[str] = BOTH, handling: Handling | None = None,
    bundle: Finder | None = None, preset: Preset | None = None, out: Path | None = None,
    environment: Mapping[str, Any] | None = None, say: Say | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Replay on each of the named backends; as :func:`~k3lab.decode.bench.run.run_bench`.

    Args:
        card: the model.
        options: rows are turns at a time; drafts, acceptance, weights, the rank; lengths are the file's.
        traffic: the sessions.
        names: backends, in their order.
        handling: of contexts and pauses.
        bundle: of the tuned path.
        preset: whose published figures stand beside ours.
        out: folder for turns as they end and a report a backend.
        environment: GPU, driver, versions, commit.
        say: is told how far it is.

    Raises:
        InputError: what cannot be run here; nothing was run.
    """
    how, tell = handling or Handling(), say or (lambda _what, _done, _of: None)
    options.check(card)
    check_bundle(bundle, names)
    device = discover()
    group = join(options.tp, device, rank=options.rank, transport=options.transport)
    try:
        check_traffic(card, options, traffic, how, group)
        assert group
        return _replay(card, options, traffic, names, how, bundle, preset, out, environment, tell, group)
    finally:
        if group:
            group.close()


def _replay(
    card: ModelCard, options: RunOptions, traffic: Traffic, names: Sequence[str], how: Handling, bundle: Finder | None,
    preset: Preset | None, out: Path | None, environment: Mapping[str, Any] | None, say: Say, group: Group,
) -> dict[str, Any]:  # fmt: skip
    from ..caches import DecodeCache
    from ..run import head_lines, usable_choices
    from .places import backend_here, weights_here

    device, first = group.device, group.rank == 0 or group.alone
    tell = say if first else lambda _what, _done, _of: None
    wanted: tuple[Choice, ...] = ()
    if "latency_specialized" in names:
        wanted = _choices(card, options, traffic, bundle, device)
        bundle = fitting_here(bundle, wanted, group)
        wanted = _choices(card, options, traffic, bundle, device)
    choices = usable_choices(wanted, options, device)
    folder = Folder(out if first else None, names, "turns")
    files = {name: Turns(folder.kept(name) if folder.path else None) for name in names}
    weights = weights_here(card, options, group.comm, group, tell)
    drafter, ran = list[Any](), {}
    for name in names:
        backend, own = backend_here(card, options, name, weights, group.comm, group, bundle, choices)
        cache = DecodeCache(
            card, tp=options.tp, max_requests=options.rows, max_context=traffic.context + options.drafts, dtype=weights.dtype,
            cache_dtype=options.cache_dtype,            max_verify=options.drafts + 1, device=weights.device, block_size=BLOCK_SIZE, padding=True, dcp=options.dcp,
        )  # fmt: skip
        _warm(backend.dispatcher(weights, cache, group.comm, own, tell))
        dispatcher = backend.dispatcher(weights, cache, group.comm, own, tell)
        replayed = partial(
            replay_backend, dispatcher, traffic, rows=options.rows, keep_bytes=int(how.keep_gb * 1e9), reuse=how.reuse,
            real_pauses=how.real_pauses, kept=files[name].add, done=partial(tell, f"{name} turns"),
            steps=_steps(card, own, backend, drafter), host=group.host,
        )  # fmt: skip
        ran[name] = group.together("the replay", replayed)
        ran[name]["operators"] = backend.used.name
        backend.check()
    notes = [
        *([AUTO_NOTE] if "auto" in names else []),
        *head_lines(replace(options, backend="latency_specialized"), wanted, device, group),
    ]
    if any(session.name.startswith("synthetic-") for session in traffic.sessions):
        notes.append("SYNTHETIC traffic: made-up sessions")
    alike = conditions(
        card, options, gpu=device.name if device else NO_GPU, gpus=group.size if group.host else 1, transport=transport_of(options, group),
        workload=f"{traffic.digest} rows {options.rows} {how.words}",
    ).to_json()  # fmt: skip
    missing = dict.fromkeys(("step time", *BY_LAYER, *(["drafter time"] if options.drafts else [])), MANY)
    if all(turn.output == 1 for session in traffic.sessions for turn in session.turns):
        missing["user rate, group decode rate"] = "one token a turn comes out of its prompt: no step was decoded"
    point = named(preset, card, options)
    reports = {
        name: {
            "conditions": alike, "backend": name, "evidence": evidence(alike), "operators": one["operators"], "ranks": group.words, "notes": notes, "measures": measured(one, MEASURES),
            "absent": missing, "dspark": drafting(card, options), "bundle": bundled(bundle, choices) if name != "auto" else None,
            "environment": environment, "preset": point, "seen": one, "steps": one["steps"],
            "weight_bytes": weights.bytes, "peak_memory_bytes": peak_memory(device),
        }
        for name, one in ran.items()
    }  # fmt: skip
    unwritten = write_reports(folder.path, reports)
    return {
        "reports": reports,
        "between": between(reports),
        "notes": notes,
        "rank": group.rank,
        "preset": point,
        "unwritten": unwritten,
    }
