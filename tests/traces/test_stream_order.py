"""Replays on two streams whose launch order no file tells: the order of starts differs, and means nothing."""

from __future__ import annotations

import random

import pytest
from k3lab.traces import check_trace, synthesize
from k3lab.traces.diff import diff_traces

MAIN = ("norm", "kda_step", "gemm_o", "router_front", "topk", "experts_up", "experts_down", "moe_tail")
SIDE = ("shared_up", "shared_down")


def replays(make, path, *, seed, graphs=1, steps=10, layers=8, without=None):
    """Steps of equal layers; the side stream begins before or after the router does."""
    draw, events, clock = random.Random(seed), [], 1_000_000
    for step in range(steps):
        rows, side = [], 0
        for layer in range(layers):
            if layer % (layers // graphs) == 0:
                correlation = 10 + step * graphs + layer * graphs // layers
                events.append(make.host("cuda_runtime", "cudaGraphLaunch", clock / 1000, 1, correlation))
                clock += 5_000
            if layer == 0:
                rows.append(("embed", clock, 2_000, 7, correlation))
                clock += 2_000
            begin = clock
            for name in MAIN:
                if (layer, name) != without:
                    rows.append((name, clock, 5_000 + draw.randrange(200), 7, correlation))
                    clock += rows[-1][2]
            side = begin + draw.randrange(14_000, 19_000)
            for name in SIDE:
                rows.append((name, side, 2_000, 9, correlation))
                side += 2_000
        events += [make.kernel(name, start / 1000, length / 1000, stream, launch)
                   for name, start, length, stream, launch in rows]  # fmt: skip
        clock += 30_000
    return make.torch(path, events, deviceProperties=[{"id": 0, "name": "NVIDIA GB300"}])


@pytest.mark.parametrize("graphs", [1, 2])
def test_all_steps_count_and_no_kernel_is_extra(tmp_path, make, graphs):
    report = check_trace(replays(make, tmp_path / "a.json", seed=1, graphs=graphs), "gb300-tp16", layers=8)
    device = report.devices[0].layers
    assert (device.counts.found, device.counts.used, device.counts.uneven) == (10, 10, 0)
    assert [(len(group.members), len(group.sequence)) for group in device.classes] == [(8, 10)]
    assert not [item.text for item in report.devices[0].findings if item.kind in ("extra", "missing")]
    assert report.verdict == "pass"


def test_a_kernel_that_is_missing_is_the_only_one_told(tmp_path, make):
    report = check_trace(replays(make, tmp_path / "a.json", seed=1, without=(3, "topk")), "gb300-tp16", layers=8)
    found = [item for item in report.devices[0].findings if item.kind in ("extra", "missing")]
    assert [(item.kind, item.layer) for item in found] == [("missing", 3)]
    assert "missing: topk" in found[0].text


def test_two_captures_of_the_same_do_not_differ(tmp_path, make):
    one, other = (replays(make, tmp_path / f"{seed}.json", seed=seed) for seed in (1, 2))
    assert diff_traces(one, other, layers=8).verdict == "no change beyond the spread"


def test_graphs_whose_node_order_is_known_keep_it(tmp_path):
    report = check_trace(synthesize(tmp_path / "a.json", steps=6), "gb300-tp16")
    for step in report.devices[0].layers.steps:
        assert [kernel.node for kernel in step] == sorted(kernel.node for kernel in step)
