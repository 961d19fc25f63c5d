"""``k3lab decode eval``: verdicts, exit codes, and one line for what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.cli.decode_inputs import kept_alone
from k3lab.cli.main import run
from k3lab.decode.evaluation.evaluate import Record
from k3lab.decode.operators import ReferenceOperators


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    lines = [{"id": str(n), "prompt_ids": [n, n + 1], "answer_ids": [7]} for n in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_small_file_concludes_nothing_and_says_so(
    problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["decode", "eval", str(problems), "--tokens", "2", "--rows", "2", "--out", str(tmp_path / "kept.jsonl")]
    assert run([*call, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["scores"]["tokens"]["verdict"] == "inconclusive" and data["scores"]["tokens"]["problems"] == 3
    assert data["settings"]["device"] == "cpu" and data["settings"]["weights"] == "random, seed 0"
    assert data["outputs"]["auto"]["mean_tokens"] == 2
    assert data["environment"]["commit"] and "torch" in data["environment"]["packages"] and data["bundle"] is None
    assert run([*call, "--strict"]) == 1  # from what was kept
    text = capsys.readouterr().out
    assert "no kernel is judged" in text and "inconclusive" in text
    assert run([*call, "--seed", "1"]) == 2
    assert "of another evaluation: its seed is 0, now 1" in capsys.readouterr().err


def test_a_fault_in_one_backend_of_the_small_model_is_worse_and_exits_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, kept = tmp_path / "made.jsonl", tmp_path / "kept.jsonl"

    def write(answers: dict[str, list[int]]) -> None:
        made = [{"id": str(n), "prompt_ids": [n, 40 + n], "answer_ids": answers.get(str(n), [0])} for n in range(10)]
        path.write_text("".join(json.dumps(line) + "\n" for line in made))

    write({})
    call = ["decode", "eval", str(path), "--tokens", "2", "--rows", "10", "--margin", "0.4", "--json"]
    assert run([*call, "--out", str(kept)]) == 0
    capsys.readouterr()
    outputs = [json.loads(line) for line in kept.read_text().splitlines()[1:] if line]
    write({one["problem"]: one["tokens"] for one in outputs if one["backend"] == "auto"})
    assert run(call) == 0
    sound = json.loads(capsys.readouterr().out)["scores"]["tokens"]
    assert sound["verdict"] != "worse" and sound["first"] == 1 and sound["second"] >= 0.7

    inner = ReferenceOperators.kda

    def half(self: ReferenceOperators, *given: Any) -> torch.Tensor:
        out = inner(self, *given)
        return torch.cat([out[:, : out.shape[1] // 2], torch.zeros_like(out[:, out.shape[1] // 2 :])], dim=1)

    monkeypatch.setattr(ReferenceOperators, "kda", half)
    assert run(call) == 1
    faulty = json.loads(capsys.readouterr().out)["scores"]["tokens"]
    assert faulty["verdict"] == "worse" and faulty["first"] == 1 and faulty["interval"][1] < 0


def test_ranks_under_torchrun_answer_together(problems: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    call = ["decode", "eval", str(problems), "--tokens", "2", "--rows", "3", "--out", str(kept), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "k3lab.cli.main", *call],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=240, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    data = json.loads(done.stdout)  # one of them prints
    assert data["settings"]["tp"] == 2 and data["ranks"] == "2 processes over gloo"
    assert data["scores"]["tokens"]["problems"] == 3 and sum(map(bool, kept.read_text().splitlines())) == 1 + 2 * 3


def test_what_ended_before_a_signal_is_kept_and_gone_on_from(
    problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, inner = tmp_path / "kept.jsonl", Record.add

    def add(self: Record, *one: Any) -> None:
        inner(self, *one)
        signal.raise_signal(signal.SIGTERM)

    call = ["decode", "eval", str(problems), "--tokens", "2", "--rows", "1", "--out", str(kept), "--json"]
    with monkeypatch.context() as patched:
        patched.setattr(Record, "add", add)
        assert run(call) == 130
    assert capsys.readouterr().err == "k3lab: interrupted\n"
    assert run(call) == 0
    assert json.loads(capsys.readouterr().out)["outputs_of_earlier_runs"] == 1


def test_a_second_run_is_kept_out_and_told_of_the_first(
    problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.jsonl"
    call = ["decode", "eval", str(problems), "--tokens", "1", "--out", str(kept)]
    with kept_alone(kept):
        assert run(call) == 2
    assert capsys.readouterr().err == f"k3lab: another run (process {os.getpid()}) writes to {kept} now\n"
    assert not kept.exists() and run(call) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "0"], "tokens 0"),
        (["--repeats", "2"], "repeats at temperature 0"),
        (["--model", "large"], "unknown model 'large'"),
        (["--stop", "x"], "speak of text"),
        (["--tokenizer", "nowhere"], "cannot read the tokenizer"),
        (["--accept", "predicted"], "give the bundle"),
        (["--tp", "2"], "torchrun --nproc-per-node 2 -m k3lab.cli.main decode eval"),
        (["--tp", "3"], "TP 3"),
        (["--transport", "loopback", "--tp", "2"], "loopback is for one rank alone; answers come from all ranks"),
    ],
)
def test_wrong_calls_are_one_line(
    problems: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert run(["decode", "eval", str(problems), "--tokens", "2", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_text_without_a_tokenizer_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, kept = tmp_path / "aime.jsonl", tmp_path / "kept.jsonl"
    path.write_text(json.dumps({"problem": "1 + 1?", "answer": 2}))
    assert run(["decode", "eval", str(path), "--out", str(kept)]) == 2
    assert "give the model's --tokenizer" in capsys.readouterr().err
    assert not kept.exists()
