"""Capturing: under an nsys of the test's own on PATH, under torch.profiler, and of a block."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import sys
import time
from pathlib import Path

import pytest
from k3lab.cli.main import run
from k3lab.traces import TraceError, read_trace
from k3lab.traces.capture import capture, python_words, recording
from k3lab.traces.nsys_scrub import scrub

SCRIPT = """
import os, sys, torch
with torch.profiler.record_function("layer 0"):
    torch.ones(8, 8) @ torch.ones(8, 8)
print("ran", __name__, *sys.argv, "beside" if os.path.isdir(sys.path[0]) and "script.py" in os.listdir(sys.path[0]) else "")
"""
SECRETS = ("hunter2token", "confidential-argument", "someuser", "printed-by-the-process")

NSYS = """#!{python}
import os, sqlite3, subprocess, sys, time
words = sys.argv[1:]
open({log!r}, "a").write(" ".join(words) + "\\n")
def after(name):
    return next((word.partition("=")[2] or words[place + 1] for place, word in enumerate(words) if word.split("=")[0] == name), None)
if words[0] == "profile":
    code = subprocess.run(words[next(place for place, word in enumerate(words) if word == {python!r}):]).returncode
    if {report}:
        open(after("-o") + ".nsys-rep", "wb").write(b"NVIDIA Tegra Profiler report")
    sys.exit(code)
if {fail}:
    sys.exit(9)
assert words[0] == "export" and after("--type") == "sqlite" and os.path.isfile(words[-1])
import shutil
shutil.copyfile({export!r}, after("-o"))
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "work" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def nsys(tmp_path, make, monkeypatch):
    """Puts an nsys on PATH that runs the command and 'exports' a file with secrets in it; returns (install, log)."""
    file = make.node_mode(tmp_path / "export.sqlite")
    file.add("TARGET_INFO_GPU", id=0, name="NVIDIA GB300")
    for name, value in (
        ("PROCESS_0:ENVIRONMENT_VARIABLE", f"TOKEN={SECRETS[0]}"),
        ("PROCESS_0:ARGUMENT_1", SECRETS[1]),
    ):
        file.add("META_DATA_CAPTURE", name=name, value=value)
    file.add("META_DATA_EXPORT", name="EXPORT_USER", value=SECRETS[2])
    for text in (f"see /home/{SECRETS[2]}/x", f"KEY={SECRETS[2]} is set", f"run with --key {SECRETS[2]}"):
        file.add("DIAGNOSTIC_EVENT", severity=2, text=text)
    file.add("DIAGNOSTIC_EVENT", severity=2, text="Not all CUDA events might have been collected.")
    file.string(SECRETS[3])
    database = sqlite3.connect(file.write())
    database.execute("CREATE TABLE ProcessStreams (globalPid, filenameId, contentId)")
    database.execute("INSERT INTO ProcessStreams SELECT 1, 1, id FROM StringIds WHERE value = ?", (SECRETS[3],))
    database.execute("CREATE TABLE PROCESSES (globalPid, pid, name)")
    owner = database.execute("SELECT globalPid FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()[0]
    database.executemany(
        "INSERT INTO PROCESSES VALUES (?, ?, ?)", [(owner, 1, "python"), (7, 2, "python"), (8, 3, SECRETS[2])]
    )
    database.execute("CREATE VIEW everything AS SELECT * FROM ProcessStreams")
    database.commit()
    database.close()
    log = tmp_path / "calls"
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(report=True, fail=False):
        path = folder / "nsys"
        path.write_text(
            NSYS.format(python=sys.executable, log=str(log), report=report, fail=fail, export=str(file.path))
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return install, log


@pytest.fixture
def no_nsys(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_args, **_more: None)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nsys_is_called_so_that_kernels_of_graphs_are_seen(nsys, script, tmp_path, capfd):
    install, log = nsys
    install()
    out = tmp_path / "work" / "t.sqlite"
    done = capture(out, [sys.executable, str(script), "a"])
    assert (done.tool, done.written, done.exit_code) == ("nsys", out, 0)
    assert "ran __main__" in capfd.readouterr().out
    profile, export = log.read_text().splitlines()
    for flag in ("--cuda-graph-trace=node", "--cpuctxsw=none", "--sample=none",
                 "--trace-fork-before-exec=true"):  # fmt: skip
        assert flag in profile.split()
    assert " -t cuda,nvtx " in profile
    assert "capture-range" not in profile and export.startswith("export --type sqlite")
    assert any("--hardware" in note for note in done.notes)
    assert len(read_trace(out).kernels) == 78 and left(script.parent) == ["script.py", "t.sqlite"]


def test_what_nsys_exports_is_kept_without_environment_arguments_and_output(nsys, script, tmp_path):
    nsys[0]()
    before = (tmp_path / "export.sqlite").read_bytes()
    assert all(secret.encode() in before for secret in SECRETS)
    out = tmp_path / "t.sqlite"
    capture(out, [sys.executable, str(script)])
    assert not [secret for secret in SECRETS if secret.encode() in out.read_bytes()]
    trace, whole = read_trace(out), read_trace(tmp_path / "export.sqlite")
    for name in ("kernels", "apis", "ranges", "node_origins", "gpus", "graph_mode", "tool"):
        assert getattr(trace, name) == getattr(whole, name), name
    database = sqlite3.connect(out)
    assert database.execute("SELECT pid, name FROM PROCESSES").fetchall() == [(1, "python"), (2, "python")]
    assert ("Not all CUDA events might have been collected.",) in database.execute(
        "SELECT text FROM DIAGNOSTIC_EVENT"
    ).fetchall()
    database.close()


@pytest.mark.parametrize(("options", "flags"), [
    ({"capture_range": "cudaProfilerApi"}, ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]),
    ({"capture_range": "decode@*"}, ["--capture-range=nvtx", "--nvtx-capture=decode@*", "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0"]),
    ({"hardware": True}, ["-t", "cuda-hw,nvtx"]),
])  # fmt: skip
def test_options_of_nsys(nsys, script, tmp_path, options, flags):
    install, log = nsys
    install()
    done = capture(tmp_path / "t.sqlite", [sys.executable, str(script)], **options)
    assert set(flags) <= set(log.read_text().splitlines()[0].split())
    assert any("--hardware" in note for note in done.notes) is not options.get("hardware", False)


def test_an_nsys_that_fails_leaves_nothing(nsys, script, tmp_path):
    install, _ = nsys
    install(report=False)
    with pytest.raises(TraceError, match="no report; did the capture range begin"):
        capture(tmp_path / "t.sqlite", [sys.executable, str(script)], capture_range="cudaProfilerApi")
    install(fail=True)
    with pytest.raises(TraceError, match=r"export failed \(exit code 9\)"):
        capture(tmp_path / "t.sqlite", [sys.executable, str(script)])
    (tmp_path / "export.sqlite").write_text("no database " * 100)
    install()
    with pytest.raises(TraceError, match="no usable SQLite"):
        capture(tmp_path / "t.sqlite", [sys.executable, str(script)])
    assert "t.sqlite" not in left(tmp_path) and not [name for name in left(tmp_path) if name.startswith(".capture")]


def test_the_exit_code_of_the_command_is_passed_on(nsys, tmp_path, capsys):
    nsys[0]()
    out = tmp_path / "t.sqlite"
    assert run(["trace", "capture", str(out), "--", sys.executable, "-c", "raise SystemExit(7)"]) == 7
    assert out.is_file() and "exit code 7" in capsys.readouterr().out


def test_torch_records_a_script_and_says_that_there_is_no_gpu(no_nsys, script, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SECRET_OF_THE_TEST", SECRETS[0])
    monkeypatch.chdir(tmp_path)
    assert run(["trace", "capture", "t.json.gz", "--json", "--", sys.executable, "-u", str(script), SECRETS[1]]) == 0
    out, err = capfd.readouterr()
    assert f"ran __main__ {script} {SECRETS[1]} beside" in err  # --json keeps standard output for itself
    data = json.loads(out)
    assert data["tool"] == "torch.profiler" and data["trace"] == "t.json.gz"
    import torch

    assert any("CPU only" in note for note in data["notes"]) is not torch.cuda.is_available()
    text = gzip.decompress(Path("t.json.gz").read_bytes()).decode()
    assert any(event["name"] == "layer 0" for event in json.loads(text)["traceEvents"])
    assert not [secret for secret in SECRETS if secret in text]
    assert left(tmp_path) == ["t.json.gz", "work"]


def test_a_script_that_fails_is_told_apart_from_one_that_leaves_no_trace(no_nsys, tmp_path, capfd):
    out = tmp_path / "t.json"
    assert capture(out, [sys.executable, "-c", "import sys; sys.exit('no')"]).exit_code == 1
    assert "no" in capfd.readouterr().err and json.loads(out.read_text())["traceEvents"]
    done = capture(out, [sys.executable, "-c", "1 / 0"], force=True)
    assert done.exit_code == 1 and done.written == out and "ZeroDivisionError" in capfd.readouterr().err
    before = out.read_bytes()
    killed = capture(out, [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], force=True)
    assert (killed.written, killed.exit_code) == (None, 137) and "nothing was written" in killed.notes[0]
    with pytest.raises(TraceError, match="before its trace could be written"):
        capture(out, [sys.executable, "-c", "import os; os._exit(0)"], force=True)
    assert out.read_bytes() == before and left(tmp_path) == ["t.json"]


def test_a_module_runs_as_one(no_nsys, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names.py").write_text("import sys; print('module', __name__, sys.argv[1:])")
    assert capture("t.json", [sys.executable, "-m", "names", "x"]).exit_code == 0
    assert "module __main__ ['x']" in capfd.readouterr().out


def test_a_command_that_runs_too_long_is_stopped_with_what_it_started(nsys, tmp_path):
    nsys[0]()
    mark, out = tmp_path / "alive", tmp_path / "t.sqlite"
    code = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"  # run by the nsys of this test
    started = time.monotonic()
    with pytest.raises(TraceError, match=r"longer than 1.5 s \(--timeout\)"):
        capture(out, [sys.executable, "-c", code], timeout_s=1.5)
    assert time.monotonic() - started < 3
    time.sleep(started + 5 - time.monotonic())
    assert not mark.exists() and not out.exists()
    assert not [name for name in left(tmp_path) if name.startswith(".capture")]


@pytest.mark.parametrize(("words", "says"), [
    (["good.json", "--", "python", "script.py"], "is there already"),
    (["folder", "--", "python", "script.py"], "is a folder"),
    (["none/t.json", "--", "python", "script.py"], "no folder that can be written"),
    (["t.sqlite", "--", "python", "script.py"], "nsys is not on PATH"),
    (["t.json", "--capture-range", "x", "--", "python", "script.py"], "nsys's"),
    (["t.json", "--timeout", "0", "--", "python", "script.py"], "must be above 0"),
    (["t.json", "--", "./engine"], "only a Python script"),
    (["t.json", "--", "python"], "only a Python script"),
    (["t.json", "--", "python", "none.py"], "no script none.py"),
])  # fmt: skip
def test_wrong_calls_are_refused_before_anything_runs(no_nsys, tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "good.json").write_text("mine")
    (tmp_path / "script.py").write_text("open('ran', 'w')")
    assert run(["trace", "capture", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err
    assert left(tmp_path) == ["folder", "good.json", "script.py"] and (tmp_path / "good.json").read_text() == "mine"


def test_a_python_without_torch_is_named(no_nsys, tmp_path):
    with pytest.raises(TraceError, match="has no torch: install either"):
        capture(tmp_path / "t.json", [sys.executable, "-S", "-c", "1"])
    assert left(tmp_path) == []


def test_python_command_lines_come_apart(tmp_path):
    script = tmp_path / "x.py"
    script.write_text("")
    assert python_words(["python3.12", "-u", "-X", "dev", str(script), "-m"]) == (
        ["python3.12"], ["-u", "-X", "dev"], [str(script), "-m"])  # fmt: skip
    assert python_words([str(script), "a"]) == ([sys.executable], [], [str(script), "a"])
    assert python_words(["/usr/bin/python", "-m", "pkg"])[2] == ["-m", "pkg"]


def test_recording_writes_the_block_whole_or_not_at_all(tmp_path):
    import torch

    path = tmp_path / "t.json.gz"
    with recording(path):
        torch.ones(4) + 1
        assert not path.exists()
    first = path.read_bytes()
    assert json.loads(gzip.decompress(first))["traceEvents"]
    with pytest.raises(ZeroDivisionError), recording(path):
        _ = 1 / 0
    assert path.read_bytes() == first and left(tmp_path) == ["t.json.gz"]
    with pytest.raises(TraceError, match="is there already"):
        recording(path, force=False)  # at the call, before any block
    with pytest.raises(TraceError, match="must end in"):
        recording(tmp_path / "t.txt")


def test_scrub_keeps_only_strings_that_are_named(tmp_path):
    path = tmp_path / "x.sqlite"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "kernel"), (2, "mark"), (3, "stdout")])
    database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, shortName, demangledName, streamId)")
    database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2, 1, NULL, 3)")
    database.execute("CREATE TABLE NVTX_EVENTS (start, end, text, textId)")
    database.execute("INSERT INTO NVTX_EVENTS VALUES (1, 2, NULL, 2)")
    database.commit()
    database.close()
    assert scrub(path) == []
    database = sqlite3.connect(path)
    assert database.execute("SELECT value FROM StringIds ORDER BY id").fetchall() == [("kernel",), ("mark",)]
    database.close()
