"""The notebook facade: same answers as the commands, each shown with its evidence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from k3lab.cli.edited import edited_family
from k3lab.cli.lab import open_lab
from k3lab.cli.shown import Shown
from k3lab.kernels import SMALL_K3, InputError, family
from k3lab.tuning import compiling, jobs


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
    assert (check.figure.layout.annotations[0].x, check.figure.layout.shapes[0].x0) == (
        0,
        1,
    )  # one place of a logarithmic axis
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


def test_a_lab_result_displays_its_table_and_its_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    seen: list[object] = []
    monkeypatch.setattr(IPython.display, "display", lambda item, **options: seen.append(item))
    open_lab("kda", tp=16, rows=8).roofline()._ipython_display_()
    assert "roofline of kda on GB300" in seen[0]["text/html"]  # type: ignore[index]
    assert type(seen[1]).__name__ == "Figure"
    with pytest.raises(InputError, match="has no figure"):
        Shown("t", {}, []).figure  # noqa: B018


def test_floors_of_all_gpus_and_both_roofs() -> None:
    shown = open_lab("kda", tp=16, rows=8).roofline()
    figure = shown.figures["floors"]
    assert [trace.name for trace in figure.data] == ["TP4", "TP8", "TP16"]
    assert len(figure.data[0].x) == 5
    for four, sixteen in zip(figure.data[0].y, figure.data[2].y, strict=True):
        assert four > sixteen
    roof = shown.figure.data[0]
    assert roof.y[1] == roof.y[2] == pytest.approx(2500)  # flat beyond the ridge
    assert roof.y[0] == pytest.approx(roof.x[0] * 8.0)  # the slope is the bandwidth
    assert "bytes" in dict(shown.rows)["held by"]


def test_a_problem_beyond_the_ridge_is_held_by_arithmetic() -> None:
    from k3lab.cli.roofline_data import limits_us
    from k3lab.kernels import Traffic
    from k3lab.kernels.gpu_cards import gpu_card

    by_bytes, by_flops = limits_us(Traffic(8_000_000, 0, 10**10), gpu_card("GB300"))
    assert (by_bytes, by_flops) == (pytest.approx(1.0), pytest.approx(4.0))


def test_a_recorded_timing_shows_itself() -> None:
    import json

    from k3lab.cli.timing_data import shown_timing

    results = Path(__file__).resolve().parents[2] / "results"
    timing = json.loads((results / "h200" / "attention_projection.json").read_text())["winner_timing"]
    shown = shown_timing("the winner on H200", timing)
    assert dict(shown.rows)["cold"] == f"{timing['cold_us']:.2f} us"
    bars = shown.figure.data[0]
    assert list(bars.x[:2]) == [timing["cold_us"], timing["hot_us"]]
    assert list(shown.figures["samples"].data[0].y) == [sample / 1000 for sample in timing["cold"]["samples_ns"]]


def test_a_trace_without_a_path_is_synthetic_and_says_so() -> None:
    shown = open_lab("experts", tp=16, rows=8).trace()
    assert shown.title == "trace of a synthetic trace, no GPU here against gb300-tp16"
    assert shown["word"] == "pass (synthetic)"
    told = dict(shown.rows)
    kda = next(group for group in shown["classes"] if group["kind"] == "kda")
    own = sum(kernel["us"] for kernel in kda["all"] if kernel["family"] == "experts")
    assert told["experts in KDA"].startswith(f"{own:.1f} of {kda['us']:.1f} us")
    assert shown.drawing.startswith("<svg ") and "k3_experts_synthetic_routed" in shown.drawing


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A family in a module of its own beside its kernel file, importable here and in other processes."""
    from k3lab.cli.new import render_files

    files = render_files("toy_mix", inside=False)
    folder = tmp_path / "site" / "toy_mix_lab"
    folder.mkdir(parents=True)
    for path, text in files.items():
        if path.startswith("k3lab_toy_mix/"):
            (folder / Path(path).name).write_text(text.replace("k3lab_toy_mix", "toy_mix_lab"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield folder
    for name in [name for name in sys.modules if name.startswith("toy_mix_lab")]:
        del sys.modules[name]
    jobs.find_family.cache_clear()
    edited_family.cache_clear()
    compiling.forget("toy_mix")


def test_an_edited_kernel_is_what_the_next_call_checks(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = open_lab("toy_mix_lab:FAMILY", tp=4, rows=2, model=SMALL_K3)
    other = open_lab("toy_mix_lab:FAMILY", tp=4, rows=3, model=SMALL_K3)
    first = lab.compile()["kernels"][0]["instructions"]
    assert "imported again" not in capsys.readouterr().out
    kernel = toy / "triton_rows.py"
    kernel.write_text(kernel.read_text().replace("+ bias\n", "- bias\n"))  # as long as before, in the same second
    wrong = lab.check()
    assert not wrong["ok"] and "relative error" in wrong["reason"]
    assert capsys.readouterr().out == "imported again: triton_rows.py\n"
    kernel.write_text(kernel.read_text().replace("- bias\n", "+ bias * bias\n"))
    assert lab.compile()["kernels"][0]["instructions"] != first
    twin = toy / "twin.py"
    twin.write_text(twin.read_text().replace("+ bias.to(compute))", "+ bias.to(compute) ** 2)"))
    assert lab.check()["ok"]
    assert other.compile()["kernels"] and lab.compile()["kernels"]  # both labs hold the one import


def test_an_edit_that_does_not_import_is_told_and_can_be_mended(toy: Path) -> None:
    lab = open_lab("toy_mix_lab:FAMILY", tp=4, rows=2, model=SMALL_K3)
    engines = toy / "engines.py"
    text = engines.read_text()
    lab.engine  # noqa: B018
    engines.write_text(text + "\nthis is no Python\n")
    with pytest.raises(InputError, match=r"engines.py changed and does not import: SyntaxError: invalid syntax"):
        lab.compile()
    engines.write_text(text)
    assert lab.compile()["kernels"]


def test_a_family_by_its_module_tunes_and_shows_what_decided(toy: Path, tmp_path: Path) -> None:
    lab = open_lab("toy_mix_lab:FAMILY", tp=4, rows=2, model=SMALL_K3)
    study = lab.tune(8, study=tmp_path / "s.sqlite3")
    assert list(study.figures) == ["history", "importance", "slices"]
    assert all("predicted" in figure.layout.title.text for figure in study.figures.values())
    assert list(study["importance"].values()) == sorted(study["importance"].values(), reverse=True)
    bars = study.figures["importance"].data[0]
    assert dict(zip(bars.y, bars.x, strict=True)) == {name: 100 * share for name, share in study["importance"].items()}
    points = sum(len(trace.x) for trace in study.figures["slices"].data if trace.mode == "markers")
    shown = {note.text for note in study.figures["slices"].layout.annotations}
    assert shown and points == 8 * len(shown)
    with pytest.raises(InputError, match="cannot be loaded from toy_mix_lab:NOTHING"):
        open_lab("toy_mix_lab:NOTHING")


def test_wrong_calls_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="unknown GPU"):
        open_lab("kda", gpu="a100")
    lab = open_lab("attention_projection", tp=16, rows=8)
    with pytest.raises(InputError, match="legal values"):
        lab.compile({"num_warps": 3})
    with pytest.raises(InputError, match="needs an NVIDIA GPU"):
        lab.time()
    with pytest.raises(InputError, match="neither measured nor predicted"):
        lab.tune(1, objective="hoped")
    monkeypatch.setattr(type(family("kda")), "engines", ())
    with pytest.raises(InputError, match="no engine"):
        open_lab("kda").check()


def test_shown_escapes() -> None:
    shown = Shown("<t>", {"a": 1}, [("<k>", "<v>")])
    assert "<t>" not in shown._repr_html_()
    assert "&lt;v&gt;" in shown._repr_html_()
