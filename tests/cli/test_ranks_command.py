"""``k3lab ranks`` at the command line: bad input in one line, its file whole or not at all, its tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from k3lab.cli.main import run
from k3lab.kernels import InputError, device
from k3lab.tuning.ranks import start
from k3lab.tuning.ranks.request import RanksError, RanksRequest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "--gpus, or start them with torchrun"), ("--gpus 1", "at least 2 ranks"), ("--gpus 2 --rows 65", "1 to 64"),
        ("--gpus 2 --rows x", "--rows is a list"), ("--gpus 2 --families kda", "'kda' does not publish"),
        ("--gpus 2 --steps 0", "steps is 0"), ("--gpus 2 --limit 0", "1 to 600 s"), ("--gpus 2 --out none/x.json", "no folder none"),
        ("--gpus 2 --logs none", "no folder none"),
        ("--gpus 2", "none is visible here"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(options: str, said: str, capsys: Any) -> None:
    assert run(["ranks", *options.split()]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[RanksRequest]:
    """Two GPUs, and ranks in threads on none; the requests that were made."""
    monkeypatch.setenv("K3LAB_NO_GPU", "0")
    monkeypatch.setattr(device, "gpu_count", lambda: 2)
    monkeypatch.syspath_prepend(str(TESTS / "tuning"))
    sys.modules.pop("fake_player", None)
    from fake_player import FakePlayer
    from k3lab.kernels.collectives import run_virtual_ranks
    from k3lab.tuning.ranks.group import RankGroup
    from k3lab.tuning.ranks.run import run_rank

    made: list[RanksRequest] = []

    def in_threads(request: RanksRequest, logs: Path | None) -> list[dict[str, Any]]:
        made.append(request)

        def body(comm: Any) -> dict[str, Any]:
            group = RankGroup(comm.rank, comm.size, comm, comm, None)
            return run_rank(request, group, FakePlayer(request, group))

        return run_virtual_ranks(request.size, body)

    monkeypatch.setattr(start, "start", in_threads)
    return made


def test_it_writes_one_file_and_prints_who_wins(gpus: list[RanksRequest], tmp_path: Path, capsys: Any) -> None:
    asked = "ranks --gpus 2 --rows 1,3 --steps 4 --quick --families output_projection --out ranks.json"
    assert run(asked.split()) == 0
    data = json.loads((tmp_path / "ranks.json").read_text())
    assert data["ranks"] == 2 and len(data["cases"]) == 4 and data["environment"]["gpu"]["card"] == "H200"
    assert data["environment"]["packages"] and data["environment"]["commit"] and data["policy"]["samples"] == 11
    printed = capsys.readouterr().out
    assert "4 cases have the twin's outputs" in printed and "NCCL chain" in printed
    assert "output_projection: two shots win nowhere" in printed and "not run: router/other at 64 rows" in printed
    assert run([*asked.split(), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [line["wins"] for line in shown["table"]] == ["one_shot"] * 2 and shown["cross_overs"] == {
        "output_projection": None
    }


def test_what_was_found_is_shown_where_its_file_cannot_be_written(gpus: list[RanksRequest], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:  # fmt: skip
    def full(path: Path, _text: str) -> None:
        raise InputError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr("k3lab.cli.ranks.write_file", full)
    asked = "ranks --gpus 2 --rows 1 --steps 2 --quick --families router,router --out ranks.json --json"
    assert run(asked.split()) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["cases"] and gpus[0].families == ("router",)  # named twice, run once
    assert said.err == "k3lab: cannot write ranks.json: No space left on device\n"


def test_more_ranks_than_gpus_only_when_asked_for(gpus: list[RanksRequest], capsys: Any) -> None:
    assert run(["ranks", "--gpus", "4"]) == 2
    assert "--time-sliced lets them share" in capsys.readouterr().err
    assert run(["ranks", "--gpus", "2", "--time-sliced"]) == 2
    assert "a GPU each" in capsys.readouterr().err and not gpus
    assert run(["ranks", "--gpus", "4", "--time-sliced", "--rows", "1", "--steps", "2", "--families", "router"]) == 0
    assert "no times were kept" in capsys.readouterr().out and gpus[0].time_sliced


def test_a_failure_leaves_no_file_and_what_was_there(gpus: list[RanksRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:  # fmt: skip
    def dies(request: RanksRequest, logs: Path | None) -> list[dict[str, Any]]:
        raise RanksError("rank 1 was killed by SIGKILL")

    asked = ["ranks", "--gpus", "2", "--rows", "1", "--steps", "2", "--families", "router", "--out", "ranks.json"]
    (tmp_path / "ranks.json").write_text("before")
    monkeypatch.setattr(start, "start", dies)
    assert run(asked) == 1
    assert capsys.readouterr().err == "k3lab: rank 1 was killed by SIGKILL\n"
    assert [path.name for path in tmp_path.iterdir()] == ["ranks.json"] and (
        tmp_path / "ranks.json"
    ).read_text() == "before"
