"""A bench of a file of sessions: agent traffic through both backends in one run, with or without drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels import InputError, ModelCard
from ...kernels.device import discover
from ..choices import Finder
from ..memory import check_memory
from ..run_options import RunOptions, check_context, label
from ..traffic.both import Turns, measures, replay_backend
from ..traffic.sessions import Traffic
from .measures import BY_LAYER
from .presets import Preset
from .reports import Folder, between, conditions, drafting, evidence
from .run import BOTH, write_reports

if TYPE_CHECKING:
    from ..dispatch import Dispatcher
    from ..traffic.steps import Steps
    from .places import Say

EAGER = "steps of many shapes, in no captured graph: `decode bench` without a workload measures them"


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


def _steps(card: ModelCard, options: RunOptions) -> Callable[[Dispatcher], Steps] | None:
    """With drafts; the drafter's weights are made or loaded once for all backends."""
    if not options.drafts:
        return None
    from ..dspark.acceptance import acceptance
    from ..dspark.drafter import Drafter
    from ..speculate_run import drafter_weights, fitted_card
    from ..traffic.steps import DraftedSteps

    accepts = acceptance(options.drafts, options.temperature, options.acceptance_length)
    made: list[Any] = []

    def steps(dispatcher: Dispatcher) -> Steps:
        if not made:
            made.append(drafter_weights(fitted_card(card), dispatcher.weights, options))
        drafter = Drafter(made[0], dispatcher.weights, dispatcher.cache, dispatcher.comm)
        return DraftedSteps(dispatcher, drafter, accepts, drafts=options.drafts, temperature=options.temperature)

    return steps


def check_traffic(card: ModelCard, options: RunOptions, traffic: Traffic, handling: Handling) -> None:
    """Raise InputError for traffic that cannot be replayed here; nothing was made."""
    options.check(card)
    handling.check()
    check_context(card, traffic.context + options.drafts)
    if options.drafts:
        from ..speculate_run import check_drafter

        check_drafter(card, options, None)
    check_memory(
        card, 1, discover(), whole=options.checkpoint is None, requests=options.rows, context=traffic.context + options.drafts,
        verify=options.drafts + 1,
    )  # fmt: skip


def run_traffic(
    card: ModelCard, options: RunOptions, traffic: Traffic, *, names: Sequence[str] = BOTH, handling: Handling | None = None,
    bundle: Finder | None = None, preset: Preset | None = None, out: Path | None = None,
    environment: Mapping[str, Any] | None = None, say: Say | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Replay on each of the named backends; as :func:`~k3lab.decode.bench.run.run_bench`.

    Args:
        card: the model.
        options: rows are turns at a time; drafts, acceptance and weights; lengths are the file's.
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
    from ..evaluation.places import places
    from .reports import bundled

    how = handling or Handling()
    options = replace(options, tp=1)
    check_traffic(card, options, traffic, how)
    folder = Folder(out, names, "turns")
    files = {name: Turns(folder.kept(name) if folder.path else None) for name in names}
    here = places(
        card, checkpoint=options.checkpoint, bundle=bundle, gpu=options.gpu, rows=options.rows, seed=options.seed, say=say,
        drafts=options.drafts,
    )  # fmt: skip
    steps, ran = _steps(card, options), {}
    for name in names:
        done = (lambda count, of, name=name: say(f"{name} turns", count, of)) if say else None
        ran[name] = replay_backend(
            here.backends[name](traffic.context), traffic, rows=options.rows, keep_bytes=int(how.keep_gb * 1e9), reuse=how.reuse,
            real_pauses=how.real_pauses, kept=files[name].add, done=done, steps=steps,
        )  # fmt: skip
    notes = [*here.notes]
    if options.drafts:
        notes.append(label(options))
    if any(session.name.startswith("synthetic-") for session in traffic.sessions):
        notes.append("SYNTHETIC traffic: made-up sessions")
    alike = conditions(
        card, options, gpu=here.conditions["device"], gpus=1, transport="none",
        workload=f"{traffic.digest} rows {options.rows} {how.words}",
    ).to_json()  # fmt: skip
    missing = dict.fromkeys(("step time", *BY_LAYER, *(["drafter time"] if options.drafts else [])), EAGER)
    reports = {
        name: {
            "conditions": alike, "backend": name, "evidence": evidence(alike), "operators": name, "ranks": "one rank", "notes": notes, "measures": measures(one),
            "absent": missing, "dspark": drafting(card, options), "bundle": bundled(bundle, here.choices) if name != "auto" else None,
            "environment": environment, "preset": preset.to_json() if preset else None, "seen": one, "steps": one["steps"],
        }
        for name, one in ran.items()
    }  # fmt: skip
    write_reports(folder.path, reports)
    return {
        "reports": reports,
        "between": between(reports),
        "notes": notes,
        "rank": 0,
        "preset": preset.to_json() if preset else None,
    }
