"""`bundle verify --stale`: entries that were measured under other conditions are checked and timed again on the GPU here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..kernels.bundle.keys import Difference, differences, key_here, key_of
from ..kernels.bundle.reader import Bundle
from ..kernels.bundle.schema import EntryModel
from ..kernels.bundle.writer import write_bundle
from ..kernels.contract import Family
from ..kernels.device import Device, require
from ..kernels.errors import InputError
from ..kernels.evidence import Evidence
from ..kernels.space import config_digest
from .choose import LEAST_BAND
from .compiling import compiler_versions
from .environment import environment
from .jobs import DEFAULT_EVALUATOR, Job, Kind, find_family, location_of
from .stop import Stop
from .supervisor import Limits
from .workers import Workers

ROUNDS = 3


@dataclass(frozen=True)
class Owner:
    """The family and engine of an entry, as they are here."""

    family: Family
    entry: EntryModel

    @staticmethod
    def of(entry: EntryModel, families: Sequence[Family] = ()) -> Owner:
        """Found among the families given, else among those that are registered."""
        named = next((one for one in families if one.name == entry.family), None)
        return Owner(named or find_family(entry.family, None), entry)

    @property
    def problem(self) -> Any:
        """The entry's problem."""
        return self.family.problem_from_json({**self.entry.key, "rows": self.entry.rows})

    def against(self, device: Device | None) -> tuple[Difference, ...]:
        """What differs between the entry and what is here."""
        engine = self.family.engine(self.entry.engine)
        return differences(key_of(self.entry), key_here(self.entry, engine, compiler_versions(engine), device))

    def job(self, kind: Kind, config: Any, arch: str, seed: int = 0) -> Job:
        """A job on the entry's problem."""
        return Job(
            kind, self.family.name, location_of(self.family), self.entry.engine, self.problem.to_json(), dict(config), arch, self.entry.gpu,
            seed,
        )  # fmt: skip


def state_of(entry: EntryModel, families: Sequence[Family] = (), device: Device | None = None) -> dict[str, Any]:
    """Whether an entry fits what is here: ``stale`` names its hard differences, ``warnings`` its soft ones."""
    try:
        found = Owner.of(entry, families).against(device)
    except InputError as error:
        return {"entry": entry.label(), "stale": [str(error)], "warnings": []}
    return {
        "entry": entry.label(),
        "stale": [str(one) for one in found if one.hard],
        "warnings": [str(one) for one in found if not one.hard],
    }


def recheck(
    path: Path, *, say: Callable[[str], None] | None = None, families: Sequence[Family] = (), limits: Limits | None = None,
    evaluator: str = DEFAULT_EVALUATOR,
) -> dict[str, Any]:  # fmt: skip
    """Check and time again every measured entry that was made under other conditions than those here.

    What comes out is appended to the entry (``rechecks``); what it held stays as it was. SIGINT and SIGTERM end it after the
    running entry, and what was found by then is kept.

    Returns:
        JSON-able: an object an entry with ``old_us``, ``new_us``, ``noise`` (relative), ``verdict`` (``same``, ``faster``,
        ``regression``, ``wrong`` or ``refused``), and ``flip``, the config that beats it now; ``ended`` is ``done`` or ``interrupted``.

    Raises:
        InputError: no bundle, no GPU, or the bundle cannot be written.
    """
    bundle, device, say = Bundle.load(path), require("bundle verify --stale"), say or (lambda text: None)
    here = environment(device)
    results: list[dict[str, Any]] = []
    entries: list[EntryModel] = []
    stop = Stop()
    with stop.listening(), Workers(limits, measured=True, evaluator=evaluator, jobs=1) as workers:
        for one in bundle.entries:
            entry = one.model
            if stop.asked or entry.evidence is not Evidence.MEASURED:
                entries.append(entry)
                continue
            try:
                owner = Owner.of(entry, families)
                found = owner.against(device)
            except InputError as error:  # a family or engine that is not here
                entries.append(entry)
                results.append({"entry": entry.label(), "because": [], "verdict": "refused", "reason": str(error)})
                continue
            if not found:
                entries.append(entry)
                continue
            say(f"{entry.label()}: {'; '.join(map(str, found))}")
            if any(difference.field == "arch" for difference in found):
                result = {"verdict": "refused", "reason": f"it is for {entry.arch}, the GPU here is {device.arch}"}
                entries.append(entry)
            else:
                result = _timed(owner, workers)
                stamp = datetime.now(UTC).isoformat(timespec="seconds")
                note = {
                    **result,
                    "at": stamp,
                    "because": [str(difference) for difference in found],
                    "environment": here,
                }
                entries.append(entry.model_copy(update={"rechecks": (*entry.rechecks, note)}))
            results.append({"entry": entry.label(), "because": [str(difference) for difference in found], **result})
    if any(one["verdict"] != "refused" for one in results):
        if Bundle.load(path).body != bundle.body:
            raise InputError(f"bundle {path} was changed by someone else meanwhile; verify again")
        write_bundle(path, entries, bundle.cubins, force=True)
    bad = [one for one in results if one["verdict"] in ("regression", "wrong")]
    return {
        "path": str(path),
        "gpu": device.name,
        "rechecked": results,
        "regressions": len(bad),
        "entries": len(entries),
        "ended": "interrupted" if stop.asked else "done",
    }


def _timed(owner: Owner, workers: Workers) -> dict[str, Any]:
    """The winner, its runner-up and the default, checked and timed in turn."""
    entry = owner.entry
    space = owner.family.engine(entry.engine).space(owner.problem, _card(entry))
    rival = entry.choice.runner_up or {}
    configs: dict[str, Any] = {
        "winner": dict(entry.config),
        "runner-up": rival.get("config"),
        "default": dict(space.default),
    }
    asked: dict[str, Any] = {}
    for name, config in configs.items():
        legal = (
            isinstance(config, dict)
            and set(config) == {param.name for param in space.params}
            and space.illegal(config) is None
        )
        if legal and config_digest(config) not in {config_digest(other) for other in asked.values()}:
            asked[name] = config
    old = entry.choice.value_us
    if "winner" not in asked:
        return {
            "verdict": "wrong",
            "reason": "its config is illegal now",
            "old_us": old,
            "new_us": None,
            "noise": None,
            "flip": None,
        }
    checked = workers.result(owner.job("measure", entry.config, entry.arch)).checked()
    if checked.value is None:
        reason = f"{checked.status}: {checked.reason}"
        return {"verdict": "wrong", "reason": reason, "old_us": old, "new_us": None, "noise": None, "flip": None}
    values: dict[str, list[float]] = {name: [] for name in asked}
    spreads = [LEAST_BAND]
    names = list(asked)
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            outcome = workers.result(owner.job("retime", asked[name], entry.arch, turn)).checked()
            if outcome.value is not None:
                values[name].append(outcome.value)
                spreads.append(float((outcome.timing or {}).get("spread", 0.0)))
    if len(values["winner"]) < ROUNDS:
        return {
            "verdict": "wrong",
            "reason": "it cannot be timed any more",
            "old_us": old,
            "new_us": None,
            "noise": None,
            "flip": None,
        }
    new = statistics.median(values["winner"])
    band = max((max(values["winner"]) - min(values["winner"])) / new, *spreads)
    noise = band + entry.choice.tie_band
    flips = [
        name
        for name, found in values.items()
        if name != "winner" and found and statistics.median(found) < new * (1 - band)
    ]
    verdict = "regression" if new > old * (1 + noise) else "faster" if new < old * (1 - noise) else "same"
    return {
        "verdict": verdict, "reason": "", "old_us": old, "new_us": round(new, 4), "noise": round(noise, 4),
        "flip": min(flips, key=lambda name: statistics.median(values[name])) if flips else None,
    }  # fmt: skip


def _card(entry: EntryModel) -> Any:
    from ..kernels.gpu_cards import gpu_card

    return gpu_card(entry.gpu)
