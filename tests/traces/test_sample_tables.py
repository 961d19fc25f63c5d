"""Recorded tables and reports, where K3LAB_TRACE_SAMPLES names a folder of them; see test_sample_folder.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from k3lab.traces import TraceError, check_trace, read_trace
from k3lab.traces.calls import count_calls
from k3lab.traces.readers.opening import NCU_CSV, STATS, kind_of, read_ncu
from k3lab.traces.timing import union_length

FOLDER = Path(os.environ.get("K3LAB_TRACE_SAMPLES", "") or os.devnull)
EXPECTED = json.loads((FOLDER / "expected.json").read_text()) if (FOLDER / "expected.json").is_file() else {}
TABLES = {name: facts for name, facts in EXPECTED.items() if name.endswith(".csv")}


def pytest_generate_tests(metafunc):
    for fixture, mark in (("timed", "kernel_sum_ns"), ("summed", "instances"), ("measured", "launches")):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, [name for name, facts in TABLES.items() if mark in facts])


if TABLES:

    def test_tables_of_kernels_in_order(timed):
        facts, trace = TABLES[timed], read_trace(FOLDER / timed)
        assert kind_of(FOLDER / timed) == STATS
        assert len(trace.kernels) == facts["kernel_rows"]
        assert sum(kernel.duration for kernel in trace.kernels) == facts["kernel_sum_ns"]
        assert union_length((kernel.start, kernel.end) for kernel in trace.kernels) == facts["union_ns"]
        assert sum(trace.copies.values()) == facts["rows"] - facts["kernel_rows"]
        assert check_trace(FOLDER / timed, "gb300-tp16").verdict == "inconclusive"

    def test_tables_of_counts(summed):
        facts, found = TABLES[summed], count_calls(FOLDER / summed, steps=1, layers=1)
        assert sum(item.calls for item in found.kernels) == facts["instances"]
        assert len(found.kernels) == facts["rows"]
        with pytest.raises(TraceError, match="k3lab trace calls"):
            check_trace(FOLDER / summed, "gb300-tp16")

    def test_tables_of_launches(measured):
        facts, report = TABLES[measured], read_ncu(FOLDER / measured)
        assert kind_of(FOLDER / measured) == NCU_CSV
        assert len(report.launches) == facts["launches"]
        assert all(launch.duration_ns and launch.dram_percent for launch in report.launches)
        with pytest.raises(TraceError, match="no layer time"):
            check_trace(FOLDER / measured, "gb300-tp16")
