"""``k3lab predict`` without a family: a layer kernel by kernel, its floor, its budget, and what is not known of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from k3lab.cli import main, predict, study_data
from k3lab.kernels import K3, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.predict_layer import choice, layer
from rich.console import Console

GB300 = gpu_card("gb300")
RESULTS = str(Path(__file__).parents[2] / "results")
SHOWN = {"kind": "kda", "tp": 16, "rows": 8, "budget": None, "floor_bandwidth": "nominal"}
LAYER = (("attention_projection", True), ("router", False))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two families of the layer, one of them without an engine: what compiles is one kernel."""
    monkeypatch.setattr(study_data, "LAYER", LAYER)
    monkeypatch.setattr(type(family("router")), "engines", ())


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.run(["predict", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.usefixtures("short")
def test_a_layer_adds_up_and_says_what_is_a_floor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--gpu", "gb300", "--tp", "16", "--rows", "8", "--results", RESULTS, "--json")
    data = json.loads(out)
    assert (code, data["evidence"], data["launches"]) == (0, "partly predicted", 1)
    first, second = data["parts"]
    assert first["basis"] == "recorded winner" and first["kernels"][0]["kernel"].startswith("k3_attention_projection_")
    assert first["calibrated"] and "memory" in first["uncalibrated"] and data["uncalibrated_engines"] == []
    assert (second["us"], second["basis"]) == (None, "floor") and "no engine yet" in second["why"]
    assert data["sum_us"] == pytest.approx(first["us"] + second["floor_us"], abs=2e-3)
    assert data["floor_us"] == pytest.approx(first["floor_us"] + second["floor_us"], abs=2e-3)
    assert first["us"] > first["floor_us"] == pytest.approx(46_270_720 / 8e12 * 1e6, rel=1e-3)
    assert (data["budget"]["us"], data["budget"]["kernels"], data["budget"]["evidence"]) == (69.0, 13, "published")


@pytest.mark.usefixtures("short")
def test_it_is_told_to_people_and_another_gpu_has_no_such_budget(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "--gpu", "gb300")
    assert "budget 69 us in 13 kernels (gb300-tp16, published): the sum is within" in out
    assert "router: router: it has no engine yet" in out and "never calibrated on GB300" in out
    _, out, _ = call(capsys, "--gpu", "b200", "--json")
    assert json.loads(out)["budget"] is None


def test_a_recorded_winner_that_is_no_longer_legal_is_not_taken() -> None:
    owner = family("attention_projection")
    problem = owner.problem(K3, tp=16, rows=8)
    mma = owner.engine("cute_mma")
    legal = next(one for one in mma.space(problem, GB300).legal if one != mma.space(problem, GB300).default)
    engine, config, basis = choice(owner, problem, GB300, ("cute_mma", legal))
    assert (engine.name, config, basis) == ("cute_mma", legal, "recorded winner")
    engine, config, basis = choice(owner, problem, GB300, ("cute_mma", {**legal, "depth": 99}))
    assert (engine.name, basis) == (owner.default_engine, "default config")
    assert engine.space(problem, GB300).default == config
    assert layer([], GB300)["sum_us"] == 0


def test_the_links_part_of_the_sum_is_told_apart_and_named_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    owner = family("output_projection")
    data = layer([(owner, owner.problem(K3, tp=16, rows=8))], GB300)
    (part,) = data["parts"]
    assert 0 < data["link_us"] == part["terms"]["link"] < data["sum_us"] and data["link_gpus"] == []
    predict.render_layer(Console(width=300), {**SHOWN, **data})
    assert (
        f"of the sum {data['link_us']:.2f} us are links to other ranks: guessed, never measured"
        in capsys.readouterr().out
    )
    predict.render_layer(Console(width=300), {**SHOWN, **data, "link_gpus": ["H200"]})
    assert "links to other ranks: fitted to ranks on H200" in capsys.readouterr().out
    predict.render_layer(Console(width=300), {**SHOWN, **layer([], GB300)})
    assert "links" not in capsys.readouterr().out


def test_options_of_one_family_are_refused_for_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in ((("--engine", "triton"), "are of one family"), (("--kind", "mtp"), "neither kda nor mla")):
        code, out, error = call(capsys, *words)
        assert (code, out) == (2, "") and message in error
