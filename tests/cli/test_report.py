"""The report: one file that loads nothing, holds every evidence word, and is refused in words where it cannot be made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from k3lab.cli import main
from k3lab.cli.lab import open_lab
from k3lab.cli.study_data import layer_basis, layer_data
from k3lab.kernels import K3, InputError, family
from k3lab.kernels.accounting import layer_bytes
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.traces import synthesize
from k3lab.traces.synthetic import Faults
from k3lab.tuning.stale import word_of


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "attention_projection.sqlite3"
    open_lab("attention_projection", tp=16, rows=8).tune(4, study=path)
    return path


def test_the_page_shows_what_it_was_given(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = synthesize(tmp_path / "trace.json.gz", layers=8, steps=22)
    command = ["report", "--out", "page", "--study", str(study), "--trace", str(trace), "--json"]
    assert main.run(command) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "pass"
    text = (tmp_path / "page" / "index.html").read_text()
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["index.html"]
    body = text[text.rindex("<main>") :]
    assert "4</b><span>trials in 1 study" in body
    assert "k3_experts_synthetic_routed" in body
    assert "synthetic trace" in body
    assert body.count('class="word predicted"') >= 3  # legend, family, winner
    assert data["verdict_shown"] == "pass (synthetic)"
    assert '<b class="synthetic">pass (synthetic)</b>' in body
    assert 'class="word pass"' not in body  # no verdict of a synthetic trace looks like one of a real run
    assert "partly predicted: floors plus 1 predicted winner; without gaps, links only in what is predicted" in body
    assert 'times on record and of the studies: predicted"' in body  # no word of what is not there
    assert "the layer above is for" not in body
    assert len(re.findall(r"Plotly\.newPlot\(", body)) == 4  # roofline, study, what decided, layer


def test_the_page_says_why_a_trace_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Faults(slow=((1, 20_000), (4, 15_000)))
    trace = synthesize(tmp_path / "t.json", layers=8, steps=8, faults=slow)
    assert main.run(["report", "--out", str(tmp_path / "page"), "--trace", str(trace)]) == 0
    text = (tmp_path / "page" / "index.html").read_text()
    body = text[text.rindex("<main>") :]
    assert "layer 1: completion period" in body and "layer 4: completion period" in body  # not the first reason alone
    assert re.search(r"<li>layer 1: kernel 9 k3_experts_synthetic_routed \[experts\] adds 44\.\d us", body)


def test_the_page_loads_nothing(study: Path, tmp_path: Path) -> None:
    assert main.run(["report", "--out", "page", "--study", str(study)]) == 0
    text = (tmp_path / "page" / "index.html").read_text()
    assert not re.findall(
        r"<(?:script|img|iframe|link)[^>]+(?:src|href)=", text[: text.index("<script>")] + text[text.rindex("<main>") :]
    )
    assert text.count("plotly.js v") == 1


def test_the_page_without_anything(tmp_path: Path) -> None:
    assert main.run(["report", "--out", "page"]) == 0
    text = (tmp_path / "page" / "index.html").read_text()
    assert "No trace given" in text
    assert "None given" in text


def test_names_are_escaped(study: Path, tmp_path: Path) -> None:
    trace = synthesize(tmp_path / "<b>trace.json.gz", layers=8, steps=22)
    assert main.run(["report", "--out", "page", "--study", str(study), "--trace", str(trace)]) == 0
    text = (tmp_path / "page" / "index.html").read_text()
    assert "&lt;b&gt;trace" in text
    assert "<b>trace" not in text


def test_unwritable_folder_and_wrong_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main.run(["report", "--out", "file/page"]) == 2
    assert "name another --out folder" in capsys.readouterr().err
    (tmp_path / "no.sqlite3").write_text("not a database")
    assert main.run(["report", "--out", "page", "--study", "no.sqlite3"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "page").exists()


def test_a_trace_of_another_gpu_is_told(tmp_path: Path) -> None:
    trace = synthesize(tmp_path / "trace.json.gz", layers=8, steps=22)
    assert main.run(["report", "--out", "page", "--trace", str(trace), "--gpu", "h200"]) == 0
    text = (tmp_path / "page" / "index.html").read_text()
    assert "The trace is a synthetic one for NVIDIA GB300; the layer above is for H200." in text
    assert "synthetic trace of NVIDIA GB300" in text


def test_numbers_stand_beside_their_evidence_word(study: Path, tmp_path: Path) -> None:
    results = Path(__file__).resolve().parents[2] / "results"
    record = json.loads((results / "h200" / "attention_projection.json").read_text())
    recorded, word = record["choice"]["value_us"], word_of(record)
    assert main.run(["report", "--out", "page", "--study", str(study), "--results", str(results)]) == 0
    text = (tmp_path / "page" / "index.html").read_text()
    assert f'H200 <span class="word {word}">{word}</span> {recorded:.2f} us' in text
    assert (
        text.count('GB300 <span class="word predicted">predicted</span> ') == 1
    )  # the page's own study, not the record


@pytest.mark.parametrize(
    ("words", "evidence", "basis"),
    [
        (["floor"] * 3, "lower bound", "byte floors alone"),
        (["predicted", "floor", "floor"], "partly predicted", "floors plus 1 predicted winner;"),
        (["measured", "measured", "floor"], "partly measured", "floors plus 2 measured winners;"),
        (["measured", "predicted", "floor"], "partly measured and predicted", "floors plus 1 measured and 1 predicted winners;"),
        (["predicted"] * 3, "predicted", "3 predicted winners;"),
    ],
)  # fmt: skip
def test_the_sum_of_a_layer_has_its_evidence_word(words: list[str], evidence: str, basis: str) -> None:
    found = layer_basis([{"evidence": word} for word in words])
    assert found[0] == evidence
    assert found[1].startswith(basis)
    assert found[1].endswith(
        "without collectives and gaps" if evidence == "lower bound" else "links only in what is predicted"
    )


@pytest.mark.parametrize("kind", ["kda", "mla"])
def test_the_layer_adds_up_to_the_model(kind: str) -> None:
    """The families of a layer together move what the accounting says of the layer, but for activations."""
    layer = layer_data(K3, 16, 8, kind, gpu_card("GB300"))
    moved = sum(part["bytes"] for part in layer["parts"])
    cache = (
        {"context": 8 * family("mla").problem(K3, tp=16, rows=8).context, "fp8_cache": False} if kind == "mla" else {}
    )  # type: ignore[attr-defined]
    whole = layer_bytes(K3, 16, 8, kind, **cache).total  # type: ignore[arg-type]
    assert moved == pytest.approx(whole, rel=0.04)
    assert layer["sum_us"] == pytest.approx(layer["floor_us"])
    assert {part["evidence"] for part in layer["parts"]} == {"floor"}
    assert layer["evidence"] == "lower bound"


def test_a_winner_replaces_its_floor(study: Path) -> None:
    from k3lab.cli.study_data import study_data

    data = study_data(study)
    layer = layer_data(K3, 16, 8, "kda", gpu_card("GB300"), [data])
    first = layer["parts"][0]
    assert (first["evidence"], first["time_us"]) == ("predicted", data["choice"]["value_us"])
    assert layer["sum_us"] == pytest.approx(layer["floor_us"] - first["floor_us"] + first["time_us"])
    other = layer_data(K3, 16, 8, "kda", gpu_card("H200"), [data])  # another GPU's winner does not count
    assert other["parts"][0]["time_us"] is None


def test_layer_kind_is_checked() -> None:
    with pytest.raises(InputError, match="neither kda nor mla"):
        layer_data(K3, 16, 8, "dense", gpu_card("GB300"))


def test_a_long_layer_lists_what_adds_most() -> None:
    from k3lab.cli.verdict_data import SHOWN, listed, short_name

    names = [f"void at::native::kernel_{i}<4, (anonymous namespace)::F>(int)" for i in range(SHOWN + 5)]
    found = listed([{"kernel": name, "family": None, "increment_ns": 1000 * i} for i, name in enumerate(names)])
    assert (found["count"], found["others"], found["others_us"]) == (SHOWN + 5, 5, 0 + 1 + 2 + 3 + 4)
    assert [kernel["place"] for kernel in found["kernels"]] == list(range(6, SHOWN + 6))
    assert found["kernels"][0]["name"] == "at::native::kernel_5"
    assert short_name("k3_router_triton_topk") == "k3_router_triton_topk"
    assert (
        short_name("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, 7>(T1)")
        == "internal::gemvx::kernel"
    )
    assert listed([])["others"] == 0
