"""``k3lab decode plan`` and ``run``: what they print, and one line for what is wrong."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from k3lab.cli.main import run
from k3lab.decode.choices import model_families
from k3lab.decode.plan import TUNED_FAMILIES
from k3lab.kernels import K3


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


def test_plan_prints_launches_with_families_and_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["decode", "plan"]) == 0
    text = capsys.readouterr().out
    assert "kimi-k3 TP16 rows 8 on GB300, backend auto: 2070 launches a step" in text  # the last one chooses tokens
    assert "kda moe layer, 68 of them: 21 launches (up to 23 with split-K reductions), target 13" in text
    assert "output_projection" in text
    assert "Not tuned" not in text
    assert run(["decode", "plan", "--logits"]) == 0
    assert "backend auto: 2069 launches a step" in capsys.readouterr().out


def test_plan_of_the_tuned_path_lists_what_is_not_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["decode", "plan", "--backend", "latency_specialized", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["backend"] == "latency_specialized"
    # one for each family, or for each of its kinds where the decode path can launch them
    told = [(one["family"], one["kind"]) for one in data["fallbacks"]]
    assert told == [*list(model_families(K3, TUNED_FAMILIES))[:-1], ("lm_head", "argmax"), ("lm_head", "embed")]
    assert run(["decode", "plan", "--backend", "latency_specialized"]) == 0
    assert "Not tuned" in capsys.readouterr().out


def test_plan_is_short_and_full_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["decode", "plan", "--backend", "latency_specialized"]) == 0
    short = capsys.readouterr().out
    counts, _, cures = short.partition("Not tuned, and what would change it:")
    assert len(counts.splitlines()) < 30
    assert len(cures.splitlines()) < 40
    assert "attention_all_reduce" not in short
    assert run(["decode", "plan", "--backend", "latency_specialized", "--full"]) == 0
    full = capsys.readouterr().out
    assert full.count("attention_all_reduce") == 3
    assert "before the layers: 2 launches" in full
    for text in (short, full):
        assert "kda moe layer, 68 of them: 21 launches (up to 23 with split-K reductions), target 13" in text
        assert "target 15" in text


def test_a_printed_cure_works_when_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["decode", "plan", "--model", "small", "--tp", "4", "--rows", "4", "--backend", "latency_specialized"]
    assert run([*asked, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    # one family stands for all that can be tuned at these sizes: the others' commands are made alike
    fallbacks = [one for one in before["fallbacks"] if one["commands"]]
    cures = [one["commands"] for one in fallbacks if one["family"] == "attention_projection"]
    assert len(cures) == 2 < len(fallbacks)
    for commands in cures:  # one after the other: the second keeps what the first put into the bundle
        for command in commands:
            words = shlex.split(command)
            assert words.pop(0) == "k3lab"
            assert run([*words, *(["--trials", "1"] if words[0] == "tune" else [])]) == 0, command
    assert "Tuned launches" in capsys.readouterr().out
    assert run([*words, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert [(one["family"], one["kind"], one["evidence"]) for one in after["tuned"]] == [
        ("attention_projection", "kda", "predicted"),
        ("attention_projection", "mla", "predicted"),
    ]
    assert not any(one["commands"] for one in after["fallbacks"] if one["family"] == "attention_projection")
    # another step of the same bundle: its cure keeps the bundle and what was accepted
    assert run(["decode", "plan", *words[2:], "--rows", "8", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    cure = next(one["commands"] for one in other["fallbacks"] if one["family"] == "attention_projection")
    assert "--objective predicted" in cure[0]
    assert cure[1].endswith("--out out/bundle --add")
    assert cure[2].endswith("--bundle out/bundle --accept predicted")
    assert [one["reason"] for one in other["unused_entries"]] == ["it serves at most 4 rows, this step has 8"] * 2


def test_auto_says_that_it_uses_no_tuned_engine(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["plan"], ["run", "--tokens", "1", "--rows", "1"]):
        assert run(["decode", *command]) == 0
        assert capsys.readouterr().out.count("note: backend auto uses no tuned engine, by design") == 1
        assert run(["decode", *command, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["notes" if command[0] == "plan" else "head"][0].startswith("backend auto uses no tuned engine")


def test_run_prints_tokens_and_fallbacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["decode", "run", "--tokens", "2", "--rows", "5", "--backend", "latency_specialized"]) == 0
    text = capsys.readouterr().out
    assert "note: no GPU: the twins run on the CPU" in text
    assert "request 3:" in text
    assert "and 1 more request\n" in text
    assert "5 requests, 2 tokens each" in text
    assert "no engine serves" in text
    assert "no bundle given" in text


def test_run_as_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["decode", "run", "--tokens", "2", "--tp", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["model"], data["tp"], data["rows"], data["backend"]) == ("small-k3", 2, 2, "auto")
    assert [len(tokens) for tokens in data["tokens"]] == [2, 2]


def test_a_model_can_come_from_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    assert run(["decode", "plan", "--model", str(path)]) == 2
    assert "a Kimi K3 text config says 'kimi_linear'" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "words"), [
    (["plan", "--tp", "7"], "TP 7 does not divide"),
    (["plan", "--rows", "65"], "rows is 65"),
    (["plan", "--backend", "fast"], "unknown backend 'fast'"),
    (["plan", "--gpu", "v100"], "v100"),
    (["plan", "--model", "big"], "unknown model 'big'; models: k3, small, demo"),
    (["plan", "--model", "/no/config.json"], "cannot read /no/config.json"),
    (["plan", "--accept", "predicted"], "give the bundle with --bundle"),
    (["plan", "--accept", "luck"], "--accept luck is unknown"),
    (["plan", "--bundle", "/no/bundle"], "is not a directory"),
    (["run", "--tp", "3"], "TP 3 does not divide"),
    (["run", "--rows", "0"], "rows is 0"),
    (["run", "--tokens", "-1"], "tokens is -1"),
    (["run", "--model", "demo"], "--model demo keeps the real widths of K3 and needs an NVIDIA GPU"),
    (["run", "--trace", "x.json"], "needs an NVIDIA GPU"),
])  # fmt: skip
def test_wrong_calls_end_with_one_line(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["decode", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_trace_check_reads_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from k3lab.traces.families import read_plan

    assert run(["decode", "plan", "--json"]) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    assert read_plan(path) == json.loads(path.read_text())["families"]
