"""Stages of real launches: every role is there, in order, within what the launch takes."""

from __future__ import annotations

import pytest
from k3lab.kernels import K3, family
from k3lab.kernels.errors import InputError
from k3lab.tuning.policy import QUICK
from k3lab.tuning.stages import measure_stages

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CASES = {
    ("output_projection", "cute_fused", None): {("begin", "woken", "asked", "product", "told"), ("begin", "woken", "asked", "listening", "heard", "sent", "finished")},
    ("output_projection", "cute_apart", None): {
        ("begin", "woken", "asked", "product", "told"), ("begin", "woken", "asked", "listening", "heard", "sent", "finished"),
        ("begin", "woken", "listening", "heard", "sent", "finished"),
    },
    ("output_projection", "cute_split", None): {("begin", "woken", "asked", "product", "told")},
    ("router", "cute_fused", None): {("begin", "woken", "asked", "product", "heard", "told", "finished")},
    ("moe_tail", "cute_fused", None): {("begin", "woken", "sent", "heard", "product", "told", "finished")},
    ("experts", "cute", None): {("begin", "woken", "asked", "sent", "told", "finished")},
    ("mla", "cute_mma", "bf16"): {("begin", "woken", "asked", "product", "finished")},
}  # fmt: skip


@pytest.mark.parametrize(("name", "engine", "kind"), CASES)
def test_stages_lie_in_order_within_the_launch(device, name, engine, kind):
    owner = family(name)
    problem = owner.problem(K3, tp=16, rows=1, **({"kind": kind} if kind else {}))
    chosen = owner.engine(engine)
    config = chosen.space(problem, device.need_card()).default
    found = measure_stages(owner, chosen, problem, config, device.arch, QUICK, launches=5)
    passed = {tuple(one.stage for one in role.stages) for role in found.roles}
    assert passed >= CASES[name, engine, kind]
    assert 1.0 < found.span_us < found.stamped_us + 1.0
    assert all(role.stages[0].stage == "begin" for role in found.roles)


def test_stages_in_a_chain_begin_before_the_wait_is_over(device):
    owner = family("output_projection")
    problem = owner.problem(K3, tp=16, rows=1)
    chosen = owner.engine("cute_fused")
    config = chosen.space(problem, device.need_card()).default
    found = measure_stages(owner, chosen, problem, config, device.arch, QUICK, launches=5, chain=True)
    assert found.chain
    woken = next(one for one in found.roles[0].stages if one.stage == "woken")
    assert woken.first_us > 3.0  # its weights were asked for, and it waited for a predecessor of 8 us
    assert 0.0 < found.stamped_us < found.span_us


def test_an_engine_without_stages_is_told(device):
    owner = family("attention_projection")
    problem = owner.problem(K3, tp=16, rows=1)
    chosen = owner.engine("cute_mma")
    with pytest.raises(InputError, match="stamps no stages"):
        measure_stages(owner, chosen, problem, chosen.space(problem, device.need_card()).default, device.arch, QUICK)
