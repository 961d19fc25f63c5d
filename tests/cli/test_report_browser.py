"""The report in a headless Chromium: its numbers, its console, light and dark, a phone; and the README's picture of it."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from k3lab.cli.lab import open_lab
from k3lab.kernels import SMALL_K3

from .browser import Browser, chromium, find_chromium
from .notebook_pictures import PICTURE, PLOT, add_pictures, open_plotly
from .screenshots import HEIGHT, WIDTH, make_report, shoot

ROOT = Path(__file__).resolve().parents[2]
CONTRAST = """(() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = node => { for (; node; node = node.parentElement) { const c = parse(getComputedStyle(node).backgroundColor); if (c.length === 3 || c[3] > 0.99) return c; } return [255, 255, 255]; };
  const worst = {};
  for (const node of document.querySelectorAll("h1, h2, h3, p, td, th, code, .word, .tile b, .tile span, summary, button, .timeline text:not([style]), .gtitle, .xtick text, .legendtext")) {
    if (!node.textContent.trim() || node.closest("details:not([open]) > :not(summary)")) continue;
    const style = getComputedStyle(node), inSvg = node instanceof SVGElement;
    const ink = light(parse(inSvg ? style.fill : style.color)), page = light(behind(inSvg ? node.closest("div") : node));
    const ratio = (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05), name = node.tagName + "." + (node.getAttribute("class") || "");
    if (!(name in worst) || ratio < worst[name]) worst[name] = ratio;
  }
  return worst;
})()"""
PLOTS = """Array.from(document.querySelectorAll(".js-plotly-plot")).map(plot => ({
  title: plot.layout.title.text, traces: plot.data.map(t => ({name: t.name, x: Array.from(t.x || []), y: Array.from(t.y || [])}))}))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        assert "CI" not in os.environ, ".ci/run installs Chromium where there is none"
        pytest.skip("no Chromium here: apt-get install chromium")
    with chromium(path, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> tuple[Path, dict[str, Any]]:
    """The page of results/, a synthetic trace and a small study; and what it was made of."""
    folder = tmp_path_factory.mktemp("report")
    open_lab("attention_projection", tp=4, rows=3, model=SMALL_K3).tune(3, study=folder / "s.sqlite3")
    return make_report(folder, (folder / "s.sqlite3",))


def test_it_shows_its_numbers_and_complains_of_nothing(browser: Browser, report: tuple[Path, dict[str, Any]]) -> None:
    page, data = report
    browser.requests.clear()
    browser.open(page)
    assert browser.complaints == []
    assert [address for address in browser.requests if not address.startswith(("data:", "blob:"))] == [
        page.resolve().as_uri()
    ]
    tiles = browser.value("Array.from(document.querySelectorAll('.tile b')).map(node => node.textContent)")
    engines = sum(bool(row["engines"]) for row in data["families"])
    assert tiles == [
        f"{engines} of {len(data['families'])}",
        "3",
        f"{data['layer']['sum_us']:.1f} us",
        "fail (synthetic)",
    ]

    table = json.loads((ROOT / "results" / "h200" / "attention_projection_table.json").read_text())
    recorded = next(
        row for row in table["rows"] if {"kind": "kda", "tp": 16, "rows": 4}.items() <= row["problem"].items()
    )
    rows = browser.value(
        "Array.from(document.querySelectorAll('details tr')).map(row => Array.from(row.cells).map(cell => cell.textContent))"
    )
    shown = next(row for row in rows if row[:2] == ["kda-tp16-rows4", "H200"])
    assert shown[2:] == [
        recorded["engine"], f"{recorded['us']:.2f} us", f"{recorded['floor_us']:.2f} us",
        f"{recorded['us'] / recorded['floor_us']:.2f}x", f"PyTorch {recorded['alternatives']['PyTorch']:.2f} us", "measured",
    ]  # fmt: skip


def test_its_plots_hold_the_recorded_figures(browser: Browser, report: tuple[Path, dict[str, Any]]) -> None:
    page, data = report
    browser.open(page)
    plots = browser.value(PLOTS)
    table = json.loads((ROOT / "results" / "h200" / "attention_projection_table.json").read_text())
    own = sorted(
        (row["problem"]["rows"], row["us"])
        for row in table["rows"]
        if {"kind": "mla", "tp": 16}.items() <= row["problem"].items()
    )
    drawn = next(plot for plot in plots if "mla-tp16 on H200: measured" in plot["title"])
    winner = next(trace for trace in drawn["traces"] if trace["name"] == "winner, measured")
    assert list(zip(winner["x"], winner["y"], strict=True)) == own
    roof = next(plot for plot in plots if plot["title"].startswith("times on record"))
    assert {"measured", "predicted"} <= {trace["name"] for trace in roof["traces"]}
    measured = next(trace for trace in roof["traces"] if trace["name"] == "measured")
    tables = [json.loads(path.read_text()) for path in (ROOT / "results" / "h200").glob("*_table.json")]
    assert len(measured["y"]) == sum(len(one["rows"]) for one in tables if one["evidence"] == "measured")
    study = next(plot for plot in plots if plot["title"].startswith("attention_projection/triton"))
    values = [trial["value"] for trial in data["studies"][0]["trials"]]
    assert next(trace for trace in study["traces"] if trace["name"] == "trial")["y"] == values
    layers = browser.value("Array.from(document.querySelectorAll('div[data-layer]')).map(node => node.dataset.layer)")
    assert layers == ["H200", "GB300"]  # the target's layer is there whatever the page is about
    assert any("GB300" in plot["title"] and "predicted" in plot["title"] for plot in plots if "MoE" in plot["title"])
    period = browser.value("document.querySelector('.timeline svg').getAttribute('aria-label')")
    assert "layer 2" in period


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_can_be_read(browser: Browser, report: tuple[Path, dict[str, Any]], dark: bool) -> None:
    browser.open(report[0], dark=dark)
    assert browser.value("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    worst = browser.value(CONTRAST)
    assert len(worst) > 12
    assert {name: ratio for name, ratio in worst.items() if ratio < 4.5} == {}
    browser.value("flip()")
    assert browser.value("document.documentElement.dataset.theme") == ("light" if dark else "dark")
    assert {name: ratio for name, ratio in browser.value(CONTRAST).items() if ratio < 4.5} == {}


def test_a_phone_scrolls_down_only(browser: Browser, report: tuple[Path, dict[str, Any]]) -> None:
    browser.open(report[0], width=390, height=800)
    assert browser.value("innerWidth") == 390
    assert browser.value("document.documentElement.scrollWidth") <= 390
    browser.value("document.querySelectorAll('details').forEach(node => { node.open = true; })")
    assert browser.value("document.documentElement.scrollWidth") <= 390
    wide = "Array.from(document.querySelectorAll('.js-plotly-plot')).filter(plot => plot.getBoundingClientRect().right > 391).length"
    assert browser.value(wide) == 0
    assert browser.complaints == []


def test_the_readmes_picture_can_be_taken(
    browser: Browser, report: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    for dark in (False, True):
        shoot(browser, report[0], tmp_path / f"{dark}.png", dark=dark)
    light, night = (tmp_path / f"{dark}.png" for dark in (False, True))
    for picture in (light, night, ROOT / "docs" / "report.png"):
        data = picture.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", data[16:24]) == (WIDTH, HEIGHT)
    assert light.read_bytes() != night.read_bytes()


def test_no_legend_covers_an_axis_title_on_a_phone(browser: Browser, report: tuple[Path, dict[str, Any]]) -> None:
    browser.open(report[0], width=390, height=800)
    covered = """Array.from(document.querySelectorAll('.js-plotly-plot')).filter(plot => {
      const title = plot.querySelector('.xtitle'), legend = plot.querySelector('.legend');
      if (!title || !legend) return false;
      return legend.getBoundingClientRect().top < title.getBoundingClientRect().bottom - 2;
    }).map(plot => plot.layout.title.text)"""
    assert browser.value(covered) == []


def test_plots_of_a_notebook_get_their_pictures(browser: Browser, tmp_path: Path) -> None:
    import plotly.graph_objects as go

    figure = json.loads(go.Figure().add_bar(x=[1, 2], y=[3, 4]).update_layout(height=200).to_json())
    outputs = [{"data": {PLOT: figure}}, {"data": {"text/plain": "x"}}, {"output_type": "stream", "text": "y"}]
    notebook = {"cells": [{"outputs": outputs}, {}]}
    open_plotly(browser, tmp_path)
    assert add_pictures(browser, notebook) == add_pictures(browser, notebook) == 1
    picture = base64.b64decode(outputs[0]["data"][PICTURE])  # type: ignore[index]
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", picture[16:24]) == (760, 200)
    assert len(set(picture)) > 50 and "PNG" not in str(outputs[1:])
    assert browser.complaints == []
