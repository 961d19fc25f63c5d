"""One family against its share: what passes, what fails, and what keeps a pass from being said."""

from __future__ import annotations

import json

import pytest
from k3lab.cli.main import run
from k3lab.traces import TraceError, check_trace, inspect_trace, load_budget, parse_budget, synthesize
from k3lab.traces.synthetic import Faults


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("good") / "good.json", layers=8, steps=6)


def changed(path, target, rename=None, drop=None):
    """The trace with kernels renamed (old part: new name) or dropped (by name and how many times seen before)."""
    data = json.loads(path.read_text())
    kept, seen = [], {}
    for event in data["traceEvents"]:
        if event["cat"] == "kernel":
            step, name = event["args"]["correlation"], event["name"]
            seen[step, name] = seen.get((step, name), -1) + 1
            if drop and drop(name, seen[step, name]):
                continue
            for part, new in (rename or {}).items():
                if part in name:
                    event["name"] = new
        kept.append(event)
    data["traceEvents"] = kept
    target.write_text(json.dumps(data))
    return target


def rows(report, index=0):
    return {row["family"]: row for row in report.to_json()["devices"][0]["classes"][index]["families"]}


def test_a_family_within_its_share_passes_and_one_over_it_fails(good):
    report = check_trace(good, "gb300-tp16", family="attention_projection")
    assert report.verdict == "pass"
    assert report.reasons[0] == "attention_projection: 6 layers within its share; 2 layers not judged"
    assert "family attention_projection" in report.headline
    report = check_trace(good, "gb300-tp16", family="output_projection")
    assert report.verdict == "fail"
    assert report.reasons[0].startswith("class A (kda), 6 layers: output_projection: adds 7.0 us, share 3.8 us")
    layer = report.to_json()["devices"][0]["layers"][0]
    assert (layer["verdict"], layer["count"], layer["time"]) == ("fail", "pass", "fail")


def test_the_families_of_a_class_add_up_to_its_period(good):
    report = inspect_trace(good)
    for group in report.to_json()["devices"][0]["classes"]:
        whole = sum(row["time_ns"] for row in group["families"]) + group["unknown"]["time_ns"]
        assert abs(whole - group["completion_period_ns"]) < 0.02 * group["completion_period_ns"]
        assert sum(row["kernels"] for row in group["families"]) == group["kernels"]
        assert group["unknown"] == {"kernels": 0, "time_ns": 0, "names": []}
        assert {row["verdict"] for row in group["families"]} == {"not judged"}


def test_the_time_of_a_family_is_increments_and_bubbles(tmp_path, good):
    slow = synthesize(tmp_path / "t.json", layers=8, steps=6, faults=Faults(slow=((1, 30_000),)))
    report = check_trace(slow, "gb300-tp16", family="experts")
    assert report.verdict == "fail"
    assert report.reasons == (report.reasons[0],)
    assert report.reasons[0].startswith("layer 1: experts: adds 5")
    late = synthesize(tmp_path / "u.json", layers=8, steps=6, faults=Faults(bubble=((2, 9_000),)))
    report = check_trace(late, "gb300-tp16", family="attention_projection")
    assert [reason.split(":")[0] for reason in report.reasons if "share 14.4 us" in reason] == ["layer 2"]


def test_kernels_of_a_family_that_are_slow_in_turn_do_not_hide_behind_their_medians(tmp_path, make):
    events, clock = [], 1_000.0
    for step in range(9):
        events.append(make.host("cuda_runtime", "cudaGraphLaunch", clock - 20, 8, 10 + step))
        for layer in range(4):
            names = ["k3_attention_projection_a", "k3_kda_b", *(f"k3_experts_{part}" for part in "xyz")]
            for place, name in enumerate(names):
                length = 50.003 if place == 2 + step % 3 else 2.001
                node = 100 + layer * len(names) + place
                events.append(make.kernel(name, clock, length, correlation=10 + step, node=node))
                clock += length
        clock += 60
    path = make.torch(tmp_path / "t.json", events, deviceProperties=[{"id": 0, "name": "NVIDIA GB300"}])
    report = check_trace(path, "gb300-tp16", family="experts")
    assert report.verdict == "fail"
    assert "experts: adds 54.0 us" in report.reasons[0]
    data = report.to_json()["devices"][0]["classes"][0]
    assert sum(row["time_ns"] for row in data["families"]) == data["completion_period_ns"] == 58_007


@pytest.mark.parametrize("gpu", ["NVIDIA H200", None])
def test_on_another_gpu_a_family_is_judged_by_its_count_alone(tmp_path, gpu):
    path = synthesize(tmp_path / "t.json", layers=8, steps=6, gpu=gpu)
    report = check_trace(path, "gb300-tp16", family="attention_projection")
    assert report.verdict == "inconclusive"
    assert report.reasons[-1] == "the kernel count alone: 6 of 6 judged layers keep it"
    layer = report.to_json()["devices"][0]["layers"][0]
    assert (layer["count"], layer["time"]) == ("pass", "inconclusive")
    for row in rows(check_trace(path, "gb300-tp16")).values():
        assert (row["verdict"], row["count"], row["time"]) == ("inconclusive", "pass", "inconclusive")
    path = synthesize(tmp_path / "u.json", layers=8, steps=6, gpu=gpu, faults=Faults(extra=(2,)))
    report = check_trace(path, "gb300-tp16", family="router")
    assert (report.verdict, report.reasons[0]) == ("fail", "layer 2: router: 3 kernels, share 2")


def test_a_share_below_a_launch_fails_nobody(good, tmp_path):
    report = check_trace(good, "gb300-tp16", family="attn_res")
    assert report.verdict == "inconclusive"
    assert "its share by bytes, 0.371 us, is less than a launch takes" in report.reasons[0]
    twice = changed(good, tmp_path / "t.json", rename={"k3_moe_tail_synthetic_main": "k3_attn_res_synthetic_again"})
    report = check_trace(twice, "gb300-tp16", family="attn_res")
    assert (report.verdict, report.reasons[0].endswith("attn_res: 2 kernels, share 1")) == ("fail", True)


def test_an_absent_family_is_inconclusive(good, tmp_path):
    gone = changed(good, tmp_path / "t.json", drop=lambda name, _: "k3_kda_" in name)
    report = check_trace(gone, parse_budget(load_budget("gb300-tp16").to_json()), family="kda")
    assert report.verdict == "inconclusive"
    assert "kda: no kernel of it is known in the layer" in report.reasons[0]
    once = changed(good, tmp_path / "u.json", drop=lambda name, nth: "router_synthetic" in name and nth == 4)
    report = check_trace(once, "gb300-tp16", family="router", layers=8)
    assert report.verdict != "pass"
    assert any("router: no kernel of it is known" in reason for reason in report.reasons)
    report = check_trace(good, "gb300-tp16", family="lm_head")
    assert (report.verdict, report.reasons) == (
        "inconclusive", ("lm_head: the budget has no share of lm_head in kda layers",))  # fmt: skip


def test_an_unknown_kernel_is_listed_and_forbids_a_pass(good, tmp_path):
    odd = changed(good, tmp_path / "t.json", rename={"experts_synthetic_shared_situ": "mystery<int>"})
    report = check_trace(odd, "gb300-tp16", family="attention_projection")
    assert report.verdict == "inconclusive"
    assert "1 kernels of unknown family may be of it (mystery<int>)" in report.reasons[0]
    unknown = report.to_json()["devices"][0]["classes"][0]["unknown"]
    assert (unknown["kernels"], unknown["names"]) == (1, [{"kernel": "mystery<int>", "times": 1}])
    assert check_trace(odd, "gb300-tp16").verdict == "pass"  # the layer as a whole needs no names
    assert check_trace(odd, "gb300-tp16", family="output_projection").verdict == "fail"
    table = {"schema": "k3lab.names_table/1", "name": "mine", "entries": [{"prefix": "mystery", "family": "experts"}]}
    (tmp_path / "names.json").write_text(json.dumps(table))
    named = check_trace(odd, "gb300-tp16", family="attention_projection", names=[tmp_path / "names.json"])
    assert named.verdict == "pass"
    assert check_trace(odd, "gb300-tp16", family="experts", plan={"mystery<int>": "experts"}).verdict == "pass"


def test_a_kernel_that_cannot_be_of_the_family_does_not_stand_in_its_way(good, tmp_path):
    budget = load_budget("gb300-tp16").to_json()
    budget["layers"]["kda"]["families"] = {
        "attn_res": {"kernels": 1, "period_ns": 5000},
        "kda": {"period_ns": 9000},
        "experts": {"kernels": 6},
    }
    odd = changed(good, tmp_path / "t.json", rename={"experts_synthetic_shared_situ": "nvjet_sm103_tst_64x8"})
    assert check_trace(odd, parse_budget(budget | {"split": None}), family="attn_res").verdict == "pass"
    assert check_trace(odd, parse_budget(budget | {"split": None}), family="kda").verdict == "inconclusive"


def test_a_dense_first_layer_is_not_held_against_the_share_of_experts(good, tmp_path):
    dense = changed(
        good, tmp_path / "t.json", drop=lambda name, nth: nth == 0 and ("_router_" in name or "_moe_tail_" in name)
    )
    report = check_trace(dense, "gb300-tp16", family="router", layers=8)
    layers = report.to_json()["devices"][0]["layers"]
    assert layers[0]["reasons"] == ["a dense layer; the budget is for layers with experts"]
    assert layers[1]["verdict"] == "fail"  # its share is less than it takes


def test_vllms_names_split_the_same_way(good, tmp_path):
    theirs = {
        "k3_kda_": "void vllm::kda_decode_fusion_many_heads_kernel<true>(float*)",
        "experts_synthetic_routed": "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x8x512",
        "experts_synthetic_shared_situ": "void vllm::situ_and_mul_kernel<c10::BFloat16>(c10::BFloat16*)",
    }
    report = check_trace(changed(good, tmp_path / "t.json", rename=theirs), "gb300-tp16", family="experts")
    assert rows(report)["experts"]["kernels"] == 5
    assert report.verdict == "pass"
    assert check_trace(tmp_path / "t.json", "gb300-tp16", family="experts", names=[]).verdict == "inconclusive"


def test_a_layer_of_unknown_kind_is_judged_where_all_kinds_agree(good, tmp_path):
    blank = {"k3_kda_": "x", "k3_mla_synthetic_query": "a", "k3_mla_synthetic_core": "b", "k3_mla_synthetic_value": "c"}
    path = changed(good, tmp_path / "t.json", rename=blank)
    budget = load_budget("h200-tp16").to_json() | {"gpu": "GB300"}
    report = check_trace(path, parse_budget(budget))
    layers = report.to_json()["devices"][0]["layers"]
    assert [layer["verdict"] for layer in layers] == [
        "pass",
        "pass",
        "pass",
        "inconclusive",
    ] * 2  # 13 keeps both, 15 one
    assert "the budget differs by kind: kda, mla" in report.reasons[0]
    budget["layers"]["mla"] |= {"kernels": 14, "families": {}}
    report = check_trace(path, parse_budget(budget))
    assert report.verdict == "fail"
    assert report.reasons[0] == "class B, 2 layers: 15 kernels, budget 14"


def test_a_family_in_a_layer_of_unknown_kind(good, tmp_path):
    blank = {
        "k3_kda_": "nvjet_a",
        "mla_synthetic_query": "nvjet_a",
        "synthetic_core": "nvjet_b",
        "synthetic_value": "nvjet_c",
    }
    path = changed(good, tmp_path / "t.json", rename=blank)
    budget = load_budget("h200-tp16").to_json() | {"gpu": "GB300"}

    def verdict(family, **shares):
        for kind, share in shares.items():
            budget["layers"][kind] |= {"families": {family: share, "experts": {"kernels": 9}}}
        report = check_trace(path, parse_budget(budget), family=family)
        return report.verdict, report.reasons[0]

    assert verdict("attn_res", kda={"period_ns": 3000}, mla={"period_ns": 4000})[0] == "pass"
    assert verdict("attn_res", kda={"period_ns": 2000}, mla={"period_ns": 4000}) == (
        "inconclusive", "attn_res: no kernel name tells the layer kind; the budget differs by kind: kda, mla")  # fmt: skip
    assert verdict("attn_res", kda={"period_ns": 2000}, mla={"period_ns": 1500})[0] == "fail"
    assert verdict("attn_res", kda={"kernels": 1}, mla={"period_ns": 1})[0] == "inconclusive"
    budget["layers"]["kda"]["families"] = {}
    found = check_trace(path, parse_budget(budget), family="attn_res")
    assert found.reasons == ("attn_res: not every layer kind of the budget has a share of attn_res",)


def test_on_another_gpu_its_own_budgets_are_named(tmp_path, good):
    other = synthesize(tmp_path / "t.json", layers=8, steps=6, gpu="NVIDIA H200")
    assert "budgets for NVIDIA H200: h200-tp16, h200-tp8" in check_trace(other, "gb300-tp16").notes
    assert not any(note.startswith("budgets for") for note in check_trace(good, "gb300-tp16").notes)


def test_a_derived_budget_says_so(good):
    notes = check_trace(good, "h200-tp16").notes
    assert any("derived, not measured" in note for note in notes)
    assert any(
        note.startswith("shares of families are inferred: ours") for note in check_trace(good, "gb300-tp16").notes
    )


def test_the_command_prints_families_and_exits_by_the_familys_verdict(good, tmp_path, capsys):
    assert run(["trace", "check", str(good), "--family", "experts"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("pass (synthetic) good.json against gb300-tp16, family experts: ")
    assert "Families of class A" in out
    assert run(["trace", "check", str(good), "--family", "kda"]) == 1
    odd = changed(good, tmp_path / "t.json", rename={"experts_synthetic_shared_situ": "mystery[/red]<int>"})
    capsys.readouterr()
    assert run(["trace", "show", str(odd)]) == 0
    out = capsys.readouterr().out
    assert "Unknown kernels of a layer (--plan or --names tells their family)" in out
    assert "1 x mystery[/red]" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--family", "gemm"], "no family 'gemm'; families: attention_projection"), (["--names", "x"], "no names table 'x'")],
)  # fmt: skip
def test_wrong_arguments_exit_2_with_one_line(good, capsys, arguments, says):
    assert run(["trace", "check", str(good), *arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert says in captured.err


def test_a_family_must_be_one_of_ours(good):
    with pytest.raises(TraceError, match="no family"):
        check_trace(good, "gb300-tp16", family="")


def test_diff_takes_names_tables_too(good, tmp_path, capsys):
    odd = changed(good, tmp_path / "t.json", rename={"experts_synthetic_shared_situ": "mystery<int>"})
    table = {"schema": "k3lab.names_table/1", "name": "mine", "entries": [{"prefix": "mystery", "family": "experts"}]}
    (tmp_path / "names.json").write_text(json.dumps(table))
    seen = {}
    for words in ((), ("--names", str(tmp_path / "names.json"))):
        run(["trace", "diff", str(odd), str(odd), "--json", *words])
        found = json.loads(capsys.readouterr().out)["devices"][0]["classes"][0]["kernels"]
        seen[words[:1]] = {kernel["family"] for kernel in found if kernel["a"] == "mystery<int>"}
    assert seen == {(): {None}, ("--names",): {"experts"}}


def test_a_family_of_another_package_has_its_share(tmp_path, monkeypatch):
    """Its name, underscores and all, is known from the entry points, as the registry of families knows it."""
    from types import SimpleNamespace

    from k3lab.traces import families

    path = synthesize(
        tmp_path / "t.json", layers=8, steps=8, faults=Faults(kernels=(("k3_token_mix_triton_rows", 1_500),))
    )
    budget = tmp_path / "b.json"
    share = {"kernels": 14, "families": {"token_mix": {"kernels": 1, "period_ns": 2_000}}}
    data = {
        "schema": "k3lab.budget/1",
        "name": "mine",
        "gpu": "GB300",
        "tp": 16,
        "layers": {"kda": share, "mla": share | {"kernels": 16}},
    }
    budget.write_text(json.dumps(data))
    with pytest.raises(TraceError, match="must map families to their shares"):
        check_trace(path, budget)
    monkeypatch.setattr(families, "entry_points", lambda group: [SimpleNamespace(name="token_mix")])
    caches = (families.known_families, families._family)
    for cached in caches:
        cached.cache_clear()
    try:
        assert check_trace(path, budget, family="token_mix", tp=16).verdict == "pass"
        slow = synthesize(
            tmp_path / "s.json", layers=8, steps=8, faults=Faults(kernels=(("k3_token_mix_triton_rows", 2_500),))
        )
        report = check_trace(slow, budget, family="token_mix", tp=16)
        assert report.verdict == "fail"
        assert "token_mix" in report.headline
    finally:
        for cached in caches:
            cached.cache_clear()


@pytest.mark.parametrize("kernel", ["name", ":2", "name:0", "name:x"])
def test_a_kernel_to_add_needs_a_name_and_a_time(kernel):
    from k3lab.cli.trace_synthesize import read_kernels
    from k3lab.kernels import InputError

    with pytest.raises(InputError, match="is not NAME:US"):
        read_kernels([kernel])
