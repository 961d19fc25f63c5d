"""What comes from anybody's files and is printed: it steers no terminal, and can always be printed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from k3lab.cli import main
from k3lab.cli.output import visible

HOSTILE = "\x1b]0;title\x07\x1b[31m[red]x[/red]\x00\x9b31m\u202e\ud800k"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A trace whose kernels and GPU have such a name."""
    events = [
        {"ph": "X", "cat": "kernel", "name": f"{HOSTILE}{index % 4}", "ts": 10 * index, "dur": 5.5,
         "args": {"device": 0, "stream": 7, "correlation": 1}}
        for index in range(24)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("hostile") / "t.json"
    path.write_text(json.dumps({"traceEvents": events, "deviceProperties": [{"id": 0, "name": HOSTILE}]}))
    return path


@pytest.mark.parametrize("command", [["check"], ["show"], ["calls", "--steps", "1", "--layers", "6"], ["ranks"]])
@pytest.mark.parametrize("as_json", [False, True])
def test_names_steer_no_terminal(hostile, command, as_json):
    words = [command[0], str(hostile), *command[1:], *(["--json"] if as_json else [])]
    done = subprocess.run([sys.executable, "-m", "k3lab.cli.main", "trace", *words], capture_output=True, check=False)
    text = done.stdout.decode()
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr == b""
    assert text.replace("\n", "") == visible(text).replace("\n", "")
    if as_json:
        assert command == ["ranks"] or any(HOSTILE in one for one in _texts(json.loads(text)))
    else:
        assert "\\u001b]0;title" in text


def _texts(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def test_errors_steer_no_terminal(tmp_path, capsys):
    assert main.run(["trace", "check", str(tmp_path / "\x1b[2Jt.json")]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert "\\u001b[2Jt.json" in error


def test_too_little_memory_is_one_line(tmp_path, capsys, monkeypatch):
    from k3lab.traces.readers import opening

    def full(*_):
        raise MemoryError

    (tmp_path / "t.json").write_text('{"traceEvents": []}')
    monkeypatch.setattr(opening, "read_torch", full)
    assert main.run(["trace", "check", str(tmp_path / "t.json")]) == 2
    assert "not enough memory" in capsys.readouterr().err
    monkeypatch.setattr(opening, "kind_of", full)
    assert main.run(["trace", "check", str(tmp_path / "t.json")]) == 2
    assert "not enough memory" in capsys.readouterr().err


def test_a_file_over_the_limit_is_not_read(tmp_path, capsys, monkeypatch):
    from k3lab.traces.readers import torch_json

    monkeypatch.setattr(torch_json, "MAX_BYTES", 10)
    (tmp_path / "t.json").write_text('{"traceEvents": []}')
    assert main.run(["trace", "check", str(tmp_path / "t.json")]) == 2
    assert "profile fewer steps" in capsys.readouterr().err
