"""Budgets, plans and names tables that are hostile or mistyped: one line, at once, and never another limit than meant."""

from __future__ import annotations

import json
import os

import pytest
from k3lab.cli.main import run
from k3lab.traces import TraceError, check_trace, load_budget
from k3lab.traces.families import read_plan
from k3lab.traces.names_table import load_table

BUDGET = {"schema": "k3lab.budget/1", "name": "b", "gpu": "GB300", "tp": 16, "rows": 8,
          "layers": {"any": {"kernels": 13, "period_ns": 69_000}}}  # fmt: skip
LOADERS = pytest.mark.parametrize("load", [load_budget, read_plan, load_table])


def written(path, **changes):
    path.write_text(json.dumps({**BUDGET, **changes}))
    return path


@LOADERS
@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path, load):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(TraceError):
        load(tmp_path / "pipe.json")


@LOADERS
def test_what_is_too_large_is_not_read(tmp_path, load):
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TraceError, match="over 64 MiB"):
        load(tmp_path / "large.json")


@LOADERS
@pytest.mark.parametrize("text", ["", "[" * 200_000, "{", "\x00", "9" * 5000])
def test_what_is_no_json_is_one_line(tmp_path, load, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TraceError) as told:
        load(tmp_path / "t.json")
    assert "\n" not in str(told.value)


@LOADERS
def test_a_name_that_no_file_can_have_is_not_there(load):
    with pytest.raises(TraceError):
        load("x" * 5000 + ".json")


@pytest.mark.parametrize("key", ["layers", "gpu", "tp"])
def test_a_key_that_is_there_twice_is_refused(tmp_path, key):
    """Which of two limits is meant, nobody knows; the looser one would pass."""
    again = json.dumps({key: BUDGET[key]})[1:]
    (tmp_path / "b.json").write_text(json.dumps(BUDGET)[:-1] + ", " + again)
    with pytest.raises(TraceError, match="a key is there twice"):
        load_budget(tmp_path / "b.json")


@pytest.mark.parametrize("kind", ["KDA", " kda", "Any", "", " "])
def test_a_mistyped_layer_kind_is_refused(tmp_path, kind):
    """Its layers would be held against another kind's limit, or none."""
    layers = {kind: {"kernels": 1}, "any": {"kernels": 13}}
    with pytest.raises(TraceError, match="kinds are kda, mla, any"):
        load_budget(written(tmp_path / "b.json", layers=layers))


@pytest.mark.parametrize("key", ["kernel", "period_us", "Kernels"])
def test_a_mistyped_limit_is_refused(tmp_path, key):
    with pytest.raises(TraceError, match=f"'{key}', which is no limit"):
        load_budget(written(tmp_path / "b.json", layers={"any": {"kernels": 13, key: 5}}))


def test_the_budget_itself_is_good(make, tmp_path):
    head = {"deviceProperties": [{"id": 0, "name": "NVIDIA GB300"}]}
    trace = make.torch(tmp_path / "t.json", make.pdl_events(slow=None, bubble=None), **head)
    assert check_trace(trace, written(tmp_path / "b.json")).verdict == "pass"


def test_a_figure_is_not_written_over_what_it_is_made_from(make, tmp_path, capsys):
    trace = make.torch(tmp_path / "t.html", make.pdl_events())
    held = trace.read_bytes()
    (tmp_path / "link.svg").symlink_to(trace)
    for out in ("t.html", "link.svg"):
        assert run(["trace", "figure", str(trace), "--out", str(tmp_path / out)]) == 2
        assert "made from" in capsys.readouterr().err
    assert run(["trace", "figure", str(trace), "--out", str(tmp_path / ("x" * 300 + ".svg"))]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert trace.read_bytes() == held
