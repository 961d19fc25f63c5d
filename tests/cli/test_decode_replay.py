"""``k3lab decode traffic`` and ``replay``: files, reports, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from k3lab.cli.main import run
from k3lab.decode.traffic.sessions import read_traffic


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


SMALL = ["--sessions", "2", "--turns", "2", "--system", "6", "--prompt", "3", "--output", "2", "--context", "40"]


def test_made_up_traffic_goes_through_both_backends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "t.jsonl", tmp_path / "out"
    assert run(["decode", "traffic", str(file), *SMALL]) == 0
    assert "SYNTHETIC traffic" in capsys.readouterr().out
    traffic = read_traffic(file)
    assert run(["decode", "replay", str(file), "--rows", "2", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "SYNTHETIC" in text and "no kernel is judged" in text and "times better" not in text
    turns = sum(len(one.turns) for one in traffic.sessions)
    for name in ("auto", "latency_specialized"):
        report = json.loads((out / f"{name}.json").read_text())
        kept = [json.loads(line) for line in (out / f"{name}.turns.jsonl").read_text().splitlines()]
        assert report["seen"]["each"] == kept and len(kept) == turns
        assert report["conditions"]["workload"].startswith(traffic.digest)
        assert report["environment"]["commit"] and report["measures"]["request latency, P90"]["value"] > 0
    assert run(["decode", "compare", str(out / "auto.json"), str(out / "latency_specialized.json")]) == 1
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert run(["decode", "replay", str(file), "--rows", "2", "--out", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


def test_turns_that_ended_before_an_interruption_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3lab.decode.traffic import both

    file, out = tmp_path / "t.jsonl", tmp_path / "out"
    assert run(["decode", "traffic", str(file), *SMALL]) == 0
    inner, count = both.Turns.add, 0

    def add(self: both.Turns, turn: object) -> None:
        nonlocal count
        inner(self, turn)  # type: ignore[arg-type]
        count += 1
        if count == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(both.Turns, "add", add)
    assert run(["decode", "replay", str(file), "--backend", "auto", "--out", str(out)]) == 130
    assert len((out / "auto.turns.jsonl").read_text().splitlines()) == 2 and not (out / "auto.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "0"], "rows 0"),
        (["--keep-gb", "-1"], "keep-gb -1"),
        (["--backend", "stock"], "unknown backend 'stock'"),
        (["--model", "large"], "unknown model"),
        (["--model", "demo"], "decode run` alone"),
        (["--gpu", "nope"], "unknown GPU"),
        (["--seed", "-1"], "seed is -1"),
    ],
)
def test_wrong_calls_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    file = tmp_path / "t.jsonl"
    assert run(["decode", "traffic", str(file), *SMALL]) == 0
    capsys.readouterr()
    assert run(["decode", "replay", str(file), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert run(["decode", "traffic", str(file)]) == 2
    assert "is there already; --force" in capsys.readouterr().err
    assert run(["decode", "traffic", str(file), "--force", "--sessions", "0"]) == 2
    assert "sessions is 0, must be 1 to" in capsys.readouterr().err
    assert read_traffic(file)  # what was there is still there
    assert run(["decode", "traffic", str(tmp_path / "no" / "folder")]) == 2
