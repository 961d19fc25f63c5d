"""``k3lab decode bench`` and ``traffic``: batches, sessions, presets, reports, exit codes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from k3lab.cli.decode_bench import bench_command
from k3lab.cli.main import run
from k3lab.decode.traffic import both
from k3lab.decode.traffic.sessions import read_traffic
from k3lab.kernels import InputError


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


SMALL = ["--sessions", "2", "--turns", "2", "--system", "6", "--prompt", "3", "--output", "2", "--context", "40"]
BOTH = ("auto", "latency_specialized")


def bench(*words: Any) -> int:
    return run(["decode", "bench", *map(str, words)])


def reports(out: Path) -> dict[str, Any]:
    return {name: json.loads((out / f"{name}.json").read_text()) for name in BOTH}


def test_a_batch_goes_through_both_backends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert (
        bench(
            "--rows",
            2,
            "--prompt",
            3,
            "--tokens",
            3,
            "--drafts",
            2,
            "--acceptance-length",
            2,
            "--rounds",
            2,
            "--out",
            out,
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "none lies beyond this percentile" in text
    assert "SYNTHETIC acceptance of mean length 2" in text and "no ratio: gpu" in text and "times better" not in text
    assert "not measured: launches a layer: needs a GPU" in text and "published" not in text
    for name, report in reports(out).items():
        kept = [json.loads(line) for line in (out / f"{name}.requests.jsonl").read_text().splitlines()]
        assert report["seen"]["each"] == kept and [(one["round"], one["output"]) for one in kept] == [
            (0, 3),
            (0, 3),
            (1, 3),
            (1, 3),
        ]
        alike = report["conditions"]
        assert (alike["model"], alike["gpu"], alike["tp"], alike["drafts"]) == ("small-k3", "cpu", 1, 2)
        assert alike["workload"].endswith("batch 2, input 3, output 3, context filled 0, chunk 512, rounds 2, seed 0")
        assert (
            alike["kv_dtype"] == "bfloat16" and alike["ssm_dtype"] == "float32" and alike["weights"] == "random, seed 0"
        )
        assert report["dspark"]["drafter"] == "small-dspark" and report["dspark"]["acceptance_length"] == 2
        assert report["environment"]["commit"] and "torch" in report["environment"]["packages"]
        # without a GPU no time is evidence, and what only a GPU can tell is no zero
        assert report["evidence"] is None and "kda MoE layer" not in report["measures"]
        assert {"drafter time", "step time, median", "time to first token, P90", "output throughput"} <= set(
            report["measures"]
        )
        assert all(one["value"] > 0 for one in report["measures"].values())
        assert report["measures"]["request latency, P90"]["samples"] == 4
        assert not report["measures"]["request latency, P90"]["tail_covered"]
    assert run(["decode", "compare", str(out / "auto.json"), str(out / "latency_specialized.json")]) == 1
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert bench("--out", out) == 2
    assert "is there already" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


def test_all_ranks_bench_as_threads(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--tp", 2, "--tokens", 2, "--fill-context", 5, "--backend", "auto", "--json") == 0
    (report,) = json.loads(capsys.readouterr().out)["reports"].values()
    assert report["conditions"]["transport"] == "threads" and report["ranks"] == "2 ranks as threads"
    assert report["conditions"]["gpus"] == 1 and report["seen"]["steps"] == 1


def test_a_preset_prints_what_was_published_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--preset", "headline", "--model", "small", "--tp", 1, "--tokens", 4, "--backend", "auto") == 0
    text = capsys.readouterr().out
    assert "842 against 488 tok/s" in text and "838 against 489" in text and "compared with nothing" in text
    assert "here (auto): decode throughput without prefill" in text and "1 x cpu, TP1" in text
    assert "changed from preset headline: model small-k3 for kimi-k3, tp 1 for 16, tokens 4 for 1000" in text
    assert bench("--preset", "list") == 0
    listed = capsys.readouterr().out
    assert "plain-64: TP16, batch 64" in listed and "3606.1 tok/s" in listed
    assert (
        bench("--preset", "plain-8", "--model", "small", "--tp", 1, "--rows", 1, "--tokens", 2, "--backend", "auto")
        == 0
    )
    text = capsys.readouterr().out
    assert "published" not in text and "changed from preset plain-8: model small-k3 for kimi-k3" in text


def test_sessions_go_through_both_backends_with_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "t.jsonl", tmp_path / "out"
    assert run(["decode", "traffic", str(file), *SMALL]) == 0
    assert "SYNTHETIC traffic" in capsys.readouterr().out
    traffic = read_traffic(file)
    assert (
        bench("--preset", "agentx-1", "--workload", file, "--model", "small", "--tp", 1, "--drafts", 2, "--out", out)
        == 0
    )
    text = capsys.readouterr().out
    assert "SYNTHETIC traffic" in text and "say nothing about kernels" in text and "times better" not in text
    assert "P90 403.2 against 223.7" in text and "does not isolate the path" in text and "drafts 2 for 0" in text
    turns = sum(len(one.turns) for one in traffic.sessions)
    for name, report in reports(out).items():
        kept = [json.loads(line) for line in (out / f"{name}.turns.jsonl").read_text().splitlines()]
        assert report["seen"]["each"] == kept and len(kept) == turns
        assert report["conditions"]["workload"].startswith(traffic.digest) and report["conditions"]["drafts"] == 2
        assert report["measures"]["request latency, P90"]["value"] > 0
        assert report["measures"]["request latency, P90"]["samples"] == turns
        assert sum(one["output"] for one in kept) == sum(turn.output for one in traffic.sessions for turn in one.turns)
    assert run(["decode", "compare", str(out / "auto.json"), str(out / "latency_specialized.json")]) == 1


def test_ranks_under_torchrun_replay_sessions_together(tmp_path: Path) -> None:
    file, out = tmp_path / "t.jsonl", tmp_path / "out"
    file.write_text(
        '{"session": "a", "turns": [{"prompt": 3, "output": 3}, {"pause_s": 2, "prompt": 1, "output": 2}]}\n'
        '{"session": "b", "start_s": 0.1, "turns": [{"prompt": 2, "output": 4}]}\n'
    )
    call = ["decode", "bench", "--workload", str(file), "--tp", "2", "--rows", "2", "--out", str(out), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "k3lab.cli.main", *call],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=240, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)["reports"]  # one of them prints and keeps
    assert reports(out).keys() == told.keys()
    for name, report in told.items():
        assert (report["conditions"]["tp"], report["conditions"]["gpus"], report["conditions"]["transport"]) == (
            2,
            2,
            "gloo",
        )
        assert report["ranks"] == "2 processes over gloo"
        assert report["seen"]["output_tokens"] == 9 and report["seen"]["reused_tokens"] == 5
        assert len((out / f"{name}.turns.jsonl").read_text().splitlines()) == 3


def test_a_rank_alone_replays_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"session": "a", "turns": [{"prompt": 3, "output": 3}, {"prompt": 1, "output": 2}]}\n')
    assert bench("--workload", file, "--rank", 1, "--of", 4, "--json") == 0
    for report in json.loads(capsys.readouterr().out)["reports"].values():
        assert report["conditions"]["transport"] == "loopback" and report["conditions"]["tp"] == 4
        assert any("no link cost" in line for line in report["notes"]) and report["seen"]["reused_tokens"] == 5


@pytest.mark.parametrize(
    ("traffic", "number"), [(False, signal.SIGINT), (False, signal.SIGTERM), (True, signal.SIGTERM)]
)
def test_what_ended_before_an_interruption_is_kept(
    traffic: bool, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    file, out, what = tmp_path / "t.jsonl", tmp_path / "out", "turns" if traffic else "requests"
    assert run(["decode", "traffic", str(file), *SMALL]) == 0
    inner, count = both.Turns.add, 0

    def add(self: both.Turns, turn: Any) -> None:
        nonlocal count
        inner(self, turn)
        count += 1
        if count == 2:
            signal.raise_signal(number)

    monkeypatch.setattr(both.Turns, "add", add)
    capsys.readouterr()
    words = ["--workload", file] if traffic else ["--tokens", 2, "--rounds", 9]
    assert bench(*words, "--backend", "auto", "--out", out) == 130
    assert len((out / f"auto.{what}.jsonl").read_text().splitlines()) == 2 and not (out / "auto.json").exists()
    said = capsys.readouterr()
    assert said.err == "k3lab: interrupted\n" and not said.out
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "0"], "rows is 0"),
        (["--backend", "stock"], "unknown backend 'stock'"),
        (["--preset", "best"], "unknown preset 'best'; presets: headline"),
        (["--preset="], "unknown preset ''"),
        (["--model", "large"], "unknown model"),
        (["--model", "demo"], "decode run` alone"),
        (["--gpu", "nope"], "unknown GPU"),
        (["--seed", str(2**64)], "seed is"),
        (["--drafts", "3", "--acceptance-length", "4.5"], "it lies in 1..4"),
        (["--acceptance-length", "2"], "speak of drafts"),
        (["--fill-context", "5000"], "small-k3 has at most 4096"),
        (["--preset", "headline"], "kimi-k3 at TP 16 needs"),
        (["--preset", "agentx-1"], "give them with --workload"),
        (["--keep-gb", "1"], "--keep-gb speaks of sessions"),
        (["--no-reuse"], "--no-reuse speaks of sessions"),
        (["--of", "4"], "--of speaks of one rank alone"),
        (["--rank", "1"], "give the group's size with --of"),
        (["--rank", "0", "--of", "2", "--drafts", "2"], "drafts need the whole group"),
        (["--backend", "auto", "--bundle", "no/bundle"], "no/bundle"),
    ],
)
def test_wrong_calls_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keep-gb", "-1"], "keep-gb is -1"),
        (["--tokens", "3"], "--tokens speaks of batches"),
        (["--tp", "2"], "sessions are replayed by a process a rank: torchrun --nproc-per-node"),
        (
            ["--preset", "agentx-1", "--model", "small"],
            "sessions are replayed by a process a rank: torchrun --nproc-per-node",
        ),
        (["--rank", "1", "--of", "2", "--drafts", "2"], "drafts need the whole group"),
        (["--backend", "auto", "--bundle", "no/bundle"], "no/bundle"),
        (["--preset", "plain-1"], "runs batches"),
        (["--rows", "9", "--drafts", "7"], "72 rows"),
        (["--drafts", "2", "--acceptance-length", "0.9"], "it lies in 1..3"),
        (["--draft-checkpoint", "no/folder", "--drafts", "2"], "no/folder"),
    ],
)
def test_wrong_replays_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"session": "a", "turns": [{"prompt": 1, "output": 1}]}\n')
    assert bench("--workload", file, *words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ('{"pause_s": -1, "prompt": 1, "output": 1}', "turn 0: pause_s is -1, must be seconds"),
        ('{"prompt": 4000, "output": 97}', "a context of 4097 tokens is asked for; small-k3 has at most 4096"),
    ],
)
def test_sessions_that_cannot_be_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], turn: str, said: str
) -> None:
    file, out = tmp_path / "t.jsonl", tmp_path / "out"
    file.write_text(f'{{"session": "a", "turns": [{turn}]}}\n')
    assert bench("--workload", file, "--out", out) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not out.exists()


def test_a_report_of_other_work_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "t.jsonl", tmp_path / "out"
    file.write_text('{"session": "a", "turns": [{"prompt": 1, "output": 1}]}\n')
    out.mkdir()
    (out / "auto.json").write_text("a batch's")
    (out / "auto.requests.jsonl").touch()
    assert bench("--workload", file, "--out", out) == 2
    assert "auto.json is there already" in capsys.readouterr().err
    assert (out / "auto.json").read_text() == "a batch's" and len(list(out.iterdir())) == 2


def test_turns_without_a_step_have_no_rate_and_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"session": "a", "turns": [{"prompt": 1, "output": 1}]}\n')
    assert bench("--workload", file, "--backend", "auto", "--json") == 0
    report = json.loads(capsys.readouterr().out)["reports"]["auto"]
    assert (
        "user rate, median" not in report["measures"] and "no step" in report["absent"]["user rate, group decode rate"]
    )


def test_a_folder_is_not_taken_by_a_replay_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = tmp_path / "t.jsonl", tmp_path / "out"
    file.write_text('{"session": "a", "turns": [{"prompt": 1, "output": 1}]}\n')

    def refused(*_: Any) -> None:
        raise InputError("no such engine here")

    monkeypatch.setattr("k3lab.decode.run.usable_choices", refused)
    assert bench("--workload", file, "--out", out) == 2
    assert not out.exists()


def test_a_full_disk_leaves_no_half_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    code = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
        "from k3lab.decode.traffic.both import Turns\nfrom k3lab.kernels import InputError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nkept = Turns(Path(sys.argv[1]))\n"
        "one = SimpleNamespace(to_json=lambda: {'text': 'x' * 30})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try:\n    [kept.add(one) for _ in range(9)]\nexcept InputError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=60)
    assert "cannot write" in done.stdout, done.stderr
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 2 and all(json.loads(line) and line.endswith("\n") for line in lines)


def test_what_was_measured_is_shown_where_its_report_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("k3lab.decode.bench.run.write_whole", full)
    file = tmp_path / "t.jsonl"
    file.write_text('{"session": "a", "turns": [{"prompt": 1, "output": 1}]}\n')
    for name, words in (("a", ["--tokens", "2"]), ("b", ["--workload", file])):
        assert bench(*words, "--backend", "auto", "--json", "--out", tmp_path / name) == 2
        said = capsys.readouterr()
        data = json.loads(said.out)
        assert data["reports"]["auto"]["measures"] and data["out"] is None
        assert "auto.json (No space left on device)" in said.err and said.err.count("\n") == 1


def test_made_up_traffic_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.jsonl"
    assert run(["decode", "traffic", str(file), *SMALL]) == 0
    capsys.readouterr()
    assert run(["decode", "traffic", str(file)]) == 2
    assert "is there already; --force" in capsys.readouterr().err
    assert run(["decode", "traffic", str(file), "--force", "--sessions", "0"]) == 2
    assert "sessions is 0, must be 1 to" in capsys.readouterr().err
    assert read_traffic(file)  # what was there is still there
    assert run(["decode", "traffic", str(tmp_path / "no" / "folder")]) == 2


def test_a_kernel_that_the_plan_lacks_fails_a_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3lab.decode.bench import run as bench_run

    inner = bench_run.run_bench

    def told(*words: Any, **more: Any) -> dict[str, Any]:
        data = inner(*words, **more)
        data["reports"]["auto"]["launches"] = {"differences": ["k3_x: 1 launches in 1 step, 2 planned"]}
        return data

    assert bench_command.__doc__
    monkeypatch.setattr(bench_run, "run_bench", told)
    assert bench("--tokens", "2", "--backend", "auto") == 1
