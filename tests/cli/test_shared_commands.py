"""tune --storage, tune --layer, study watch and study pull as a user types them, with the real compiler and a real database."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from k3lab.cli import main

sys.path.insert(0, str(Path(__file__).parents[1] / "tuning"))

import postgres

TUNE = ("tune", "attention_projection", "--rows", "4", "--gpu", "gb300", "--objective", "predicted", "--trials", "2")
NAME = "attention_projection-triton-kda-tp16-rows4-gb300-predicted"


@pytest.fixture
def address() -> Iterator[str]:
    if reason := postgres.missing():
        pytest.skip(reason)
    with postgres.running() as server:
        yield server.create("studies")


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main.run([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_from_a_database_to_a_bundle(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = run(capsys, *TUNE, "--storage", address)
    assert (tuned["study"], tuned["trials"], tuned["evidence"]) == (NAME, 2, "predicted")
    monkeypatch.setenv("K3LAB_STORAGE", address)
    assert run(capsys, *TUNE)["new_trials"] == 0
    assert run(capsys, *TUNE, "--study", "mine")["new_trials"] == 2
    seen = run(capsys, "study", "watch", "--study", NAME)
    (study,) = seen["studies"]
    assert (study["study"], study["trials"], study["left_s"]) == (NAME, 2, 0.0)
    assert len(study["workers"]) == 2
    assert main.run(["study", "watch", "--once"]) == 0
    text = capsys.readouterr().out
    assert "2 of 2" in text and "predicted" in text and "left" in text
    assert main.run(["study", "watch", "--every", "0.5"]) == 0  # nothing is left to do: it ends
    assert NAME in capsys.readouterr().out
    pulled = run(capsys, "study", "pull", "--study", NAME)
    assert pulled["studies"][0]["whole"]
    assert main.run(["study", "pull", "--study", NAME]) == 2
    file = pulled["studies"][0]["file"]
    assert run(capsys, "study", "show", file)["choice"]["config"] == tuned["choice"]["config"]
    (entry,) = run(capsys, "export", file, "--out", "bundle")["entries"]
    assert entry["config"] == tuned["choice"]["config"]
    assert run(capsys, "bundle", "diff", "bundle", "bundle")["same"]
    assert run(capsys, "bundle", "merge", "bundle", "bundle", "--out", "merged")["entries"] == 1
    assert run(capsys, "bundle", "verify", "merged", "--here")["keys"] == []
    assert run(capsys, "bundle", "warm", "merged", "--arch", "sm_90a", "--jobs", "1")["compiled"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tune", "--rows", "4"), "name a family"),
        (("tune", "attention_projection", "--layer"), "name no family"),
        (("tune", "attention_projection", "--rows", "1-4"), "must be one whole number"),
        (("tune", "--layer", "--kind", "kda"), "leave --kind out"),
        (("tune", "--layer", "--for", "soon"), "such as 48h"),
        (("tune", "attention_projection", "--storage", "sqlite:///a"), "loses data when several machines write it"),
        (("tune", "attention_projection", "--storage", "postgresql://h/d", "--fresh"), "--fresh is for files"),
        (("study", "watch"), "name the database"),
        (("study", "pull"), "name the database"),
    ],
)
def test_wrong_calls_are_one_line(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments) == 2
    seen = capsys.readouterr()
    assert words in seen.err and seen.err.count("\n") == 1 and not seen.out


@pytest.mark.parametrize(
    ("words", "rows"),
    [((), (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)), (("--rows", "8"), (8,)), (("--rows", "2,4"), (2, 4))],
)
def test_a_layer_is_tuned_for_the_rows_that_are_named(
    words: tuple[str, ...], rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from k3lab.tuning import layer

    asked: list[Any] = []

    def tune_layer(request: Any, say: Any) -> dict[str, Any]:
        asked.append(request)
        return {"gpu": "GB300", "evidence": "predicted", "tp": request.tp, "ended": "done", "queue": []}

    monkeypatch.setattr(layer, "tune_layer", tune_layer)
    assert run(capsys, "tune", "--layer", "--objective", "predicted", "--gpu", "gb300", *words)["ended"] == "done"
    assert asked[0].rows == rows


def test_a_watch_outlives_its_database(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3lab.kernels import InputError
    from k3lab.tuning import watch as tuning_watch

    if reason := postgres.missing():
        pytest.skip(reason)
    whole = tuning_watch.snapshot
    with postgres.running() as server:
        address = server.create("studies")
        run(capsys, *TUNE, "--storage", address)
        seen: list[dict[str, Any]] = []

        def then_away(*arguments: Any) -> dict[str, Any]:
            if len(seen) == 2:
                server.start()
            seen.append({})
            data = whole(*arguments)
            if len(seen) == 1:
                server.stop()
                return {**data, "left_s": 5.0}
            return data

        monkeypatch.setattr(tuning_watch, "snapshot", then_away)
        assert main.run(["study", "watch", "--storage", address, "--every", "0.5"]) == 0
        said = capsys.readouterr().out
        assert "the database is away" in said and "the database is back" in said and len(seen) == 3

        def studies(*_: Any) -> None:
            server.stop()

        monkeypatch.setattr(tuning_watch, "check_schema", studies)  # between two questions
        with pytest.raises(InputError, match="went away") as lost:
            whole(address)
        assert "\n" not in str(lost.value)
