"""The notebook facade: same answers as the commands, each shown with its evidence."""

from __future__ import annotations

from pathlib import Path

import pytest
from k3lab.cli.lab import Shown, open_lab
from k3lab.kernels import SMALL_K3, InputError


def test_a_lab_shows_itself() -> None:
    lab = open_lab("attention_projection", tp=16, rows=8)
    assert "3216" in lab._repr_html_()
    assert "46.27 MB" in repr(lab)


def test_check_and_compile_and_predict() -> None:
    lab = open_lab("attention_projection", tp=4, rows=3, model=SMALL_K3)
    check = lab.check()
    assert check["ok"]
    assert check["how"] == "interpreter"
    assert "pass" in check._repr_html_()
    kernel = lab.compile(arch="sm_90a")["kernels"][0]
    assert kernel["registers"] > 0
    assert lab.compile({"block_n": 16})["kernels"][0]["blocks"] > kernel["blocks"]
    prediction = lab.predict()
    assert prediction.title.startswith("predicted ")
    assert prediction["microseconds"] > 0


def test_tune_goes_on_where_it_stopped(tmp_path: Path) -> None:
    lab = open_lab("attention_projection", tp=4, rows=3, model=SMALL_K3)
    first = lab.tune(2, study=tmp_path / "s.sqlite3")
    again = lab.tune(4, study=tmp_path / "s.sqlite3")
    assert (len(first["trials"]), len(again["trials"])) == (2, 4)
    assert "older" not in dict(first.rows)
    assert dict(again.rows)["older"] == "2 of them were in the study already, 2 are new"
    assert dict(lab.tune(3, study=tmp_path / "s.sqlite3").rows)["older"].startswith("all 4 were in the study already")
    assert again["trials"][:2] == first["trials"]
    assert again["evidence"] == "predicted"
    title = again.figure.layout.title.text
    assert "predicted" in title


def test_floors_of_all_gpus() -> None:
    figure = open_lab("kda", tp=16, rows=8).roofline()
    assert [trace.name for trace in figure.data] == ["TP4", "TP8", "TP16"]
    assert len(figure.data[0].x) == 5
    for four, sixteen in zip(figure.data[0].y, figure.data[2].y, strict=True):
        assert four > sixteen


def test_wrong_calls_are_refused_in_words() -> None:
    with pytest.raises(InputError, match="unknown GPU"):
        open_lab("kda", gpu="a100")
    lab = open_lab("attention_projection", tp=16, rows=8)
    with pytest.raises(InputError, match="legal values"):
        lab.compile({"num_warps": 3})
    with pytest.raises(InputError, match="needs an NVIDIA GPU"):
        lab.time()
    with pytest.raises(InputError, match="neither measured nor predicted"):
        lab.tune(1, objective="hoped")
    with pytest.raises(InputError, match="no engine"):
        open_lab("kda").check()


def test_shown_escapes() -> None:
    shown = Shown("<t>", {"a": 1}, [("<k>", "<v>")])
    assert "<t>" not in shown._repr_html_()
    assert "&lt;v&gt;" in shown._repr_html_()
