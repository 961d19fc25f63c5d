"""Causes of one gap, by what a trace records in it; no other cause is named, and none where nothing shows it."""

from __future__ import annotations

from itertools import product

import pytest
from k3lab.traces import inspect_trace

LAYERS, KERNELS, WORK, APART = 4, 13, 3.5, 0.75
GAP = (2, 6, 40.0)  # layer, kernel, us


def capture(make, *, gap=GAP, launched=None, launch="cudaLaunchKernel", names=None, graph=False, steps=4, extra=None):
    """Steps of layers with one long gap.

    Args:
        gap: layer, kernel, length.
        launched: when the kernel behind the gap is launched, us after the gap begins, and those that follow 2 us
            apart; the others, and with None all, are launched long before they start.
        launch: the launch call.
        names: by position of the kernels around the gap, their names.
        graph: one graph launch a step in place of a launch each.
        extra: rows to add, given the start and end of the gap, in us.
    """
    events, correlation = [], 1000
    for step in range(steps):
        clock = 10_000.5 + step * 2_000
        launch_at = clock - 500
        events.append(make.host("user_annotation", f"step[DECODE bs=1] {step}", clock - 900, 1_900))
        if graph:
            events.append(make.host("cuda_runtime", "cudaGraphLaunch", clock - 400, 8, step + 1))
        for layer, index in product(range(LAYERS), range(KERNELS)):
            correlation += 1
            behind = (layer, index) == gap[:2]
            launch_at += 2.0
            if behind:
                begin, clock = clock - APART, clock - APART + gap[2]
                launch_at = launch_at if launched is None else begin + launched
                events += extra(begin, clock) if extra else []
            number = step + 1 if graph else correlation
            if not graph:
                events.append(make.host("cuda_runtime", launch, launch_at, 1.5, number))
            name = (names or {}).get((layer, index), f"k{index:02}")
            node = layer * KERNELS + index + 1 if graph else 0
            events.append(make.kernel(name, clock, WORK, correlation=number, node=node))
            clock += WORK + APART
    return events


def told(make, path, **asked):
    """The finding on the gap, and the texts of all but that on the pause between steps."""
    (device,) = inspect_trace(make.torch(path / "t.json", capture(make, **asked))).devices
    gaps = [item for item in device.findings if item.kind == "gap"]
    assert [item.layer for item in gaps] == [asked.get("gap", GAP)[0]]
    assert gaps[0].cost_ns == round((asked.get("gap", GAP)[2] - APART) * 1000)
    return gaps[0], [item.text for item in device.findings if item.kind != "between"]


def test_a_launch_after_the_end_of_the_kernel_before_is_host_bound(tmp_path, make):
    one, texts = told(make, tmp_path, launched=34.0)
    assert one.cause == "host-bound"
    assert "cudaLaunchKernel started 34.0 us after the kernel before had ended" in one.text
    assert one.text.startswith("layer 2: a gap of 40.0 us before kernel 6 k06, 0.750 us in its peers: ")
    assert sum("host-bound" in text for text in texts) == 1


def test_a_launch_before_that_end_is_not_host_bound(tmp_path, make):
    one, texts = told(make, tmp_path, launched=-5.0)
    assert one.cause == "unexplained"
    assert one.text.endswith("its peers: unexplained")
    assert not any("host-bound" in text for text in texts)


def test_a_late_launch_that_cannot_have_taken_so_long_is_not_host_bound(tmp_path, make):
    one, _ = told(make, tmp_path, launched=3.0)
    assert one.cause == "unexplained"
    assert "started 3.0 us after the kernel before had ended, and the kernel long after that" in one.text


def test_a_launch_shortly_before_the_gap_is_the_latency_of_a_launch(tmp_path, make):
    one, texts = told(make, tmp_path, launched=-2.5, gap=(2, 6, 6.5))
    assert one.cause == "launch latency"
    assert "cudaLaunchKernel started 9.0 us before the kernel" in one.text
    assert not any("host-bound" in text for text in texts)
    assert (
        told(make, tmp_path, launched=-4.0, gap=(2, 6, 6.5))[0].cause == "unexplained"
    )  # 10.5 us: more than a launch takes


def test_a_launch_that_is_not_in_the_file_is_not_guessed(tmp_path, make):
    events = [event for event in capture(make, launched=34.0, steps=1) if event["cat"] == "kernel"]
    (device,) = inspect_trace(make.torch(tmp_path / "t.json", events)).devices
    (one,) = [item for item in device.findings if item.kind == "gap"]
    assert one.cause == "unexplained"
    assert one.text.endswith("unexplained (the launch call is not in the file)")
    (pdl,) = [item for item in device.findings if item.kind == "pdl"]
    assert "the launch calls are not in the file" in pdl.text


@pytest.mark.parametrize(("category", "name"), [("gpu_memcpy", "Memcpy DtoH"), ("gpu_memset", "Memset (Device)")])
def test_a_gap_with_a_copy_in_it_is_not_called_host_bound(tmp_path, make, category, name):
    def copy(start, end):
        return [make.kernel(name, start + 2, 12) | {"cat": category}]

    one, texts = told(make, tmp_path, launched=34.0, extra=copy)
    assert one.cause == "copy"
    assert f"a {category[4:]} takes 12.0 us of it" in one.text
    assert not any("host-bound" in text for text in texts)


def test_a_copy_that_fills_little_of_a_gap_in_a_graph_leaves_the_rest_unexplained(tmp_path, make):
    for length, cause in ((8, "unexplained"), (30, "copy")):

        def copy(start, end, length=length):
            return [make.kernel("Memset (Device)", start + 2, length) | {"cat": "gpu_memset"}]

        one, _ = told(make, tmp_path, graph=True, extra=copy)
        assert one.cause == cause
        assert f"a memset takes {length}.0 us of it" in one.text
        assert one.text.endswith(", the rest is unexplained") == (cause == "unexplained")


def test_a_copy_elsewhere_or_a_tiny_one_is_no_cause(tmp_path, make):
    for offset, length in ((-30, 12), (2, 1.5)):

        def copy(start, end, offset=offset, length=length):
            return [make.kernel("Memcpy DtoH", start + offset, length) | {"cat": "gpu_memcpy"}]

        assert told(make, tmp_path, launched=34.0, extra=copy)[0].cause == "host-bound"
    other = capture(make, launched=34.0, extra=lambda start, end: [
        make.kernel("Memcpy DtoH", start + 2, 12, device=1) | {"cat": "gpu_memcpy"}])  # fmt: skip
    (device,) = inspect_trace(make.torch(tmp_path / "t.json", other)).devices
    assert [item.cause for item in device.findings if item.kind == "gap"] == ["host-bound"]


def test_the_profilers_own_work_is_named_where_it_fills_most_of_the_gap(tmp_path, make):
    for length, cause in ((36, "overhead"), (12, "host-bound")):

        def flush(start, end, length=length):
            return [make.host("overhead", "Buffer Flush", start + 1, length)]

        one, _ = told(make, tmp_path, launched=34.0, extra=flush)
        assert one.cause == cause


def test_a_host_that_waited_for_the_device_is_a_sync(tmp_path, make):
    def wait(begin, until):
        return lambda start, end: [
            make.host("cuda_runtime", "cudaStreamSynchronize", start + begin, until - begin, 70_000 + int(start))
        ]

    one, texts = told(make, tmp_path, launched=34.0, extra=wait(-60, 5))
    assert one.cause == "sync"
    assert "cudaStreamSynchronize, and launched 34.0 us after the kernel before had ended" in one.text
    assert not any("host-bound" in text for text in texts)
    assert told(make, tmp_path, launched=34.0, extra=wait(-60, -20))[0].cause == "host-bound"  # over long before
    assert told(make, tmp_path, launched=-5.0, extra=wait(-60, 5))[0].cause == "unexplained"  # launched already


def test_a_thread_that_waits_while_another_launches_is_not_to_blame(tmp_path, make):
    def wait(start, end):
        row = make.host("cuda_runtime", "cudaEventSynchronize", start - 60, 65, 70_000 + int(start))
        return [row | {"tid": 5}]

    assert told(make, tmp_path, launched=34.0, extra=wait)[0].cause == "host-bound"


def test_kernels_of_another_stream_that_ran_meanwhile_are_named(tmp_path, make):
    def other(start, end):
        return [make.kernel("memory_saver", start + 1, 36, stream=99, correlation=80_000 + int(start))]

    one, _ = told(make, tmp_path, launched=34.0, extra=other)
    assert one.cause == "other kernels"
    assert "memory_saver, launched later or elsewhere, ran for 36.0 us of it" in one.text


@pytest.mark.parametrize(("place", "says"), [((2, 5), "behind the collective"), ((2, 6), "before the collective")])
def test_ranks_may_be_apart_where_a_collective_is_beside_the_gap(tmp_path, make, place, says):
    names = {(layer, place[1]): "ncclDevKernel_AllReduce_Sum_bf16_RING_LL" for layer in range(LAYERS)}
    one, _ = told(make, tmp_path, launched=-5.0, names=names)
    assert one.cause == "collective"
    assert f"{says} ncclDevKernel_AllReduce_Sum_bf16_RING_LL: ranks may be apart" in one.text
    late, _ = told(make, tmp_path, launched=34.0, names=names)
    assert late.cause == "host-bound"  # the launch tells more than the neighbour


def test_inside_one_graph_the_host_is_not_blamed_but_a_launch_that_goes_on_is(tmp_path, make):
    one, texts = told(make, tmp_path, graph=True)
    assert one.cause == "unexplained"
    assert not any("host-bound" in text for text in texts)
    events = capture(make, graph=True)
    for event in events:
        if event["name"] == "cudaGraphLaunch":
            event["dur"] = 5_000.0  # returns after the last kernel has run
    (device,) = inspect_trace(make.torch(tmp_path / "t.json", events)).devices
    (gap,) = [item for item in device.findings if item.kind == "gap"]
    assert gap.cause == "launching"
    assert "cudaGraphLaunch, which launches it, was still at work for 40.0 us of it" in gap.text


def two_graphs(make, late=4):
    """Four steps of two graphs each; in the first ``late`` of them there is the gap between the two."""
    events = capture(make, graph=True)
    for step in range(4):
        first = next(
            event for event in events if event["name"] == "cudaGraphLaunch" and event["args"]["correlation"] == step + 1
        )
        events.append(make.host("cuda_runtime", "cudaGraphLaunch", first["ts"] + 20, 8, 500 + step))
        rows = [event for event in events if event["cat"] == "kernel" and event["args"]["correlation"] == step + 1]
        for event in rows[GAP[0] * KERNELS + GAP[1] :]:
            event["args"]["correlation"] = 500 + step
            event["ts"] -= 0 if step < late else GAP[2] - APART
    return events


def test_gaps_between_graphs_in_one_step_of_four_cost_a_quarter_a_step(tmp_path, make):
    (device,) = inspect_trace(make.torch(tmp_path / "t.json", two_graphs(make, late=1))).devices
    (graphs,) = [item for item in device.findings if item.kind == "graphs"]
    assert graphs.cost_ns == 10_000


def test_a_second_graph_launched_in_time_is_told_as_the_start_of_a_graph(tmp_path, make):
    (device,) = inspect_trace(make.torch(tmp_path / "t.json", two_graphs(make))).devices
    (gap,) = [item for item in device.findings if item.kind == "gap"]
    assert gap.cause == "graph start"
    (graphs,) = [item for item in device.findings if item.kind == "graphs"]
    assert graphs.text == "a step is 2 graph launches (piecewise graphs): 40.0 us of gaps where they meet"
    assert graphs.cost_ns == 40_000


def test_gaps_in_every_layer_are_told_once_by_class_with_the_share_of_each_cause(tmp_path, make):
    """Eager: every kernel is launched after the one before has ended, but for those behind a copy."""
    events, correlation = [], 0
    for step in range(3):
        clock = 10_000.5 + step * 5_000
        events.append(make.host("user_annotation", f"step[DECODE bs=1] {step}", clock - 50, 4_000))
        for _ in range(LAYERS):
            for index in range(KERNELS):
                correlation += 1
                if index == 6:
                    events.append(make.kernel("Memcpy DtoD", clock - 9, 8) | {"cat": "gpu_memcpy"})
                events.append(make.host("cuda_runtime", "cudaLaunchKernel", clock - 4, 1.5, correlation))
                events.append(make.kernel(f"k{index:02}", clock, 4.5, correlation=correlation))
                clock += 15.0
    (device,) = inspect_trace(make.torch(tmp_path / "t.json", events)).devices
    (idle,) = [item for item in device.findings if item.kind == "idle"]
    assert idle.text.startswith(
        "class A: 136.5 us of 195.0 us a layer is idle time between kernels, most of it before kernel "
    )
    assert idle.cause == "host-bound"
    assert "(host-bound 92% of the time, copy 8%)" in idle.text
    assert idle.cost_ns == LAYERS * 136_500
    (pdl,) = [item for item in device.findings if item.kind == "pdl"]
    assert pdl.text.endswith("launched by cudaLaunchKernel: no PDL attribute")


def overlapping(make, lost, launch):
    """Eager steps whose kernels overlap by 0.6 us, but for those of which ``lost(layer, kernel)`` holds."""
    events, correlation = [], 0
    for step in range(4):
        end = 10_000.5 + step * 2_000
        events.append(make.host("user_annotation", f"step[DECODE bs=1] {step}", end - 900, 1_900))
        for layer, index in product(range(LAYERS), range(KERNELS)):
            correlation += 1
            apart = lost(layer, index)
            call = launch if apart else "cudaLaunchKernelExC"
            events.append(make.host("cuda_runtime", call, end - 500, 1.5, correlation))
            start = end + 0.4 if apart else end - 0.6
            events.append(make.kernel(f"k{index:02}", start, 5.0, correlation=correlation))
            end = start + 5.0
    return events


LAUNCHES = pytest.mark.parametrize(("launch", "says"), [
    ("cudaLaunchKernel", "launched by cudaLaunchKernel: no PDL attribute"),
    ("cudaLaunchKernelExC", "launched by cudaLaunchKernelExC: PDL not seen (no proof: kernels may wait at once)"),
])  # fmt: skip


@LAUNCHES
def test_lost_overlap_names_the_call_that_cannot_carry_pdl(tmp_path, make, launch, says):
    events = overlapping(make, lambda layer, index: (layer, index) == (1, 4), launch)
    (device,) = inspect_trace(make.torch(tmp_path / "t.json", events)).devices
    (one,) = [item for item in device.findings if item.kind == "overlap"]
    assert (one.layer, one.cost_ns) == (1, 1_000)
    assert one.text.startswith("layer 1: a kernel starts after the one before on the stream has ended")
    assert one.text.endswith(says)
    assert "gap" not in {item.kind for item in device.findings}


@LAUNCHES
def test_a_kernel_that_overlaps_in_no_layer_is_told_without_a_cost(tmp_path, make, launch, says):
    events = overlapping(make, lambda layer, index: index == 4, launch)
    (device,) = inspect_trace(make.torch(tmp_path / "t.json", events)).devices
    (one,) = [item for item in device.findings if item.kind == "overlap"]
    assert (one.layer, one.cost_ns, one.cause) == (None, None, "no overlap")
    assert one.text.startswith(
        "class A: kernel 4 k04 never starts before the one before it has ended, where 12 others do"
    )
    assert one.text.endswith(says)
    most = overlapping(make, lambda layer, index: index != 4, launch)
    (device,) = inspect_trace(make.torch(tmp_path / "t.json", most)).devices
    assert "overlap" not in {item.kind for item in device.findings}
