"""Reports of Nsight Systems, exported by an ``nsys`` on PATH: a script here, that does what it is told."""

from __future__ import annotations

import os
import sys
import tempfile
import time

import pytest
from k3lab.cli.main import run
from k3lab.traces import TraceError, check_trace, read_trace
from k3lab.traces.readers.nsys_report import read_report

REPORT = b"NVIDIA Tegra Profiler report" + bytes(200)
HEAD = f"#!{sys.executable}\nimport os, sys, shutil, subprocess, time\nout = sys.argv[sys.argv.index('-o') + 1]\n"


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "data" / "run 1.nsys-rep"
    path.parent.mkdir()
    path.write_bytes(REPORT)
    return path


@pytest.fixture
def nsys(tmp_path, monkeypatch):
    """Put an nsys on PATH that does ``body``; temporary folders go to one of the test."""
    folder, temporary = tmp_path / "bin", tmp_path / "temporary"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def install(body):
        script = folder / "nsys"
        script.write_text(HEAD + body)
        script.chmod(0o755)
        return temporary

    return install


def test_an_export_is_made_read_and_deleted(tmp_path, make, report, nsys):
    database = make.node_mode(tmp_path / "made.sqlite", replays=7).write()
    temporary = nsys(
        f"open({str(tmp_path / 'said')!r}, 'w').write('\\n'.join(sys.argv[1:]))\nshutil.copy({str(database)!r}, out)\n"
    )
    trace = read_trace(report)
    assert trace.kernels == read_trace(database).kernels
    assert (trace.path, trace.format) == ("run 1.nsys-rep", "Nsight Systems report")
    said = (tmp_path / "said").read_text().splitlines()
    assert said[:5] == ["export", "--type", "sqlite", "--force-overwrite", "true"] and said[-1] == str(report)
    assert list(temporary.iterdir()) == [] and list(report.parent.iterdir()) == [report]
    assert check_trace(report, "gb300-tp16").to_json()["devices"]


def test_a_neighbouring_export_is_not_taken_for_it(make, report, nsys):
    make.node_mode(report.with_suffix(".sqlite")).write()
    nsys("sys.exit(1)\n")
    with pytest.raises(TraceError, match="failed"):
        read_trace(report)


def test_without_nsys_the_command_is_printed(report, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        TraceError, match=r"no nsys on PATH; run nsys export --type sqlite -o trace.sqlite run 1.nsys-rep"
    ):
        read_trace(report)
    assert run(["trace", "check", str(report)]) == 2
    assert "nsys export" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".nsys-rep", ".qdrep", ".qdstrm"])
def test_by_magic_or_by_name(tmp_path, monkeypatch, suffix):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, data in (("renamed.bin", REPORT), (f"old{suffix}", bytes(range(256)))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TraceError, match="an Nsight Systems report"):
            read_trace(tmp_path / name)


def test_a_failure_tells_its_code_and_nothing_of_the_output(report, nsys):
    temporary = nsys("print('PASSWORD=x'); sys.stderr.write('PASSWORD=x'); open(out, 'w').write('half'); sys.exit(3)\n")
    with pytest.raises(TraceError, match=r"failed \(exit code 3\).*nsys export --type sqlite") as caught:
        read_trace(report)
    assert "PASSWORD" not in str(caught.value) and "\n" not in str(caught.value)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("pass\n", "wrote no file"),
        ("open(out, 'w').write('garbage' * 100)\n", "not a usable SQLite file"),
        ("open(out, 'wb').write(b'SQLite format 3\\x00' + bytes(3000))\n", "not a usable SQLite file|not one of nsys"),
        ("open(out, 'w')\n", "not one of nsys export"),
    ],
)
def test_what_is_no_export_is_refused(report, nsys, body, says):
    temporary = nsys(body)
    with pytest.raises(TraceError, match=says) as caught:
        read_trace(report)
    assert "\n" not in str(caught.value) and list(temporary.iterdir()) == []


def test_an_nsys_that_cannot_run(tmp_path, report, nsys):
    nsys("")
    (tmp_path / "bin" / "nsys").write_text("#!/nowhere/python\n")
    with pytest.raises(TraceError, match="nsys cannot be run"):
        read_trace(report)


def test_a_hang_is_stopped_with_its_children(tmp_path, report, nsys):
    pid = tmp_path / "pid"
    temporary = nsys(
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\nopen(out, 'w').write('x')\ntime.sleep(600)\n"
    )
    began = time.monotonic()
    with pytest.raises(TraceError, match="took over 3 s and was stopped"):
        read_report(report, seconds=3)
    assert time.monotonic() - began < 60
    assert list(temporary.iterdir()) == []
    for _ in range(100):
        if _gone(int(pid.read_text())):
            break
        time.sleep(0.1)
    assert _gone(int(pid.read_text()))


def _gone(pid):
    """Whether the process is dead: not there, or waiting to be collected by init."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = f"/proc/{pid}/stat"
    return os.path.exists(stat) and open(stat).read().rsplit(")", 1)[1].split()[0] == "Z"


def test_children_of_a_finished_export_are_stopped_too(tmp_path, make, report, nsys):
    database = make.node_mode(tmp_path / "made.sqlite").write()
    pid = tmp_path / "pid"
    nsys(
        f"shutil.copy({str(database)!r}, out)\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
    )
    assert read_trace(report).kernels
    for _ in range(100):
        if _gone(int(pid.read_text())):
            break
        time.sleep(0.1)
    assert _gone(int(pid.read_text()))


def test_the_export_of_a_damaged_table_names_the_file_and_leaves_nothing(tmp_path, make, report, nsys):
    database = make.node_mode(tmp_path / "made.sqlite").write()
    data = database.read_bytes()
    database.write_bytes(data[: len(data) // 2])
    temporary = nsys(f"shutil.copy({str(database)!r}, out)\n")
    with pytest.raises(TraceError, match=r"run 1.sqlite: not a usable SQLite file"):
        read_trace(report)
    assert list(temporary.iterdir()) == []
