"""The FMA kernel for very few rows: its space, its machine code, its order around the dependency wait."""

import dataclasses
import importlib.util
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from k3lab.kernels import K3, SMALL_K3, family
from k3lab.kernels.attention_projection.cute_skinny_engine import order as summation
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.compiling import compile_config
from k3lab.tuning.cubin import kernel_resources
from k3lab.tuning.sass_order import order, places, release_fault, wait_fault

FAMILY = family("attention_projection")
ENGINE = FAMILY.engine("cute_skinny")
CARDS = {"sm_90a": gpu_card("H200"), "sm_103a": gpu_card("GB300")}
STREAMED = r"LDG\.E\.NA\.(64|128)"
BASE = {
    "threads": 128, "vec": 8, "k_order": "free", "outputs_a_block": 1, "depth": 7, "preload": 2,
    "early_loads": False, "weight_cache": "stream", "release": "loads",
}  # fmt: skip
GRID = {
    "as by default": (1, {}),
    "everything before the wait": (1, {"preload": 7, "early_loads": True}),
    "nothing before the wait": (1, {"preload": 0, "release": "end"}),
    "two outputs, two rows": (2, {"outputs_a_block": 2, "depth": 4, "release": "entry"}),
    "wide block": (1, {"threads": 448, "outputs_a_block": 4, "depth": 2}),
    "one warp": (1, {"threads": 32, "vec": 8, "outputs_a_block": 2, "depth": 14}),
    "narrow vectors": (1, {"threads": 224, "vec": 4, "outputs_a_block": 3, "depth": 4, "preload": 4}),
    "two loads a vector": (2, {"threads": 64, "vec": 16, "outputs_a_block": 2, "depth": 2, "release": "end"}),
    "four rows": (4, {"outputs_a_block": 4, "depth": 2}),
    "eight rows": (8, {"depth": 4, "k_order": "invariant"}),
}


def build(rows, change, arch, **problem):
    instance = dataclasses.replace(FAMILY.problem(K3, tp=16, rows=rows), **problem)
    config = {**BASE, **change}
    assert ENGINE.space(instance, CARDS[arch]).illegal(config) is None
    (launch,) = compile_config(ENGINE, instance, config, arch).launches
    return config, launch


BLACKWELL = (
    "as by default",
    "nothing before the wait",
    "two outputs, two rows",
    "narrow vectors",
    "two loads a vector",
    "eight rows",
)
"""Of the grid: every order around the wait, every width of a load, few and many rows."""


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, marks=() if arch == "sm_90a" or name in BLACKWELL else pytest.mark.slow)
        for name, arch in itertools.product(GRID, CARDS)
    ],
)
def test_machine_code(name, arch):
    rows, change = GRID[name]
    config, launch = build(rows, change, arch)
    found = kernel_resources(launch)
    assert launch.pdl
    assert found.kernel.startswith("k3_attention_projection_cute_skinny_fma")
    assert found.spill_instructions == 0
    code = order(launch.cubin)
    threads, vec, a_block = config["threads"], config["vec"], config["outputs_a_block"]
    loads = a_block * 7168 // (threads * min(vec, 8))
    wide = "64" if vec == 4 else "128"
    assert len(places(code, rf"LDG\.E\.NA\.{wide}")) == len(places(code, STREAMED)) == loads
    assert len(places(code, rf"LDG\.E\.{wide}")) == rows * 7168 // (threads * min(vec, 8))
    before = config["preload"] * a_block * max(1, vec // 8)
    assert wait_fault(code, STREAMED, ahead=before) is None
    assert len([place for place in places(code, STREAMED) if place < places(code, "ACQBULK")[0]]) == before
    assert release_fault(code, STREAMED, config["release"]) is None


@pytest.mark.parametrize("arch", CARDS)
@pytest.mark.parametrize(("rows", "a_block"), [(1, 1), (1, 2), (2, 2), (4, 4)])
def test_instructions_a_weight(arch, rows, a_block):
    """One FMA a weight and row; converting costs one instruction a loaded element on Hopper, none on Blackwell."""
    _, launch = build(rows, {"outputs_a_block": a_block, "depth": 2}, arch)
    code = order(launch.cubin)
    weights = a_block * 7168 // 128
    fma = "FFMA" if arch == "sm_90a" else r"FHFMA\.BF16"
    assert len(places(code, fma)) == weights * rows
    conversions = len(places(code, r"(LOP3|SHF|IMAD\.U32|IMAD\.SHL|PRMT|HADD2|IADD3|MOV|IMAD\.MOV)\b.*"))
    elements = weights + rows * 7168 // 128
    assert conversions <= 50 + (1.05 * elements if arch == "sm_90a" else 0)
    if a_block > 1:
        assert (conversions - 50) * 8 / weights + 8 * rows <= 20 * rows


@pytest.mark.parametrize(("rows", "a_block", "most"), [(1, 1, 5), (1, 8, 9), (4, 4, 16), (8, 4, 31)])
def test_sums_of_a_warp_share_their_shuffles(rows, a_block, most):
    _, launch = build(rows, {"threads": 224, "vec": 4, "outputs_a_block": a_block, "depth": 2}, "sm_90a", outputs=3200)
    assert 0 < len(places(order(launch.cubin), r"SHFL\.BFLY")) <= most


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 8, 12, 24, 31, 32])
def test_the_sums_of_a_warp_end_where_they_are_stored(monkeypatch, count):
    """The warp sum of the kernel itself, run on NumPy arrays of 32 lanes."""
    spec = importlib.util.find_spec("k3lab.kernels.attention_projection.cute_skinny")
    cute_skinny = importlib.util.module_from_spec(spec)  # one of its own: tracing rewrites what it has traced
    spec.loader.exec_module(cute_skinny)
    lanes = np.arange(32)
    fakes = {
        "select_": np.where, "Float32": np.float32, "Int32": lambda value: np.asarray(value) + 0 * lanes,
        "Boolean": lambda value: np.asarray(value) & (lanes >= 0),
        "cutlass": SimpleNamespace(range_constexpr=range, const_expr=bool),
        "arch": SimpleNamespace(shuffle_sync_bfly=lambda value, offset: value[lanes ^ offset]),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(cute_skinny, name, fake)
    values = [np.random.default_rng(j).standard_normal(32).astype(np.float32) for j in range(count)]
    total, which, stores = cute_skinny.transpose_sum.__wrapped__(values, lanes)
    assert sorted(which[stores]) == list(range(count)), "each result is stored by one lane"
    for lane in lanes[stores]:
        tree = values[which[lane]]
        for distance in (16, 8, 4, 2, 1):
            tree = tree + tree[lanes ^ distance]
        assert total[lane] == tree[0]


@pytest.mark.parametrize("weight_cache", ["plain", "stream"])
def test_hints_of_weight_loads(weight_cache):
    _, launch = build(1, {"weight_cache": weight_cache}, "sm_90a")
    code = order(launch.cubin)
    assert (len(places(code, r"LDG\.E\.NA\.128")), len(places(code, r"LDG\.E\.128"))) == {
        "plain": (0, 14), "stream": (7, 7)}[weight_cache]  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("kind", ["kda", "mla"])
def test_every_problem_has_a_space(kind, tp, name):
    for card, rows in itertools.product((K3, SMALL_K3), (1, 2, 4, 8)):
        problem = FAMILY.problem(card, tp=tp, rows=rows, kind=kind)
        assert ENGINE.refuses(problem, CARDS[name].arch) is None
        space = ENGINE.space(problem, CARDS[name])  # refuses an illegal default itself
        assert space.default["k_order"] == "invariant"
        if rows in (1, 8) and card is K3:
            assert len(space.legal) >= 100


@pytest.mark.parametrize("hidden", [128, 256, 384, 3584, 4096, 7168])
def test_the_invariant_order_is_one_for_all_rows_outputs_and_gpus(hidden):
    pinned = set()
    for rows, outputs, card in itertools.product((1, 4, 8), (16, 2880, 6288), CARDS.values()):
        problem = dataclasses.replace(FAMILY.problem(K3, tp=16, rows=rows), hidden=hidden, outputs=outputs)
        space = ENGINE.space(problem, card).restricted({"k_order": "invariant"})
        pinned |= {(config["threads"], config["vec"]) for config in space.legal}
    assert pinned == {summation(hidden)}
    config = {**BASE, "k_order": "invariant"}
    assert "the same for all rows" in ENGINE.summation_order(problem, config)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"threads": 896, "vec": 16}, "do not divide hidden 7168"),
        (
            {"outputs_a_block": 8, "k_order": "invariant", "threads": 64},
            "invariant order of hidden 7168 is that of 128 threads x 8",
        ),
        ({"depth": 14}, "more tiles under way than there are"),
        ({"depth": 2, "preload": 4}, "preloaded tiles are among those under way"),
        ({"threads": 32, "outputs_a_block": 8}, "products a thread"),
        ({"threads": 896, "depth": 1, "preload": 1, "outputs_a_block": 8}, "do not fit the registers"),
        ({"threads": 64, "outputs_a_block": 6, "depth": 14}, "do not fit the registers"),
        ({"depth": 1, "preload": 0, "early_loads": True}, "early_loads is for several tiles"),
        ({"threads": 32, "vec": 4, "depth": 1, "preload": 0}, "latency is not covered"),
    ],
)
def test_illegal_configs_say_why(change, reason):
    space = ENGINE.space(FAMILY.problem(K3, tp=16, rows=2), CARDS["sm_90a"])
    assert reason in space.illegal({**BASE, **change})


def test_waves_are_part_of_the_constraints():
    """288 outputs by twos are 144 blocks: some SM of 132 gets two, none of 152 does."""
    problem = dataclasses.replace(FAMILY.problem(K3, tp=16, rows=1), outputs=288)
    reason = ENGINE.space(problem, CARDS["sm_90a"]).illegal({**BASE, "outputs_a_block": 2})
    assert "busiest of 132 SMs" in reason
    assert ENGINE.space(problem, CARDS["sm_103a"]).illegal({**BASE, "outputs_a_block": 2}) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 9}, "at most 8"),
        ({"hidden": 7200}, "not a multiple of 128"),
        ({"hidden": 128 * 129, "rows": 8}, "more than 2048 products a thread"),
        ({"outputs": 300000}, "counts elements in 32 bits"),
        ({"dtype": "float32"}, "read bfloat16"),
    ],
)
def test_refusals(change, reason):
    problem = dataclasses.replace(FAMILY.problem(K3, tp=16, rows=1), **change)
    assert reason in ENGINE.refuses(problem, "sm_90a")


def test_the_judge_of_the_order_sees_faults():
    _, launch = build(1, {}, "sm_90a")
    code = order(launch.cubin)
    (wait,), (release,) = places(code, "ACQBULK"), places(code, "PREEXIT")
    x = places(code, r"LDG\.E\.128")[0]
    assert "LDG.E.128" in wait_fault([code[x], *code], STREAMED)
    assert "2 dependency waits" in wait_fault([*code, code[wait]], STREAMED)
    assert "0 loads of weights before" in wait_fault([code[wait], *code[:wait], *code[wait + 1 :]], STREAMED)
    predicated = dataclasses.replace(code[wait], predicated=True)
    assert "not every thread" in wait_fault([*code[:wait], predicated, *code[wait + 1 :]], STREAMED)
    around = dataclasses.replace(code[0], mnemonic="BRA.U", operands="UP0, `(.L_x_0)", target=code[wait + 1].address)
    first_x = next(place for place in places(code, r"LDG\.E\.128") if place > wait)
    for past in (around, dataclasses.replace(around, predicated=True, operands="`(.L_x_0)")):
        assert f"LDG.E.128 at {code[first_x].address:#x}" in wait_fault([past, *code[1:]], STREAMED, ahead=0)
    leaving = dataclasses.replace(code[0], mnemonic="EXIT", predicated=True)
    assert "a path ends" in wait_fault([leaving, *code[1:]], STREAMED)
    assert wait_fault([dataclasses.replace(around, target=code[wait].address), *code[1:]], STREAMED, ahead=0) is None
    with pytest.raises(ValueError, match="does not say"):
        wait_fault([dataclasses.replace(code[0], mnemonic="BRX"), *code[1:]], STREAMED)
    for mnemonic in ("UTMAREDG.2D.ADD", "LDGMC.E.F32ADD", "ATOM.E.ADD", "STG.E"):
        assert mnemonic in wait_fault([dataclasses.replace(code[0], mnemonic=mnemonic), *code[1:]], STREAMED)
    without = [*code[:release], *code[release + 1 :]]
    assert "0 releases" in release_fault(without, STREAMED, "loads")
    assert "after a load" in release_fault(code, STREAMED, "entry")
    amid = places(without, STREAMED)[0] + 1
    assert "after a load" in release_fault([*without[:amid], code[release], *without[amid:]], STREAMED, "entry")
    assert "does not lie between" in release_fault([code[release], *without], STREAMED, "loads")
    assert "does not lie between" in release_fault([*without, code[release]], STREAMED, "loads")
    assert "1 releases" in release_fault(code, STREAMED, "end")
