"""The command line frame: one plain line and exit 2 for a wrong call, lazy modules, JSON, pipes."""

from __future__ import annotations

import gzip
import importlib
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from k3lab.cli import main
from k3lab.cli.output import plain
from k3lab.kernels.evidence import Evidence
from k3lab.kernels.registry import FAMILIES, family


def result_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main.run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_family_of_a_twin_alone_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(family("kda")), "engines", ())
    for command in ("check", "tune"):
        assert main.run([command, "kda"]) == 2
        assert "kda has no engine yet, only its twin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "unknown command 'nope'; commands: kernels, check"),
        (["doctor", "--nope"], "No such option: --nope"),
        (["check"], "Missing argument"),
        (["check", "nope"], "unknown family 'nope'; families: attention_projection"),
        (["check", "attention_projection", "--tp", "7"], "TP 7 does not divide"),
        (["check", "attention_projection", "--rows", "65"], "rows is 65"),
        (["check", "attention_projection", "--rows", "many"], "Invalid value for '--rows'"),
        (["check", "attention_projection", "--engine", "nope"], "has no engine 'nope'; it has: triton"),
        (["predict", "attention_projection", "--gpu", "a100"], "unknown GPU 'a100'"),
        (["compile", "attention_projection", "--arch", "sm_42"], "sm_42"),
        (["compile", "attention_projection", "--config", "block_k=7"], "legal values are"),
        (["time", "attention_projection"], "needs an NVIDIA GPU"),
        (["tune", "attention_projection", "--gpu", "h200", "--objective", "measured"], "needs an NVIDIA GPU"),
        (["tune", "attention_projection", "--trials", "0"], "trials is 0"),
        (["study", "show", "absent.sqlite3"], "there is no study absent.sqlite3"),
        (["export", "absent.sqlite3", "--out", "b"], "there is no study absent.sqlite3"),
        (["bundle", "verify", "absent"], "is not a directory"),
        (["decode", "plan", "--bundle", "absent"], "is not a directory"),
        (["decode", "plan", "--tp", "5"], "TP 5"),
        (["trace", "check", "absent.json"], "absent.json"),
        (["report", "--budget", "nope"], "no budget 'nope'"),
        (["report", "--kind", "nope"], "layer kind 'nope'"),
        (["demo", "--trials", "0"], "trials is 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_call_is_one_line_and_exit_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    seen = capsys.readouterr()
    assert seen.err.startswith("k3lab: ")
    assert seen.err.count("\n") == 1
    assert message in seen.err
    assert not seen.out
    assert not list(tmp_path.iterdir()), "something was half-written"


def test_only_the_module_of_the_command_is_imported() -> None:
    code = (
        "import sys\nfrom k3lab.cli.main import run\nrun(['kernels', '--help'])\n"
        "print(sorted(name for name in sys.modules if name.startswith('k3lab.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "['k3lab.cli.kernels', 'k3lab.cli.main', 'k3lab.cli.output']"


def test_help_is_quick() -> None:
    best = 9.0
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "k3lab.cli.main", "--help"], capture_output=True, text=True, timeout=60
        )
        best = min(best, time.perf_counter() - started)
    assert done.returncode == 0
    assert all(f" {name} " in done.stdout for name in main.COMMANDS)
    assert best < 2.0


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m k3lab.cli.main kernels --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.split() == ["141"]


@pytest.mark.parametrize("arguments", ["kernels", "kernels --json", "--help"])
def test_an_output_that_is_full_or_closed_is_no_traceback(arguments: str) -> None:
    command = f"{sys.executable} -m k3lab.cli.main {arguments}"
    full = subprocess.run(f"{command} >/dev/full", shell=True, capture_output=True, text=True, timeout=60)
    assert (full.returncode, full.stderr.count("\n")) == (2, 1)
    assert full.stderr.startswith("k3lab: cannot write (No space left on device)")
    closed = subprocess.run(f"{command} >&-", shell=True, capture_output=True, text=True, timeout=60)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_working_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && {sys.executable} -m k3lab.cli.main doctor"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "k3lab: the working folder is gone; change to one that is there\n")


def test_a_family_package_that_breaks_at_import_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from k3lab.kernels import registry

    (tmp_path / "broken_pack.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_locations", lambda: {"broken": "broken_pack:FAMILY"})
    assert main.run(["check", "broken"]) == 2
    error = capsys.readouterr().err
    assert "family 'broken' cannot be loaded from broken_pack:FAMILY: ZeroDivisionError" in error
    assert error.count("\n") == 1


def test_two_packages_of_one_family_name_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from k3lab.kernels import InputError, registry

    points = [EntryPoint("mix", f"{package}:FAMILY", "k3lab.families") for package in ("one", "two")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    caches = (registry._locations, registry._claims)
    for cached in caches:
        cached.cache_clear()
    try:
        with pytest.raises(InputError, match=r"claim the family name 'mix': one:FAMILY and two:FAMILY"):
            registry.family("mix")
        assert registry.family("router").name == "router"
    finally:
        for cached in caches:
            cached.cache_clear()


def test_interrupt_ends_with_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from k3lab.cli import doctor

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "diagnose", interrupted)
    assert main.run(["doctor"]) == 130
    assert capsys.readouterr().err == "k3lab: interrupted\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3lab.cli import doctor

    def broken() -> None:
        raise ValueError("not an InputError")

    monkeypatch.setattr(doctor, "diagnose", broken)
    with pytest.raises(ValueError, match="not an InputError"):
        main.run(["doctor"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("k3lab 0.")


def test_plain_values() -> None:
    assert plain({"a": float("nan"), "b": (1, Path("x")), 3: Evidence.MEASURED}) == {
        "a": None,
        "b": [1, "x"],
        "3": "measured",
    }


def test_kernels_lists_the_model_and_its_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    timed = {"family": "attention_projection", "evidence": "measured", "environment": {"gpu": {"name": "NVIDIA H200"}}}
    space = {"identity": {"family": "router", "gpu": "GB300"}, "evidence": "predicted"}
    (folder / "a.json").write_text(json.dumps(timed))
    (folder / "b.json").write_text(json.dumps(timed))
    (folder / "space.json.gz").write_bytes(gzip.compress(json.dumps(space).encode()))
    (folder / "wordless.json").write_text(json.dumps({**timed, "family": "kda", "evidence": "guessed"}))
    (folder / "broken.json").write_text("{")
    (folder / "broken.json.gz").write_bytes(b"no gzip")
    rows = {row["family"]: row for row in result_of(capsys, "kernels")["families"]}
    assert set(FAMILIES) <= set(rows)
    assert {"triton", "cute_skinny"} <= {engine["name"] for engine in rows["attention_projection"]["engines"]}
    known = {name: [(entry["gpu"], entry["evidence"]) for entry in row["evidence"]] for name, row in rows.items()}
    assert known["attention_projection"] == [("H200", "measured")] * 2
    assert known["router"] == [("GB300", "predicted")]
    assert known["kda"] == []
    assert main.run(["kernels"]) == 0
    assert capsys.readouterr().out.count("H200: measured") == 1


def test_doctor_knows_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    data = result_of(capsys, "doctor")
    items = {item["name"]: item for item in data["items"]}
    assert data["healthy"]
    assert not data["can_measure"]
    assert items["GPU"]["found"] == "K3LAB_NO_GPU is set"
    assert Path(items["cuobjdump"]["found"]).name == "cuobjdump"


def test_doctor_exits_1_where_a_part_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from k3lab.cli import doctor

    monkeypatch.setattr(doctor, "PACKAGES", (*doctor.PACKAGES, "no-such-package-k3"))
    assert main.run(["doctor", "--json"]) == 1
    missing = next(
        item for item in json.loads(capsys.readouterr().out)["items"] if item["name"] == "no-such-package-k3"
    )
    assert missing["cure"] == "pip install no-such-package-k3"


@pytest.mark.parametrize("group", ["decode", "trace"])
def test_a_group_without_a_command_says_what_is_missing(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([group]) == 2
    assert capsys.readouterr().err == "k3lab: name a command; they are listed above\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_any_command_with_one_line(number: signal.Signals) -> None:
    waits = "main.build_app = lambda _: (print('begun', flush=True), time.sleep(60))"
    script = f"import time\nfrom k3lab.cli import main\n{waits}\nmain.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (130, "k3lab: interrupted\n")


def test_sigterm_ends_what_waits_outside_python() -> None:
    """A second lock of a plain mutex, as a wait for a kernel that does not end: no handler of Python's runs in it."""
    waits = (
        "def waits(_):\n    print('begun', flush=True)\n    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)\n"
        "    libc.pthread_mutex_lock(mutex)\n    libc.pthread_mutex_lock(mutex)"
    )
    script = (
        f"import ctypes\nfrom k3lab.cli import main\n{waits}\nmain.build_app, main.GRACE_S = waits, 0.5\nmain.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (130, "k3lab: interrupted\n")


def test_closed_standard_streams_stay_closed() -> None:
    """What tells of signals takes none of their numbers, to which a child would write."""
    script = (
        "import os, sys\nfrom k3lab.cli import main\n"
        "def look(_):\n    open(sys.argv[1], 'w').write(str([os.path.exists(f'/proc/self/fd/{n}') and 'pipe' in os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)]))\n    sys.exit(0)\n"
        "main.run = look\nmain.main()"
    )
    with tempfile.NamedTemporaryFile("r") as file:
        quoted = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(script)} {file.name} 0<&- 1>&- 2>&-"
        assert subprocess.run(["sh", "-c", quoted]).returncode == 0
        assert file.read() == "[False, False, False]"


@pytest.mark.parametrize(("module", "name"), main.FAULTS)
def test_a_fault_of_a_measurement_is_one_line_and_exit_1(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = getattr(importlib.import_module(f"k3lab.{module}"), name)

    def build(_: object) -> None:
        raise kind("3 programmatic edges,\nnot 4")

    monkeypatch.setattr(main, "build_app", build)
    assert main.run(["stages"]) == 1
    assert capsys.readouterr().err == "k3lab: 3 programmatic edges, not 4\n"
