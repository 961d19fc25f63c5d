"""Causes of a gap in Nsight Systems exports: copies, fills, waits and overhead lie in tables of their own."""

from __future__ import annotations

import pytest
from k3lab.traces import inspect_trace
from nsys_eras import LATEST

PROCESS = 0x1000000_000000 | (0x6F << 24)
STEPS, LAYERS, KERNELS = 4, 3, 13
WORK, APART, GAP = 5_000, 700, 30_000  # ns


def gap_in(make, path, table=None, process=PROCESS, late=True):
    """Eager steps with NVTX layers and a gap before kernel 4 of layer 1, with a row of a table in it."""
    file = make.nsys(path)
    file.tables = LATEST.tables
    correlation = 0
    for step in range(STEPS):
        clock = 10_000_000 + step * 1_000_000
        host = clock - 400_000
        file.range(f"step[DECODE bs=1] {step}", host - 1_000, clock + 500_000)
        for layer in range(LAYERS):
            opened = host
            for index in range(KERNELS):
                correlation += 1
                if (layer, index) == (1, 4):
                    begin, clock = clock - APART, clock - APART + GAP
                    host = begin + GAP - 6_000 if late else host
                    row = {"deviceId": 0, "streamId": 7, "globalPid": process}
                    if table is not None:
                        start = begin - 20_000 if table.endswith("SYNCHRONIZATION") else begin + 1_000
                        file.add(table, start=start, end=begin + 22_000, **row)
                file.api("cudaLaunchKernel_v7000", host, host + 900, correlation)
                file.kernel(f"k{index:02}", clock, clock + WORK, correlation)
                clock += WORK + APART
                host += 1_000
            file.range(f"layer_{layer}", opened, host - 50)
    (device,) = inspect_trace(file.write()).devices
    (gap,) = [item for item in device.findings if item.kind == "gap"]
    assert (gap.layer, gap.cost_ns) == (1, GAP - APART)
    return gap


@pytest.mark.parametrize(("table", "cause", "says"), [
    (None, "host-bound", "cudaLaunchKernel started 24.0 us after the kernel before had ended"),
    ("CUPTI_ACTIVITY_KIND_MEMCPY", "copy", "a memcpy takes 21.0 us of it"),
    ("CUPTI_ACTIVITY_KIND_MEMSET", "copy", "a memset takes 21.0 us of it"),
    ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "sync", "the host was in a wait for the device, and launched 24.0 us after"),
    ("CUPTI_ACTIVITY_KIND_OVERHEAD", "overhead", "for 21.0 us of it"),
    ("PROFILER_OVERHEAD", "overhead", "for 21.0 us of it"),
])  # fmt: skip
def test_what_lies_in_the_gap_is_its_cause(tmp_path, make, table, cause, says):
    gap = gap_in(make, tmp_path / "t.sqlite", table)
    assert gap.cause == cause
    assert says in gap.text


def test_a_copy_of_another_process_is_no_cause(tmp_path, make):
    other = PROCESS + (1 << 24)
    assert gap_in(make, tmp_path / "t.sqlite", "CUPTI_ACTIVITY_KIND_MEMCPY", process=other).cause == "host-bound"


def test_without_anything_in_it_and_launched_in_time_a_gap_is_unexplained(tmp_path, make):
    assert gap_in(make, tmp_path / "t.sqlite", late=False).cause == "unexplained"
    assert gap_in(make, tmp_path / "u.sqlite", "CUPTI_ACTIVITY_KIND_MEMCPY", late=False).cause == "copy"
