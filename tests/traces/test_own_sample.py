"""A recorded H200 trace against the answer of a script that shares nothing with the package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from k3lab.cli.main import run
from k3lab.traces import check_trace

FOLDER = Path(__file__).parent / "samples"
SAMPLE = FOLDER / "h200_decode_graph.json.gz"


@pytest.fixture(scope="module")
def answer():
    made = subprocess.run(
        [sys.executable, "-I", str(FOLDER / "answer.py")], capture_output=True, timeout=60, check=True
    )
    return json.loads(made.stdout)


def test_show_agrees_with_the_answer(answer, capsys):
    assert run(["trace", "show", str(SAMPLE), "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert answer["kernels_per_layer"] == [123, 224, 217, 218, 219]  # else the script has found something else
    assert device["steps"]["used"] == answer["steps"]
    assert [layer["kernels"] for layer in device["layers"]] == answer["kernels_per_layer"]
    assert [layer["completion_period_ns"] for layer in device["layers"]] == answer["completion_period_ns"]
    split = device["split"]
    assert (split["prefix"], split["suffix"]) == (answer["prefix"], answer["suffix"])
    assert answer["kernels_per_step"] == [split["prefix"] + sum(answer["kernels_per_layer"]) + split["suffix"]]
    assert split["method"].startswith("our attention projections")


def test_the_sample_is_small_and_tells_nothing_of_its_host():
    assert SAMPLE.stat().st_size < 60_000
    import gzip

    text = gzip.decompress(SAMPLE.read_bytes()).decode()
    assert not any(
        word in text for word in ("/tmp", "/home", "/root", "traceName", "trace_id", "process_name", "python")
    )


def test_the_script_and_the_trimmer_import_nothing_of_ours():
    for name in ("answer.py", "trim.py"):
        assert "k3lab" not in (FOLDER / name).read_text().replace("k3lab decode", "")
    imports = [line for line in (FOLDER / "answer.py").read_text().splitlines() if line.startswith(("import", "from"))]
    assert imports == ["import gzip", "import json"]


def test_the_recorded_layers_and_our_projection_are_over_the_derived_budget():
    whole = check_trace(SAMPLE, "h200-tp16")
    assert whole.verdict == "fail"
    assert whole.reasons[0].startswith("class A, 1 layers: 123 kernels, budget 15")
    ours = check_trace(SAMPLE, "h200-tp16", family="attention_projection")
    layers = ours.to_json()["devices"][0]["layers"]
    assert [layer["verdict"] for layer in layers] == ["fail", "fail", *["inconclusive"] * 3]
    assert layers[0]["count"] == "pass"
    assert layers[0]["reasons"][0].startswith("attention_projection: adds 16.")
    assert layers[2]["reasons"][0].startswith("attention_projection: no kernel of it is known in the layer, and ")
    assert check_trace(SAMPLE, "gb300-tp16", family="attention_projection").verdict == "inconclusive"
