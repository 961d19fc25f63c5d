"""Verdicts on whole traces: what passes, what fails and why, and what must stay inconclusive."""

from __future__ import annotations

import json
import random

import pytest
from k3lab.traces import TraceError, check_trace, inspect_trace, load_budget, read_trace, synthesize
from k3lab.traces.synthetic import Faults, layer_parts


def texts(report, kind):
    return [item.text for device in report.devices for item in device.findings if item.kind == kind]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("good") / "good.json")


def test_the_synthetic_trace_passes_and_says_what_it_is(good):
    report = check_trace(good, "gb300-tp16")
    assert report.verdict == "pass"
    assert report.trace.synthetic
    assert "synthetic" in report.headline
    assert any("not recorded on a GPU" in note for note in report.notes)
    data = report.to_json()
    json.dumps(data)
    assert data["synthetic"] is True
    device = data["devices"][0]
    assert [layer["kernels"] for layer in device["layers"]] == [13, 13, 13, 15] * 3
    assert [(group["kind"], len(group["layers"])) for group in device["classes"]] == [("kda", 9), ("mla", 3)]
    assert [layer["verdict"] for layer in device["layers"]] == ["pass", "pass", "pass", "not judged"] * 3
    assert {part["family"] for part in device["classes"][1]["sequence"]} == {
        "attention_projection", "mla", "output_projection", "experts", "router", "moe_tail", "attn_res"}  # fmt: skip


def test_the_generator_is_seeded_and_the_periods_are_what_it_draws(tmp_path, good):
    again = synthesize(tmp_path / "again.json")
    assert again.read_bytes() == good.read_bytes()
    assert synthesize(tmp_path / "other.json", seed=1).read_bytes() != good.read_bytes()
    nominal = sum(cost for _, cost in layer_parts("kda"))
    for layer in check_trace(good, "gb300-tp16").devices[0].layers.layers:
        if len(layer.kernels) == 13:
            assert abs(layer.period - nominal) < 0.01 * nominal


def test_a_slow_kernel_is_named_in_its_layer(tmp_path):
    path = synthesize(tmp_path / "t.json", faults=Faults(slow=((5, 12_000),)))
    report = check_trace(path, "gb300-tp16")
    assert report.verdict == "fail"
    assert len(report.reasons) == 1
    assert report.reasons[0].startswith("layer 5: completion period 72.")
    (text,) = texts(report, "kernel")
    assert "layer 5: kernel 9 k3_experts_synthetic_routed [experts]" in text
    assert "+12." in text or "+11.9" in text


def test_a_bubble_is_named_and_charged_to_the_layer_behind_it(tmp_path):
    path = synthesize(tmp_path / "t.json", faults=Faults(bubble=((6, 15_000),)))
    report = check_trace(path, "gb300-tp16")
    assert [reason.split(":")[0] for reason in report.reasons] == ["layer 6"]
    (text,) = texts(report, "gap")
    assert "before kernel 0 k3_attention_projection_synthetic_main" in text
    assert text.endswith("(after layer 5), 0.0 us in its peers: unexplained")


def test_a_fourteenth_kernel_fails_the_count_on_any_gpu(tmp_path):
    for gpu in ("NVIDIA GB300", "NVIDIA H200", None):
        path = synthesize(tmp_path / "t.json", gpu=gpu, faults=Faults(extra=(2,)))
        report = check_trace(path, "gb300-tp16")
        assert report.verdict == "fail"
        assert report.reasons[0] == "layer 2: 14 kernels, budget 13"
        assert texts(report, "extra") == [
            "layer 2: extra kernels against its class: k3_router_synthetic_split_k_reduce "
            "(the GEMM before it is split along K and needs this sum), 1.5 us"
        ]


def test_a_finding_names_few_kernels_and_counts_the_rest():
    from k3lab.traces.explain.differences import _listed

    assert _listed(["b_kernel", "a_kernel", "b_kernel"]) == "2 times b_kernel, a_kernel"
    assert _listed([f"kernel_{name}" for name in "edcbaa"]) == "2 times kernel_a, kernel_e, kernel_d and 2 more"


def test_a_twelve_kernel_layer_keeps_the_count_and_is_told(tmp_path):
    path = synthesize(tmp_path / "t.json", faults=Faults(missing=(4,)))
    report = check_trace(path, "gb300-tp16")
    assert report.verdict == "pass"
    assert texts(report, "missing") == [
        "layer 4: kernels of its class missing: k3_router_synthetic_route, there 2.5 us"
    ]


def test_all_layers_slow_fails_the_class_and_names_the_largest_parts(tmp_path):
    report = check_trace(synthesize(tmp_path / "t.json", scale=1.2), "gb300-tp16")
    assert report.reasons[0].startswith("class A (kda), 9 layers: completion period 72.")
    (text,) = texts(report, "parts")
    assert text.index("k3_experts_synthetic_routed") < text.index("k3_attention_projection_synthetic_main")


@pytest.mark.parametrize(
    ("gpu", "says"),
    [("NVIDIA H200", "H200"), ("NVIDIA B300 SXM6 AC", "B300 SXM6"), (None, "does not name its GPU")],
)
def test_on_another_gpu_the_count_is_judged_and_the_time_is_not(tmp_path, gpu, says):
    report = check_trace(synthesize(tmp_path / "t.json", gpu=gpu), "gb300-tp16")
    assert report.verdict == "inconclusive"
    assert says in report.reasons[0]
    assert report.reasons[-1] == "the kernel count alone: 9 of 9 judged layers keep it"
    layer = report.to_json()["devices"][0]["layers"][0]
    assert (layer["count"], layer["time"], layer["verdict"]) == ("pass", "inconclusive", "inconclusive")


def test_the_callers_gpu_counts_only_where_the_trace_names_none(tmp_path):
    unnamed = synthesize(tmp_path / "u.json", gpu=None)
    assert check_trace(unnamed, "gb300-tp16", gpu="gb300").verdict == "pass"
    named = synthesize(tmp_path / "n.json", gpu="NVIDIA H200")
    report = check_trace(named, "gb300-tp16", gpu="GB300")
    assert report.verdict == "inconclusive"
    assert any("what it says counts" in note for note in report.notes)


def test_another_tp_or_other_rows_leave_the_time_open(tmp_path, good):
    assert check_trace(good, "gb300-tp16", tp=8).verdict == "inconclusive"
    assert check_trace(good, "gb300-tp16", rows=64).verdict == "inconclusive"
    assert check_trace(good, "gb300-tp16", tp=16, rows=8).verdict == "pass"
    other = synthesize(tmp_path / "t.json", tp=8)
    assert "TP is 8" in check_trace(other, "gb300-tp16").reasons[0]


def test_a_step_cut_by_the_end_of_the_capture_is_dropped(tmp_path):
    path = synthesize(tmp_path / "t.json", faults=Faults(cut_last=True))
    report = check_trace(path, "gb300-tp16")
    counts = report.devices[0].layers.counts
    assert (report.verdict, counts.cut, counts.warm_up, counts.used) == ("pass", 1, 4, 20)


def test_a_step_that_lost_a_kernel_in_the_middle_forbids_a_pass(tmp_path, good):
    data = json.loads(good.read_text())
    launches = [event for event in data["traceEvents"] if event["name"] == "cudaGraphLaunch"]
    step = launches[12]["args"]["correlation"]
    rows = [event for event in data["traceEvents"] if event["cat"] == "kernel" and event["args"]["correlation"] == step]
    data["traceEvents"].remove(rows[40])
    (tmp_path / "t.json").write_text(json.dumps(data))
    report = check_trace(tmp_path / "t.json", "gb300-tp16")
    assert report.verdict == "inconclusive"
    assert "1 steps have other kernels" in report.reasons[0]


def test_the_number_of_layers_is_held_to(good):
    assert check_trace(good, "gb300-tp16", layers=12).verdict == "pass"
    report = check_trace(good, "gb300-tp16", layers=13)
    assert report.verdict == "inconclusive"
    assert "13 layers" in report.reasons[0]


def test_pdl_overlap_slow_kernel_and_bubble_by_hand(tmp_path, make):
    report = check_trace(make.torch(tmp_path / "t.json", make.pdl_events()), "gb300-tp16", gpu="GB300")
    layers = report.devices[0].layers.layers
    assert [layer.period for layer in layers] == [61_000, 60_500, 72_500, 64_500]
    assert [layer.typical.start_period for layer in layers] == [60_500, 60_500, 76_500, None]
    assert [layer.typical.total for layer in layers] == [67_000, 67_000, 79_000, 67_000]
    assert [layer.typical.wall for layer in layers] == [61_000, 61_000, 73_000, 61_000]
    assert report.reasons == ("layer 2: completion period 72.5 us, budget 69.0 us",)
    assert texts(report, "kernel") == ["layer 2: kernel 9 k09 adds 17.5 us, 5.5 us in its peers (+12.0 us)"]
    assert "PDL" in texts(report, "ahead")[0]
    assert check_trace(make.torch(tmp_path / "u.json", make.pdl_events(slow=None)), "gb300-tp16", gpu="GB300"
                       ).verdict == "pass"  # fmt: skip


def test_whole_microseconds_are_too_coarse_for_a_time_verdict(tmp_path, make):
    events = make.pdl_events(overlap=1.0)
    report = check_trace(make.torch(tmp_path / "t.json", events), "gb300-tp16", gpu="GB300")
    assert report.verdict == "inconclusive"
    assert any("resolution" in reason for reason in report.reasons)


def test_event_order_shift_and_compression_change_nothing(tmp_path, make):
    path = synthesize(tmp_path / "t.json", steps=6, faults=Faults(slow=((1, 9_000),), bubble=((2, 3_000),)))

    def answer(where):
        data = check_trace(where, "gb300-tp16").to_json()
        return {key: value for key, value in data.items() if key != "file"}

    first = answer(path)
    text = path.read_text()
    data = json.loads(text, parse_float=str)
    rng = random.Random(0)
    for _ in range(3):
        rng.shuffle(data["traceEvents"])
        assert answer(make.torch(tmp_path / "s.json.gz", data["traceEvents"], **head(data))) == first
    for event in data["traceEvents"]:
        whole, part = event["ts"].split(".")
        ns = int(whole) * 1000 + int(part) + 2**50
        event["ts"] = f"{ns // 1000}.{ns % 1000:03d}"
    assert answer(make.torch(tmp_path / "m.json", data["traceEvents"], **head(data))) == first


def head(data):
    return {key: value for key, value in data.items() if key not in ("traceEvents", "schemaVersion")}


def test_user_ranges_split_eager_steps_by_launch_not_by_time(tmp_path, make):
    """The kernels run long after their marks have closed; only the launches lie inside."""
    events, correlation = [], 0
    for step in range(3):
        clock = 1000.5 + step * 1000
        events.append(make.host("user_annotation", f"step[DECODE bs=1] {step}", clock, 900))
        for layer in range(4):
            events.append(make.host("user_annotation", f"model.layers.{layer}", clock + 10 + layer * 100, 90))
            for index in range(15 if layer == 3 else 13):
                correlation += 1
                at = clock + 11 + layer * 100 + index * 5
                name = f"mla_{index}" if layer == 3 and index < 3 else f"k{index}"
                events.append(make.host("cuda_runtime", "cudaLaunchKernel", at, 3, correlation))
                events.append(make.kernel(name, at + 5000, 4.2, correlation=correlation))
    device = inspect_trace(make.torch(tmp_path / "t.json", events)).devices[0].layers
    assert device.method == "NVTX or user ranges around the launches"
    assert device.counts.source == "step marks"
    assert [len(layer.kernels) for layer in device.layers] == [13, 13, 13, 15]
    assert [group.kind for group in device.classes] == [None, "mla"]
    assert inspect_trace(tmp_path / "t.json").devices[0].layers.counts.used == 3


def test_prefill_steps_are_not_judged(tmp_path, make):
    events = [make.host("user_annotation", "execute_context_1(888_788)_generation_0(0)", 900, 5000.5)]
    events += make.pdl_events(steps=1)
    report = check_trace(make.torch(tmp_path / "t.json", events), "gb300-tp16", gpu="GB300")
    assert report.verdict == "inconclusive"
    assert "prefill" in report.reasons[0]


def test_kernels_without_launches_or_marks_are_not_judged(tmp_path, make):
    events = [make.kernel(f"k{index % 13}", 5.3 * index, 4, correlation=index) for index in range(130)]
    report = check_trace(make.torch(tmp_path / "t.json", events), "gb300-tp16", gpu="GB300")
    assert report.verdict == "inconclusive"
    assert "nothing marks the steps" in report.reasons[0]


def test_two_graphs_a_step_are_one_step(tmp_path, make):
    events = []
    for step in range(6):
        for half in range(2):
            at = 1000.5 + step * 1000 + half * 400
            correlation = 10 + 2 * step + half
            events.append(make.host("cuda_runtime", "cudaGraphLaunch", at, 5, correlation))
            for index in range(26):
                name = f"k{index % 13}"
                events.append(make.kernel(name, at + 10 + index * 5, 4.5, correlation=correlation, node=index + 1))
            tail = "graph_b_end" if half else "graph_a_end"
            events.append(make.kernel(tail, at + 300, 2, correlation=correlation, node=99))
    device = inspect_trace(make.torch(tmp_path / "t.json", events)).devices[0].layers
    assert (device.counts.found, len(device.layers)) == (6, 4)
    assert [len(layer.kernels) for layer in device.layers] == [13, 14, 13, 13]


def test_every_device_is_judged_and_the_worst_decides(tmp_path, make):
    events = make.pdl_events(slow=None, bubble=None)
    other = make.pdl_events(slow=(1, 2, 20.0), bubble=None)
    for event in other:
        event["args"]["correlation"] += 500
        if event["cat"] == "kernel":
            event["args"]["device"] = 1
    report = check_trace(make.torch(tmp_path / "t.json", events + other), "gb300-tp16", gpu="GB300")
    assert [device.verdict for device in report.devices] == ["pass", "fail"]
    assert report.verdict == "fail"


def test_a_plan_names_the_families_of_foreign_kernels(tmp_path, make):
    path = make.torch(tmp_path / "t.json", make.pdl_events())
    for plan in ({"k09": "experts"}, [{"kernel": "k09", "family": "experts"}],
                 {"tp": 16, "layers": [{"kind": "kda", "launches": [{"kernel": "k09", "family": "experts"}]}]}):  # fmt: skip
        report = check_trace(path, "gb300-tp16", gpu="GB300", plan=plan)
        assert "k09 [experts]" in texts(report, "kernel")[0]
    file = tmp_path / "plan.json"
    file.write_text('{"k09": "experts"}')
    assert "k09 [experts]" in texts(check_trace(path, "gb300-tp16", gpu="GB300", plan=file), "kernel")[0]
    for wrong in (tmp_path / "none.json", [1, 2], {"a": 1}, []):
        with pytest.raises(TraceError, match="plan"):
            check_trace(path, "gb300-tp16", plan=wrong)


def test_wrong_arguments(tmp_path, good):
    for wrong in ({"layers": 0}, {"tp": 0}, {"rows": -1}):
        with pytest.raises(TraceError, match="must be 1 or more"):
            check_trace(good, "gb300-tp16", **wrong)
    with pytest.raises(TraceError, match="known: gb300-tp16"):
        check_trace(good, "gb400")
    for wrong in ({"steps": 0}, {"layers": 0}, {"scale": 0}):
        with pytest.raises(TraceError, match="at least"):
            synthesize(tmp_path / "t.json", **wrong)
    with pytest.raises(TraceError, match="cannot be written"):
        synthesize(tmp_path / "none" / "t.json")


def test_an_unwritable_target_leaves_nothing_behind(tmp_path):
    (tmp_path / "t.json").mkdir()
    with pytest.raises(TraceError):
        synthesize(tmp_path / "t.json")
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_ninety_three_layers(tmp_path):
    report = check_trace(synthesize(tmp_path / "t.json", layers=93, steps=3), load_budget("gb300-tp16"), layers=93)
    assert report.verdict == "pass"
    assert len(read_trace(tmp_path / "t.json").kernels) == 3 * (70 * 13 + 23 * 15 + 2)


@pytest.mark.parametrize("mark", ["ProfilerStep#3", "step 1", "decode_step_1"])
def test_replays_of_one_graph_under_one_mark_are_steps_of_their_own(tmp_path, make, mark):
    events = [make.host("user_annotation", mark, 900.25, 5000), *make.pdl_events(slow=None, bubble=None)]
    device = inspect_trace(make.torch(tmp_path / "t.json", events)).devices[0].layers
    assert (device.counts.found, len(device.layers)) == (3, 4)


def test_the_profilers_own_schedule_does_not_hide_the_steps_in_it(tmp_path, make):
    events = [make.host("user_annotation", "ProfilerStep#3", 0.25, 5000)]
    for step in range(3):
        events.append(make.host("user_annotation", f"k3lab decode step {step}", 100 + step * 1000, 900))
        for index in range(52):
            correlation = 100 * step + index
            at = 110 + step * 1000 + index * 10
            events.append(make.host("cuda_runtime", "cudaLaunchKernel", at, 3, correlation))
            events.append(make.kernel(f"k{index % 13}", at + 20, 4.5, correlation=correlation))
    device = inspect_trace(make.torch(tmp_path / "t.json", events)).devices[0].layers
    assert (device.counts.source, device.counts.found, device.counts.decode) == ("step marks", 3, True)
    assert [len(layer.kernels) for layer in device.layers] == [13] * 4


def test_a_device_with_a_trifle_of_kernels_is_left_out_and_said(tmp_path, make):
    events = [*make.pdl_events(slow=None), make.kernel("init", 10.5, 3, device=1, correlation=9999)]
    report = check_trace(make.torch(tmp_path / "t.json", events), "gb300-tp16", gpu="GB300")
    assert (report.verdict, len(report.devices)) == ("pass", 1)
    assert any(note.startswith("1 kernels on devices") for note in report.notes)
    assert any("steps of 500 ns" in note for note in report.notes)


def test_a_graph_launched_inside_a_layer_range_is_not_that_layer(tmp_path, make):
    events = make.pdl_events(slow=None)
    launches = [event for event in events if event["name"] == "cudaGraphLaunch"]
    events += [
        make.host("user_annotation", f"layer_{index}", event["ts"] - 5, 40) for index, event in enumerate(launches)
    ]
    device = inspect_trace(make.torch(tmp_path / "t.json", events)).devices[0].layers
    assert device.method == "recurring kernel sequence"
    assert len(device.layers) == 4


def test_kernels_of_one_name_are_told_apart_by_their_grid(tmp_path, make):
    events = [make.host("cuda_runtime", "cudaGraphLaunch", 10.25, 5, 1)]
    for layer in range(6):
        for index in range(8):
            at = 100 + (8 * layer + index) * 6
            events.append(make.kernel("gemm", at, 5, node=8 * layer + index + 1, grid=(10 + index, 1, 1)))
    device = inspect_trace(make.torch(tmp_path / "t.json", events)).devices[0].layers
    assert [len(layer.kernels) for layer in device.layers] == [8] * 6
