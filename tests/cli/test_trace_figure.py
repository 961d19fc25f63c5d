"""The timeline of a layer: its numbers are the report's, its labels never meet, hostile names harm nothing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest
from k3lab.cli.main import run
from k3lab.cli.trace_layout import Rect, Text, lay_out
from k3lab.cli.trace_png import png
from k3lab.cli.trace_svg import page, svg
from k3lab.kernels import InputError
from k3lab.traces import TraceError, check_trace, synthesize
from k3lab.traces.figure import layer_figure
from k3lab.traces.synthetic import Faults

SPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("figure")
    return synthesize(
        folder / "slow.json.gz", steps=6, layers=8, faults=Faults(slow=((2, 20_000),), bubble=((4, 4000),))
    )


def launches(folder: Path, names: list[str], streams: int = 1) -> Path:
    """Six steps of four layers, back to back, one 10 us kernel after another; every ``streams`` one on a side stream."""
    events, clock = [], 1000
    for step in range(6):
        events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "pid": 1, "tid": 1, "ts": clock - 20,
                       "dur": 5, "args": {"correlation": step + 1}})  # fmt: skip
        for layer in range(4):
            for place, name in enumerate(names):
                stream = 7 + place % streams
                args = {
                    "device": 0,
                    "stream": stream,
                    "correlation": step + 1,
                    "graph node id": layer * len(names) + place + 1,
                }
                events.append({"ph": "X", "cat": "kernel", "name": name, "ts": clock, "dur": 10, "args": args})
                clock += 10
        clock += 100
    path = folder / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def overlapping(layout) -> list[tuple[str, str]]:
    """Pairs of texts that share pixels."""
    boxes = [
        (*item.span, item.y - 0.75 * item.size, item.y + 0.2 * item.size, item.text)
        for item in layout.items
        if isinstance(item, Text)
    ]
    return [
        (one[4], other[4])
        for index, one in enumerate(boxes)
        for other in boxes[index + 1 :]
        if one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]
    ]


def outside(layout) -> list[object]:
    texts = [
        item
        for item in layout.items
        if isinstance(item, Text) and not 0 <= item.span[0] <= item.span[1] <= layout.width
    ]
    rects = [
        item
        for item in layout.items
        if isinstance(item, Rect) and not 0 <= item.x <= item.x + item.width <= layout.width
    ]
    return [
        *texts,
        *rects,
        *(item for item in layout.items if isinstance(item, (Text, Rect)) and not 0 <= item.y <= layout.height),
    ]


@pytest.mark.parametrize("layer", [0, 2, 3, 4])
def test_the_numbers_drawn_are_those_of_the_report(slow, layer):
    report = check_trace(slow, "gb300-tp16")
    device = report.devices[0].layers
    typical = device.layers[layer].typical
    root = ET.fromstring(svg(lay_out(layer_figure(slow, budget="gb300-tp16", layer=layer))))
    assert root.get("data-completion-period-ns") == str(typical.completion_period)
    assert (root.get("data-budget-ns"), root.get("data-synthetic"), root.get("data-layer")) == (
        "69000" if layer != 3 else "", "true", str(layer))  # fmt: skip
    bars = {rect.get("data-kernel"): rect for rect in root.iter(f"{SPACE}rect") if rect.get("data-kernel")}
    kernels = device.layers[layer].kernels
    assert set(bars) == set(kernels)
    for name, share in zip(kernels, typical.shares, strict=True):
        assert (bars[name].get("data-increment-ns"), bars[name].get("data-before-ns")) == (
            str(share.increment),
            str(share.bubble),
        )
        assert int(bars[name].get("data-end-ns")) <= typical.completion_period
    assert max(int(bar.get("data-end-ns")) for bar in bars.values()) == typical.completion_period
    shares = [int(rect.get("data-share-ns")) for rect in root.iter(f"{SPACE}rect") if rect.get("data-share")]
    assert sum(shares) == typical.completion_period
    gaps = [int(rect.get("data-gap-ns")) for rect in root.iter(f"{SPACE}rect") if rect.get("data-gap-ns")]
    assert sum(gaps) == sum(share.bubble for share in typical.shares) == int(root.get("data-gap-ns"))
    assert gaps or layer == 0


def test_times_begin_where_the_kernels_before_the_layer_end(slow):
    for layer in (0, 2, 4):
        latest = 0
        for bar in layer_figure(slow, layer=layer).bars:
            assert bar.gap_ns == max(0, bar.start_ns - latest)
            assert bar.increment_ns == max(0, bar.end_ns - max(latest, bar.start_ns))
            latest = max(latest, bar.end_ns)


def test_bars_lie_where_their_times_are(slow):
    figure = layer_figure(slow, budget="gb300-tp16", layer=2)
    layout = lay_out(figure)
    drawn = [item for item in layout.items if isinstance(item, Rect) and "kernel" in item.data]
    first, second = drawn[0], drawn[1]
    scale = (second.x - first.x) / (int(second.data["start-ns"]) - int(first.data["start-ns"]))
    for one in drawn:
        assert one.x - first.x == pytest.approx(
            scale * (int(one.data["start-ns"]) - int(first.data["start-ns"])), abs=0.01
        )
        assert one.width == pytest.approx(
            max(0.8, scale * (int(one.data["end-ns"]) - int(one.data["start-ns"]))), abs=0.01
        )
    colours = {one.data["family"]: one.colour for one in drawn}
    assert len(set(colours.values())) == len(colours) == 7
    assert [stream for stream, _ in figure.streams] == [7, 21]


def test_titles_say_what_where_and_that_it_is_synthetic(slow):
    title = lay_out(layer_figure(slow, budget="gb300-tp16")).title
    assert title.startswith("layer 2 (class A, kda): 13 kernels, 80.")
    assert "budget gb300-tp16: 13 kernels / 69.0 us: fail" in title
    assert "slow.json.gz, step " in title and "NVIDIA GB300, synthetic: no measurement" in title
    assert "pass (synthetic)" in lay_out(layer_figure(slow, budget="gb300-tp16", layer=0)).title
    assert "budget" not in lay_out(layer_figure(slow, layer=0)).title


def test_the_legend_tells_time_part_and_share_of_each_family(slow):
    figure = layer_figure(slow, budget="gb300-tp16", layer=2)
    texts = [item.text for item in lay_out(figure).items if isinstance(item, Text)]
    (experts,) = (text for text in texts if text.startswith("experts") and "share" in text)
    told = dict(figure.families)["experts"]
    assert experts == f"experts {told / 1000:.1f} us, {told / figure.period_ns:.0%}, share 46.4"
    assert not any(
        "share " in item.text for item in lay_out(layer_figure(slow, layer=2)).items if isinstance(item, Text)
    )


def test_which_layer_is_shown(slow):
    assert layer_figure(slow, budget="gb300-tp16").number == 2
    assert layer_figure(slow).number == 2
    typical = layer_figure(slow, class_name="b")
    assert (typical.kind, typical.class_name) == ("mla", "B")
    for arguments, says in (({"layer": 99}, "layers 0 to 7"), ({"class_name": "Z"}, "there are A, B"),
                            ({"device": 5}, "no device 5"), ({"layer": 1, "class_name": "A"}, "not both")):  # fmt: skip
        with pytest.raises(TraceError, match=says):
            layer_figure(slow, **arguments)


@pytest.mark.parametrize(
    ("count", "streams"),
    [(4, 1), (13, 1), (60, 1), pytest.param(300, 1, marks=pytest.mark.slow), (4, 2), (13, 2), (60, 2), (300, 2)],
)
def test_labels_never_meet(tmp_path, count, streams):
    names = [
        f"void some::library::kernel_number_{place}_with_a_long_name<float, {place}>(int)" for place in range(count)
    ]
    layout = lay_out(layer_figure(launches(tmp_path, names, streams), layer=1, layers=4))
    assert overlapping(layout) == [] and outside(layout) == []
    labels = Counter(item.text for item in layout.items if isinstance(item, Text))
    assert sum(count for label, count in labels.items() if label.startswith("some::library")) == count
    heads = [
        item.text for item in layout.items if isinstance(item, Text) and item.bold and item.text.startswith("stream")
    ]
    assert heads == [f"stream {7 + place}" for place in range(min(streams, count))]


def test_labels_of_close_limits_do_not_meet(slow, tmp_path):
    budget = tmp_path / "b.json"
    for period in (1_000, 60_000, 60_400, 61_000, 600_000):
        data = {
            "schema": "k3lab.budget/1",
            "name": "near",
            "gpu": "GB300",
            "tp": 16,
            "layers": {"any": {"period_ns": period}},
        }
        budget.write_text(json.dumps(data))
        layout = lay_out(layer_figure(slow, budget=budget, layer=0))
        assert overlapping(layout) == [] and outside(layout) == []


def test_hostile_names_are_only_text(tmp_path):
    names = [
        '</title><script>alert("1")</script>',
        "a&b<c>\"'",
        "bad\x00\x1b[31m\ud800name",
        "$\\frac{1}{2}$",
        "x" * 5000,
    ]
    layout = lay_out(layer_figure(launches(tmp_path, names), layer=1, layers=4))
    for text in (svg(layout), page(layout)):
        assert "<script" not in text and "\x00" not in text and "\x1b" not in text
        text.encode()
    root = ET.fromstring(svg(layout))
    drawn = [rect.get("data-kernel") for rect in root.iter(f"{SPACE}rect") if rect.get("data-kernel")]
    assert drawn[:2] == names[:2] and drawn[3:] == names[3:]
    assert png(layout).startswith(b"\x89PNG")
    assert overlapping(layout) == []


def test_a_page_loads_nothing_and_follows_the_reader(slow):
    text = page(lay_out(layer_figure(slow, budget="gb300-tp16")))
    assert "prefers-color-scheme:dark" in text and "color-scheme:light dark" in text
    assert (
        "<script" not in text
        and "<link" not in text
        and "src=" not in text
        and "url(" not in text
        and "@import" not in text
    )
    assert text.count("http") == text.count('xmlns="http://www.w3.org/2000/svg"') == 1
    assert "adds 44." in text and len(text) < 60_000


def test_a_png_has_no_background_and_colours_of_every_family(slow):
    import io

    from matplotlib.image import imread

    layout = lay_out(layer_figure(slow, budget="gb300-tp16", layer=2))
    made = png(layout)
    assert made == png(layout)
    image = imread(io.BytesIO(made))
    assert image.shape == (2 * layout.height, 2 * layout.width, 4)
    assert image[0, 0, 3] == 0
    seen = {tuple(round(255 * value) for value in pixel[:3]) for pixel in image.reshape(-1, 4)[::7] if pixel[3] == 1}
    for item in layout.items:
        if isinstance(item, Rect) and item.opacity == 1 and item.width > 20:
            assert tuple(int(item.colour[at : at + 2], 16) for at in (1, 3, 5)) in seen


def test_without_matplotlib_one_line_says_what_to_install(slow, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"k3lab\[docs\]"):
        png(lay_out(layer_figure(slow)))
    assert run(["trace", "figure", str(slow), "--out", str(tmp_path / "x.png")]) == 2
    assert run(["trace", "figure", str(slow), "--out", str(tmp_path / "x.svg")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.svg"]


def test_the_command(slow, tmp_path, capsys):
    out = tmp_path / "layer.html"
    assert (
        run(["trace", "figure", str(slow), "--out", str(out), "--class", "A", "--budget", "gb300-tp16", "--json"]) == 0
    )
    data = json.loads(capsys.readouterr().out)
    assert (data["class"], data["kernels"], data["budget_ns"], data["synthetic"]) == ("A", 13, 69_000, True)
    assert out.read_text().startswith("<!doctype html>")
    for words, says in (
        (["--out", str(tmp_path / "x.pdf")], "must end in .html, .svg or .png"),
        (["--out", str(tmp_path / "no" / "x.svg")], "cannot write"),
        (["--out", str(out), "--layer", "77"], "no layer 77"),
    ):
        before = out.read_bytes()
        assert run(["trace", "figure", str(slow), *words]) == 2
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1 and out.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["layer.html"]


def test_what_the_file_does_not_say_can_be_said(tmp_path, capsys):
    trace = synthesize(tmp_path / "t.json", steps=6, layers=8, gpu=None)
    words = ["trace", "figure", str(trace), "--out", str(tmp_path / "x.svg"), "--layer", "1", "--json"]
    seen = {}
    for said in ((), ("--gpu", "GB300", "--rows", "8"), ("--gpu", "GB300", "--rows", "4")):
        assert run([*words, "--budget", "gb300-tp16", *said]) == 0
        seen[said[1:]] = json.loads(capsys.readouterr().out)["verdict"]
    assert list(seen.values()) == ["inconclusive", "pass", "inconclusive"]
    assert run([*words, "--gpu", "GB300"]) == 2
    assert "give --budget too" in capsys.readouterr().err


def test_the_figure_of_the_docs_is_what_its_commands_draw(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["trace", "synthesize", "out/slow.json.gz", "--slow-layer", "2"]) == 0
    assert run(["trace", "figure", "out/slow.json.gz", "--budget", "gb300-tp16", "--out", "out/layer.svg"]) == 0
    shown = Path(__file__).parents[2] / "docs" / "trace_layer.svg"
    assert Path("out/layer.svg").read_text() == shown.read_text(), (
        "draw docs/trace_layer.svg again, as docs/traces.md does"
    )
