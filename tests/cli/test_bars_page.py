"""The bars' section of the decode page: made from a result, checked against it, wrong files in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from k3lab.cli.bars_page import NONE, PAGE, RESULT, main

ROOT = Path(__file__).resolve().parents[2]


def result() -> dict[str, Any]:
    part = {"family": "experts", "launches": 1.0, "us": 31.25, "floor_us": 24.0, "above_floor_us": 7.25}
    layer = {
        "us": 72.04,
        "floor_us": 46.4,
        "traced_us": 73.3,
        "made_of": [part],
        "launches": 7.0,
        "share_of_floor": 0.6,
    }
    row = {"rows": 8, "backends": {"auto": {"layers": {"kda": layer | {"us": 300.0, "launches": 61.0}}}}}
    row["backends"]["latency_specialized"] = {"layers": {"kda": layer}}  # type: ignore[index]
    verdict = {"what": "KDA MoE layer, 8 rows", "unit": "us", "got": 72.04, "close": 85, "aim": 65, "verdict": "closes"}
    return {"gpu": "H200", "rank": 0, "tp": 16, "verdicts": [verdict], "rows": [row], "environment": {}}


def test_the_page_is_as_the_recorded_result_says() -> None:
    assert main(["--check", "--root", str(ROOT)]) == 0, "`python -m k3lab.cli.bars_page` renews it"


def test_a_section_is_made_checked_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--root", str(tmp_path)]
    assert main(asked) == 2 and "cannot read" in capsys.readouterr().err
    page, file = tmp_path / PAGE, tmp_path / RESULT
    page.parent.mkdir()
    page.write_text("before\n")
    assert main(asked) == 2 and "needs one line '<!-- begin bars -->'" in capsys.readouterr().err
    page.write_text("before\n<!-- begin bars -->\nold\n<!-- end bars -->\nafter\n")
    assert main([*asked, "--check"]) == 1 and "old" in page.read_text()
    assert main(asked) == 0 and main([*asked, "--check"]) == 0
    assert page.read_text() == f"before\n<!-- begin bars -->\n{NONE}\n<!-- end bars -->\nafter\n"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(result()))
    assert main([*asked, "--check"]) == 1
    assert main(asked) == 0
    text = page.read_text()
    assert "| KDA MoE layer, 8 rows | 72.0 us | 85 | 65 | closes |" in text
    assert "| `experts` | 1.0 | 31.2 | 24.0 | 7.2 |" in text
    assert "KDA + MoE layer, 8 rows: 72.0 us (floor 46.4); `auto` 300.0 us in 61.0 launches, 60% of its floor" in text
    assert text.startswith("before\n") and text.endswith("after\n") and NONE not in text
    assert "rank 0 of 16 alone ([record]" in text
    file.write_text(json.dumps({**result(), "rows": [{**row, "dcp": 16} for row in result()["rows"]]}))
    assert main(asked) == 0 and "alone, each context over all ranks (DCP) ([record]" in page.read_text()
    text = page.read_text()
    parts = (
        {"rows": [7]},
        {"rows": 7},
        {"verdicts": [{"what": "a bar"}]},
        {"environment": []},
        {"rows": [{"rows": 8, "backends": {}}]},
    )
    for wrong in ("[]", "{}", "nonsense", *(json.dumps({**result(), **part}) for part in parts)):
        file.write_text(wrong)
        capsys.readouterr()
        assert main(asked) == 2
        assert capsys.readouterr().err == f"k3lab: {file} is no result of `k3lab decode bars --out`\n"
    assert page.read_text() == text


def test_the_readme_repeats_the_recorded_bars() -> None:
    """Times of layers and steps, bars and `auto` as the record has them, and by how much they are missed."""
    data = json.loads((ROOT / RESULT).read_text())
    readme = (ROOT / "README.md").read_text()
    told = re.findall(rf"^\| \[(\d+) rows?\b[^]]*\]\({RESULT.as_posix()}\) \| (.*) \|$", readme, re.M)
    close = {one["what"]: one["close"] for one in data["verdicts"] if one["unit"] == "us"}
    wanted, over = [], []
    for row in data["rows"]:
        rows = f"{row['rows']} row{'s' * (row['rows'] > 1)}"
        layer, step = close[f"KDA MoE layer, {rows}"], close[f"whole step, {rows}"]
        own, auto = row["backends"]["latency_specialized"], row["backends"]["auto"]
        us, step_us = own["layers"]["kda"]["us"], own["step_us"]
        over += [us / layer - 1, step_us / step - 1]
        bars = f"{layer:g} us, {step / 1e3:g} ms"
        beside = f"{auto['layers']['kda']['us']:.0f} us, {auto['step_us'] / 1e3:.1f} ms"
        wanted.append((str(row["rows"]), f"{us:.1f} us | {step_us / 1e3:.2f} ms | {bars} | {beside}"))
    assert told == wanted
    if min(over) > 0:
        assert f"miss them, by {min(over):.0%} to {max(over):.0%}".replace("%", " %").replace(" % to", " to") in readme
