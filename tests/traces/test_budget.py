"""Budget files, families and names."""

from __future__ import annotations

import json

import pytest
from k3lab.traces import TraceError, budget_names, load_budget, parse_budget
from k3lab.traces.families import FAMILIES, UNNAMED, Names, layer_kind
from k3lab.traces.marks import layer_number, step_mark
from k3lab.traces.names import base_name, short_name

GOOD = {"schema": "k3lab.budget/1", "name": "mine", "gpu": "GB300", "tp": 16,
        "layers": {"any": {"kernels": 13, "period_ns": 69000}}}  # fmt: skip


def test_the_published_budget_states_its_conditions():
    budget = load_budget("gb300-tp16")
    assert (budget.gpu, budget.tp, budget.rows) == ("GB300", 16, 8)
    assert {"tp", "rows"} <= set(budget.inferred)  # published is a layer of "the shown configuration"
    limit = budget.limit("kda")
    assert (limit.kernels, limit.period_ns) == (13, 69_000)
    assert budget.limit("mla") is None  # no figure was published
    assert budget.limit(None) == limit
    assert budget.source
    assert budget.conditions
    assert parse_budget(budget.to_json()) == budget
    assert budget.evidence == "published"
    assert budget_names() == ("gb300-tp16", "h200-tp16", "h200-tp8")


def test_a_limit_for_any_kind_serves_all():
    budget = parse_budget(GOOD | {"layers": GOOD["layers"] | {"mla": {"kernels": 15}}})
    assert budget.limit("kda").kernels == budget.limit(None).kernels == 13
    assert budget.limit("mla").kernels == 15
    assert budget.limit("mla").period_ns is None


@pytest.mark.parametrize("name", budget_names())
def test_shares_are_of_our_families_and_add_up_to_the_layer(name):
    budget = load_budget(name)
    assert budget.split.evidence == {"gb300-tp16": "inferred"}.get(name, "derived")
    assert parse_budget(json.loads(json.dumps(budget.to_json()))) == budget
    for kind, limit in budget.layers.items():
        assert sum(share.period_ns for share in limit.families.values()) == limit.period_ns
        assert sum(share.kernels for share in limit.families.values()) >= limit.kernels
        assert set(limit.families) == set(FAMILIES) - {"lm_head", "kda", "mla"} | {kind}
        assert set(budget.split.bytes[kind]) == set(limit.families)


@pytest.mark.parametrize(("name", "fits"), [("NVIDIA GB300", True), ("gb300", True), ("NVIDIA B300", False),
                                            ("NVIDIA GB3000", False), ("NVIDIA H200", False)])  # fmt: skip
def test_gpu_names(name, fits):
    assert load_budget("gb300_tp16").fits_gpu(name) is fits


@pytest.mark.parametrize(
    ("change", "says"),
    [({"schema": "x"}, "schema"), ({"name": 3}, "'name'"), ({"gpu": " "}, "'gpu'"), ({"tp": None}, "'tp'"),
     ({"tp": True}, "'tp'"), ({"rows": 0}, "'rows'"), ({"layers": {}}, "'layers'"), ({"layers": {"kda": 3}}, "kda"),
     ({"layers": {"kda": {}}}, "neither"), ({"layers": {"kda": {"period_ns": 69.0}}}, "period_ns"),
     ({"conditions": "x"}, "conditions"), ({"split": {"rule": "x"}}, "split"),
     ({"layers": {"kda": {"period_ns": 5, "families": {"nofamily": {"period_ns": 5}}}}}, "families"),
     ({"layers": {"kda": {"period_ns": 5, "families": {"kda": {"period_ns": 3}, "router": {"period_ns": 1}}}}},
      "add up to 4 ns, its period is 5"),
     ({"layers": {"kda": {"period_ns": 5, "families": {"kda": {}}}}}, "share of kda")],
)  # fmt: skip
def test_wrong_budget_files_are_told_apart(tmp_path, change, says):
    path = tmp_path / "b.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(TraceError, match=says):
        load_budget(path)


def test_budget_files_by_path(tmp_path):
    path = tmp_path / "b.json"
    path.write_text(json.dumps(GOOD))
    assert load_budget(path).name == "mine"
    path.write_text("{")
    with pytest.raises(TraceError, match="not a readable JSON"):
        load_budget(path)
    with pytest.raises(TraceError, match="no budget"):
        load_budget(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("kernel", "family"),
    [("k3_attention_projection_triton_main", "attention_projection"), ("k3_kda_cute_step", "kda"),
     ("void k3_moe_tail_cute_x<int>(int*)", "moe_tail"), ("kernel_cutlass_k3_lm_head_cute_skinny_main_tensor", "lm_head"),
     ("k3_newfamily_cute_main", "newfamily"), ("ampere_gemm", None), ("xk3_kda", None)],
)  # fmt: skip
def test_families_of_our_kernels(kernel, family):
    assert UNNAMED.family(kernel) == family


def test_a_plan_comes_after_a_kernels_own_name_but_not_after_its_whole_name():
    plan = {"attn_res": "attn_res", "gemm": "router", "gemm_splitk": "experts"}
    assert Names(plan).family("k3_output_projection_cute_attn_res") == "output_projection"
    assert Names({"k3_kda_cute_x": "mla"}).family("k3_kda_cute_x") == "mla"
    assert Names(plan).family("sm103_gemm_splitk_reduce") == "experts"
    assert Names(plan).family("other") is None


def test_kinds_of_layers():
    assert layer_kind(["k3_kda_cute", "x"]) == "kda"
    assert layer_kind(["kda_core", "mla_query"]) == "mla"
    assert layer_kind(["flashmla_fwd"]) == "mla"
    assert layer_kind(["smlapse", "gemm"]) is None


@pytest.mark.parametrize(
    ("name", "base"),
    [("void at::native::elementwise_kernel<128, 4, at::X<int>::op()#1>(int, F)", "at::native::elementwise_kernel"),
     ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bLi256EEvPT0_", "aiter::add_rmsnorm_quant_kernel"),
     ("_Z3fooi", "foo"), ("_Zbroken", "_Zbroken"), ("k00", "k00"), ("<lambda>", "<lambda>"), ("()", "()"),
     ("void (anonymous namespace)::store<2l>((anonymous namespace)::P)", "store")],
)  # fmt: skip
def test_base_names(name, base):
    assert base_name(name) == base
    assert len(short_name(name * 40)) <= 48


@pytest.mark.parametrize(
    ("name", "decode", "requests"),
    [("execute_context_0(0)_generation_32(32)", True, 32), ("execute_context_1(888_788544)_generation_0(0)", False, 0),
     ("execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785)", True, 32), ("step[DECODE bs=8] 3", True, 8),
     ("step[EXTEND bs=1]", False, 1), ("[Executor] _forward_step 12: 0 ctx reqs, 8 gen reqs", True, 8),
     ("[Executor] _forward_step 3: 2 ctx reqs, 8 gen reqs", False, 8), ("step 4", None, None),
     ("decode_step_3", True, None)],
)  # fmt: skip
def test_step_marks(name, decode, requests):
    mark = step_mark(name)
    assert (mark.decode, mark.requests) == (decode, requests)


@pytest.mark.parametrize("name", ["layer_0", "stepper motor", "aten::add", "optimizer.step"])
def test_what_is_no_step_mark(name):
    assert step_mark(name) is None


@pytest.mark.parametrize(
    ("name", "number"),
    [("layer_12", 12), ("layers.12", 12), ("model.layers.12.mlp.experts", 12), ("TransformerBlock[3]", 3),
     ("layer_wise_benchmarks layer_idx 7", 7), ("encoder.block.3.layer.1", 3), ("DecoderLayer_5", 5),
     ("aten::add, op_id = 31", None), ("player_3", None), ("## Call CompiledFxGraph f64h7 ##", None)],
)  # fmt: skip
def test_layer_marks(name, number):
    assert layer_number(name) == number
