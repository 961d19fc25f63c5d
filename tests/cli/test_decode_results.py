"""The results page's sections on the decode path: made of the files, presets apart, and plain where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from k3lab.cli.decode_results import layers, limits, presets, steps
from k3lab.kernels import InputError

ALIKE = {
    "model": "kimi-k3", "weights": "random, seed 0", "gpu": "NVIDIA H200", "gpus": 1, "tp": 16, "dcp": 1, "transport": "loopback", "drafts": 7,
    "acceptance": "SYNTHETIC acceptance of mean length 6", "kv_dtype": "bfloat16", "ssm_dtype": "float32", "workload": "w",
}  # fmt: skip
PLAIN = {**ALIKE, "drafts": 0, "acceptance": "none"}


def keep(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def backend(us: float, step: float) -> dict[str, Any]:
    layer = {"us": us, "launches": 7.5, "share_of_floor": 0.61}
    return {
        "layers": {"kda": layer, "mla": {"us": 91.25, "launches": None, "share_of_floor": None}}, "step_us": step,
        "step_launches": 801, "step_floor_us": 4300.0,
    }  # fmt: skip


def keep_bars(results: Path, **changes: Any) -> None:
    row = {
        "rows": 8, "context": 512, "backends": {"auto": backend(140.0, 14000.0), "latency_specialized": backend(70.5, 7000.0)},
        "ratios": {"kda layer": 1.986, "mla layer": 1.0, "step": 2.0},
    }  # fmt: skip
    data = {
        "evidence": "measured", "gpu": "H200", "rank": 0, "tp": 16, "model": "kimi-k3", "rows": [row],
        "notes": ["rank 0 of 16 alone over loopback"], "faults": ["KDA MoE layer, 8 rows: 90.0 us, at most 85"],
    }  # fmt: skip
    keep(results / "h200" / "decode_bars.json", data | changes)


def keep_bench(results: Path, name: str, alike: dict[str, Any], auto: float, own: float, **changes: Any) -> None:
    for backend, value in (("auto", auto), ("latency_specialized", own)):
        report = {
            "evidence": "measured", "backend": backend, "conditions": alike, "preset": {"name": name, "changed": []},
            "measures": {"decode throughput without prefill": {"value": value, "unit": "tok/s"}},
            "absent": {"drafter time": "no drafts"}, "seen": {},
        }  # fmt: skip
        keep(results / "h200" / f"decode_{name}" / f"{backend}.json", report | changes)


def test_without_results_every_table_says_so(tmp_path: Path) -> None:
    assert layers(tmp_path).count("no result yet") == 4 and "k3lab decode bars --rank 0 --of 16" in layers(tmp_path)
    assert steps(tmp_path).count("no result yet") == 2
    told = presets(tmp_path)
    assert told.index("### headline: speculative, 7 drafts") < told.index("### plain-1: non-speculative")
    assert told.count("| no result yet | no result yet |") == 2 and "--preset plain-1 --rank 0 --of 16" in told
    text = limits(tmp_path)
    assert "no bars and no bench are on record" in text and "no run with drafts is on record" in text


def test_tables_are_the_files(tmp_path: Path) -> None:
    keep_bars(tmp_path)
    text = layers(tmp_path)
    assert "no result yet" not in text
    assert (
        "| H200, rank 0 of 16, kimi-k3 | 8 | 512 | kda MoE layer | `latency_specialized` | 70.5 us | 7.50 | 61% | 1.99 |"
        in text
    )
    assert "| mla MoE layer | `auto` | 91.2 us | not told | not told |  |" in text
    assert (
        "- rank 0 of 16 alone over loopback" in text and "- missed: H200, rank 0 of 16, kimi-k3: KDA MoE layer" in text
    )
    assert "| whole step | `latency_specialized` | 7000 us | 801 | 61% | 2.00 |" in steps(tmp_path)


def test_presets_have_tables_apart_and_published_figures_no_ratio(tmp_path: Path) -> None:
    keep_bench(tmp_path, "headline", ALIKE, 300.0, 600.0)
    keep_bench(tmp_path, "plain-1", PLAIN, 100.0, 150.0)
    drafted, plain = presets(tmp_path).split("### plain-1")
    assert "| decode throughput without prefill | 300 tok/s | 600 tok/s | 2.00 |" in drafted
    assert "| decode throughput without prefill | 100 tok/s | 150 tok/s | 1.50 |" in plain and "600 tok/s" not in plain
    assert "842 against 488 tok/s" in drafted and "256.4 tok/s" in plain and "842" not in plain
    assert "transport loopback, drafts 7" in drafted and "(`results/h200/decode_headline`)" in drafted
    assert "- not measured: drafter time: no drafts" in plain and "no result yet" not in drafted + plain


def test_percentiles_stand_with_their_samples(tmp_path: Path) -> None:
    latency = {"value": 2.5, "unit": "s", "samples": 9, "tail_covered": False}
    steps = {"value": 7.0, "unit": "ms", "samples": 1000, "tail_covered": True}
    keep_bench(
        tmp_path, "plain-1", PLAIN, 1.0, 2.0, measures={"request latency, P90": latency, "step time, P90": steps}
    )
    text = presets(tmp_path)
    assert "| request latency, P90 | 2.5* s | 2.5* s | 1.00* | 9 |" in text
    assert "| step time, P90 | 7 ms | 7 ms | 1.00 | 1000 |" in text and "\n\n- \\* of too few samples" in text
    keep_bench(tmp_path, "plain-1", PLAIN, 1.0, 2.0, measures={"step time, P90": steps})
    assert "too few" not in presets(tmp_path)


def test_what_a_run_changed_and_runs_without_a_preset_are_told(tmp_path: Path) -> None:
    keep_bench(tmp_path, "headline", PLAIN, 1.0, 2.0, preset={"name": "headline", "changed": ["drafts 0 for 7"]})
    keep_bench(tmp_path, "mine", PLAIN, 3.0, 6.0, preset=None)
    text = presets(tmp_path)
    assert "- changed from the preset: drafts 0 for 7" in text.split("### plain-1")[0]
    assert "| 3 tok/s | 6 tok/s | 2.00 |" in text.split("### h200/decode_mine: no preset")[1]


def test_reports_that_differ_share_no_ratio(tmp_path: Path) -> None:
    keep_bench(tmp_path, "headline", ALIKE, 300.0, 600.0)
    path = tmp_path / "h200" / "decode_headline" / "auto.json"
    path.write_text(path.read_text().replace('"tp": 16', '"tp": 8'))
    assert "| 300 tok/s | 600 tok/s |  |" in presets(tmp_path)


def test_what_cannot_be_concluded_follows_from_the_files(tmp_path: Path) -> None:
    keep_bench(tmp_path, "headline", ALIKE, 300.0, 600.0)
    text = limits(tmp_path)
    assert "no bars and no bench" not in text and "synthetic acceptance fixes" in text
    assert "a rank alone over loopback has no link cost" in text and "on a GB300" in text
    whole = {**ALIKE, "gpu": "NVIDIA GB300", "gpus": 16, "weights": "3f", "acceptance": "standard acceptance, greedy"}
    keep_bench(tmp_path, "drafts-3", whole, 1.0, 2.0, seen={"turns": 4})
    text = limits(tmp_path)
    assert all(
        words not in text for words in ("GB300", "link cost", "synthetic acceptance", "weights are random", "no replay")
    )
    assert "with drafts against without" in text  # whatever is on record


def test_a_ratio_to_operators_is_none_to_a_stock_engine(tmp_path: Path) -> None:
    words = (
        "launches a KDA layer, where a stock engine's sequence has 20 to 23. A ratio to it is none to a stock engine"
    )
    keep_bars(tmp_path)  # 7.5 launches
    assert words not in limits(tmp_path)
    more = {"measures": {"kda MoE layer, launches": {"value": 270.9, "unit": "launches"}}}
    keep_bench(tmp_path, "headline", ALIKE, 300.0, 600.0, **more)
    assert f"up to 271 {words}" in limits(tmp_path)
    slow = {**backend(2796.0, 14000.0), "layers": {"kda": {"us": 2796.0, "launches": 310.2, "share_of_floor": 0.02}}}
    row = {"rows": 8, "context": 512, "backends": {"auto": slow}, "ratios": {}}
    keep_bars(tmp_path, rows=[row])
    assert f"up to 310 {words}" in limits(tmp_path)


def test_what_is_no_measured_result_is_refused(tmp_path: Path) -> None:
    keep_bars(tmp_path, evidence="predicted")
    with pytest.raises(InputError, match="is no measured result"):
        layers(tmp_path)
    keep_bench(tmp_path, "plain-1", PLAIN, 1.0, 2.0, evidence=None)
    with pytest.raises(InputError, match="is no measured result"):
        presets(tmp_path)
