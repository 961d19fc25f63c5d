"""Recorded traces, where there is a folder of them: set K3LAB_TRACE_SAMPLES to one with an expected.json.

expected.json maps a file name to facts of it; those this test knows are held. Without the variable there is
nothing to collect: recorded traces are not part of the repository.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from k3lab.traces import TraceError, check_trace, inspect_trace, read_trace
from k3lab.traces.timing import union_length

FOLDER = Path(os.environ.get("K3LAB_TRACE_SAMPLES", "") or os.devnull)
EXPECTED = json.loads((FOLDER / "expected.json").read_text()) if (FOLDER / "expected.json").is_file() else {}
READABLE = [
    name for name, facts in EXPECTED.items() if name.endswith((".json", ".gz", ".sqlite")) and "error" not in facts
]
REFUSED = [name for name, facts in EXPECTED.items() if "error" in facts]
LAYERED = [name for name in READABLE if "kernels_per_layer" in EXPECTED[name].get("layers", {})]


def pytest_generate_tests(metafunc):
    for fixture, names in (("readable", READABLE), ("refused", REFUSED), ("layered", LAYERED)):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, names)


if READABLE:

    def test_facts_of_the_file(readable):
        trace, facts = read_trace(FOLDER / readable), EXPECTED[readable]
        kernels = trace.kernels
        bad = facts.get("bad_rows", facts.get("bad_interval_rows", 0))
        assert len(trace.rejected) == bad
        assert len(kernels) == facts.get("kernel_valid", 0)
        assert sum(kernel.duration for kernel in kernels) == facts.get("kernel_sum_ns", 0)
        if "union_ns" in facts:
            assert union_length((kernel.start, kernel.end) for kernel in kernels) == facts["union_ns"]
        for device, length in facts.get("union_ns_per_device", {}).items():
            own = [(kernel.start, kernel.end) for kernel in kernels if str(kernel.device) == device]
            assert union_length(own) == length
        if "names" in facts and not bad:
            assert len({kernel.name for kernel in kernels}) == facts["names"]
        if "nvtx_ranges" in facts:
            assert len(trace.ranges) == facts["nvtx_ranges"]
        if "memcpy_rows" in facts:
            assert trace.copies.get("memcpy", 0) == facts["memcpy_rows"]
        if "graph_trace_rows" in facts:
            assert len(trace.graph_replays) == facts["graph_trace_rows"]
        assert trace.tool in (None, f"nsys {facts.get('nsys')}") or trace.format.startswith("torch")

    def test_every_file_gets_a_report_or_one_line(readable):
        facts = EXPECTED[readable]
        if not facts.get("kernel_valid") and not facts.get("graph_trace_rows"):
            with pytest.raises(TraceError, match="no kernel"):
                check_trace(FOLDER / readable, "gb300-tp16")
            return
        report = check_trace(FOLDER / readable, "gb300-tp16")
        json.dumps(report.to_json())
        assert report.verdict in ("fail", "inconclusive")  # none of them is known to be of a GB300
        for device in report.devices:
            for layer in device.layers.layers:
                for times in layer.times:
                    assert times.total - times.overlap + times.gap == times.wall
                    assert sum(share.increment + share.bubble for share in times.shares) == times.completion_period

    def test_files_that_are_no_trace(refused):
        with pytest.raises(TraceError) as caught:
            read_trace(FOLDER / refused)
        assert "\n" not in str(caught.value)

    def test_layers(layered):
        facts = EXPECTED[layered]["layers"]
        device = inspect_trace(FOLDER / layered).devices[0].layers
        counts = [len(layer.kernels) for layer in device.layers]
        wanted = facts["kernels_per_layer"]
        number = facts.get("layers") or facts.get("layers_per_step") or len(wanted)
        wanted = wanted if isinstance(wanted, list) else [wanted]
        assert counts == (wanted if len(wanted) == number else wanted * number)
        for key in ("prefix", "prefix_in_graph"):
            assert device.prefix == facts.get(key, device.prefix)
        for key in ("suffix", "suffix_in_graph"):
            assert device.suffix == facts.get(key, device.suffix)
        assert device.counts.used == facts.get("steps", facts.get("replays", device.counts.used))
        assert [layer.name for layer in device.layers] == facts.get("layer_names", [x.name for x in device.layers])
        periods = [layer.period for layer in device.layers]
        for key, unit in (
            ("completion_period_us_median", 1000),
            ("completion_period_us", 1000),
            ("completion_period_ns", 1),
        ):
            for found, value in zip(periods, facts.get(key, []), strict=False):
                assert abs(found - value * unit) <= 10
        if "wall_us_max" in facts:
            walls = [layer.typical.wall for layer in device.layers]
            assert max(walls) == round(facts["wall_us_max"] * 1000)
            assert walls.index(max(walls)) == facts["wall_us_max_layer"]


def findings(name, *kinds):
    (device,) = inspect_trace(FOLDER / name).devices
    return [item for item in device.findings if not kinds or item.kind in kinds]


if (SLOW_LAYER := "torch_sglang_qwen3_8b_decode_amd.json.gz") in EXPECTED:

    def test_the_slow_layer_and_the_gap_are_named():
        gap, kernel = findings(SLOW_LAYER)[:2]
        assert gap.text.startswith("layer 2: a gap of 273.7 us before kernel 0 ")
        assert "(after layer 1)" in gap.text
        # the replay was still being submitted: hipGraphLaunch returns 0.7 ms after the gap
        assert gap.cause == "launching"
        assert "hipGraphLaunch, which launches it, was still at work for 273.7 us of it" in gap.text
        assert kernel.text.startswith("layer 7: kernel 1 ")
        assert "adds 148.8 us" in kernel.text
        assert not findings(SLOW_LAYER, "ahead", "idle", "overlap", "extra", "missing", "side", "graphs")


if (EAGER := "torch_b200_vllm_eager.json.gz") in EXPECTED:

    def test_overlap_and_a_host_that_is_late_are_told_of_an_eager_trace():
        (ahead,) = findings(EAGER, "ahead")
        assert "PDL seen" in ahead.text
        idle = findings(EAGER, "idle")
        assert [item.cause for item in idle] == ["host-bound", "host-bound"]
        assert all(item.cost_ns > 18 * 1_500_000 for item in idle)
        assert findings(EAGER)[0] == idle[0]


if (AHEAD := "h200_graph_pdl_kda13_mla15.json.gz") in EXPECTED:

    def test_launches_that_run_ahead_are_all_there_is_to_tell_of_a_good_replay():
        (one,) = findings(AHEAD)
        assert one.text.startswith("launches run ahead: PDL seen")


if (ONE_BY_ONE := "h200_eager_nvtx4.json.gz") in EXPECTED:

    def test_an_eager_trace_is_host_bound_from_end_to_end():
        assert {item.cause for item in findings(ONE_BY_ONE, "idle", "gap", "between")} == {"host-bound"}
        (pdl,) = findings(ONE_BY_ONE, "pdl")
        assert pdl.text.endswith("launched by cuLaunchKernelEx: PDL not seen (no proof: kernels may wait at once)")


if (BUBBLE := "synth_pdl_decode_13x4x3.json") in EXPECTED:

    def test_the_slow_kernel_and_the_bubble_of_the_synthetic_decode():
        assert [(item.kind, item.layer, item.cost_ns) for item in findings(BUBBLE, "kernel", "gap", "overlap")] == [
            ("kernel", 2, 12_000), ("gap", 3, 3_500)]  # fmt: skip


if (TWO := "nsys_2026.2_schema3.25.0_2gpu_nvtx.sqlite") in EXPECTED:

    def test_each_process_of_a_file_is_a_rank():
        from k3lab.traces.ranks import check_ranks

        report = check_ranks([FOLDER / TWO], "gb300-tp16")
        assert [(lane.number, lane.device.layers.device) for lane in report.ranks] == [(0, 0), (1, 1)]
        assert report.verdict == "inconclusive" and "2 ranks are there, the world has 16" in report.doubts
        assert all(item.spread_ns == item.largest_ns - item.smallest_ns for item in report.layers)
        assert report.skew.refused is not None and report.skew.ranks == ()
