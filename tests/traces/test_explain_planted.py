"""Causes planted in synthetic traces: each is found where it is, and told of no trace in which it is not."""

from __future__ import annotations

import pytest
from k3lab.traces import TraceError, check_trace, inspect_trace, synthesize
from k3lab.traces.synthetic import Faults

STEPS = 8
PLANTED = {
    "slow": (Faults(slow=((2, 9_000),)), "kernel", 2, "slow", 9_000),
    "bubble": (Faults(bubble=((6, 15_000),)), "gap", 6, "unexplained", 15_000),
    "copy": (Faults(copy=((6, 15_000),)), "gap", 6, "copy", 15_000),
    "flush": (Faults(flush=((6, 15_000),)), "gap", 6, "overhead", 15_000),
    "exposed": (Faults(exposed=((5, 6_000),)), "side", 5, "side stream", 4_800),
    "split-k": (Faults(extra=(1,)), "extra", 1, "split-K reduce", 1_500),
    "cast": (Faults(cast=(1,)), "extra", 1, "cast or copy", 1_800),
    "missing": (Faults(missing=(1,)), "missing", 1, "", -2_500),
    "stock": (Faults(stock=(4,), slow=((4, 7_000),)), "fallback", 4, "stock kernel", 7_000),
    "no overlap": (Faults(no_overlap=(5,)), "overlap", 5, "lost overlap", 2_500),
    "graphs": (Faults(graphs=3), "graphs", None, "piecewise graphs", 57_700),
    "pause": (Faults(pause_ns=2_000_000), "between", None, "host-bound", 2_025_000),
}
EVERYWHERE = {"ahead", "between", "parts"}  # true of every such trace, or of every one that fails
ALSO = {"graphs": {"gap"}}  # a late graph is a gap before its first layer, too


def findings(path, **told):
    (device,) = check_trace(path, "gb300-tp16", **told).devices
    return device.findings


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_found_with_its_cost_and_nothing_else(tmp_path, name):
    faults, kind, layer, cause, cost = PLANTED[name]
    found = findings(synthesize(tmp_path / "t.json", steps=STEPS, faults=faults))
    (one,) = [item for item in found if item.kind == kind]
    assert (one.layer, one.cause) == (layer, cause)
    assert one.cost_ns == pytest.approx(cost, rel=0.06, abs=200)
    assert {item.kind for item in found} <= {kind, *EVERYWHERE, *ALSO.get(name, ())}


def test_a_good_trace_has_nothing_to_explain_in_its_layers(tmp_path):
    found = findings(synthesize(tmp_path / "t.json", steps=STEPS))
    assert [item.kind for item in found] == ["between", "ahead"]
    assert "longer than a step" not in found[0].text
    assert found[1].cost_ns is None


def test_the_costliest_comes_first_and_what_has_no_cost_last(tmp_path):
    faults = Faults(copy=((2, 30_000),), slow=((5, 12_000),), missing=(6,), extra=(4,))
    found = findings(synthesize(tmp_path / "t.json", steps=STEPS, faults=faults))
    assert [item.kind for item in found] == ["between", "gap", "kernel", "extra", "missing", "parts", "ahead"]
    costs = [item.cost_ns for item in found]
    assert costs[-2:] == [None, None]
    assert costs[:-2] == sorted(costs[:-2], reverse=True)


def test_replays_that_wait_longer_than_a_step_are_host_bound(tmp_path):
    (one,) = [f for f in findings(synthesize(tmp_path / "t.json", steps=STEPS, faults=Faults(pause_ns=2_000_000)))
              if f.kind == "between"]  # fmt: skip
    assert "host-bound graphs, longer than a step" in one.text
    assert "cudaGraphLaunch started 2000.0 us after the kernel before had ended" in one.text


def test_a_side_stream_that_holds_up_every_layer_is_told_by_class(tmp_path):
    faults = Faults(exposed=tuple((layer, 5_000) for layer in range(12)))
    sides = [f for f in findings(synthesize(tmp_path / "t.json", steps=STEPS, faults=faults)) if f.kind == "side"]
    assert [(f.layer, f.text.split(":")[0]) for f in sides] == [(None, "class A"), (None, "class B")]
    assert sides[0].cost_ns == pytest.approx(9 * 3_800, rel=0.05)


def test_where_nothing_overlaps_pdl_is_not_seen_and_not_said_to_be_absent(tmp_path):
    faults = Faults(no_overlap=tuple(range(12)))
    found = findings(synthesize(tmp_path / "t.json", steps=STEPS, faults=faults))
    assert "ahead" not in {item.kind for item in found}
    (one,) = [item for item in found if item.kind == "pdl"]
    assert "PDL not seen (no proof that the attribute is absent" in one.text
    assert one.cost_ns is None


def test_a_traced_step_far_from_the_untraced_one_is_told(tmp_path):
    path = synthesize(tmp_path / "t.json", steps=STEPS)
    step = check_trace(path, "gb300-tp16").devices[0].layers.step_ns
    for untraced, told in ((step, 0), (step * 100 // 104, 0), (step * 100 // 106, 1), (step * 100 // 94, 1)):
        found = [f for f in findings(path, step_ns=untraced) if f.kind == "profiler"]
        assert len(found) == told
        assert all(f.cost_ns == step - untraced for f in found)
    assert [f.kind for f in inspect_trace(path, step_ns=step // 2).devices[0].findings][:1] == ["profiler"]
    for ask in (check_trace, inspect_trace):
        with pytest.raises(TraceError, match="step_ns must be 1 or more"):
            ask(path, **({"budget": "gb300-tp16"} if ask is check_trace else {}), step_ns=0)


def test_a_gap_in_few_steps_is_told_with_how_many(tmp_path, make):
    """Medians do not show it."""
    events = make.pdl_events(steps=8, slow=None, bubble=None)
    rows = [event for event in events if event["cat"] == "kernel" and event["args"]["correlation"] == 12]
    for event in rows[30:]:
        event["ts"] += 25.0
    late = rows[30]["ts"]
    events.append(make.host("overhead", "Buffer Flush", late - 30, 30))
    (device,) = inspect_trace(make.torch(tmp_path / "t.json", events)).devices
    (one,) = [item for item in device.findings if item.kind == "gap"]
    assert one.text.startswith("in 1 of 8 steps: a gap of 24.5 us (layer 2, before k04): overhead")
    assert (one.layer, one.cause, one.cost_ns) == (2, "overhead", 24_500 // 8)


def test_names_with_line_breaks_and_escapes_stay_on_one_printable_line(tmp_path, make):
    events = make.pdl_events()
    for event in events:
        event["name"] = event["name"].replace("k09", "k09\x1b[31m\u2028")
    (device,) = inspect_trace(make.torch(tmp_path / "t.json", events)).devices
    assert any("k09" in item.text for item in device.findings)
    assert all(item.text.isprintable() for item in device.findings)


def test_without_layers_nothing_is_explained_and_that_is_said(tmp_path, make):
    events = [make.kernel(f"k{index}", 5.3 * index, 4, correlation=index) for index in range(40)]
    (device,) = inspect_trace(make.torch(tmp_path / "t.json", events)).devices
    (one,) = device.findings
    assert (one.kind, one.cost_ns) == ("abstained", None)
    assert one.text.startswith("nothing is explained: ")


def test_stock_kernels_where_the_plan_has_ours(tmp_path):
    path = synthesize(tmp_path / "t.json", steps=STEPS, faults=Faults(stock=tuple(range(12))))
    plan = {"k3_experts_triton_routed": "experts", "fused_moe": "experts"}
    (told,) = [f for f in findings(path, plan=plan) if f.kind == "fallback"]
    assert told.text.startswith("k3_experts_triton_routed [experts] is planned and did not run in 12 layers: stock kernels of "
                                "its family ran, fused_moe_kernel (24.")  # fmt: skip
    assert told.cost_ns == pytest.approx(12 * 24_000, rel=0.02)
    assert not [f for f in findings(path, plan={"fused_moe": "experts"}) if f.kind == "fallback"]
    ours = synthesize(tmp_path / "u.json", steps=STEPS)
    assert not [f for f in findings(ours, plan=plan) if f.kind == "fallback"]


def test_layers_of_another_class_with_more_kernels_are_told_against_the_larger_class(tmp_path):
    faults = Faults(cast=(0, 4, 8))
    found = findings(synthesize(tmp_path / "t.json", steps=STEPS, faults=faults))
    texts = [f.text for f in found if f.kind == "extra"]
    assert any("against class" in text and "unrolled_elementwise_kernel" in text for text in texts)
    assert any("14 kernels, budget 13" in text and "fusion should have removed" in text for text in texts)


def test_families_over_their_share_are_told_where_a_class_fails_on_the_budgets_gpu(tmp_path):
    shares = [f for f in findings(synthesize(tmp_path / "t.json", steps=STEPS, scale=1.2)) if f.kind == "share"]
    assert [f.text.split(" adds")[0] for f in shares] == [
        "class A: router", "class A: output_projection", "class A: moe_tail", "class A: kda"]  # fmt: skip
    assert (
        "its share of the budget (inferred) is 1.3 us (+5.9 us); most is added by kernel 7 k3_router_synthetic_front"
        in (shares[0].text)
    )
    assert shares[0].cost_ns == pytest.approx(9 * 5_890, rel=0.02)
    for told in ({"gpu": "NVIDIA H200", "scale": 1.2}, {}, {"faults": Faults(slow=((2, 20_000),))}):
        found = findings(synthesize(tmp_path / "u.json", steps=STEPS, **told))
        assert "share" not in {item.kind for item in found}


def test_what_could_go_from_layers_of_unknown_kind_that_are_over_every_count(tmp_path, make):
    cast = "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(int)>(int)"
    names = [f"k{index:02}" for index in range(13)]
    names = [*names[:3], cast, *names[3:8], "cublasLt::splitKreduce_kernel<32>", cast, *names[8:]]
    events, clock = [], 1000.25
    for step in range(6):
        events.append(make.host("cuda_runtime", "cudaGraphLaunch", clock - 20, 8, 10 + step))
        for layer in range(4):
            for index, name in enumerate(names):
                node = 1000 + layer * len(names) + index
                events.append(make.kernel(name, clock, 2.125, correlation=10 + step, node=node))
                clock += 2.5
        clock += 30
    path = make.torch(tmp_path / "t.json", events)
    (device,) = check_trace(path, "h200-tp16").devices
    told = {item.cause: item for item in device.findings if item.kind == "extra"}
    assert set(told) == {"cast or copy", "split-K reduce"}
    assert told["cast or copy"].text == (
        "class A: 16 kernels, budget 15; 2 of them (at::native::vectorized_elementwise_kernel): an elementwise cast or copy "
        "that fusion should have removed, 4.2 us a layer"
    )
    assert told["cast or copy"].cost_ns == 4 * 2 * 2_125
    assert not [item for item in inspect_trace(path).devices[0].findings if item.kind == "extra"]
