"""Families of other packages: a good one is listed, a broken one says why and harms no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from k3lab.cli import main
from k3lab.kernels import InputError, family, registry

POINTS = {
    "good": "probe_good = k3lab_probe_good:FAMILY",
    "raises": "probe_raises = k3lab_probe_raises:FAMILY",
    "taken": "kda = k3lab_probe_good:FAMILY",
    "first": "probe_twice = k3lab_probe_good:FAMILY",
    "second": "probe_twice = k3lab_probe_raises:FAMILY",
}
"""Name of a package to the entry point it declares."""


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, point in POINTS.items():
        folder = tmp_path / "site" / f"k3lab_probe_{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: k3lab-probe-{name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[k3lab.families]\n{point}\n")
    (tmp_path / "site" / "k3lab_probe_good.py").write_text("from k3lab.kernels.router import FAMILY\n")
    (tmp_path / "site" / "k3lab_probe_raises.py").write_text("raise OSError('no\\nsuch disk')\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    caches = (registry._locations, registry._claims, registry.family)
    for cached in caches:
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("plug_ins")
def test_a_broken_plug_in_is_a_row_that_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["kernels", "--json"]) == 0
    rows = {row["family"]: row for row in json.loads(capsys.readouterr().out)["families"]}
    assert rows["probe_good"]["problem"] is None
    assert rows["attention_projection"]["problem"] is None
    assert rows["probe_raises"]["title"].startswith("cannot be loaded: ")
    assert rows["probe_raises"]["title"].endswith("k3lab_probe_raises:FAMILY: OSError: no such disk")
    assert "which k3lab has itself" in rows["kda"]["problem"]
    assert "two packages claim" in rows["probe_twice"]["problem"]
    assert main.run(["kernels"]) == 0
    assert capsys.readouterr().out.count("cannot be loaded: ") == 3


@pytest.mark.usefixtures("plug_ins")
def test_doctor_lists_plug_ins_and_stays_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "--json"]) == 0
    items = {item["name"]: item for item in json.loads(capsys.readouterr().out)["items"]}
    assert items["plug-in probe_good"]["ok"]
    assert "k3lab-probe-good" in items["plug-in probe_good"]["found"]
    assert "OSError: no such disk" in items["plug-in probe_raises"]["found"]
    assert items["plug-in probe_raises"]["cure"] == "repair or uninstall k3lab-probe-raises"
    assert not items["plug-in kda"]["ok"]


@pytest.mark.usefixtures("plug_ins")
def test_a_name_that_two_claim_is_refused_and_others_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert family("router").name == "router"
    with pytest.raises(InputError, match="claims the family name 'kda', which k3lab has itself"):
        family("kda")
    assert main.run(["check", "probe_raises"]) == 2
    seen = capsys.readouterr()
    assert seen.err.startswith("k3lab: family 'probe_raises' cannot be loaded from k3lab_probe_raises:FAMILY: OSError")
    assert (seen.err.count("\n"), seen.out) == (1, "")
