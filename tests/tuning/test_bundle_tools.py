"""Bundles: hard fields refuse and soft ones warn, stale entries are timed again, and bundles are compared, merged and warmed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import fake_family
import pytest
from k3lab.cli import bundle as cli
from k3lab.kernels import InputError
from k3lab.kernels.bundle.keys import Key, differences, refuse_hard
from k3lab.kernels.bundle.reader import Bundle
from k3lab.kernels.bundle.schema import EntryModel
from k3lab.kernels.bundle.writer import write_bundle
from k3lab.kernels.device import Device
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import bundle_check
from k3lab.tuning import tune as tune_module
from k3lab.tuning.bundle_check import recheck, state_of
from k3lab.tuning.bundle_tools import diff, merge, warm
from k3lab.tuning.export import export
from k3lab.tuning.supervisor import Limits
from k3lab.tuning.tune import TuneRequest, tune

FAMILIES = (fake_family.FAMILY,)
H200 = Device(0, "NVIDIA H200", "sm_90a", 132, 1, 1, "580.1", gpu_card("h200"))
KEY = Key("sm_90a", "a" * 16, {"triton": "3.9"}, "NVIDIA H200", "580.1")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200, as the fakes have it."""
    monkeypatch.setattr(tune_module, "require_gpu", lambda gpu: H200)
    monkeypatch.setattr(bundle_check, "require", lambda purpose: H200)


def bundle(folder: Path, name: str = "bundle", *, rows: tuple[int, ...] = (8,), objective: str = "measured", trials: int = 14) -> Path:  # fmt: skip
    studies = []
    for count in rows:
        path = folder / f"{name}-{count}-{objective}.sqlite3"
        tune(TuneRequest(
            fake_family.FAMILY, fake_family.SMALL, fake_family.FakeProblem(1, count), gpu_card("h200"), objective, trials, path, 0,  # type: ignore[arg-type]
            Limits(compile_s=20, measure_s=20), "fake_evaluator",
        ))  # fmt: skip
        studies.append(path)
    export(studies, folder / name, family=fake_family.FAMILY, evaluator="fake_evaluator")
    return folder / name


def change(path: Path, **fields: Any) -> EntryModel:
    """Rewrite the bundle with its first entry changed."""
    there = Bundle.load(path)
    entries = [one.model for one in there.entries]
    entries[0] = entries[0].model_copy(update=fields)
    write_bundle(path, entries, there.cubins, force=True)
    return entries[0]


def first(path: Path) -> EntryModel:
    return Bundle.load(path).entries[0].model


@pytest.mark.parametrize(
    ("field", "value", "hard"),
    [
        ("arch", "sm_103a", True),
        ("source_digest", "b" * 16, True),
        ("compilers", {"triton": "3.8"}, True),
        ("gpu", "NVIDIA H200 NVL", False),
        ("driver", "590.2", False),
    ],
)
def test_each_field_refuses_or_warns(field: str, value: Any, hard: bool) -> None:
    found = differences(KEY, dataclasses.replace(KEY, **{field: value}))
    assert [(one.field.split(".")[0], one.hard) for one in found] == [(field, hard)]
    if hard:
        with pytest.raises(InputError, match=rf"^it: {field}.* was .*, is .*: tune again$") as refused:
            refuse_hard("it", found, "tune again")
        assert "\n" not in str(refused.value)
    else:
        (line,) = refuse_hard("it", found, "tune again")
        assert f"{field} was " in line and str(value) in line


def test_what_is_not_known_says_nothing() -> None:
    assert differences(KEY, KEY) == ()
    assert differences(KEY, dataclasses.replace(KEY, gpu=None, driver="unknown", compilers={"triton": "unknown"})) == ()


def test_an_entry_says_how_it_differs_from_what_is_here(tmp_path: Path) -> None:
    path = bundle(tmp_path)
    fits = {"entry": first(path).label(), "stale": [], "warnings": []}
    assert state_of(first(path), FAMILIES, H200) == fits
    assert state_of(first(path), FAMILIES, None) == fits
    other = dataclasses.replace(H200, driver="590.2", name="NVIDIA H200 NVL")
    assert state_of(first(path), FAMILIES, other)["warnings"] == [
        "gpu was NVIDIA H200, is NVIDIA H200 NVL",
        "driver was 580.1, is 590.2",
    ]
    old = change(path, source_digest="0" * 16)
    (line,) = state_of(old, FAMILIES)["stale"]
    assert line.startswith("source_digest was 0000000000000000, is ")
    assert "nobody" in state_of(old.model_copy(update={"family": "nobody"}))["stale"][0]


def test_stale_entries_are_timed_again_and_what_they_held_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle(tmp_path, rows=(4, 8))
    before = Bundle.load(path)
    assert recheck(path, families=FAMILIES, evaluator="fake_evaluator")["rechecked"] == []  # nothing is stale
    assert Bundle.load(path).body == before.body
    monkeypatch.setattr(bundle_check, "require", lambda purpose: dataclasses.replace(H200, driver="590.2"))
    done = recheck(path, families=FAMILIES, evaluator="fake_evaluator")
    assert [(one["verdict"], one["flip"], one["because"]) for one in done["rechecked"]] == [
        ("same", None, ["driver was 580.1, is 590.2"])
    ] * 2
    assert done["regressions"] == 0
    recheck(path, families=FAMILIES, evaluator="fake_evaluator")
    after = Bundle.load(path)
    for old, new in zip(before.body.entries, after.body.entries, strict=True):
        assert new.model_copy(update={"rechecks": ()}) == old
        assert [note["environment"]["gpu"]["driver"] for note in new.rechecks] == ["590.2", "590.2"]
        assert new.rechecks[0]["old_us"] == old.choice.value_us == new.rechecks[0]["old_us"]
        assert abs(new.rechecks[0]["new_us"] / old.choice.value_us - 1) < new.rechecks[0]["noise"]
    assert after.cubins == before.cubins


def test_a_regression_a_flip_and_a_wrong_result_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundle(tmp_path)
    true = first(path)
    choice = true.choice.model_copy(update={"value_us": true.choice.value_us * 0.9})
    change(path, source_digest="0" * 16, choice=choice)
    (one,) = recheck(path, families=FAMILIES, evaluator="fake_evaluator")["rechecked"]
    assert (one["verdict"], one["old_us"]) == ("regression", choice.value_us)
    assert one["because"][0].startswith("source_digest was 0000000000000000")
    slow = {"tile": 8, "deep": False, "mode": "a"}  # the default takes 29 us, this 32
    change(path, config=slow, choice=choice.model_copy(update={"value_us": 40.0}))
    (one,) = recheck(path, families=FAMILIES, evaluator="fake_evaluator")["rechecked"]
    assert (one["verdict"], one["flip"]) == ("faster", "runner-up")
    change(path, config={"tile": 8, "deep": True, "mode": "a"})
    done = recheck(path, families=FAMILIES, evaluator="fake_evaluator")
    assert (done["rechecked"][0]["verdict"], done["regressions"]) == ("wrong", 1)
    assert len(first(path).rechecks) == 3


def test_an_entry_of_another_architecture_is_refused_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundle(tmp_path)
    monkeypatch.setattr(bundle_check, "require", lambda purpose: dataclasses.replace(H200, arch="sm_103a"))
    before = Bundle.load(path).body
    (one,) = recheck(path, families=FAMILIES, evaluator="fake_evaluator")["rechecked"]
    assert (one["verdict"], one["reason"]) == ("refused", "it is for sm_90a, the GPU here is sm_103a")
    assert Bundle.load(path).body == before


def test_an_entry_of_an_engine_that_is_not_here_is_refused_and_the_others_are_timed(tmp_path: Path) -> None:
    path = bundle(tmp_path, rows=(4, 8))
    change(path, engine="gone")
    there = Bundle.load(path)
    entries = [one.model for one in there.entries]
    entries[1] = entries[1].model_copy(update={"source_digest": "0" * 16})
    write_bundle(path, entries, there.cubins, force=True)
    done = recheck(path, families=FAMILIES, evaluator="fake_evaluator")
    assert sorted(one["verdict"] for one in done["rechecked"]) == ["refused", "same"]
    assert "gone" in next(one["reason"] for one in done["rechecked"] if one["verdict"] == "refused")
    assert [len(one.model.rechecks) for one in Bundle.load(path).entries] == [0, 1]


def test_a_signal_ends_it_after_the_running_entry_and_what_was_found_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle(tmp_path, rows=(2, 4, 8))
    there = Bundle.load(path)
    entries = [one.model.model_copy(update={"source_digest": "0" * 16}) for one in there.entries]
    write_bundle(path, entries, there.cubins, force=True)
    timed = bundle_check._timed

    def then_a_signal(owner: Any, workers: Any) -> dict[str, Any]:
        found = timed(owner, workers)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(bundle_check, "_timed", then_a_signal)
    done = recheck(path, families=FAMILIES, evaluator="fake_evaluator")
    assert (done["ended"], [one["verdict"] for one in done["rechecked"]]) == ("interrupted", ["same"])
    assert [len(one.model.rechecks) for one in Bundle.load(path).entries] == [1, 0, 0]


def test_predicted_entries_are_no_measurements_to_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundle(tmp_path, objective="predicted")
    change(path, source_digest="0" * 16)
    assert recheck(path, families=FAMILIES, evaluator="fake_evaluator")["rechecked"] == []


def test_a_comparison_names_what_differs(tmp_path: Path) -> None:
    one, two = bundle(tmp_path, "one", rows=(4, 8)), bundle(tmp_path, "two", rows=(8, 16))
    found = diff(one, two)
    assert len(found["only_first"]) == len(found["only_second"]) == 1 and "rows<=4" in found["only_first"][0]
    assert (found["changed"], found["same"]) == ([], False)
    assert diff(one, one)["same"]
    there = first(two)
    change(
        two,
        config={"tile": 2, "deep": False, "mode": "a"},
        compilers={"triton": "1.0"},
        choice=there.choice.model_copy(update={"value_us": 1.5}),
    )
    (changed,) = diff(one, two)["changed"]
    assert set(changed["fields"]) == {"config", "compilers", "us"}
    assert changed["fields"]["us"] == [there.choice.value_us, 1.5]


def test_a_merge_holds_all_and_prefers_what_was_measured(tmp_path: Path) -> None:
    one, two = bundle(tmp_path, "one", rows=(4, 8)), bundle(tmp_path, "two", rows=(8, 16), objective="predicted")
    done = merge([two, one], tmp_path / "all")
    entries = {entry.rows: str(entry.evidence) for entry in Bundle.load(tmp_path / "all").body.entries}
    assert entries == {4: "measured", 8: "measured", 16: "predicted"}
    assert (done["entries"], len(done["left_out"]), done["warnings"]) == (3, 1, [])
    assert "rows<=8" in done["left_out"][0] and "predicted" in done["left_out"][0]
    merge([one, one], tmp_path / "same")
    assert Bundle.load(tmp_path / "same").body == Bundle.load(one).body


def test_a_merge_asks_where_it_cannot_know_and_refuses_hard_differences(tmp_path: Path) -> None:
    one, two = bundle(tmp_path, "one"), bundle(tmp_path, "two", rows=(8, 16))
    value = change(two, config={"tile": 2, "deep": False, "mode": "a"}).config
    with pytest.raises(InputError, match="they differ: --prefer first or last"):
        merge([one, two], tmp_path / "all")
    merge([one, two], tmp_path / "all", prefer="last")
    assert first(tmp_path / "all").config == value
    merge([one, two], tmp_path / "all", prefer="first", force=True)
    assert first(tmp_path / "all").config == first(one).config
    environment = json.loads(json.dumps(first(one).environment))
    environment["gpu"]["driver"] = "590.2"
    change(one, environment=environment)
    (warning,) = merge([one, two], tmp_path / "all", prefer="first", force=True)["warnings"]
    assert "driver was 590.2, is 580.1" in warning
    change(one, source_digest="0" * 16)
    with pytest.raises(InputError, match="source_digest was 0000000000000000"):
        merge([one, two], tmp_path / "other", prefer="first")
    assert not (tmp_path / "other").exists()
    for paths, prefer, words in (([one], None, "at least two"), ([one, two], "best", "first or last")):
        with pytest.raises(InputError, match=words):
            merge(paths, tmp_path / "other", prefer=prefer)


def test_warming_compiles_every_row_once_in_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundle(tmp_path, rows=(1, 2, 4, 8))
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("FAKE_COMPILE_SECONDS", "0.3")
    done = warm(path, jobs=2, archs=("sm_90a", "sm_103a"), families=FAMILIES, evaluator="fake_evaluator")
    assert (done["compiled"], done["failed"], done["stale"]) == (8, [], [])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert Counter(kind for kind, _, _ in lines) == {"compile": 8}
    assert len({pid for _, _, pid in lines}) == 2
    change(path, compilers={"triton": "1.0"})
    done = warm(path, jobs=1, families=FAMILIES, evaluator="fake_evaluator")
    assert (done["compiled"], len(done["stale"])) == (3, 1)
    assert "compilers.triton was 1.0" in done["stale"][0]["reasons"][0]
    with pytest.raises(InputError, match="unknown architecture"):
        warm(path, archs=("sm_1",), families=FAMILIES)


def test_tables_tell_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3lab.cli.output import console
    from k3lab.kernels.bundle.reader import describe

    path = bundle(tmp_path)
    change(path, source_digest="0" * 16, choice=first(path).choice.model_copy(update={"value_us": 1.0}))
    cli.render_rechecked(console(), recheck(path, families=FAMILIES, evaluator="fake_evaluator"))
    assert "regression" in capsys.readouterr().out
    cli.render_verified(console(), {**describe(Bundle.load(path)), "keys": [state_of(first(path), FAMILIES)]})
    assert "stale: fake" in capsys.readouterr().out
    cli.render_diff(console(), diff(path, bundle(tmp_path, "two")))
    assert "source_digest: 0000000000000000 -> " in capsys.readouterr().out
