"""``--kv-dtype``: what the MLA cache is kept in, in every command that makes one, in plans, and in what reports may be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.cli.main import run
from k3lab.decode.caches import DecodeCache

FP8 = ["--kv-dtype", "float8_e4m3fn"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """Dtypes of the MLA pages of all caches."""
    found: set[torch.dtype] = set()
    inner = DecodeCache.__init__

    def noted(self: DecodeCache, *given: Any, **more: Any) -> None:
        inner(self, *given, **more)
        found.update(pages.dtype for pages in self.mla.values())

    monkeypatch.setattr(DecodeCache, "__init__", noted)
    return found


@pytest.mark.parametrize("words", [["run", "--tokens", "2"], ["run", "--tokens", "2", "--drafts", "1"], ["bench", "--tokens", "2", "--drafts", "1"]])  # fmt: skip
def test_caches_are_kept_in_what_was_asked_for(
    words: list[str], made: set[torch.dtype], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["decode", *words, *FP8, "--json"]) == 0
    assert made == {torch.float8_e4m3fn}
    assert capsys.readouterr().out


def test_both_backends_of_an_evaluation_have_such_a_cache(
    tmp_path: Path, made: set[torch.dtype], capsys: pytest.CaptureFixture[str]
) -> None:
    problems = tmp_path / "p.jsonl"
    problems.write_text('{"prompt_ids": [1], "answer_ids": [2]}\n')
    assert run(["decode", "eval", str(problems), "--tokens", "2", *FP8, "--json"]) == 0
    assert made == {torch.float8_e4m3fn}
    assert json.loads(capsys.readouterr().out)["settings"]["kv_dtype"] == "float8_e4m3fn"


def test_reports_of_other_caches_share_no_ratio(
    tmp_path: Path, made: set[torch.dtype], capsys: pytest.CaptureFixture[str]
) -> None:
    file, reports = tmp_path / "t.jsonl", []
    file.write_text('{"session": "a", "turns": [{"prompt": 3, "output": 2}, {"prompt": 1, "output": 2}]}\n')
    for words, dtype in (([], torch.bfloat16), (FP8, torch.float8_e4m3fn)):
        made.clear()
        out = tmp_path / str(len(reports))
        call = ["decode", "bench", "--workload", str(file), "--rows", "1", "--backend", "auto", "--out", str(out)]
        assert run([*call, *words]) == 0
        assert made == {dtype}
        reports.append(out / "auto.json")
    told = [json.loads(path.read_text())["conditions"]["kv_dtype"] for path in reports]
    assert told == ["bfloat16", "float8_e4m3fn"]
    capsys.readouterr()
    assert run(["decode", "compare", *map(str, reports), "--json"]) == 1
    assert "kv_dtype" in [one["field"] for one in json.loads(capsys.readouterr().out)["different"]]


def test_a_plan_asks_for_kernels_of_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["decode", "plan", "--rows", "8", "--drafts", "7", "--backend", "latency_specialized", "--json"]
    kinds = []
    for words in ([], FP8):
        assert run([*call, *words]) == 0
        told = json.loads(capsys.readouterr().out)
        (mla,) = [one for one in told["fallbacks"] if one["family"] == "mla"]
        kinds += [next(part for part in mla["commands"][0].split() if "verify8" in part and "/" not in part)]
        assert (" ".join(FP8) in mla["commands"][-1]) == bool(words), mla["commands"][-1]
    assert kinds == ["bf16_verify8", "fp8_verify8"]


@pytest.mark.parametrize("command", ["run", "bench", "plan", "eval"])
def test_another_dtype_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = tmp_path / "p.jsonl"
    problems.write_text('{"prompt_ids": [1], "answer_ids": [2]}\n')
    given = [str(problems), "--tokens", "2"] if command == "eval" else []
    assert run(["decode", command, *given, "--kv-dtype", "float16"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert "kv-dtype is 'float16'; MLA rows are kept in bfloat16 or float8_e4m3fn" in shown.err
