"""tune, study, export and bundle, end to end with the real compiler: what a user types, and what comes back."""

from __future__ import annotations

import gzip
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from k3lab.cli import main

TUNE = ("tune", "attention_projection", "--rows", "4", "--gpu", "gb300", "--objective", "predicted")
STUDY = "studies/attention_projection-triton-kda-tp16-rows4-gb300-predicted.sqlite3"


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main.run([*arguments, "--json"]) == code
    seen = capsys.readouterr()
    assert seen.err == ""
    return json.loads(seen.out)


def test_from_a_study_to_a_verified_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = run(capsys, *TUNE, "--trials", "3")
    assert (tuned["study"], tuned["evidence"], tuned["ended"], tuned["trials"]) == (STUDY, "predicted", "trials", 3)
    assert run(capsys, *TUNE, "--trials", "2")["new_trials"] == 0
    shown = run(capsys, "study", "show", STUDY)
    assert [trial["status"] for trial in shown["top"]] == ["ok"] * tuned["statuses"]["ok"]
    assert shown["choice"] == tuned["choice"]
    (kernel,) = shown["best"]["resources"]
    assert kernel["kernel"].startswith("k3_attention_projection_triton")
    assert kernel["registers"] > 0
    assert shown["best"]["prediction"]["terms"]
    exported = run(capsys, "export", STUDY, "--out", "bundle", "--arch", "sm_90a")
    (label,) = exported["predicted_entries"]
    assert "(predicted, engine triton)" in label
    assert run(capsys, "bundle", "show", "bundle")["entries"] == exported["entries"]
    assert run(capsys, "bundle", "verify", "bundle")["files"] == 3
    (entry,) = exported["entries"]
    assert [(build["arch"], build["evidence"]) for build in entry["builds"]] == [
        ("sm_103a", "predicted"),
        ("sm_90a", "compiled"),
    ]
    cubin = tmp_path / "bundle" / entry["builds"][0]["launches"][0]["cubin"]
    damaged = bytearray(cubin.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    cubin.write_bytes(damaged)
    for word in ("show", "verify"):
        assert main.run(["bundle", word, "bundle"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "was changed after it was written" in error


def test_the_tables_name_the_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*TUNE, "--trials", "2"]) == 0
    seen = capsys.readouterr()
    assert "(predicted)" in seen.out
    assert "0 of 2 trials are there" in seen.err
    assert "2/2: best" in seen.err
    for words in (["study", "show", STUDY], ["export", STUDY, "--out", "bundle"], ["bundle", "show", "bundle"]):
        assert main.run(words) == 0
        assert "predicted" in capsys.readouterr().out


def test_a_recorded_sample_is_marked_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("study", "record", *TUNE[1:], "--sample", "1", "--out", "space.json.gz")
    recorded = run(capsys, *words)
    data = json.loads(gzip.decompress((tmp_path / "space.json.gz").read_bytes()))
    assert (recorded["evidence"], data["evidence"], data["coverage"]["kind"]) == ("predicted", "predicted", "sample")
    assert recorded["study"].endswith("-space.sqlite3")
    assert recorded["configs"] == len(data["configs"]) in (1, 2)


def test_a_search_with_a_parameter_held_is_a_study_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, *TUNE, "--trials", "1")
    held = run(capsys, *TUNE, "--trials", "3", "--fix", "schedule=splitk", "--fix", "split_k=2")
    assert held["study"] == STUDY.replace("predicted", "predicted-schedule_is_splitk-split_k_is_2")
    assert held["new_trials"] == 3
    shown = run(capsys, "study", "show", held["study"])
    assert shown["identity"]["fixed"] == {"schedule": "splitk", "split_k": 2}
    assert {(trial["config"]["schedule"], trial["config"]["split_k"]) for trial in shown["top"]} == {("splitk", 2)}
    assert main.run(["study", "show", held["study"]]) == 0
    assert "split_k held at 2" in " ".join(capsys.readouterr().out.split())
    (entry,) = run(capsys, "export", held["study"], "--out", "bundle")["entries"]
    assert entry["config"]["split_k"] == 2
    recorded = run(
        capsys, "study", "record", *TUNE[1:], "--sample", "2", "--out", "s.json.gz", "--fix", "split_k=3"
    )  # fmt: skip
    assert recorded["choice"]["config"]["split_k"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*TUNE, "--objective", "guessed"], "unknown objective 'guessed'; objectives: measured, predicted"),
        ([*TUNE, "--compile-limit", "0"], "more than 0"),
        ([*TUNE, "--compile-limit", "nan"], "a wall limit is nan s"),
        ([*TUNE, "--measure-limit", "inf"], "at most 86400 s"),
        ([*TUNE, "--compile-limit", "1e300"], "at most 86400 s"),
        ([*TUNE, "--seed", str(10**30)], "Invalid value for '--seed'"),
        (["check", "attention_projection", "--seed", str(10**30)], "Invalid value for '--seed'"),
        ([*TUNE, "--fix", "block_n"], "--fix is name=value, not 'block_n'"),
        ([*TUNE, "--fix", "nothing=4"], "unknown parameter 'nothing'"),
        ([*TUNE, "--fix", "schedule=fma", "--fix", "schedule=splitk"], "--fix names schedule twice"),
        ([*TUNE, "--fix", "num_warps=5"], "num_warps is '5', legal values are"),
        ([*TUNE, "--fix", "schedule=fma", "--fix", "split_k=2"], "no legal config has schedule=fma, split_k=2"),
        (["study", "record", *TUNE[1:], "--out", "x.json.gz", "--fix", "=4"], "--fix is name=value, not '=4'"),
        ([*TUNE, "--study", "."], "is a folder"),
        ([*TUNE, "--study", "/proc/none/s.sqlite3"], "cannot be written"),
        ([*TUNE, "--study", "text"], "is no SQLite database"),
        (["study", "show", "text"], "is no SQLite database"),
        (["study", "record", "attention_projection", "--out", "x.json"], "a recording is a .json.gz file"),
        (["export", "text", "--out", "bundle"], "is no SQLite database"),
        (["export", "text", "--out", "bundle", "--arch", "sm_1"], "unknown architecture 'sm_1'"),
        (["bundle", "show", "."], "has no bundle.json"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("no study")
    assert main.run(arguments) == 2
    seen = capsys.readouterr()
    assert message in seen.err
    assert seen.err.count("\n") == 1
    assert seen.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_terminal_gets_a_bar_with_the_best_so_far(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "k3lab.cli.main", *TUNE, "--trials", "2"]
    environment = {**os.environ, "COLUMNS": "160", "TERM": "xterm"}
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, cwd=tmp_path, env=environment)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # the terminal's other side was closed
        pass
    os.close(ours)
    assert child.wait(timeout=60) == 0
    text = seen.decode(errors="replace")
    assert "2/2" in text
    assert "best " in text
    assert "us (trial " in text


TABLE = (
    "tune-table",
    "attention_projection",
    "--model",
    "small",
    "--tp",
    "4",
    "--gpu",
    "gb300",
    "--objective",
    "predicted",
)


def test_a_table_of_the_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two kinds, two row counts, two engines: from the command line to a bundle that serves the rows between."""
    words = (*TABLE, "--kind", "kda,mla", "--rows", "1,8", "--engines", "triton,cute_skinny", "--trials", "2")
    table = run(capsys, *words, "--later-trials", "1", "--results", "results/table.json")
    assert (table["ended"], table["missing"], table["evidence"]) == ("done", [], "predicted")
    assert [(row["problem"]["kind"], row["problem"]["rows"]) for row in table["rows"]] == [
        (kind, rows) for kind in ("kda", "mla") for rows in (1, 8)
    ]
    assert all(set(row["engines"]) == {"triton", "cute_skinny"} for row in table["rows"])
    assert all(row["us"] == min(row["engines"].values()) for row in table["rows"])
    assert len(list((tmp_path / "studies").glob("*.sqlite3"))) == 8
    kept = json.loads((tmp_path / "results" / "table.json").read_text())
    assert (kept["evidence"], kept["gpu"], len(kept["rows"])) == ("predicted", "GB300", 4)
    again = run(capsys, *words, "--later-trials", "1")
    assert (again["new_trials"], again["rows"]) == (0, table["rows"])
    exported = run(capsys, "export", "studies", "--out", "bundle")
    assert [entry["rows"] for entry in exported["entries"]] == [1, 8, 1, 8]
    assert [entry["config"] for entry in exported["entries"]] == [row["config"] for row in table["rows"]]
    assert main.run(["bundle", "show", "bundle"]) == 0
    shown = capsys.readouterr().out
    tables = shown[shown.index("┏") :]
    assert (tables.count("┏"), tables.count("│ <=8"), tables.count("predicted │")) == (2, 2, 4)


def test_what_does_not_fit_beside_a_table_is_refused_before_a_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*TABLE, "--engines", "triton", "--trials", "1", "--results", "t.json", "--add")
    run(capsys, *words, "--rows", "1", "--studies", "one")
    text = (tmp_path / "t.json").read_text()
    for changed, message in (
        (text.replace('"predicted"', '"measured"'), "another evidence"),
        (text.replace('"GB300"', '"H200"'), "another gpu"),
        (text.replace('"attention_projection"', '"router"'), "is a table of router"),
        (text[:-9], "is no table"),
    ):
        (tmp_path / "t.json").write_text(changed)
        assert main.run([*words, "--rows", "8", "--studies", "two"]) == 2
        seen = capsys.readouterr()
        assert message in seen.err
        assert (seen.err.count("\n"), seen.out, (tmp_path / "two").exists()) == (1, "", False)
        assert (tmp_path / "t.json").read_text() == changed
    (tmp_path / "t.json").write_text(text)
    run(capsys, *words, "--rows", "8", "--studies", "two")
    assert [row["problem"]["rows"] for row in json.loads((tmp_path / "t.json").read_text())["rows"]] == [1, 8]


def test_a_table_tells_its_progress_and_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*TABLE, "--rows", "1,64", "--trials", "1", "--engines", "triton,cute_wgmma"]) == 0
    seen = capsys.readouterr()
    assert "[1/4] kda-tp4-rows1-hidden256 triton: best " in seen.err
    assert "of 1 trials (1 ok)" in seen.err
    assert "left out: cute_wgmma: " in " ".join(seen.out.split())
    assert "predicted" in seen.out


def test_lists_and_ranges() -> None:
    from k3lab.cli.table import numbers, words

    assert numbers("1-8,12, 16 ,3", "--rows") == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]
    assert numbers("64", "--rows") == [64]
    assert words("b, a,b", "--kind") == ["b", "a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "1-"], "--rows is a list of numbers and ranges such as 1-8,12,16, not '1-'"),
        (["--rows", ""], "--rows is a list of numbers"),
        (["--rows", "٣"], "--rows is a list of numbers"),
        (["--rows", "8-1"], "--rows has the range '8-1', which runs backwards"),
        (["--rows", "1-99999"], "more than 1024 numbers"),
        (["--rows", "1-65"], "rows is 65; the decode path serves 1 to 64 rows"),
        (["--tp", "4,x"], "--tp is a list of numbers"),
        (["--kind", "kda,"], "--kind is a list of names such as kda,mla, not 'kda,'"),
        (["--kind", "kda,nope"], "no kind 'nope'"),
        (["--engines", "triton,none"], "no engine 'none'"),
        (["--trials", "0"], "trials is 0"),
        (["--jobs", "0"], "jobs is 0, must be 1 to 16"),
        (["--budget-seconds", "0"], "the budget is 0 s"),
        (["--results", "t.txt"], "a result file is a .json file"),
        (["--add"], "--add keeps rows of a result file: name it with --results"),
    ],
)
def test_wrong_tables_are_one_line_and_leave_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*TABLE, *arguments]) == 2
    seen = capsys.readouterr()
    assert message in seen.err
    assert (seen.err.count("\n"), seen.out, list(tmp_path.iterdir())) == (1, "", [])


def test_the_number_of_processes_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        run(capsys, *TUNE, "--trials", "3", "--jobs", jobs, "--study", f"{jobs}.sqlite3")["choice"]
        for jobs in ("1", "2")
    ]
    assert found[0] == found[1]
