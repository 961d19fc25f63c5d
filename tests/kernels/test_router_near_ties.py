"""Two orders of one sum may choose different experts, only at near ties: such choices are counted and bounded."""

from __future__ import annotations

import pytest
import torch

from .router_case import FAMILY, MMA, problem, whole_numbers
from .router_hard import SCORES_APART, near_ties

ROWS, TP = 64, 4


def fronts(seed: int) -> list[dict[str, torch.Tensor]]:
    """Inputs of all ranks' fronts at TP 4, BF16, logits of magnitude one, of which nearly all come in pairs of one sum.

    A row of x has one value throughout, and of two experts one has the other's weights in another order. The best expert
    has no partner, so the sixteenth place falls between the two of a pair: rounding alone says which is chosen.
    """
    generator = torch.Generator().manual_seed(seed)
    one = problem(ROWS, "front", TP)
    half = torch.randn((one.all_experts // 2, one.hidden), generator=generator) * one.hidden**-0.5
    weights = torch.cat([half, half[:, torch.randperm(one.hidden, generator=generator)]])
    weights[0] = weights[0].abs() * 0.06
    weights = weights[torch.randperm(len(weights), generator=generator)].to(torch.bfloat16)
    x = (
        (0.75 + 0.25 * torch.rand((ROWS, 1), generator=generator))
        .to(torch.bfloat16)
        .expand(ROWS, one.hidden)
        .contiguous()
    )
    whole = whole_numbers(one, 0)
    return [{**whole, "x": x, "w_router": own.contiguous()} for own in weights.chunk(TP)]


def summed(inputs: list[dict[str, torch.Tensor]], parts: int) -> torch.Tensor:
    """FP32 logits [rows, 896] whose sum over K goes in ``parts`` ranges, ascending."""
    found = []
    for one in inputs:
        x, w = one["x"].float(), one["w_router"].float()
        width = x.shape[1] // parts
        total = torch.zeros(len(x), len(w))
        for part in range(parts):
            at = slice(part * width, (part + 1) * width)
            total += x[:, at] @ w[:, at].T
        found.append(total)
    return torch.cat(found, 1)


def test_choices_of_two_orders_differ_at_near_ties_alone_and_are_counted() -> None:
    rows = differing = 0
    for seed in range(4):
        inputs = fronts(seed)
        found = near_ties(summed(inputs, 1), summed(inputs, 448), torch.zeros(896), 16)
        rows, differing = rows + found.rows, differing + found.differing
        assert found.apart <= SCORES_APART, found
    assert rows == 256 and 64 < differing <= rows


def test_a_choice_that_is_no_near_tie_is_seen() -> None:
    logits = torch.randn((ROWS, 896), generator=torch.Generator().manual_seed(1))
    other = logits.clone()
    best = logits[5].topk(17).indices
    other[5, best[15]], other[5, best[16]] = logits[5, best[16]], logits[5, best[15]]
    found = near_ties(logits, other, torch.zeros(896), 16)
    gap = torch.sigmoid(logits[5, best[15]].double()) - torch.sigmoid(logits[5, best[16]].double())
    assert (found.rows, found.differing) == (ROWS, 1) and found.apart == pytest.approx(float(gap))
    assert found.apart > SCORES_APART
    same = near_ties(logits, logits, torch.zeros(896), 16)
    assert (same.differing, same.apart) == (0, 0.0)


@pytest.mark.gpu
def test_engines_choose_differently_at_near_ties_alone(device) -> None:  # type: ignore[no-untyped-def]
    from .test_router_gpu import Case

    one = problem(ROWS, "front", TP)
    ways = [(MMA, {}), (MMA, {"k_order": "invariant"}), (FAMILY.engine("triton"), {})]
    for seed in range(2):
        inputs = fronts(seed)
        found = [summed(inputs, 1)]
        for engine, change in ways:
            space = engine.space(one, device.need_card()).restricted(change)
            shards = []
            for own in inputs:
                case = Case(device, one, dict(space.default), engine=engine, inputs=own)
                case.run()
                shards.append(case.outputs["logits"].cpu()[:, : one.experts])
            found.append(torch.cat(shards, 1))
        for other in found[1:]:
            ties = near_ties(found[0], other, torch.zeros(896), 16)
            assert ties.differing > 0 and ties.apart <= SCORES_APART, ties
