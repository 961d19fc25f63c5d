"""The package's budgets are what is computed from the families' bytes; none of their shares is typed in."""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from k3lab.cli import budget_files
from k3lab.kernels import K3, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.traces import load_budget
from k3lab.traces.shares import floor_ns, shared_out

ROOT = Path(__file__).parents[2]


def test_the_files_are_what_is_computed(capsys):
    assert budget_files.main(["--check", "--root", str(ROOT)]) == 0
    assert capsys.readouterr().out == ""


def test_a_file_that_drifted_is_told_and_written_anew(tmp_path, capsys):
    for path in budget_files.files(ROOT):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    drifted = tmp_path / "traces" / "budgets" / "h200_tp16.json"
    drifted.write_text(drifted.read_text().replace('"period_ns": ', '"period_ns": 1', 1))
    (tmp_path / "results" / "h200" / "budgets" / "tp8_rows8.json").unlink()
    assert budget_files.main(["--check", "--root", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("is not what is computed") == 2
    assert budget_files.main(["--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("wrote") == 2
    assert budget_files.main(["--check", "--root", str(tmp_path)]) == 0


def test_the_published_split_follows_the_bytes():
    layer = load_budget("gb300-tp16").layers["kda"]
    project = family("attention_projection")
    one = project.traffic(project.problem(K3, tp=16, rows=8, kind="kda")).bytes
    whole = sum(budget_files.moved("kda", 16, 8, budget_files.VERIFIED).values())
    assert abs(layer.families["attention_projection"].period_ns - 69_000 * one / whole) < 1
    assert {name: share.kernels for name, share in layer.families.items()} == {
        "attention_projection": 1, "kda": 1, "output_projection": 2, "router": 2, "experts": 6, "moe_tail": 2,
        "attn_res": 1}  # fmt: skip


@pytest.mark.parametrize(("name", "tp"), [("h200-tp16", 16), ("h200-tp8", 8)])
@pytest.mark.parametrize(("kind", "kernels"), [("kda", 13), ("mla", 15)])
def test_a_derived_budget_is_its_bytes_and_the_latency_of_its_kernels(name, tp, kind, kernels):
    layer = load_budget(name).layers[kind]
    bytes_here = sum(budget_files.moved(kind, tp, 8, budget_files.PLAIN).values())
    there = sum(budget_files.moved("kda", 16, 8, budget_files.VERIFIED).values())
    excess = (69_000 - there / 8e3) / 13
    assert layer.kernels == kernels
    assert abs(layer.period_ns - (bytes_here / 4.67e3 + kernels * excess)) < 8
    assert bytes_here / 4.67e3 < layer.period_ns < 69_000 / (there / 8e3) * bytes_here / 4.67e3  # stricter than scaling


def test_the_provenance_names_its_evidence_and_the_ceiling_it_rests_on():
    data = json.loads((ROOT / "results" / "h200" / "budgets" / "tp16_rows8.json").read_text())
    assert data["evidence"] == "derived"
    assert data["here"]["read_bandwidth"] == gpu_card("H200").measured_read_bandwidth
    assert (data["here"]["read_bandwidth_is"], data["published"]["read_bandwidth_is"]) == ("measured", "nominal")
    assert data["layers"] == json.loads((ROOT / "traces" / "budgets" / "h200_tp16.json").read_text())["layers"]


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**12), min_size=1, max_size=9).filter(any))
def test_shares_add_up_and_are_off_by_less_than_a_nanosecond(total, weights):
    named = {str(index): weight for index, weight in enumerate(weights)}
    shares = shared_out(total, named)
    assert sum(shares.values()) == total
    assert all(abs(share - Fraction(total * named[name], sum(weights))) < 1 for name, share in shares.items())


def test_floors_round_to_the_nearest():
    assert [floor_ns(moved, 2e9) for moved in (0, 1, 2, 3, 4)] == [0, 1, 1, 2, 2]
