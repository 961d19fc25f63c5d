"""Attention projection: shapes, bytes, the twin, what engines refuse, spaces, machine code."""

import dataclasses
import itertools

import pytest
import torch
from k3lab.kernels import K3, SMALL_K3, InputError, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.compare import compare
from k3lab.tuning.compiling import compile_config
from k3lab.tuning.cubin import full_mnemonics, kernel_resources, sass
from k3lab.tuning.sass_order import order, release_fault, wait_fault

FAMILY = family("attention_projection")
GB300 = gpu_card("GB300")


@pytest.mark.parametrize(
    ("tp", "kind", "outputs"),
    [(8, "kda", 6288), (8, "mla", 3648), (16, "kda", 3216), (16, "mla", 2880), (4, "kda", 12440)],
)
def test_outputs_of_one_rank(tp, kind, outputs):
    problem = FAMILY.problem(K3, tp=tp, rows=8, kind=kind)
    assert problem.outputs == -(-outputs // 16) * 16
    assert FAMILY.traffic(problem).weight_bytes == problem.outputs * 7168 * 2


@pytest.mark.parametrize("rows", [0, 65, -1])
def test_rows_out_of_range(rows):
    with pytest.raises(InputError, match="1 to 64 rows"):
        FAMILY.problem(K3, tp=16, rows=rows)


def test_unknown_kind():
    with pytest.raises(InputError, match="kinds: kda, mla"):
        FAMILY.problem(K3, tp=16, rows=8, kind="gqa")


def test_labels_tell_models_apart():
    assert FAMILY.problem(K3, tp=4, rows=8).label == "kda-tp4-rows8"
    assert FAMILY.problem(SMALL_K3, tp=4, rows=8).label == "kda-tp4-rows8-hidden256"


def test_problem_survives_json():
    problem = FAMILY.problem(K3, tp=16, rows=8, kind="mla")
    assert FAMILY.problem_from_json(problem.to_json()) == problem
    with pytest.raises(InputError, match="not a problem"):
        FAMILY.problem_from_json({"tp": 16, "colour": "red"})


def test_twin_is_an_fp64_product_to_fp32_accuracy():
    problem = FAMILY.problem(SMALL_K3, tp=4, rows=5)
    inputs = FAMILY.inputs(problem, seed=3)
    exact = inputs["x"].double() @ inputs["w"].double().T
    assert torch.allclose(FAMILY.twin(problem, inputs)["out"].double(), exact, rtol=0, atol=1e-5 * exact.std().item())


def test_tolerance_admits_one_rounding_and_no_missing_element():
    problem = FAMILY.problem(K3, tp=16, rows=4)
    problem = dataclasses.replace(problem, outputs=256)
    inputs = FAMILY.inputs(problem, seed=4)
    twin = FAMILY.twin(problem, inputs)["out"]
    tolerance = FAMILY.tolerance(problem, "out")
    assert compare("out", twin.bfloat16(), twin, tolerance).ok
    one_term_short = (inputs["x"][:, 1:].float() @ inputs["w"][:, 1:].float().T).bfloat16()
    assert not compare("out", one_term_short, twin, tolerance).ok
    x, w = inputs["x"].float(), inputs["w"].float()
    halves = [(x[:, part] @ w[:, part].T).bfloat16() for part in (slice(0, 3584), slice(3584, None))]
    assert not compare("out", halves[0] + halves[1], twin, tolerance).ok, "BF16 partial sums are one rounding too many"


def test_engines_refuse_with_a_reason():
    triton, skinny = FAMILY.engine("triton"), FAMILY.engine("cute_skinny")
    problem = FAMILY.problem(K3, tp=16, rows=8)
    assert triton.refuses(problem, "sm_103a") is None
    assert skinny.refuses(problem, "sm_90a") is None
    assert "at most 8" in skinny.refuses(dataclasses.replace(problem, rows=9), "sm_90a")
    assert "float32" in triton.refuses(dataclasses.replace(problem, dtype="float32"), "sm_90a")
    assert "sm_80" in triton.refuses(problem, "sm_80")
    assert "multiple of 64" in triton.refuses(dataclasses.replace(problem, hidden=7000), "sm_90a")
    with pytest.raises(InputError, match="it has: triton, cute_skinny"):
        FAMILY.engine("cutlass")


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16, 33, 64])
@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("kind", ["kda", "mla"])
def test_spaces_hold_at_least_forty_configs_and_fit_the_gpu(rows, tp, kind):
    space = FAMILY.engine("triton").space(FAMILY.problem(K3, tp=tp, rows=rows, kind=kind), GB300)
    assert len(space.legal) >= 200
    assert space.illegal(space.default) is None
    assert all(config["schedule"] == "splitk" for config in space.legal) == (rows > 8)


@pytest.mark.parametrize("rows", range(1, 9))
def test_skinny_space_has_a_legal_default_for_the_small_model_too(rows):
    for card, tp in ((K3, 16), (SMALL_K3, 4)):
        problem = FAMILY.problem(card, tp=tp, rows=rows)
        assert FAMILY.engine("cute_skinny").space(problem, GB300).legal


@pytest.mark.parametrize("name", ["H200", "GB300"])
@pytest.mark.parametrize("engine", FAMILY.engines, ids=lambda engine: engine.name)
@pytest.mark.parametrize(
    "outputs", [16, 96, 1600, 24720, 299584, *(pytest.param(n, marks=pytest.mark.slow) for n in (1008, 9984, 49376))]
)
def test_any_shape_is_refused_with_a_reason_or_has_a_space(engine, name, outputs):
    """From less than a tile to more rows than all SMs have in the largest tiles, at short and long K."""
    card = gpu_card(name)
    for hidden, rows in itertools.product((64, 128, 192, 256, 768, 1024, 2048, 7168, 16384), (1, 8, 33, 64)):
        problem = dataclasses.replace(FAMILY.problem(K3, tp=16, rows=rows), outputs=outputs, hidden=hidden)
        if engine.refuses(problem, card.arch) is None:
            space = engine.space(problem, card)
            assert space.illegal(space.default) is None
            if hidden == 7168 and rows in (8, 64) and "k_order" in space.default:
                assert space.restricted({"k_order": "invariant"}).legal


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize("rows", [8, 64])
def test_splitk_uses_the_tensor_cores_and_asynchronous_copies(arch, rows):
    engine, problem = FAMILY.engine("triton"), FAMILY.problem(K3, tp=16, rows=rows)
    compiled = compile_config(engine, problem, engine.space(problem, GB300).default, arch)
    (launch,) = compiled.launches
    found = kernel_resources(launch)
    assert found.kernel == "k3_attention_projection_triton_splitk"
    assert found.spill_instructions == 0
    assert found.registers <= 255
    assert found.dynamic_shared_bytes <= GB300.shared_per_block
    mma = {"sm_90a": {"HGMMA", "HMMA"}, "sm_103a": {"UTCHMMA", "HMMA"}}[arch]
    assert mma & set(found.instructions)
    assert found.instructions["LDGSTS"] > 0
    assert any(name.startswith("LDGSTS.E.BYPASS.128") for name in full_mnemonics(sass(launch.cubin)))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize(
    ("rows", "release", "change"),
    [
        (8, "loads", {"split_k": 5, "num_stages": 3}),
        (64, "entry", {"split_k": 5, "num_stages": 3}),
        (64, "end", {"split_k": 1, "num_stages": 2, "block_n": 32}),
        (2, "loads", {"schedule": "fma", "block_n": 4, "block_k": 1024, "split_k": 1, "num_stages": 1}),
        (1, "entry", {"schedule": "fma", "block_n": 4, "block_k": 1024, "split_k": 1, "num_stages": 1}),
    ],
)
def test_triton_asks_for_weights_before_the_dependency_wait(rows, release, change, arch):
    engine, problem = FAMILY.engine("triton"), FAMILY.problem(K3, tp=16, rows=rows)
    space = engine.space(problem, GB300)
    config = {**space.default, **change, "release": release}
    assert space.illegal(config) is None
    (launch,) = compile_config(engine, problem, config, arch).launches
    assert launch.pdl
    assert kernel_resources(launch).spill_instructions == 0
    code = order(launch.cubin)
    first = r"LDG\.E\.EF\.128"  # the weights of the first tile; later ones of splitk come by LDGSTS, as x does
    assert wait_fault(code, first, ahead=4) is None
    every = first if config["schedule"] == "fma" else r"LDG\.E\.EF\.128|LDGSTS.*"
    assert release_fault(code, every, release) is None


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize("name", ["triton", "cute_skinny"])
def test_fma_kernels_load_wide_and_do_not_spill(arch, name):
    engine, problem = FAMILY.engine(name), FAMILY.problem(K3, tp=16, rows=2)
    config = dict(engine.space(problem, GB300).default)
    if name == "triton":
        config = {"schedule": "fma", "block_n": 4, "block_k": 1024, "split_k": 1, "num_warps": 4, "num_stages": 1}
        config["release"] = "end"
    else:
        config |= {"outputs_a_block": 2, "depth": 4}
    (launch,) = compile_config(engine, problem, config, arch).launches
    found = kernel_resources(launch)
    assert found.kernel.startswith(f"k3_attention_projection_{name}")
    assert found.spill_instructions == 0
    code = full_mnemonics(sass(launch.cubin))
    assert sum(count for mnemonic, count in code.items() if mnemonic.startswith("LDG.E") and ".128" in mnemonic) >= 2
    assert {"FFMA", "FFMA2", "FHFMA", "FHFMA2"} & set(found.instructions)


def test_a_cubin_holds_no_path_of_this_machine():
    from pathlib import Path

    import k3lab.kernels

    root = str(Path(k3lab.kernels.__file__).parent.parent).encode()
    for engine in FAMILY.engines:
        problem = FAMILY.problem(K3, tp=16, rows=2)
        config = engine.space(problem, GB300).default
        for launch in compile_config(engine, problem, config, engine.archs[-1], cache=False).launches:
            assert root not in launch.cubin
