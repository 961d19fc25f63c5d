"""Families of the twins: shapes, JSON, seeds, refusals, bytes, and tolerances that BF16 twins meet."""

from __future__ import annotations

import json
import re

import pytest
import torch
from k3lab.kernels import K3, SMALL_K3, Family, InputError, Problem, family
from k3lab.kernels.accounting import expected_distinct_experts, expert_bytes, lm_head_bytes
from k3lab.tuning.compare import compare

NAMES = ("output_projection", "router", "experts", "kda", "mla", "moe_tail", "attn_res", "lm_head")
CASES = [(name, kind) for name in NAMES for kind in (family(name).kinds or (None,))]


def _rows(kind: str | None) -> int:
    """Eight rows, or two requests of a verify step."""
    tokens = re.search(r"verify(\d)", kind or "")
    return 2 * int(tokens[1]) if tokens else 8


def _problem(name: str, kind: str | None, card=SMALL_K3, tp: int = 4) -> tuple[Family, Problem]:
    return family(name), family(name).problem(card, tp=tp, rows=_rows(kind), kind=kind)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_inputs_and_twin_have_the_stated_shapes_and_seeds_repeat(name: str, kind: str | None) -> None:
    fam, problem = _problem(name, kind)
    inputs = fam.inputs(problem, seed=3)
    before = {key: tensor.clone() for key, tensor in inputs.items()}
    outputs = fam.twin(problem, inputs)
    specs = fam.output_specs(problem)
    assert tuple(outputs) == tuple(specs) == tuple(key for key in fam.outputs if key in specs)
    for key, (shape, dtype) in specs.items():
        assert tuple(outputs[key].shape) == shape
        assert outputs[key].dtype == (
            torch.float32 if getattr(torch, dtype).is_floating_point else getattr(torch, dtype)
        )
        assert outputs[key].isfinite().all()
        assert not dtype.startswith(("float", "bfloat")) or 0.05 < outputs[key].square().mean().sqrt() < 50
    again, other = fam.inputs(problem, seed=3), fam.inputs(problem, seed=4)
    for key, tensor in before.items():
        assert torch.equal(inputs[key].view(torch.uint8), tensor.view(torch.uint8)), f"the twin changed {key}"
        assert torch.equal(again[key].view(torch.uint8), tensor.view(torch.uint8))
    assert any(not torch.equal(other[key].view(torch.uint8), before[key].view(torch.uint8)) for key in before)
    assert set(fam.mutated) <= set(inputs)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_inputs_of_some_kind(name: str) -> None:
    made = [family(name).inputs(_problem(name, kind)[1], seed=3) for kind in family(name).kinds or (None,)]
    assert set(family(name).rotated) | set(family(name).constant) <= set().union(*made)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_problems_survive_json(name: str, kind: str | None) -> None:
    fam, problem = _problem(name, kind, K3, 16)
    assert fam.problem_from_json(json.loads(json.dumps(problem.to_json()))) == problem
    assert problem.label.endswith(f"tp16-rows{_rows(kind)}")
    assert set(problem.to_json()) - set(problem.key) == {"rows"}


@pytest.mark.parametrize("name", NAMES)
def test_wrong_calls_are_refused(name: str) -> None:
    fam = family(name)
    with pytest.raises(InputError, match="TP 7 does not divide"):
        fam.problem(K3, tp=7, rows=8)
    for rows in (0, 65):
        with pytest.raises(InputError, match="1 to 64 rows"):
            fam.problem(K3, tp=8, rows=rows)
    with pytest.raises(InputError, match=f"{name} has no kind 'nope'"):
        fam.problem(K3, tp=8, rows=8, kind="nope")
    good = fam.problem(K3, tp=8, rows=8).to_json()
    with pytest.raises(InputError, match=f"not a problem of {name}"):
        fam.problem_from_json({**good, "surplus": 1})
    if fam.kinds:
        with pytest.raises(InputError, match="no kind 'nope'"):
            fam.problem_from_json({**good, "kind": "nope"})


@pytest.mark.parametrize(("name", "kind"), [("kda", "verify4"), ("mla", "fp8_verify4")])
def test_verify_rows_are_a_multiple_of_its_tokens(name: str, kind: str) -> None:
    with pytest.raises(InputError, match="multiple of 4 rows"):
        family(name).problem(K3, tp=8, rows=6, kind=kind)


def _bf16_twin(name: str, problem: Problem, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The twin with its BF16 rounding points: what a correct engine computes, but for the order of sums."""
    import k3lab.kernels.twin_family as shared

    module = __import__(f"k3lab.kernels.{name}.family", fromlist=["FAMILY"])
    original = module.in_fp32
    module.in_fp32 = lambda tensors: dict(tensors)
    try:
        return module.FAMILY.twin(problem, inputs)
    finally:
        module.in_fp32 = original
        assert original is shared.in_fp32


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_rounding_twin_is_within_tolerance_and_a_wrong_one_is_not(name: str, kind: str | None) -> None:
    fam, problem = _problem(name, kind, tp=1)
    inputs = fam.inputs(problem, seed=5)
    reference, rounded = fam.twin(problem, inputs), _bf16_twin(name, problem, inputs)
    for key, (_, dtype) in fam.output_specs(problem).items():
        tolerance, wanted = fam.tolerance(problem, key), reference[key].double()
        assert rounded[key].dtype == getattr(torch, dtype)
        assert (found := compare(key, rounded[key], reference[key], tolerance)).ok, found.message
        wrong = rounded[key].double() * 1.06 - wanted
        assert wrong.norm() / wanted.norm() > tolerance.relative


def test_bytes_agree_with_the_accounting() -> None:
    experts = family("experts")
    problem = experts.problem(K3, tp=16, rows=8)
    shared_bytes = 3 * 2 * K3.hidden_size * K3.shared_intermediate_size / 16
    routed_bytes = expert_bytes(K3, 16, expected_distinct_experts(K3, 8))
    assert experts.traffic(problem).weight_bytes == pytest.approx(routed_bytes + shared_bytes, abs=1)
    head = family("lm_head")
    assert head.traffic(head.problem(K3, tp=8, rows=1)).weight_bytes == lm_head_bytes(K3, 8)
    output = family("output_projection")
    assert output.traffic(output.problem(K3, tp=8, rows=1)).weight_bytes == 2 * 7168 * 1536 + 3 * 2 * 7168
    router = family("router")
    assert router.traffic(router.problem(K3, tp=16, rows=1)).weight_bytes == 2 * 7168 * (56 + 224)


def test_mla_counts_the_cache_to_the_context_only() -> None:
    mla = family("mla")
    short, long = (mla.problem(K3, tp=8, rows=4, kind=kind) for kind in ("fp8", "bf16"))
    difference = mla.traffic(long).weight_bytes - mla.traffic(short).weight_bytes
    assert difference == 4 * 576 * (1024 + 1)


def test_no_cache_block_belongs_to_two_requests_and_no_token_has_an_expert_twice() -> None:
    mla, problem = _problem("mla", "bf16")
    inputs = mla.inputs(problem, seed=0)
    assert inputs["block_table"].unique().numel() == inputs["block_table"].numel()
    assert inputs["context"][0] == problem.to_json()["context"]
    experts, problem = _problem("experts", "bf16")
    ids = experts.inputs(problem, seed=0)["ids"]
    assert all(len(set(row)) == len(row) for row in ids.tolist())
