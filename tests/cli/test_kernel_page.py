"""A kernel's page from its table: every figure of the sections, the marks around them, and a figure that only data changes."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from k3lab.cli import kernel_page, page_data, page_figure
from k3lab.cli.kernel_page import begun, differences, filled, main, read_page, write_page
from k3lab.kernels import InputError

ROWS = (1, 2, 3, 4, 8, 9, 16, 32, 64)
SHAPES = ((8, "kda", 6288), (8, "mla", 3648), (16, "kda", 3216), (16, "mla", 2880))
FAMILY = "attention_projection"


def table() -> dict[str, Any]:
    """Each row count takes 1.2 times the bytes at 4.6 TB/s and 0.01 us a row; cuBLAS 1.5 times as long."""
    rows = []
    for tp, kind, outputs in SHAPES:
        floor = 2 * outputs * 7168 / 4.6e6
        for count in ROWS:
            us = round(1.2 * floor + 0.01 * count, 3)
            rows.append({
                "problem": {"tp": tp, "rows": count, "kind": kind, "outputs": outputs}, "engine": "cute_mma", "config": {"chunks": 2},
                "us": us, "band": 0.01, "chain_us": us - 3.5, "plain_us": us + 0.1, "hidden_us": 3.6, "floor_us": round(floor, 3),
                "alternatives": {"PyTorch": round(1.5 * us, 3)}, "engines": {"cute_mma": us, **({"cute_skinny": us + 1} if count < 9 else {})},
                "reason": "ahead", "config_reason": "fastest",
            })  # fmt: skip
    environment = {
        "gpu": {"name": "NVIDIA H200", "driver": "580.1"},
        "packages": {"torch": "2.11.0", "triton": "3.6.0"},
        "commit": "abc",
    }
    return {
        "format": "k3lab-table", "schema": 1, "family": FAMILY, "gpu": "H200", "evidence": "measured", "environment": environment,
        "policy": {"calls": 40, "rotate_bytes": 400_000_000}, "problem": {"hidden": 7168, "dtype": "bfloat16"}, "rows": rows,
        "missing": [], "skipped": {},
    }  # fmt: skip


def at(data: dict[str, Any], outputs: int, rows: int) -> dict[str, Any]:
    return next(one for one in data["rows"] if one["problem"]["outputs"] == outputs and one["problem"]["rows"] == rows)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store(tmp_path, table())
    return tmp_path


def store(root: Path, data: dict[str, Any]) -> None:
    path = root / "results" / "h200" / f"{FAMILY}_table.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def bar_line(page: Any, outputs: int, rows: str) -> list[str]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.sections["bars"].splitlines()]
    return next(cells for cells in lines if cells[:2] == [str(outputs), rows])


def test_bars_are_held_or_missed_by_their_slowest_row_count(root: Path) -> None:
    data = table()
    at(data, 3216, 8)["us"] = 13.2
    at(data, 3216, 2)["us"] = 12.401
    store(root, data)
    page = read_page(FAMILY, root)
    assert bar_line(page, 3216, "1-2") == ["3216", "1-2", "12.4", "12.40 at 2 rows", "**missed** by 0.001 us"]
    assert bar_line(page, 3216, "3-8") == ["3216", "3-8", "13.2", "13.20 at 8 rows", "held"]  # the bar itself holds
    assert bar_line(page, 3216, "9-64")[3] == "12.67 at 64 rows"
    data["rows"] = [one for one in data["rows"] if one["problem"]["outputs"] != 2880]
    store(root, data)
    assert bar_line(read_page(FAMILY, root), 2880, "1-2")[3:] == ["-", "not measured"]


def test_the_mean_is_over_the_asked_shapes_and_tells_the_least(root: Path) -> None:
    data = table()
    asked = [at(data, outputs, rows) for outputs in (6288, 3648, 3216, 2880) for rows in (1, 2, 4, 8, 16, 32, 64)]
    for place, one in enumerate(asked):
        one["alternatives"]["PyTorch"] = one["us"] * (1.1 + 0.01 * place)
    at(data, 3216, 16)["alternatives"]["PyTorch"] = 0.98 * at(data, 3216, 16)["us"]
    at(data, 3216, 9)["alternatives"]["PyTorch"] = 1.0  # none of the shapes asked for
    store(root, data)
    ratios = [one["alternatives"]["PyTorch"] / one["us"] for one in asked]
    mean = math.prod(ratios) ** (1 / 28)
    first, second = read_page(FAMILY, root).sections["mean"].splitlines()
    assert f"**{mean:.3f}x**, bar 1.25x: {'held' if mean >= 1.25 else '**missed**'}." in first
    assert second == "Least gain: 0.980x at N = 3216, 16 rows; none below 1.0x: **missed**."
    at(data, 3216, 16)["alternatives"] = {}
    store(root, data)
    assert read_page(FAMILY, root).sections["mean"] == "27 of 28 shapes are measured beside cuBLAS: no mean yet."


def test_every_problem_has_its_line(root: Path) -> None:
    data = table()
    at(data, 6288, 4).update(alternatives={}, chain_us=None, hidden_us=None)
    store(root, data)
    lines = read_page(FAMILY, root).sections["tables"].splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "### TP8, KDA: N = 6288", "### TP8, MLA: N = 3648", "### TP16, KDA: N = 3216", "### TP16, MLA: N = 2880",
    ]  # fmt: skip
    one = at(data, 6288, 1)
    assert lines[4] == (
        f"| 1 | `cute_mma` | {one['us']:.2f} | 19.60 | {one['floor_us'] / one['us']:.1%} | {1.5 * one['us']:.2f} | 1.50 "
        f"| {one['us'] - 3.5:.2f} | 3.60 |"
    )
    assert lines[7].endswith("| - | - | - | - |")
    assert sum(line.startswith("| ") for line in lines) == 4 * (len(ROWS) + 2)


def test_aims_count_the_row_counts_that_reach_them(root: Path) -> None:
    data = table()
    for rows in (1, 2, 3):
        at(data, 2880, rows).update(us=10.0, floor_us=8.5)
    at(data, 2880, 1)["hidden_us"] = 2.99
    at(data, 2880, 2)["hidden_us"] = None
    store(root, data)
    (line,) = [one for one in read_page(FAMILY, root).sections["aims"].splitlines() if one.startswith("| 2880")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:3] == ["85%", "3 of 9"]
    assert cells[4] == "85.0% at 3 rows"
    assert cells[5:] == ["7 of 8", "2.99 to 3.60"]


def test_one_order_of_the_sum_has_its_cost(root: Path) -> None:
    assert "Not measured" in read_page(FAMILY, root).sections["invariant"]
    held = table()
    held["rows"] = [
        {**row, "us": row["us"] * 1.1, "engine": "cute_wgmma"} for row in held["rows"] if row["problem"]["rows"] == 8
    ]
    held["rows"][0]["problem"] = {**held["rows"][0]["problem"], "rows": 7}  # the main table has no such row
    (root / "results" / "h200" / f"{FAMILY}_invariant.json").write_text(json.dumps(held))
    lines = read_page(FAMILY, root).sections["invariant"].splitlines()
    us = at(table(), 3648, 8)["us"]
    assert lines[2].startswith("| TP8, KDA, 7 rows | `cute_wgmma` |") and lines[2].endswith("| - | - |")
    assert lines[3] == f"| TP8, MLA, 8 rows | `cute_wgmma` | {us * 1.1:.2f} | `cute_mma` {us:.2f} | +10.0% |"
    assert len(lines) == 2 + len(SHAPES)


def test_the_record_is_named(root: Path) -> None:
    data = {**table(), "missing": ["kda-tp4-rows1: the power went out"]}
    store(root, data)
    first, second, third = read_page(FAMILY, root).sections["record"].splitlines()
    link = f"../results/h200/{FAMILY}_table.json"
    assert (
        first
        == f"Measured on NVIDIA H200, driver 580.1; torch 2.11.0, triton 3.6.0; commit abc: [36 problems]({link})."
    )
    assert "at least 40 calls" in second
    assert "400 MB" in second
    assert third == "Missing: kda-tp4-rows1: the power went out"


def test_sections_are_replaced_and_the_text_around_them_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main([FAMILY, "--root", str(root), "--check"]) == 1
    assert "is not there" in capsys.readouterr().out
    assert main([FAMILY, "--root", str(root)]) == 0
    page = read_page(FAMILY, root)
    assert sorted(path.name for path in page.text.parent.iterdir()) == [f"{FAMILY}.md", f"{FAMILY}.svg"]
    text = page.text.read_text()
    assert f"({FAMILY}.svg)" in text
    mine = text.replace("## Bars\n", "## Bars\n\nWhat I have to say.\n") + "\nThe end.\n"
    page.text.write_text(mine)
    assert main([FAMILY, "--root", str(root), "--check"]) == 0
    data = table()
    at(data, 3216, 2)["us"] = 9.99
    store(root, data)
    capsys.readouterr()
    assert main([FAMILY, "--root", str(root), "--check"]) == 1
    told = capsys.readouterr().out
    assert "section tables is not what the table says" in told
    assert "section record" not in told
    assert page.text.read_text() == mine
    write_page(read_page(FAMILY, root))
    now = page.text.read_text()
    assert "| 9.99 |" in now
    assert "What I have to say." in now
    assert now.endswith("\nThe end.\n")
    assert differences(read_page(FAMILY, root)) == []
    at(data, 3216, 2)["engines"]["cute_skinny"] = 10.5  # only the figure shows it
    store(root, data)
    assert differences(read_page(FAMILY, root)) == [f"{page.figure} does not show what the table says"]


def test_marks_that_are_not_there_once_each_are_refused(root: Path) -> None:
    page = read_page(FAMILY, root)
    whole = begun(page)
    begin, end = "<!-- begin mean -->\n", "<!-- end mean -->"
    for wrong in (
        whole.replace(begin, ""), whole.replace(end, ""), whole + begin, whole.replace(begin, "").replace(end, f"{end}\n{begin}"),
    ):  # fmt: skip
        with pytest.raises(InputError, match="needs one line '<!-- begin mean -->' and one line '<!-- end mean -->' after it"):  # fmt: skip
            filled(wrong, page.sections, page.text)
    once = filled(whole, page.sections, page.text)
    assert filled(once, page.sections, page.text) == once


def test_the_figure_is_the_same_bytes_for_the_same_data(root: Path) -> None:
    pytest.importorskip("matplotlib")
    page = read_page(FAMILY, root)
    drawn = page_figure.draw(page.table, page.bars)
    assert drawn == page_figure.draw(copy.deepcopy(page.table), page.bars)
    for word in ("cute_mma", "cute_skinny", "cuBLAS", "bytes at the read ceiling", "bar", "N = 6288 (TP8 KDA)", "N = 2880 (TP16 MLA)"):  # fmt: skip
        assert f">{word}<" in drawn
    assert "dc:date" not in drawn
    assert "Matplotlib" not in drawn
    assert "#ffffff" not in drawn.replace(" ", "")  # nothing white behind it
    assert "fill: #000000" not in drawn  # nor black text
    assert f"data {page_figure.digest(page.table, page.bars)}" in drawn
    assert len(drawn) < 150_000


def test_the_figure_shows_every_engine_the_bars_and_only_shapes_with_rows(root: Path) -> None:
    page = read_page(FAMILY, root)
    axes = page_figure.plotted(page.table, page.bars)
    assert [one["outputs"] for one in axes] == [6288, 3648, 3216, 2880]
    assert [rows for rows, _ in axes[0]["engines"]["cute_mma"]] == list(ROWS)
    assert [rows for rows, _ in axes[0]["engines"]["cute_skinny"]] == [1, 2, 3, 4, 8]
    assert axes[0]["bars"] == [(1, 2, 22.5), (3, 8, 23.0), (9, 64, 24.5)]
    assert axes[1]["bars"] == []
    data = table()
    data["rows"] = [one for one in data["rows"] if one["problem"]["outputs"] == 3216]
    store(root, data)
    page = read_page(FAMILY, root)
    assert [one["outputs"] for one in page_figure.plotted(page.table, page.bars)] == [3216]
    pytest.importorskip("matplotlib")
    assert ">N = 6288" not in page_figure.draw(page.table, page.bars)
    data["rows"] = []
    store(root, data)
    page = read_page(FAMILY, root)
    with pytest.raises(InputError, match="no row of a shape"):
        page_figure.draw(page.table, page.bars)


def test_bars_are_found_by_outputs_and_rows() -> None:
    bars = page_data.load_bars(FAMILY)
    found = {rows: page_data.bar_of(bars, {"problem": {"outputs": 6288, "rows": rows}}) for rows in (1, 2, 3, 8, 9, 64)}
    assert found == {1: 22.5, 2: 22.5, 3: 23.0, 8: 23.0, 9: 24.5, 64: 24.5}
    assert page_data.bar_of(bars, {"problem": {"outputs": 3648, "rows": 1}}) is None


def test_bars_of_another_family_tell_shapes_apart_by_tp() -> None:
    bars = page_data.load_bars("output_projection")

    def bar(tp: int, rows: int, kind: str = "kda") -> float | None:
        return page_data.bar_of(bars, {"problem": {"tp": tp, "rows": rows, "kind": kind}})

    assert [bar(16, 1), bar(16, 8), bar(8, 8), bar(8, 64), bar(16, 64), bar(16, 1, "mla")] == [
        6.5,
        8,
        10,
        16,
        None,
        None,
    ]
    row = {
        "problem": {"tp": 16, "kind": "kda", "rows": 1}, "engine": "cute_fused", "engines": {"cute_fused": 6.0}, "us": 6.0,
        "floor_us": 3.0, "alternatives": {"PyTorch": 24.0}, "chain_us": None, "hidden_us": None,
    }  # fmt: skip
    other = {**row, "problem": {**row["problem"], "kind": "mla"}}
    table = {"rows": [row, other]}
    assert "| TP16, KDA | 1-1 | 6.5 | 6.00 at 1 row | held |" in page_data.bars_section(table, bars)
    assert [line for line in page_data.tables_section(table, bars) if line.startswith("#")] == [
        "### TP16, KDA",
        "### TP16, MLA",
    ]
    (axis,) = page_figure.plotted(table, bars)
    assert (axis["tp"], axis["bars"]) == (16, [(1, 1, 6.5), (2, 8, 8.0)])


def one_row(problem: dict[str, Any], us: float, floor: float = 3.0, **more: Any) -> dict[str, Any]:
    """A table's row of one engine; PyTorch takes 30 us."""
    return {
        "problem": problem, "engine": "cute", "engines": {"cute": us}, "us": us, "floor_us": floor,
        "alternatives": {"PyTorch": 30.0}, "chain_us": None, "hidden_us": None, **more,
    }  # fmt: skip


def test_a_family_whose_shapes_are_kind_and_tp_has_its_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [one_row({"kind": kind, "tp": tp, "rows": count}, us)
            for kind, tp, count, us in (
                ("uniform", 8, 1, 6.5), ("uniform", 16, 1, 5.3), ("uniform", 16, 4, 6.2), ("uniform", 16, 8, 6.0), ("choice", 16, 8, 2.4), ("zipf", 16, 1, 5.0),
            )]  # fmt: skip
    path = tmp_path / "results" / "h200" / "router_table.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**table(), "family": "router", "problem": {"hidden": 7168}, "rows": rows}))
    page = read_page("router", tmp_path)
    bars = page.sections["bars"].splitlines()
    assert bars[0] == "| problem | rows | at most, us | slowest, us |  |"
    assert len(bars) == 2 + len(page.bars["bars"])
    for line in (
        "| TP16, uniform | 1-1 | 5.3 | 5.30 at 1 row | held |",
        "| TP16, uniform | 2-8 | 6.1 | 6.20 at 4 rows | **missed** by 0.100 us |",
        "| TP16, choice | 1-8 | 2.5 | 2.40 at 8 rows | held at the only row count measured |",
        "| TP8, uniform | 1-1 | 6.4 | 6.50 at 1 row | **missed** by 0.100 us |",
        "| TP16, front | 1-1 | 2.8 | - | not measured |",
    ):
        assert line in bars
    assert page.sections["mean"] == "No mean over PyTorch is asked for."
    assert page.sections["aims"] == "No aim beyond the bars is set."
    assert [line for line in page.sections["tables"].splitlines() if line.startswith("#")] == [
        "### TP8, uniform", "### TP16, choice", "### TP16, uniform", "### TP16, zipf",
    ]  # fmt: skip
    axes = page_figure.plotted(page.table, page.bars)
    assert [one["shape"] for one in axes] == ["TP16 uniform", "TP8 uniform", "TP16 choice", "TP16 zipf"]
    assert [one["bars"] for one in axes[1:]] == [[(1, 1, 6.4), (2, 8, 7.3)], [(1, 8, 2.5), (9, 64, 4.0)], []]
    write_page(page)
    assert differences(page) == []
    assert ">TP16 uniform<" in page.figure.read_text()


def test_aims_in_microseconds_are_told_beside_what_was_measured() -> None:
    bars = page_data.load_bars("moe_tail")
    rows = [one_row({"tp": 16, "rows": 1}, 5.0), one_row({"tp": 16, "rows": 4}, 6.0)]
    assert page_data.aims_section({"rows": rows}, bars)[2:] == [
        "| TP16 | 1 | 5.0 | 5.00 | reached |", "| TP16 | 8 | 7.0 | - | not measured |",
    ]  # fmt: skip
    assert "### TP16" in page_data.tables_section({"rows": rows}, bars)
    (line,) = [line for line in page_data.bars_section({"rows": rows}, bars) if "2-8" in line]
    assert line == "| TP16 | 2-8 | 8.0 | 6.00 at 4 rows | held at the only row count measured |"
    routed = one_row({"tp": 16, "kind": "routed", "rows": 8}, 38.5)
    told = page_data.aims_section({"rows": [routed]}, page_data.load_bars("experts"))
    assert "| TP16, routed | 8 | 38.0 | 38.50 | 0.500 us above |" in told
    assert "| TP16, bf16 | 8 | 42.0 | - | not measured |" in told  # a bar of another kind is none of its
    assert told[-1] == "Aims that this table does not tell: prefetch_us 2.5."


def test_what_a_chain_must_hide_is_counted_over_problems_with_a_bar() -> None:
    bars = page_data.load_bars("output_projection")
    rows = [one_row({"tp": 16, "kind": "kda", "rows": count}, 6.0, hidden_us=us) for count, us in ((1, 0.9), (2, 1.0), (3, None))]  # fmt: skip
    other = one_row({"tp": 16, "kind": "mla", "rows": 1}, 6.0, hidden_us=5.0)
    assert page_data.aims_section({"rows": [*rows, other]}, bars) == [
        "1 of 2 problems with a bar, timed in a chain, hide 1 us there: 0.90 to 1.00 us."
    ]
    assert page_data.aims_section({"rows": [other]}, bars) == [
        "0 of 0 problems with a bar, timed in a chain, hide 1 us there."
    ]


def test_figures_that_may_be_hot_are_told(root: Path) -> None:
    data = table()
    at(data, 3216, 2)["notes"] = [
        "9 copies of the weights fit, 66 MB in place of 400: the cold figure may be a hot one"
    ]
    at(data, 3216, 3)["notes"] = ["clocks held down: sw_power_cap"]
    store(root, data)
    assert read_page(FAMILY, root).sections["record"].splitlines()[2].startswith("Memory held fewer copies for 1 of them")  # fmt: skip


def test_lines_are_drawn_only_where_something_is_known_between_points() -> None:
    points = [(1, 2.0), (8, 3.0), (64, 4.0)]
    assert page_figure._line(points, ":", None) == {"linestyle": ":", "marker": None}
    assert page_figure._line(points[:2], ":", None) == {"linestyle": "none", "marker": "_"}
    assert page_figure._line(points[:1], "-", "o") == {"linestyle": "none", "marker": "o"}
    assert page_figure._runs([(1, 1, 5.0), (2, 8, 6.0), (16, 64, 9.0)]) == [
        [(1, 1, 5.0), (2, 8, 6.0)], [(16, 64, 9.0)],
    ]  # fmt: skip


def test_a_family_without_bars_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    from k3lab.cli import page_data

    monkeypatch.setattr(page_data, "KERNELS", tmp_path)
    assert main(["lm_head", "--root", str(tmp_path)]) == 2
    assert "family lm_head has no bars" in capsys.readouterr().err


def test_wrong_calls_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in ((FAMILY, "no table at"), ("nothing", "unknown family")):
        assert main([name, "--root", str(tmp_path)]) == 2
        told = capsys.readouterr().err
        assert told.startswith("k3lab: ")
        assert words in told
        assert told.count("\n") == 1
    store(tmp_path, {"format": "other"})
    assert main([FAMILY, "--root", str(tmp_path)]) == 2
    assert "is no table" in capsys.readouterr().err
    (tmp_path / "results" / "h200" / f"{FAMILY}_table.json").write_text("{")
    assert main([FAMILY, "--root", str(tmp_path)]) == 2
    assert "is no JSON" in capsys.readouterr().err


def test_a_page_is_written_whole_or_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_page, "draw", lambda *_: "<svg/>")
    page = read_page(FAMILY, root)
    page.text.parent.mkdir()
    page.text.write_text("# mine\n")
    with pytest.raises(InputError, match="needs one line"):
        write_page(page)
    assert [path.name for path in page.text.parent.iterdir()] == [f"{FAMILY}.md"]
    assert page.text.read_text() == "# mine\n"
