"""Reports of a bench, one a backend: the conditions that decide a number, where it comes from, and the ratio where one may be given."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...kernels import Evidence, InputError, ModelCard
from ..choices import Choice, Fallback, Finder, Tuned
from ..evaluation.compare import NO_GPU, Conditions, compare, report_of
from ..evaluation.places import weights_digest
from ..run_options import RunOptions, label
from ..scope import digest
from .presets import Preset

SSM_DTYPE = "float32"
"""Of the KDA states that a bench keeps."""


def drafting(card: ModelCard, options: RunOptions) -> dict[str, Any] | None:
    """DSpark's settings; None without drafts."""
    from ..speculate_run import fitted_card

    if not options.drafts:
        return None
    return {
        "drafter": fitted_card(card).name, "weights": weights_digest(options.draft_checkpoint, options.seed), "drafts": options.drafts,
        "temperature": options.temperature, "acceptance": label(options), "acceptance_length": options.acceptance_length,
    }  # fmt: skip


def bundled(bundle: Finder | None, choices: Sequence[Choice]) -> dict[str, Any] | None:
    """A bundle's path, digest and evidence, what of it was used and what was not; None without one."""
    if bundle is None:
        return None
    return {
        "path": str(getattr(bundle, "path", "")), "digest": digest(bundle),
        "evidence": dict(Counter(str(one.model.evidence) for one in bundle.entries)),
        "used": [
            {"family": one.family, "kind": one.kind, "engine": one.engine, "evidence": str(one.evidence), "config": one.config}
            for one in choices if isinstance(one, Tuned)
        ],
        "not_used": [one.to_json() for one in choices if isinstance(one, Fallback)],
    }  # fmt: skip


def asked(options: RunOptions, rounds: int) -> str:
    """What was asked for, with its digest: what two runs must share to share a ratio."""
    text = (
        f"batch {options.rows}, input {options.prompt}, output {options.tokens}, context filled {options.fill},"
        f" chunk {options.chunk}, rounds {rounds}, seed {options.seed}"
    )
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]} {text}"


def conditions(
    card: ModelCard, options: RunOptions, *, gpu: str, gpus: int, transport: str, workload: str
) -> Conditions:
    """What decides the numbers of a run."""
    drafts = drafting(card, options)
    return Conditions(
        model=card.name, weights=weights_digest(options.checkpoint, options.seed), gpu=gpu, gpus=gpus, tp=options.tp, dcp=options.dcp,
        transport=transport, drafts=options.drafts,
        acceptance=f"{drafts['acceptance']}; drafter {drafts['drafter']}, {drafts['weights']}" if drafts else "none",
        kv_dtype=options.kv_dtype, ssm_dtype=SSM_DTYPE, workload=workload,
    )  # fmt: skip


def named(preset: Preset | None, card: ModelCard, options: RunOptions) -> dict[str, Any] | None:
    """A preset with what of it was ``changed``; None without one."""
    return preset.to_json() | {"changed": preset.changed(card, options)} if preset else None


def evidence(alike: Mapping[str, Any]) -> str | None:
    """The evidence word; None without a GPU, where no time says anything."""
    return None if alike["gpu"] == NO_GPU else Evidence.MEASURED.value


def between(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The tuned path against ``auto`` by the rules of ``decode compare``; None unless both ran."""
    if not {"auto", "latency_specialized"} <= set(reports):
        return None
    a, b = (report_of(reports[name], Path(name)) for name in ("auto", "latency_specialized"))
    return compare(a, b)


class Folder:
    """Where reports and what ended go; made before anything is run.

    Raises:
        InputError: it cannot be made, or holds what an earlier run has kept.
    """

    def __init__(self, path: Path | None, names: Sequence[str], what: str) -> None:
        """``what`` ends: the files of ``names`` are called ``<name>.<what>.jsonl``."""
        self.path, self._what = path, what
        if path is None:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
            # a report too: batches and sessions keep under names of their own, their reports do not
            files = [file for name in names for file in (self.kept(name), path / f"{name}.json")]
            there = next((file for file in files if file.exists()), None)
        except OSError as error:
            raise InputError(f"cannot make {path} ({error.strerror})") from None
        if there:
            raise InputError(f"{there} is there already; name another folder, or remove it")

    def kept(self, name: str) -> Path:
        """File of a backend."""
        assert self.path
        return self.path / f"{name}.{self._what}.jsonl"
