"""The family of the experts: kinds, routing profiles, what a timed call reads, and what is refused as a measurement."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from k3lab.cli.page_data import bar_of, load_bars
from k3lab.kernels import K3, SMALL_K3, family
from k3lab.kernels.accounting import expert_bytes

FAMILY = family("experts")


def small(rows: int, kind: str = "routed", **change):
    one = FAMILY.problem(SMALL_K3, tp=16, rows=rows, kind=kind)
    return dataclasses.replace(
        one, **{"experts": 96, "latent": 32, "intermediate": 32, "hidden": 32, "shared_intermediate": 32, **change}
    )


@pytest.mark.parametrize(
    ("kind", "activations", "profile", "has_shared"),
    [
        ("bf16", "bf16", "uniform", True), ("mxfp8_ceil", "mxfp8_ceil", "uniform", True),
        ("routed", "bf16", "uniform", False), ("routed_zipf", "bf16", "zipf", False), ("routed_hot", "bf16", "hot", False),
    ],
)  # fmt: skip
def test_a_kind_says_activations_profile_and_parts(kind, activations, profile, has_shared):
    one = FAMILY.problem(K3, tp=16, rows=8, kind=kind)
    assert (one.activations, one.profile, one.has_shared) == (activations, profile, has_shared)
    assert set(FAMILY.output_specs(one)) == ({"latent_partial", "shared_partial"} if has_shared else {"latent_partial"})
    assert ("x" in FAMILY.draws(one)) == has_shared


@pytest.mark.parametrize(("rows", "distinct"), [(1, 16), (8, 120.3), (64, 613)])
def test_uniform_routing_reads_as_many_experts_as_it_should(rows, distinct):
    one = FAMILY.problem(K3, tp=16, rows=rows, kind="routed")
    assert one.distinct == pytest.approx(distinct, abs=0.5)
    assert FAMILY.traffic(one).weight_bytes == pytest.approx(expert_bytes(K3, 16, one.distinct), abs=1)
    zipf, hot = (FAMILY.problem(K3, tp=16, rows=rows, kind=f"routed_{name}") for name in ("zipf", "hot"))
    assert rows == 1 or (zipf.distinct < one.distinct and hot.distinct < one.distinct)


@pytest.mark.parametrize("kind", ["routed", "routed_zipf", "routed_hot", "bf16"])
def test_inputs_choose_as_many_distinct_experts_as_their_profile(kind):
    one = small(8, kind)
    for seed in range(3):
        inputs = FAMILY.inputs(one, seed)
        assert abs(len(inputs["ids"].unique()) - one.distinct) <= 0.5
        assert all(len(set(row)) == len(row) for row in inputs["ids"].tolist())
        assert FAMILY.measurement_fault(one, inputs) is None
    inputs["ids"] = inputs["ids"][:1].expand(8, -1)
    assert "distinct experts" in FAMILY.measurement_fault(one, inputs)


@pytest.mark.parametrize("kind", ["routed", "bf16"])
def test_timed_calls_read_all_experts_before_one_comes_again(kind):
    one = small(3, kind)
    inputs = FAMILY.inputs(one, 0)
    bytes_a_call = FAMILY.traffic(one).weight_bytes
    copies = FAMILY.cold_copies(one, inputs, 40 * bytes_a_call)
    assert len(copies) == 41
    chosen = len(inputs["ids"].unique())
    seen = torch.cat([copy["ids"].unique() for copy in copies[: one.experts // chosen]])
    assert len(seen) == len(seen.unique()), "an expert comes again before all have come"
    for copy in copies:
        assert len(copy["ids"].unique()) == chosen and copy["ids"].dtype == torch.int32
        assert copy["w13"].data_ptr() == inputs["w13"].data_ptr()
        counts = (one["ids"].unique(return_counts=True)[1].sort()[0] for one in (copy, inputs))
        assert torch.equal(*counts), "who shares an expert still does"
    if kind == "bf16":
        assert len({copy["gate_up"].data_ptr() for copy in copies}) == len(copies)


def test_bars_are_those_of_the_routed_experts_alone_and_of_both():
    bars = load_bars("experts")

    def bar(kind, rows, tp=16):
        return bar_of(bars, {"problem": FAMILY.problem(K3, tp=tp, rows=rows, kind=kind).to_json()})

    assert [bar("routed", rows) for rows in (1, 8, 64)] == [11.0, 50.0, 230.0]
    assert bar("bf16", 8) == 53.0
    assert bar("routed", 8, 8) is bar("routed_zipf", 8) is None


@pytest.mark.parametrize(("kind", "rows"), [("bf16", 5), ("routed_hot", 9), ("routed", 1)])
def test_the_alternative_does_the_same_work(kind, rows):
    one = small(rows, kind, latent=64, intermediate=64, hidden=64, shared_intermediate=64)
    inputs = FAMILY.inputs(one, 2)
    outputs = {
        name: torch.full(shape, float("nan"), dtype=torch.bfloat16)
        for name, (shape, _) in FAMILY.output_specs(one).items()
    }
    FAMILY.alternative(one, {**inputs, **outputs})()
    for name, wanted in FAMILY.twin(one, inputs).items():
        error = (outputs[name].double() - wanted.double()).norm() / wanted.double().norm()
        assert error <= 2 * FAMILY.tolerance(one, name).relative, name  # gate and up are rounded too
    assert FAMILY.alternative(small(1, "mxfp8_ceil"), inputs) is None
