"""Names tables: every launch of the published lists has one family, or none where its name and place leave it open."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
from k3lab.decode.stock import stock_layer, target_layer
from k3lab.traces import TraceError
from k3lab.traces import names_table as module
from k3lab.traces.families import FAMILIES, UNNAMED, Names, gather_names, layer_kind, read_plan, stock_instead
from k3lab.traces.names_table import Entry, glob_matches, load_table, own_tables, parse_table, table_names

OWN = "k3_attention_projection_triton_splitk"
GEMM = "nvjet_sm103_tst_64x8_64x16_4x1_v_bz_TNT"


def sequences():
    for name in table_names():
        data = json.loads((module._FOLDER / f"{name}.json").read_text())
        for title, launches in data["sequences"].items():
            yield pytest.param(name, launches, id=title)


def by_what(name, title):
    launches = json.loads((module._FOLDER / f"{name}.json").read_text())["sequences"][title]
    return {launch["what"]: launch["kernel"] for launch in launches}


SPECIAL = by_what("vllm_latency_specialized", "kda tp8 rows 5-8, 13 launches")
STOCK = by_what("vllm_stock", "kda, 21 launches and 2 split-K reductions")


@pytest.mark.parametrize(("table", "launches"), list(sequences()))
def test_every_launch_of_a_published_list_has_its_family(table, launches):
    names = [launch["kernel"] for launch in launches]
    wanted = tuple(launch["family"] for launch in launches)
    assert load_table(table).families(names) == wanted
    assert gather_names().families(names) == wanted  # whatever other table there is
    assert set(wanted) - {None} <= set(FAMILIES)
    for name in names:
        entry = load_table(table).entry(name)
        assert entry is not None, name
        settled = {one.family for whole in own_tables() for one in whole.entries if one.matches(name) and one.family}
        assert len(settled) <= 1, (name, settled)


def test_the_lists_are_those_of_the_plan():
    thirteen = json.loads((module._FOLDER / "vllm_latency_specialized.json").read_text())["sequences"]
    assert [len(launches) for launches in thirteen.values()] == [13, 13, 15]
    for kind, title in (("kda", "kda tp8 rows 5-8, 13 launches"), ("mla", "mla tp8 rows 5-8, 15 launches")):
        counts = Counter(launch["family"] for launch in thirteen[title])
        assert counts == Counter(launch.family for launch in target_layer(kind, dense=False).sequence)
    (stock,) = json.loads((module._FOLDER / "vllm_stock.json").read_text())["sequences"].values()
    assert len(stock) == 23 == len(stock_layer("kda", dense=False, rows=8)) + 2
    known = Counter(launch["family"] for launch in stock if launch["family"])
    planned = Counter(launch.family for launch in stock_layer("kda", dense=False, rows=8))
    planned["output_projection"] += 1  # its GEMM's reduction
    assert all(count <= planned[family] for family, count in known.items())


@pytest.mark.parametrize("family", ["attention_projection", "kda", "router", "experts"])
def test_a_lone_library_gemm_could_be_of_any_family_that_multiplies(family):
    names = gather_names()
    assert names.family(GEMM) is None
    assert names.could_be(GEMM, family)
    assert not names.could_be(GEMM, "attn_res")
    assert names.could_be("a name nobody knows", "attn_res")


def test_a_gemm_is_settled_only_between_landmarks_that_leave_one_family():
    table = load_table("vllm_stock")
    kda, reduce, norm = (STOCK[what] for what in ("conv, gates, delta rule, norm", "all-reduce", "AttnRes, input norm"))
    assert table.families([norm, GEMM, kda, GEMM, reduce])[1:4] == (None, "kda", "output_projection")
    assert table.families([norm, GEMM, "unknown", GEMM, reduce])[3] is None


def test_the_class_in_two_roles_is_told_by_its_place_or_not_at_all():
    table = load_table("vllm_latency_specialized")
    front, gemm, situ, experts = (SPECIAL[what] for what in
                                  ("router and latent-down rows", "shared gate and up", "SiTU", "routed experts"))  # fmt: skip
    oproj = SPECIAL["o-proj, partial"]
    assert table.families([oproj, gemm, situ, gemm, front, situ, experts])[1:6] == (
        "experts", "experts", "experts", "router", "router")  # fmt: skip
    mixed = table.families([oproj, gemm, front, situ, situ, experts, gemm])
    assert mixed[3:5] == (None, None)


def test_the_kind_of_vllms_layers_is_told_by_their_names():
    assert layer_kind(SPECIAL.values()) == "kda"
    assert layer_kind(STOCK.values()) == "kda"
    query = SPECIAL["conv, gates, delta rule, norm"].replace("KdaSplit", "MlaQuery")
    assert layer_kind([*SPECIAL.values(), query]) == "mla"
    assert layer_kind([GEMM, "fmhaSm100fKernel_QkvE4m3OBfloat16HQk576HV512PagedKv"]) == "mla"
    assert layer_kind([GEMM, "fmhaSm100fKernel_QkvE4m3OBfloat16H64PagedKv"]) is None


def test_vllms_own_kimi_k3_is_not_ours():
    name = "void vllm::kimi_k3_fused_ops::fusedKimiK3MLADecodeQConcatKVCacheKernel<c10::BFloat16>(c10::BFloat16*)"
    assert UNNAMED.family(name) is None
    assert gather_names().family(name) == "mla"


def test_own_names_come_before_tables_and_a_plan_before_both():
    names = gather_names({"nvjet_sm103": "router", OWN: "kda"})
    assert (names.family(GEMM), names.family(OWN)) == ("router", "kda")
    assert gather_names().family(OWN) == UNNAMED.family(OWN) == "attention_projection"
    assert UNNAMED.family(STOCK["SiTU"]) is None
    assert gather_names().family(STOCK["SiTU"]) == "experts"
    assert names.plan == {"nvjet_sm103": "router", OWN: "kda"}
    assert gather_names(tables=[]).family(STOCK["SiTU"]) is None


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [("a*b", "ab", True), ("a*b", "axxb", True), ("a*b", "abx", False), ("a*b*b", "ab", False), ("ab*ba", "aba", False),
     ("*x*", "axb", True), ("*x*", "ab", False), ("a", "a", True), ("a", "ab", False), ("a.c", "abc", False),
     ("*ab*cd*", "cdab", False), ("*ab*cd*", "abcd", True)],
)  # fmt: skip
def test_globs(pattern, name, matches):
    assert glob_matches(pattern, name) is matches


def test_globs_take_linear_time():
    begin = time.perf_counter()
    assert not glob_matches("*" + "a*" * 30 + "b", "a" * 200_000)
    assert not glob_matches("*ab" * 30 + "*", "a" * 200_000)
    assert time.perf_counter() - begin < 2


def test_the_most_specific_entry_wins_whatever_the_order():
    rows = [{"glob": "*gemm*", "could_be": ["kda", "mla"]}, {"glob": "*gemm_kda*", "family": "kda"},
            {"prefix": "ns::gemm_kda_x", "family": "mla"}, {"exact": "gemm", "family": "router"}]  # fmt: skip
    for order in (rows, rows[::-1]):
        table = parse_table({"schema": module.SCHEMA, "name": "t", "entries": order})
        assert table.families(["void a::gemm_kda<1>(int)", "void ns::gemm_kda_x<2>(int)", "gemm", "other"]) == (
            "kda", "mla", "router", None)  # fmt: skip


GOOD = {"schema": module.SCHEMA, "name": "t", "entries": [{"exact": "a", "family": "kda"}]}


@pytest.mark.parametrize(
    ("change", "says"),
    [({"schema": "x"}, "schema"), ({"name": ""}, "'name'"), ({"entries": []}, "'entries'"), ({"entries": [3]}, "entry 0"),
     ({"entries": [{"exact": "a"}]}, "family or could_be"), ({"entries": [{"glob": "**", "family": "kda"}]}, "pattern"),
     ({"entries": [{"exact": "a", "glob": "b", "family": "kda"}]}, "one pattern"),
     ({"entries": [{"regex": "(a+)+", "family": "kda"}]}, "entry 0"),
     ({"entries": [{"exact": "a", "family": "kda", "could_be": ["mla"]}]}, "either"),
     ({"entries": GOOD["entries"] * 2}, "twice"), ({"rules": [{"role": "x", "family": "kda"}]}, "landmark"),
     ({"rules": {}}, "'rules'"), ({"landmarks": [3]}, "'landmarks'")],
)  # fmt: skip
def test_wrong_tables_are_told_apart(tmp_path, change, says):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(TraceError, match=says):
        load_table(path)


def test_a_table_by_path_and_a_missing_one(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(GOOD))
    assert load_table(tmp_path / "t.json").entries == (Entry("exact", "a", "kda", frozenset(), ""),)
    with pytest.raises(TraceError, match="known: vllm_latency_specialized, vllm_stock"):
        load_table("none")
    (tmp_path / "u.json").write_text("{")
    with pytest.raises(TraceError, match="not a readable JSON"):
        load_table(tmp_path / "u.json")


def test_a_stock_kernel_in_place_of_a_planned_one_is_told():
    plan = {"layers": [{"kind": "kda", "launches": [{"kernel": OWN, "family": "attention_projection"}]},
                       {"kind": "mla", "launches": [{"kernel": "qkv_a_gemm", "family": "attention_projection"}]}]}  # fmt: skip
    names = gather_names(plan)
    kda, mla = STOCK["conv, gates, delta rule, norm"], "fmhaSm100fKernel_QkvE4m3_mla"
    (found,) = stock_instead(names, [[OWN, kda], [GEMM, kda], [GEMM, mla]])
    assert (found.planned, found.family, found.layers) == (OWN, "attention_projection", (1,))
    assert (found.ran, found.unknown) == ((), (GEMM,))
    assert stock_instead(names, [[OWN, kda], [GEMM, mla]]) == []
    unnamed = [["x", "y"]] * 3
    assert [item.layers for item in stock_instead(names, unnamed)] == [(0, 1, 2)]
    assert stock_instead(names, [*unnamed, [OWN]]) == []
    assert stock_instead(gather_names({OWN: "attention_projection"}), [[OWN, kda], [GEMM, kda]]) == []
    assert stock_instead(gather_names(), [[GEMM, kda]]) == []


def test_plans_of_any_form_give_names():
    assert read_plan([{"name": "x", "family": "kda"}]) == {"x": "kda"}
    assert isinstance(gather_names({"x": "kda"}), Names)
    with pytest.raises(TraceError, match="a plan is"):
        gather_names({"x": 3})
