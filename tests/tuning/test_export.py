"""From studies to a bundle, and recordings of whole spaces."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_family
import pytest
from k3lab.kernels import Evidence, InputError, whole_file
from k3lab.kernels.bundle.reader import Bundle, Miss
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import record as recording
from k3lab.tuning import tune as tune_module
from k3lab.tuning.export import ExportResult, export
from k3lab.tuning.study import TuningStudy
from k3lab.tuning.supervisor import Limits
from k3lab.tuning.tune import TuneRequest, tune

Study = Callable[..., Path]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """Makes a study of the fake family."""
    monkeypatch.setattr(tune_module, "require_gpu", lambda gpu: None)

    def make(
        name: str,
        rows: int = 8,
        engine: str = "small",
        gpu: str = "gb300",
        objective: str = "predicted",
        trials: int = 14,
    ) -> Path:
        path = tmp_path / f"{name}.sqlite3"
        tune(request(path, rows, engine, gpu, objective, trials))
        return path

    return make


def request(path: Path, rows: int, engine: str, gpu: str, objective: str, trials: int) -> TuneRequest:
    return TuneRequest(
        fake_family.FAMILY, fake_family.FAMILY.engine(engine), fake_family.FakeProblem(1, rows), gpu_card(gpu), objective,  # type: ignore[arg-type]
        trials, path, 0, Limits(), "fake_evaluator",
    )  # fmt: skip


def exported(studies: list[Path], out: Path, **options: object) -> ExportResult:
    return export(studies, out, family=fake_family.FAMILY, evaluator="fake_evaluator", **options)  # type: ignore[arg-type]


def test_a_predicted_study_becomes_an_entry_that_says_so(tmp_path: Path, study: Study) -> None:
    result = exported([study("one")], tmp_path / "bundle", archs=["sm_90a"])
    (entry,) = result.entries
    assert entry.config == {"tile": 4, "deep": True, "mode": "a"}
    assert (entry.evidence, entry.gpu, entry.arch, entry.rows) == (Evidence.PREDICTED, "GB300", "sm_103a", 8)
    assert entry.key == {"tp": 1, "width": 64}
    assert [(build.arch, build.evidence) for build in entry.builds] == [
        ("sm_103a", "predicted"),
        ("sm_90a", "compiled"),
    ]
    assert entry.timing is None
    assert entry.prediction is not None
    assert entry.prediction["microseconds"] == entry.choice.value_us == 18.01
    assert (entry.choice.default_us, entry.choice.trials) == (29.01, {"ok": 14})
    assert entry.source_digest == fake_family.SMALL.source_digest()
    assert entry.summation_order == "ascending"
    assert result.to_json()["predicted_entries"] == [entry.label()]


def test_adding_keeps_what_is_there_and_measured_entries(tmp_path: Path, study: Study) -> None:
    bundle = tmp_path / "bundle"
    exported([study("one"), study("two", rows=4)], bundle, add=True)
    exported([study("real", objective="measured"), study("three", rows=16)], bundle, add=True)
    entries = {entry.rows: entry.evidence for entry in Bundle.load(bundle).body.entries}
    assert entries == {4: Evidence.PREDICTED, 8: Evidence.MEASURED, 16: Evidence.PREDICTED}
    again = exported([tmp_path / "one.sqlite3"], bundle, add=True)
    assert {entry.rows: entry.evidence for entry in again.entries} == entries
    assert "predicted, and" in again.passed_over[0]
    assert "has a measured entry of this problem" in again.passed_over[0]
    with pytest.raises(InputError, match="replace it with --force"):
        exported([tmp_path / "one.sqlite3"], bundle)


def test_what_was_compiled_is_what_is_loaded(tmp_path: Path, study: Study) -> None:
    exported([study("one")], tmp_path / "bundle", archs=["sm_90a"])
    bundle = Bundle.load(tmp_path / "bundle", accept_predicted=True)
    problem = fake_family.FakeProblem(1, 8)
    entry = bundle.find(fake_family.FAMILY, problem, "GB300")
    assert not isinstance(entry, Miss)
    for arch in ("sm_103a", "sm_90a"):
        here = fake_family.SMALL.compile(problem, {"tile": 4, "deep": True, "mode": "a"}, arch)
        assert dataclasses.replace(entry.compiled(arch, problem), config=dict(here.config)) == here


def test_the_same_studies_give_the_same_bytes(tmp_path: Path, study: Study) -> None:
    studies = [study("one"), study("two", rows=16)]
    exported(studies, tmp_path / "a", archs=["sm_90a"])
    exported(studies[::-1], tmp_path / "b", archs=["sm_90a"])
    files = [
        {str(p.relative_to(d)): p.read_bytes() for p in d.rglob("*") if p.is_file()}
        for d in (tmp_path / "a", tmp_path / "b")
    ]
    assert files[0] == files[1]
    assert len(files[0]) == 5


def test_measured_beats_predicted_and_the_faster_engine_wins(tmp_path: Path, study: Study) -> None:
    slow, fast = study("small"), study("large", engine="large", trials=30)
    measured = study("measured", objective="measured")
    other_gpu = study("h200", gpu="h200", objective="measured")
    result = exported([slow, fast], tmp_path / "a")
    assert [entry.engine for entry in result.entries] == ["large"]
    assert len(result.passed_over) == 1
    assert str(slow) in result.passed_over[0]
    result = exported([slow, fast, measured, other_gpu], tmp_path / "b")
    assert [(entry.gpu, entry.engine, entry.evidence) for entry in result.entries] == [
        ("GB300", "small", "measured"), ("H200", "small", "measured"),
    ]  # fmt: skip
    assert result.entries[0].timing is not None
    assert result.to_json()["predicted_entries"] == []


def test_a_study_of_changed_sources_is_not_exported(
    tmp_path: Path, study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = study("one")
    monkeypatch.setattr(fake_family.FakeEngine, "source_digest", lambda self: "f" * 16)
    with pytest.raises(InputError, match=r"another source_digest .*now 'ffff"):
        exported([path], tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_study_in_which_all_failed_is_not_exported(tmp_path: Path, study: Study) -> None:
    path = study("one", trials=1)
    with TuningStudy.for_reading(path) as opened:
        (trial,) = opened.trials()
    assert trial.outcome is not None
    wrong = json.dumps({**trial.outcome.to_json(), "status": "wrong", "value": None})
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE trial_user_attributes SET value_json = ? WHERE key = 'k3lab:outcome'", (wrong,))
    with pytest.raises(InputError, match="no config that ended ok among 1 trials"):
        exported([path], tmp_path / "bundle")


def test_wrong_exports_are_refused_and_write_nothing(tmp_path: Path, study: Study) -> None:
    path = study("one")
    out = tmp_path / "out"
    with pytest.raises(InputError, match="at least one study"):
        exported([], out)
    with pytest.raises(InputError, match="unknown architecture 'sm_12'"):
        exported([path], out, archs=["sm_12"])
    with pytest.raises(InputError, match="there is no study"):
        exported([tmp_path / "none.sqlite3"], out)
    with pytest.raises(InputError, match="unknown family 'fake'"):
        export([path], out, evaluator="fake_evaluator")
    assert not out.exists()
    exported([path], out)
    with pytest.raises(InputError, match="--force"):
        exported([path], out)


def test_a_winner_that_does_not_build_is_told(tmp_path: Path, study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    path = study("one")
    (tmp_path / "breaking_evaluator.py").write_text(
        "def build(task, stage):\n    stage('compile')\n    raise ValueError('no such PTX')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="does not build for sm_103a: compile_error: ValueError: no such PTX"):
        export([path], tmp_path / "out", family=fake_family.FAMILY, evaluator="breaking_evaluator")
    assert not (tmp_path / "out").exists()


def test_a_measured_study_without_its_finals_is_not_exported(
    tmp_path: Path, study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tune_module.run_finals
    monkeypatch.setattr(tune_module, "run_finals", lambda *args: {})
    path = study("stopped", objective="measured", trials=6)
    with pytest.raises(InputError, match="stopped before its finals"):
        exported([path], tmp_path / "b")
    assert not (tmp_path / "b").exists()
    monkeypatch.setattr(tune_module, "run_finals", real)
    assert study("stopped", objective="measured", trials=6) == path  # the same command finishes it
    assert exported([path], tmp_path / "b").entries[0].evidence == "measured"


def test_a_whole_space_is_recorded_with_its_failures(tmp_path: Path) -> None:
    out = tmp_path / "new" / "space.json.gz"
    asked = request(tmp_path / "s.sqlite3", 8, "faulty", "gb300", "predicted", 1)
    asked = dataclasses.replace(asked, limits=Limits(compile_s=0.3, measure_s=0.3))
    result = recording.record(asked, out)
    data = recording.read(out)
    assert (result.path, result.configs, result.legal) == (out, 30, 30)
    assert (data["evidence"], data["identity"]["gpu"], data["coverage"]["kind"]) == ("predicted", "GB300", "whole")
    assert {one["status"] for one in data["configs"]} >= {"ok", "wrong", "crashed", "timeout", "compile_timeout"}
    assert data["space"]["params"][0]["name"] == "fault"
    assert data["environment"]["packages"]
    before = out.read_bytes()
    recording.record(asked, out)
    assert out.read_bytes() == before


def test_a_sample_is_recorded_beside_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "require_gpu", lambda gpu: None)
    asked = request(tmp_path / "s.sqlite3", 8, "large", "h200", "measured", 1)
    recording.record(asked, tmp_path / "space.json.gz", sample=12)
    data = recording.read(tmp_path / "space.json.gz")
    assert len(data["configs"]) in (12, 13)
    assert data["configs"][0]["config"] == dict(fake_family.LARGE.default)
    assert (data["coverage"], data["evidence"]) == ({"kind": "sample", "sample": 12, "seed": 0}, "measured")
    assert data["finals"]
    assert all(one["timing"] for one in data["configs"])


def test_wrong_recordings_are_refused(tmp_path: Path) -> None:
    asked = request(tmp_path / "s.sqlite3", 8, "small", "gb300", "predicted", 1)
    for out, sample, words in (
        (tmp_path / "x.json", None, "json.gz"), (tmp_path / "x.json.gz", 0, "sample is 0"),
        (Path("/proc/none/x.json.gz"), None, "cannot be written"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            recording.record(asked, out, sample=sample)
    assert not asked.path.exists()
    good = {
        "format": recording.FORMAT, "schema": 1, "evidence": "predicted", "identity": {"objective": "predicted"},
        "configs": [{"config": {"a": 1}}],
    }  # fmt: skip
    for content, words in (
        (b"no gzip", "is not a recording"),
        (gzip.compress(b"{}"), "not a recording of"),
        (gzip.compress(json.dumps({**good, "schema": 9}).encode()), "schema 9"),
        (gzip.compress(json.dumps({**good, "configs": good["configs"] * 2}).encode()), "twice"),
        (gzip.compress(json.dumps(good).encode())[:-9], "is not a recording"),
    ):
        (tmp_path / "r.json.gz").write_bytes(content)
        with pytest.raises(InputError, match=words):
            recording.read(tmp_path / "r.json.gz")


def test_a_sample_holds_its_own_configs_whatever_else_the_study_has(tmp_path: Path) -> None:
    path, out = tmp_path / "s.sqlite3", tmp_path / "space.json.gz"
    ask = request(path, 8, "large", "gb300", "predicted", 12)
    tune(ask)
    first = recording.record(ask, out, sample=4)
    again = recording.record(dataclasses.replace(ask, seed=5), out, sample=4)
    assert (first.configs, again.configs, again.to_json()["trials"]) == (5, 5, again.to_json()["trials"])
    assert again.to_json()["trials"] > 12
    fresh = tmp_path / "fresh.json.gz"
    recording.record(dataclasses.replace(ask, study=tmp_path / "t.sqlite3", seed=5), fresh, sample=4)
    assert {one["digest"] for one in recording.read(out)["configs"]} == {
        one["digest"] for one in recording.read(fresh)["configs"]
    }


def test_a_recording_is_not_replaced_by_one_of_something_else(
    tmp_path: Path, study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "space.json.gz"
    recording.record(request(tmp_path / "m.sqlite3", 8, "small", "gb300", "measured", 1), out, sample=2)
    before = out.read_bytes()
    for rows, engine, gpu, objective in (
        (8, "small", "gb300", "predicted"),
        (8, "large", "gb300", "measured"),
        (4, "small", "gb300", "measured"),
        (8, "small", "h200", "measured"),
    ):
        with pytest.raises(InputError, match="is a recording of another"):
            recording.record(request(tmp_path / "o.sqlite3", rows, engine, gpu, objective, 1), out, sample=2)
    assert out.read_bytes() == before
    assert not (tmp_path / "o.sqlite3").exists()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_file.os, "replace", full)
    with pytest.raises(InputError, match=r"space\.json\.gz cannot be written \(No space left on device\)"):
        recording.write(out, {})
    assert out.read_bytes() == before


def test_damaged_recordings_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "space.json.gz"
    recording.record(request(tmp_path / "s.sqlite3", 8, "small", "gb300", "predicted", 1), path, sample=2)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with contextlib.suppress(InputError):
            recording.read(path)
    good = json.loads(gzip.decompress(whole))
    for change in ({"identity": 5}, {"configs": {}}, {"configs": [{}]}, {"configs": [5]}, {"evidence": "measured"}):
        path.write_bytes(gzip.compress(json.dumps({**good, **change}).encode()))
        with pytest.raises(InputError):
            recording.read(path)


def test_entries_that_someone_else_adds_meanwhile_are_not_lost(
    tmp_path: Path, study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3lab.tuning import export as module

    first, second, third = (study(f"rows{rows}", rows=rows) for rows in (2, 4, 8))
    out = tmp_path / "bundle"
    exported([first], out)
    build = module._build

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(module, "_build", build)
        exported([second], out, add=True)
        return build(*arguments)

    monkeypatch.setattr(module, "_build", meanwhile)
    with pytest.raises(InputError, match="was changed by someone else meanwhile"):
        exported([third], out, add=True)
    assert [one.rows for one in Bundle.load(out).entries] == [2, 4]
    exported([third], out, add=True)
    assert [one.rows for one in Bundle.load(out).entries] == [2, 4, 8]
