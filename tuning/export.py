"""From studies to a bundle: one entry for each problem and GPU, built for every architecture asked for."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..kernels import registry
from ..kernels.bundle.reader import Bundle
from ..kernels.bundle.schema import (
    MANIFEST,
    ArgModel,
    BufferModel,
    BuildModel,
    ChoiceModel,
    EntryModel,
    LaunchModel,
    canonical,
)
from ..kernels.bundle.writer import check_target, cubin_path, write_bundle
from ..kernels.contract import Engine, Family, Problem
from ..kernels.errors import InputError
from ..kernels.evidence import Evidence
from ..kernels.gpu_cards import GPU_CARDS, GpuCard, gpu_card
from .between import decide, decide_predicted, same_contest
from .choose import Choice, choose, without_finals
from .identity import StudyIdentity
from .in_situ import both_numbers
from .jobs import DEFAULT_EVALUATOR, Job, location_of
from .outcome import Outcome, Status
from .study import TrialRecord, TuningStudy, glance
from .supervisor import Limits, Supervisor


@dataclass(frozen=True)
class Candidate:
    """The winner of one study."""

    path: Path
    family: Family
    engine: Engine
    problem: Problem
    gpu: GpuCard
    identity: Mapping[str, Any]
    choice: Choice
    trial: TrialRecord
    statuses: dict[str, int]
    environment: Mapping[str, Any] | None
    contest: Mapping[str, Any] | None = None
    """The comparison with other engines that the study was in; None where there was none since its last trial."""
    against: str = ""
    """Why it wins over other engines."""

    @property
    def evidence(self) -> Evidence:
        """Measured or predicted, as the study was."""
        return Evidence(self.identity["objective"])

    @property
    def place(self) -> tuple[str, str, str, int]:
        """Which entry it would be: family, GPU, key, rows."""
        return self.family.name, self.gpu.name, canonical(self.problem.key), self.problem.rows


@dataclass(frozen=True)
class ExportResult:
    """What was written."""

    path: Path
    entries: tuple[EntryModel, ...]
    passed_over: tuple[str, ...]
    """Studies whose winner another study of the same problem and GPU beat, and why."""

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "bundle": str(self.path),
            "entries": [entry.model_dump(mode="json") for entry in self.entries],
            "predicted_entries": [entry.label() for entry in self.entries if entry.evidence is not Evidence.MEASURED],
            "passed_over": list(self.passed_over),
        }


def read_candidate(path: Path, family: Family | None = None) -> Candidate:
    """The winner of a study, which must be one of today's sources and compilers.

    Args:
        path: the study's file.
        family: the study's family if it is not registered.

    Raises:
        InputError: no study; one of other sources, compilers or space; or one in which nothing succeeded.
    """
    with TuningStudy.for_reading(path) as study:
        identity = study.identity
        found = (
            family if family is not None and family.name == identity["family"] else registry.family(identity["family"])
        )
        engine = found.engine(identity["engine"])
        problem = found.problem_from_json(identity["problem"])
        gpu = gpu_card(identity["gpu"])
        fixed = identity.get("fixed", {})
        StudyIdentity.of(found, engine, problem, gpu, identity["objective"], fixed).require(identity, path)
        trials = study.trials()
        space = engine.space(problem, gpu).restricted(fixed)
        choice = choose(study, space)
        if choice is None:
            raise InputError(
                f"study {path} has no config that ended ok among {len(trials)} trials; see `k3lab study show {path}`"
            )
        if identity["objective"] == "measured" and without_finals(trials, space, study.note("finals") or {}):
            raise InputError(f"study {path} was stopped before its finals: the same `k3lab tune` command finishes it")
        statuses = Counter(str(trial.outcome.status) for trial in trials if trial.outcome)
        return Candidate(
            path,
            found,
            engine,
            problem,
            gpu,
            identity,
            choice,
            trials[choice.trial],
            dict(sorted(statuses.items())),
            study.note("environment"),
            contest
            if (contest := study.note("contest")) and contest["trials"].get(engine.name) == len(trials)
            else None,
        )


def select(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[str]]:
    """One candidate for each problem and GPU: measured before predicted, then by contest; and who lost to whom.

    Raises:
        InputError: two measured candidates of one problem were never compared in one process.
    """
    groups: dict[tuple[str, str, str, int], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.place, []).append(candidate)
    winners, lost = [], []
    for _, group in sorted(groups.items()):
        measured = [one for one in group if one.evidence is Evidence.MEASURED]
        first = _first(measured or group)
        winners.append(first)
        lost += [
            f"{other.path}: {other.engine.name} {other.choice.value_us:.2f} us ({other.evidence}) loses to "
            f"{first.engine.name} {first.choice.value_us:.2f} us ({first.evidence}) of {first.path}"
            for other in sorted(group, key=lambda one: (one.choice.value_us, one.engine.name, str(one.path)))
            if other.path != first.path
        ]
    return winners, lost


def _first(group: Sequence[Candidate]) -> Candidate:
    """The winner among candidates of one problem, GPU and evidence, with the reason."""
    ranked = sorted(group, key=lambda one: (one.choice.value_us, one.engine.name, str(one.path)))
    if len(group) == 1:
        return ranked[0]
    order = [engine.name for engine in ranked[0].family.engines]
    best = {one.engine.name: one for one in reversed(ranked)}
    if ranked[0].evidence is not Evidence.MEASURED:
        decision = decide_predicted({name: one.choice.value_us for name, one in best.items()}, order)
    else:
        contest = same_contest([one.contest for one in group])
        if contest is None or len(best) < len(group):
            names = " and ".join(sorted(str(one.path) for one in group))
            raise InputError(
                f"{names} were measured apart: `k3lab tune-table` compares engines in one process; or export one of them"
            )
        decision = decide(contest, {name: one.choice.digest for name, one in best.items()}, order)
    return replace(best[decision.engine], against=decision.reason)


def studies_in(folder: Path) -> tuple[list[Path], list[str]]:
    """The studies of a folder that a table is made of, and those that are none of it, and why.

    Raises:
        InputError: there is none.
    """
    found, passed = [], []
    for path in sorted(folder.glob("*.sqlite3")):
        if re.search(r"-old\d+$", path.stem):
            passed.append(f"{path}: put aside by --fresh")
        elif path.stem.endswith("-space"):
            passed.append(f"{path}: a recorded space")
        elif held := glance(path).identity.get("fixed"):
            passed.append(f"{path}: holds {', '.join(held)}; name it to export it")
        else:
            found.append(path)
    if not found:
        raise InputError(f"folder {folder} has no study; `k3lab tune-table` fills one")
    return found, passed


def _candidates(studies: Sequence[str | Path], family: Family | None) -> tuple[list[Candidate], list[str]]:
    """The candidates of files and folders; what of a folder is not ready is passed over with its reason."""
    named = list(dict.fromkeys(Path(path) for path in studies if not Path(path).is_dir()))
    candidates, passed = [read_candidate(path, family) for path in named], []
    for folder in dict.fromkeys(Path(path) for path in studies if Path(path).is_dir()):
        found, apart = studies_in(folder)
        passed += apart
        for path in found:
            if path in named:
                continue
            try:
                candidates.append(read_candidate(path, family))
            except InputError as error:
                passed.append(f"{path}: {error}")
    if not candidates:
        raise InputError(f"no study here can be exported: {passed[0]}")
    return candidates, passed


def keep(there: Bundle, winners: Sequence[Candidate]) -> tuple[list[EntryModel], list[Candidate], list[str]]:
    """The entries of a bundle that stay, the winners that go in, and which winners do not, and why."""
    stay = {entry.model.place: entry.model for entry in there.entries}
    new, passed = [], []
    for winner in winners:
        old = stay.get(winner.place)
        if old and old.evidence is Evidence.MEASURED and winner.evidence is not Evidence.MEASURED:
            passed.append(f"{winner.path}: {winner.evidence}, and {there.path} has a measured entry of this problem")
        else:
            stay.pop(winner.place, None)
            new.append(winner)
    return list(stay.values()), new, passed


def check_archs(archs: Sequence[str]) -> None:
    """Make sure every architecture is one of a GPU card.

    Raises:
        InputError: one is not.
    """
    known = sorted({card.arch for card in GPU_CARDS.values()})
    for arch in archs:
        if arch not in known:
            raise InputError(f"unknown architecture {arch!r}; architectures: {', '.join(known)}")


def export(
    studies: Sequence[str | Path],
    out: str | Path,
    *,
    archs: Sequence[str] = (),
    force: bool = False,
    add: bool = False,
    family: Family | None = None,
    limits: Limits | None = None,
    evaluator: str = DEFAULT_EVALUATOR,
) -> ExportResult:
    """Write a bundle of the studies' winners.

    Args:
        studies: files of finished or running studies, measured or predicted; or folders of them.
        out: the bundle's directory.
        archs: further architectures to build each winner for; such builds are only ``compiled``.
        force: replace a bundle that is there.
        add: keep the entries of a bundle that is there, but those of the same problem and GPU; of these
            only measured ones are kept, and only from winners that are predicted.
        family: the studies' family if it is not registered.

    Raises:
        InputError: see :func:`read_candidate`, :func:`k3lab.kernels.bundle.writer.write_bundle`; or a
            winner does not build.
    """
    out = Path(out)
    check_archs(archs)
    check_target(out, force or add)
    there = Bundle.load(out) if add and (out / MANIFEST).exists() else None
    if not studies:
        raise InputError("export needs at least one study")
    candidates, apart = _candidates(studies, family)
    winners, lost = select(candidates)
    lost += apart
    cubins: dict[str, bytes] = {}
    entries = []
    if there is not None:
        kept, winners, passed = keep(there, winners)
        lost += passed
        entries += kept
        used = {launch.cubin for entry in kept for build in entry.builds for launch in build.launches}
        cubins |= {name: there.cubins[name] for name in sorted(used)}
    with Supervisor(limits, gpu=False, evaluator=evaluator) as worker:
        for winner in winners:
            wanted = dict.fromkeys([winner.gpu.arch, *archs])
            builds = tuple(_build(winner, arch, worker, cubins) for arch in wanted)
            entries.append(_entry(winner, builds))
    if there is not None and Bundle.load(out).body != there.body:
        raise InputError(f"bundle {out} was changed by someone else meanwhile; export again")
    body = write_bundle(out, entries, cubins, force=force or add)
    return ExportResult(out, body.entries, tuple(lost))


def _build(winner: Candidate, arch: str, worker: Supervisor, cubins: dict[str, bytes]) -> BuildModel:
    """The winner's config built for an architecture; adds its cubins."""
    job = Job(
        kind="build",
        family=winner.family.name,
        location=location_of(winner.family),
        engine=winner.engine.name,
        problem=winner.problem.to_json(),
        config=dict(winner.choice.config),
        arch=arch,
        gpu=winner.gpu.name,
        digests=(winner.identity["source_digest"], winner.identity["glue_digest"]),
    )
    outcome: Outcome = worker.run(job)
    if outcome.status is not Status.OK or outcome.payload is None:
        raise InputError(f"the winner of {winner.path} does not build for {arch}: {outcome.status}: {outcome.reason}")
    payload = outcome.payload
    launches = []
    for launch in payload["launches"]:
        cubin = base64.b64decode(launch["cubin"])
        name = cubin_path(cubin)
        cubins[name] = cubin
        shapes = {field: tuple(launch[field]) for field in ("grid", "block", "cluster")}
        args = tuple(ArgModel(**{**arg, "box": tuple(arg["box"])}) for arg in launch["args"])
        launches.append(LaunchModel(**{**launch, **shapes, "cubin": name, "args": args}))
    return BuildModel(
        arch=arch,
        evidence=winner.evidence if arch == winner.gpu.arch else Evidence.COMPILED,
        launches=tuple(launches),
        buffers=tuple(BufferModel(**{**buffer, "shape": tuple(buffer["shape"])}) for buffer in payload["buffers"]),
        resources=tuple(payload["resources"]),
    )


def _entry(winner: Candidate, builds: tuple[BuildModel, ...]) -> EntryModel:
    choice, outcome = winner.choice, winner.trial.outcome
    assert outcome is not None
    return EntryModel(
        family=winner.family.name,
        engine=winner.engine.name,
        key=dict(winner.problem.key),
        rows=winner.problem.rows,
        gpu=winner.gpu.name,
        arch=winner.gpu.arch,
        config=dict(choice.config),
        config_digest=choice.digest,
        evidence=winner.evidence,
        source_digest=winner.identity["source_digest"],
        compilers=dict(winner.identity["compilers"]),
        summation_order=winner.engine.summation_order(winner.problem, choice.config),
        choice=ChoiceModel(
            reason=choice.reason + (f"; between engines: {winner.against}" if winner.against else ""),
            value_us=round(choice.value_us, 4),
            default_us=choice.default_us,
            margin_over_default=choice.margin_over_default,
            tie_band=choice.tie_band,
            runner_up=dict(choice.runner_up) if choice.runner_up else None,
            trials=winner.statuses,
        ),
        timing=_timing(winner) if outcome.timing and winner.evidence is Evidence.MEASURED else None,
        prediction=dict(outcome.prediction) if outcome.prediction else None,
        environment=dict(winner.environment) if winner.environment else None,
        builds=builds,
    )


def _timing(winner: Candidate) -> dict[str, Any]:
    """The trial's measurement, with the finals' flip rate and what the captured layer said, where there are any."""
    assert winner.trial.outcome is not None
    choice, found = winner.choice, dict(winner.trial.outcome.timing or {})
    if choice.flip_rate is not None:
        found["flip_rate"] = choice.flip_rate
    if choice.in_situ is not None:
        found["in_situ"] = both_numbers(choice.in_situ)
    return found
