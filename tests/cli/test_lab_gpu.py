"""The lab on a GPU: a time shows itself beside its floor, a trace is the demo model's, a search measures, doctor knows the part."""

from __future__ import annotations

import json

import pytest
from k3lab.cli import main
from k3lab.cli.lab import open_lab

pytestmark = pytest.mark.gpu


def test_a_time_shows_itself(device):
    shown = open_lab("attention_projection", tp=16, rows=1, gpu=device.need_card().name, engine="triton").time()
    assert shown["cold_us"] > shown["hot_us"]
    assert dict(shown.rows)["cold"] == f"{shown['cold_us']:.2f} us"
    assert list(shown.figures) == ["times", "samples"]
    assert len(shown.figures["samples"].data[0].y) == len(shown["cold"]["samples_ns"])


def test_a_search_measures_and_tells_what_decided(device, tmp_path):
    lab = open_lab("attention_projection", tp=16, rows=1, gpu=device.need_card().name, engine="triton")
    study = lab.tune(6, study=tmp_path / "s.sqlite3")
    assert study["evidence"] == "measured"
    assert study["importance"]


def test_a_trace_is_the_demo_models(device):
    shown = open_lab("attention_projection", tp=16, rows=8).trace()
    assert shown.title.startswith("trace of the demo model against ")
    assert not shown["synthetic"]
    assert shown["gpus"] and device.name.split()[-1] in shown["gpus"][0]


def test_doctor_knows_the_part(device, capsys):
    main.run(["doctor", "--json"])
    items = {item["name"]: item for item in json.loads(capsys.readouterr().out)["items"]}
    assert "MHz" in items["GPU 0 clocks"]["found"] and " W" in items["GPU 0 power cap"]["found"]
    assert items["GPU 0 MIG"]["found"]
