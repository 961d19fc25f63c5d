"""Bundles compared, merged, and their kernels compiled ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from ..kernels.bundle.keys import Difference, differences, key_of, refuse_hard
from ..kernels.bundle.reader import Bundle
from ..kernels.bundle.schema import EntryModel
from ..kernels.bundle.writer import check_target, write_bundle
from ..kernels.contract import Family
from ..kernels.errors import InputError
from ..kernels.evidence import Evidence
from .bundle_check import Owner, state_of
from .export import check_archs
from .jobs import DEFAULT_EVALUATOR
from .outcome import Status
from .supervisor import Limits
from .workers import Workers, check_jobs

COMPARED = ("engine", "config", "evidence", "source_digest", "compilers", "arch")
"""Fields of an entry that a comparison tells one by one; times and cubins come on top."""


def diff(one: Path, two: Path) -> dict[str, Any]:
    """What two bundles do not have alike: entries of one only, and fields that differ.

    Raises:
        InputError: either is no bundle.
    """
    first, second = ({entry.model.place: entry.model for entry in Bundle.load(path).entries} for path in (one, two))
    changed = []
    for place in sorted({*first} & {*second}):
        if fields := _changed(first[place], second[place]):
            changed.append({"entry": first[place].label(), "fields": fields})
    return {
        "first": str(one),
        "second": str(two),
        "only_first": [first[place].label() for place in sorted({*first} - {*second})],
        "only_second": [second[place].label() for place in sorted({*second} - {*first})],
        "changed": changed,
        "same": {*first} == {*second} and not changed,
    }


def _changed(one: EntryModel, two: EntryModel) -> dict[str, list[Any]]:
    a, b = one.model_dump(mode="json"), two.model_dump(mode="json")
    fields = {name: [a[name], b[name]] for name in COMPARED if a[name] != b[name]}
    if one.choice.value_us != two.choice.value_us:
        fields["us"] = [one.choice.value_us, two.choice.value_us]
    builds = [{build.arch: [launch.cubin for launch in build.launches] for build in each.builds} for each in (one, two)]
    for arch in sorted({*builds[0], *builds[1]}):
        there, here = builds[0].get(arch), builds[1].get(arch)
        if there != here:
            fields[f"cubins {arch}"] = ["none" if found is None else ", ".join(found) for found in (there, here)]
    return fields


def merge(paths: Sequence[Path], out: Path, *, prefer: str | None = None, force: bool = False) -> dict[str, Any]:
    """Write the entries of several bundles as one.

    Of two for one place the measured one stays; of two with the same evidence that differ, the preferred bundle's.

    Args:
        paths: the bundles.
        out: the new one.
        prefer: ``first`` or ``last``, as named.
        force: replace a bundle that is there.

    Raises:
        InputError: no bundle; two entries of one engine that differ in a hard field (:mod:`k3lab.kernels.bundle.keys`);
            two entries for one place and no preference.
    """
    if len(paths) < 2:
        raise InputError("a merge needs at least two bundles")
    if prefer not in (None, "first", "last"):
        raise InputError(f"--prefer is first or last, not {prefer!r}")
    check_target(out, force)
    bundles = [Bundle.load(path) for path in paths]
    kept: dict[Any, tuple[EntryModel, Bundle]] = {}
    notes: list[str] = []
    for bundle in bundles:
        for entry in bundle.entries:
            new = entry.model
            old = kept.get(new.place)
            if old is None or _wins(new, old[0], prefer, bundle, old[1]):
                kept[new.place] = new, bundle
                loser = old
            else:
                loser = new, bundle
            if loser is not None and loser[0] != kept[new.place][0]:
                notes.append(f"{loser[0].label()} of {loser[1].path} is left out")
    warnings = _alike([entry for entry, _ in kept.values()])
    cubins = {
        launch.cubin: bundle.cubins[launch.cubin]
        for entry, bundle in kept.values()
        for build in entry.builds
        for launch in build.launches
    }
    body = write_bundle(out, [entry for entry, _ in kept.values()], cubins, force=force)
    return {"bundle": str(out), "entries": len(body.entries), "left_out": notes, "warnings": warnings}


def _wins(new: EntryModel, old: EntryModel, prefer: str | None, here: Bundle, there: Bundle) -> bool:
    if new == old:
        return False
    if (new.evidence is Evidence.MEASURED) != (old.evidence is Evidence.MEASURED):
        return new.evidence is Evidence.MEASURED
    if prefer is None:
        raise InputError(
            f"{here.path} and {there.path} both have {new.label()}, and they differ: --prefer first or last"
        )
    return prefer == "last"


def _alike(entries: Sequence[EntryModel]) -> list[str]:
    """Refuse entries of one engine that rest on different kernels or compilers; warnings where GPU or driver differ."""
    warnings: list[str] = []
    first: dict[tuple[str, str, str], EntryModel] = {}
    for entry in entries:
        base = first.setdefault((entry.family, entry.engine, entry.arch), entry)
        found: tuple[Difference, ...] = differences(key_of(base), key_of(entry))
        cure = f"not the same in {base.label()}: export both from studies of one kernel and compiler"
        warnings += refuse_hard(entry.label(), found, cure)
    return warnings


def warm(
    path: Path, *, archs: Sequence[str] = (), jobs: int = 1, families: Sequence[Family] = (), say: Callable[[str], None] | None = None,
    limits: Limits | None = None, evaluator: str = DEFAULT_EVALUATOR,
) -> dict[str, Any]:  # fmt: skip
    """Compile every entry's kernels into the cache, several at a time; what is there already takes no compiler.

    Args:
        path: the bundle.
        archs: architectures; by default each entry's own.
        jobs: processes.
        families: of entries that are not registered.
        say: hears of each failure.
        limits: wall limits.
        evaluator: of the worker processes.

    Returns:
        JSON-able: ``compiled`` and ``failed`` (with reasons), entries left out as ``stale``, and the seconds it took.

    Raises:
        InputError: no bundle, an unknown architecture, no worker.
    """
    check_jobs(jobs)
    check_archs(archs)
    begun, say = monotonic(), say or (lambda text: None)
    stale, asked = [], []
    for one in Bundle.load(path).entries:
        state = state_of(one.model, families)
        if state["stale"]:
            stale.append({"entry": one.label, "reasons": state["stale"]})
            say(f"left out: {one.label}: {'; '.join(state['stale'])}")
            continue
        owner = Owner.of(one.model, families)
        asked += [
            (one.label, arch, owner.job("compile", one.model.config, arch)) for arch in archs or (one.model.arch,)
        ]
    failed = []
    with Workers(limits, measured=False, evaluator=evaluator, jobs=jobs) as workers:
        for _, _, job in asked:
            workers.submit(job)
        for label, arch, job in asked:
            outcome = workers.result(job)
            if outcome.status is not Status.OK:
                failed.append({"entry": label, "arch": arch, "reason": f"{outcome.status}: {outcome.reason}"})
                say(f"failed: {label} for {arch}: {outcome.status}: {outcome.reason}")
    return {
        "path": str(path), "compiled": len(asked) - len(failed), "failed": failed, "stale": stale, "jobs": jobs,
        "seconds": round(monotonic() - begun, 2),
    }  # fmt: skip
