"""``trace diff`` on synthetic pairs: what was changed is told, and nothing of what was not."""

from __future__ import annotations

import gzip
import json
import random

import pytest
from k3lab.cli.main import run
from k3lab.traces import TraceError, synthesize
from k3lab.traces.diff import diff_json, diff_traces
from k3lab.traces.diff.spread import FEWEST_STEPS, change
from k3lab.traces.synthetic import Faults

ALL = tuple(range(12))
KDA = tuple(layer for layer in ALL if layer % 4 != 3)


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("before") / "before.json")


@pytest.fixture
def after(tmp_path):
    """Writes the trace after; another seed, so that all else is noise."""
    return lambda **told: synthesize(tmp_path / "after.json", **({"seed": 7} | told))


def compared(before, path, **told):
    diff = diff_traces(before, path, **told)
    data = diff_json(diff)
    json.dumps(data)
    return diff, data


def kernels(data, index=0):
    return {kernel["a"] or kernel["b"]: kernel for kernel in data["devices"][0]["classes"][index]["kernels"]}


def test_noise_is_no_change(before, after):
    for seed in (3, 7, 11):
        diff, data = compared(before, after(seed=seed))
        assert (diff.verdict, diff.reasons) == ("no change beyond the spread", ())
        found = data["devices"][0]["classes"]
        assert [(row["a"], row["b"], row["kind"], row["layers"]) for row in found] == [
            ("A", "A", "kda", [9, 9]), ("B", "B", "mla", [3, 3])]  # fmt: skip
        assert not any(row["completion_period"]["beyond_the_spread"] for row in found)
        assert {kernel["state"] for row in found for kernel in row["kernels"]} == {"same"}


def test_one_slower_kernel_is_the_one_that_is_told(before, after):
    diff, data = compared(before, after(faults=Faults(slow=tuple((layer, 3_000) for layer in KDA))))
    assert diff.verdict == "changed"
    assert [reason.split(":")[0] for reason in diff.reasons] == ["class A (kda)", "class A (kda)", "step"]
    assert diff.reasons[0].startswith("class A (kda): slower beyond the spread of the steps: completion period 60.")
    assert diff.reasons[1].startswith("class A (kda): k3_experts_synthetic_routed [experts] adds 2")
    rows = kernels(data)
    assert rows.pop("k3_experts_synthetic_routed")["increment"]["delta_ns"] == pytest.approx(3_000, abs=100)
    assert not any(row["increment"]["beyond_the_spread"] for row in rows.values())
    families = {row["family"]: row["increment"] for row in data["devices"][0]["classes"][0]["families"]}
    assert [name for name, row in families.items() if row["beyond_the_spread"]] == ["experts"]
    assert data["devices"][0]["classes"][1]["completion_period"]["beyond_the_spread"] is False


def test_the_other_way_round_it_is_faster(before, after):
    path = after(faults=Faults(slow=tuple((layer, 3_000) for layer in KDA)))
    diff, _ = compared(path, before)
    assert "class A (kda): faster beyond the spread" in diff.reasons[0]
    assert "(-3.0 us" in diff.reasons[0] or "(-2.9 us" in diff.reasons[0]


def test_a_single_slow_layer_is_named(before, after):
    diff, data = compared(before, after(faults=Faults(slow=((4, 9_000),))))
    assert diff.reasons[0].endswith(", in layers 4 alone")
    assert data["devices"][0]["classes"][0]["layers_beyond_the_spread"] == [4]


def test_a_removed_kernel_is_told_with_what_it_took(before, after):
    diff, data = compared(before, after(faults=Faults(missing=ALL)))
    removed = [reason for reason in diff.reasons if "kernel" in reason and "removed" in reason]
    assert removed == [
        f"class {name}: kernel removed: k3_router_synthetic_route [router], 2.5 us" for name in ("A (kda)", "B (mla)")
    ]
    assert "kernels a step: 164 to 152" in diff.reasons
    row = kernels(data)["k3_router_synthetic_route"]
    assert (row["state"], row["b"], row["increment"]["b_ns"], row["increment"]["beyond_the_spread"]) == (
        "removed",
        None,
        None,
        None,
    )
    assert [row["state"] for row in kernels(data).values()].count("same") == 12
    diff, data = compared(after(faults=Faults(missing=ALL)), before)
    assert kernels(data)["k3_router_synthetic_route"]["state"] == "added"


def test_another_kernel_in_the_same_place_is_told_as_such(before, after):
    diff, data = compared(before, after(faults=Faults(stock=ALL)), plan={"fused_moe_kernel": "experts"})
    row = kernels(data)["k3_experts_synthetic_routed"]
    assert (row["state"], row["b"], row["family"]) == ("renamed", "fused_moe_kernel", "experts")
    assert any("kernel renamed: k3_experts_synthetic_routed is fused_moe_kernel [experts], 24.0 us to 2" in reason
               for reason in diff.reasons)  # fmt: skip
    _, data = compared(before, after(faults=Faults(stock=ALL)), plan={"fused_moe_kernel": "kda"})
    assert kernels(data)["k3_experts_synthetic_routed"]["state"] == "replaced"


def test_lost_pdl_is_told_by_the_overlap(before, after):
    diff, data = compared(before, after(faults=Faults(no_overlap=ALL)))
    lost = [reason for reason in diff.reasons if "overlap on one stream" in reason]
    assert [reason.split(":")[0] for reason in lost] == ["class A (kda)", "class B (mla)"]
    assert all(reason.endswith("PDL seen in a alone") and " to 0.0 us " in reason for reason in lost)
    assert not [reason for reason in diff.reasons if "removed" in reason or "added" in reason]
    assert {row["state"] for row in kernels(data).values()} == {"same"}
    assert data["devices"][0]["classes"][0]["overlap_same_stream"]["b_ns"] == 0


def test_several_launches_in_place_of_one(before, after):
    diff, data = compared(before, after(faults=Faults(graphs=3)))
    assert "launches a step: 1 to 3" in diff.reasons
    assert data["devices"][0]["launches_a_step"] == [1, 3]
    assert any(reason.startswith("class A (kda): idle time") for reason in diff.reasons)


@pytest.mark.parametrize(("told", "field"), [
    ({"gpu": "NVIDIA H200"}, "GPU"), ({"tp": 8}, "number of ranks (TP)"),
])  # fmt: skip
def test_unlike_captures_are_refused_by_the_field(before, after, told, field, capsys):
    path = after(**told)
    diff, data = compared(before, path)
    assert (diff.verdict, diff.devices) == ("refused", ())
    assert [row["field"] for row in data["refused"]] == [field]
    assert run(["trace", "diff", str(before), str(path)]) == 1
    assert f"{field} differs" in capsys.readouterr().out
    forced, _ = compared(before, path, force=True)
    assert forced.verdict == "no change beyond the spread"
    assert any(note.startswith(f"compared although {field} differs") for note in forced.notes)
    assert run(["trace", "diff", str(before), str(path), "--force"]) == 0


def test_rows_and_layers_that_differ_are_refused(tmp_path, make):
    def marked(name, prefix, rows):
        events = make.pdl_events(steps=8, slow=None, bubble=None)
        for event in events:
            event["name"] = event["name"].replace("k", prefix) if event["cat"] == "kernel" else event["name"]
        calls = [event for event in events if event["name"] == "cudaGraphLaunch"]
        events += [make.host("user_annotation", f"execute_context_0(0)_generation_1({rows}) #{n}", call["ts"] - 1, 50)
                   for n, call in enumerate(calls)]  # fmt: skip
        return make.torch(tmp_path / name, events)

    one = marked("a.json", "k", 8)
    assert diff_traces(one, marked("b.json", "k", 8)).verdict == "no change beyond the spread"
    assert diff_traces(one, marked("c.json", "k", 4)).refused[0][0] == "rows"
    refused = diff_traces(one, marked("d.json", "entirely_different_", 8)).refused
    assert refused == (("layer structure", "4 x 13 kernels in a.json, 4 x 13 kernels in d.json"),)


def test_another_number_of_layers_is_compared_by_class(before, after):
    diff, data = compared(before, after(layers=16))
    assert diff.verdict == "no change beyond the spread"
    assert [row["layers"] for row in data["devices"][0]["classes"]] == [[9, 12], [3, 4]]
    assert "12 layers in a, 16 in b: compared by class, not by step" in diff.notes
    diff, _ = compared(before, after(layers=16, scale=1.1))
    assert diff.verdict == "changed"
    assert not any(reason.startswith(("step", "kernels a step")) for reason in diff.reasons)


def test_layers_that_split_off_are_compared_with_their_like(before, after):
    diff, data = compared(before, after(faults=Faults(cast=(0, 4, 8))))
    found = data["devices"][0]["classes"]
    assert [(row["a"], row["b"], row["layers"], row["split_off"]) for row in found] == [
        ("A", "B", [9, 6], False), ("B", "C", [3, 3], False), ("A", "A", [9, 3], True)]  # fmt: skip
    added = [reason for reason in diff.reasons if "kernel added: at::native::unrolled_elementwise_kernel" in reason]
    assert [reason.split(":")[0] for reason in added] == ["class A (kda), 9 and 3 layers"]


@pytest.mark.parametrize("steps", [FEWEST_STEPS, FEWEST_STEPS + 2, 20])
def test_noise_alone_seldom_parts_any_of_forty_times(steps):
    draw = random.Random(steps)

    def parted():
        return change(*([round(draw.gauss(10_000, 400)) for _ in range(steps)] for _ in "ab")).beyond

    false = sum(any(parted() for _ in range(40)) for _ in range(200))
    assert false <= 5  # of 200 comparisons; with five steps it would be fifty


@pytest.mark.parametrize("steps", [1, 7])
def test_few_steps_are_no_spread(tmp_path, steps):
    paths = [synthesize(tmp_path / f"{seed}.json", steps=steps, seed=seed) for seed in (0, 1)]
    diff, data = compared(*paths)
    assert diff.verdict == "inconclusive"
    assert "under 8 steps" in diff.reasons[0]
    assert data["devices"][0]["classes"][0]["completion_period"]["beyond_the_spread"] is None
    assert run(["trace", "diff", *map(str, paths)]) == 1


def test_where_a_trace_has_no_layers_nothing_is_compared(before, tmp_path, make):
    bare = make.torch(tmp_path / "bare.json", [make.kernel(f"k{n}", 5.3 * n, 4, correlation=n) for n in range(40)])
    diff, data = compared(before, bare)
    assert (diff.verdict, data["devices"]) == ("inconclusive", [])
    assert diff.reasons[0].startswith("b, bare.json: no layers found")
    whole = make.nsys(tmp_path / "whole.sqlite")
    whole.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=10, end=9000, deviceId=0, streamId=7, correlationId=1, graphId=1)
    diff, _ = compared(before, whole.write())
    assert diff.verdict == "inconclusive"
    assert "traced as a whole" in diff.reasons[0]


def test_lost_kernels_forbid_to_say_that_nothing_changed(before, after):
    path = after()
    data = json.loads(path.read_text())
    row = next(event for event in data["traceEvents"] if event.get("cat") == "kernel")
    data["traceEvents"].append({**row, "dur": -5})
    path.write_text(json.dumps(data))
    diff, _ = compared(before, path)
    assert diff.verdict == "inconclusive"
    assert diff.reasons == ("b, after.json: 1 kernel rows have unusable times",)


def test_the_command_prints_what_changed_and_exits_0(before, after, capsys):
    path = after(faults=Faults(missing=ALL))
    assert run(["trace", "diff", str(before), str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("changed: before.json (a) against after.json (b)")
    assert "kernel removed: k3_router_synthetic_route [router]" in out
    assert "Rule: p10 to p90 of the steps do not overlap" in out
    assert run(["trace", "diff", str(before), str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "changed"


def test_bad_input(before, tmp_path, capsys):
    assert run(["trace", "diff", str(before), str(tmp_path / "none.json")]) == 2
    assert "no such file" in capsys.readouterr().err
    with pytest.raises(TraceError, match="layers must be 1 or more"):
        diff_traces(before, before, layers=0)


def test_the_order_of_events_and_the_zero_of_the_clock_change_nothing(before, after, tmp_path):
    path = after(faults=Faults(slow=((4, 9_000),), missing=(5,), copy=((6, 8_000),)))
    first = diff_json(diff_traces(before, path))["devices"]
    data = json.loads(path.read_text(), parse_float=str)
    random.Random(1).shuffle(data["traceEvents"])
    for event in data["traceEvents"]:
        whole, part = event["ts"].split(".")
        event["ts"] = f"{int(whole) + 2**40}.{part}"
    moved = tmp_path / "moved.json.gz"
    moved.write_bytes(gzip.compress(json.dumps(data).encode()))
    assert diff_json(diff_traces(before, moved))["devices"] == first
