"""The demo, whole, with few trials; and what it does where a step fails or the folder is not its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from k3lab.cli import demo, main
from k3lab.cli.output import console
from k3lab.kernels import InputError


def test_the_demo_does_the_main_job_twice(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(["demo", "--out", "demo", "--trials", "3"]) == 0
    seen = capfd.readouterr().out
    for needle in (
        "9/9  Write the report",
        "$ k3lab tune attention_projection --tp 16 --rows 8 --gpu GB300 --objective predicted --trials 3",
        "chosen:",
        "1 entry is only predicted; running it needs --accept predicted",
        "k3_attention_projection_triton",
        "The trace is synthetic",
        "pass (synthetic) synthetic_trace.json.gz against gb300-tp16",
        "demo/report/index.html",
    ):
        assert needle in seen
    data = json.loads((tmp_path / "demo" / "demo.json").read_text())
    assert data["ok"]
    assert [item["exit"] for item in data["steps"]] == [0] * 9
    assert (tmp_path / "demo" / "bundle" / "bundle.json").is_file()
    demo.prepare(tmp_path / "demo")  # a second demo starts from an empty folder
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [demo.MARKER]


def test_with_a_gpu_every_step_is_a_command_that_exists(tmp_path: Path) -> None:
    """Parsed, not run: each step's options are those of its command."""
    import typer

    for gpu in ("H200", "GB300"):
        steps = demo.steps_with_gpu(tmp_path, 40, gpu)
        assert any("measured" in step.command for step in steps)
        assert any("predicted" in step.command for step in steps) == (gpu != "GB300")
        for step in [*steps, *demo.steps_without_gpu(tmp_path, 40)]:
            command = typer.main.get_command(main.build_app(step.command[0]))
            words = list(step.command)
            while hasattr(command, "commands"):
                command = command.commands[words.pop(0)]
            command.make_context("step", words)  # raises a usage error for an unknown option or a missing argument


def test_it_stops_at_the_first_step_that_fails() -> None:
    good, bad = demo.Step("a", ("--version",)), demo.Step("b", ("check", "nope"))
    results = demo.run_steps([good, bad, good], shown=False, console=console())
    assert [item["exit"] for item in results] == [0, 2]


def test_a_verdict_does_not_stop_it_but_a_wrong_file_does(tmp_path: Path) -> None:
    from k3lab.traces import synthesize

    slow = synthesize(tmp_path / "slow.json.gz", layers=8, steps=22, scale=1.5)
    good = demo.Step("a", ("--version",))
    judged = demo.Step("b", ("trace", "check", str(slow)), may_fail=True)
    absent = demo.Step("c", ("trace", "check", "absent.json"), may_fail=True)
    assert [item["exit"] for item in demo.run_steps([judged, good], shown=False, console=console())] == [1, 0]
    assert [item["exit"] for item in demo.run_steps([absent, good], shown=False, console=console())] == [2]


def test_a_folder_that_is_not_the_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(InputError, match="not a demo's; name another --out folder"):
        demo.prepare(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"


def test_a_step_that_does_not_end_is_stopped_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "STEP_LIMIT_S", 0.01)
    assert demo.run_step(demo.Step("slow", ("kernels",)), shown=False) == demo.LATE
    assert "did not end within 0.01 s" in capsys.readouterr().err
