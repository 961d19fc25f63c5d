"""Routing profiles: frequencies, distinct experts, the table of the other ranks, and measurements that do not stand for one."""

from __future__ import annotations

import pytest
import torch
from k3lab.kernels import K3, family
from k3lab.kernels.accounting import expected_distinct_experts
from k3lab.kernels.router import profiles

from .router_case import problem

FAMILY = family("router")


def test_uniform_is_what_the_accounting_expects():
    for rows in (1, 8, 64):
        assert profiles.expected_distinct("uniform", 896, rows, 16) == pytest.approx(
            expected_distinct_experts(K3, rows)
        )


def test_profiles_differ_in_how_many_experts_a_step_reads():
    found = {name: profiles.expected_distinct(name, 896, 64, 16) for name in profiles.PROFILES}
    assert found["zipf"] < found["hot"] < found["uniform"]
    hot = profiles.frequencies("hot", 896)
    assert float(hot.topk(896 // profiles.HOT_EXPERTS).values.sum()) == pytest.approx(profiles.HOT_SHARE)
    zipf = profiles.frequencies("zipf", 896).sort(descending=True).values
    assert float(zipf[0] / zipf[9]) == pytest.approx(10)


def test_a_captured_profile_is_drawn_as_often_as_it_says():
    share = profiles.frequencies([1.0, 2.0, 4.0, 1.0], 4)
    drawn = profiles.draw(share, 20_000, 1, 3).flatten()
    assert (torch.bincount(drawn, minlength=4) / 20_000).tolist() == pytest.approx([0.125, 0.25, 0.5, 0.125], abs=0.01)


@pytest.mark.parametrize("kind", profiles.PROFILES)
@pytest.mark.parametrize(("tp", "rows"), [(16, 8), (8, 64), (16, 1)])
def test_the_table_realises_its_profile_and_keeps_clear_of_ties(kind, tp, rows):
    one = problem(rows, kind, tp)
    for seed in (0, 1):
        inputs = FAMILY.inputs(one, seed)
        wanted = FAMILY.twin(one, inputs)
        assert FAMILY.measurement_fault(one, wanted) is None
        scores = (wanted["logits"].sigmoid() + inputs["bias"]).sort(-1, descending=True).values[:, :17]
        assert float((scores[:, :-1] - scores[:, 1:]).min()) > 1e-6
        own = wanted["ids"] // one.experts == profiles.own_slot(tp)
        assert rows == 1 or bool(own.any()), "this rank's experts are chosen too"


def test_a_measurement_off_its_profile_is_refused():
    one = problem(8)
    ids = torch.arange(128).clamp(max=116).view(8, 16)
    assert "117.0 distinct experts in the mean, 120.3 in the profile" in str(
        FAMILY.measurement_fault(one, {"ids": ids})
    )
    assert FAMILY.measurement_fault(one, {"ids": torch.arange(128).clamp(max=117).view(8, 16)}) is None
    assert FAMILY.measurement_fault(problem(8, "front"), {}) is None


def test_words_come_back():
    logits, latents = torch.randn(3, 2, 4), torch.randn(3, 2, 6).to(torch.bfloat16)
    first, second = profiles.from_words(profiles.words_of(logits, latents), 4)
    assert torch.equal(first, torch.cat(list(logits), dim=-1))
    assert torch.equal(second, torch.cat(list(latents), dim=-1))
