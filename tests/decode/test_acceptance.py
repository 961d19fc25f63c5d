"""Acceptance of drafts: standard and synthetic, what each makes of a row, and that it says what it is."""

from __future__ import annotations

import pytest
import torch
from k3lab.decode.dspark.acceptance import Standard, Synthetic, rates_of_length
from k3lab.decode.dspark.reference import Drafts
from k3lab.decode.likeliest import likeliest
from k3lab.kernels import InputError

SEEDS = [11, 22, 33]


# -- acceptance --------------------------------------------------------------------------------------
def logits_for(tokens: list[list[int]], vocabulary: int = 8) -> torch.Tensor:
    """Rows whose likeliest tokens are the given ones."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocabulary).double() * 5


def at(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(count) + 100, torch.arange(width).expand(count, width) + 1000 * torch.arange(count)[:, None]


@pytest.mark.parametrize(("drafts", "best", "out"), [
    ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
    ([1, 2, 3], [1, 2, 7, 4], [1, 2, 7]),
    ([1, 2, 3], [5, 2, 3, 4], [5]),
    ([1, 2, 3], [1, 5, 3, 4], [1, 5]),  # what follows a rejected draft is not looked at
    ([1, -1, 3], [1, 0, 3, 4], [1, 0]),
    ([-1, -1, -1], [0, 0, 0, 0], [0]),
])  # fmt: skip
def test_greedy_acceptance_stops_at_the_first_other_token(drafts: list[int], best: list[int], out: list[int]) -> None:
    seeds, positions = at(2, 4)
    both = torch.tensor([drafts, [6, 6, 6]])
    got = Standard().verify(Drafts(both), logits_for([best, [6, 6, 6, 1]]), seeds, positions)
    assert got.lists() == [out, [6, 6, 6, 1]]
    assert got.counts.tolist() == [len(out), 4]


def test_the_lower_of_equally_likely_tokens_is_accepted() -> None:
    logits = torch.zeros(1, 2, 4)
    logits[0, 0, [1, 3]] = 2
    seeds, positions = at(1, 2)
    assert Standard().verify(Drafts(torch.tensor([[1]])), logits, seeds, positions).lists() == [[1, 0]]
    assert Standard().verify(Drafts(torch.tensor([[3]])), logits, seeds, positions).lists() == [[1]]
    assert likeliest(logits).tolist() == [[1, 0]]


@pytest.mark.parametrize("how", ["likeliest", "sampled", "placeholder"])
def test_sampling_with_drafts_is_sampling_without(how: str) -> None:
    """Of 30,000 requests, the first token is distributed as the target says, and the second given the first."""
    count, temperature = 30_000, 0.7
    generator = torch.Generator().manual_seed(3)
    target, draft = (torch.randn(3, 5, generator=generator, dtype=torch.float64) * 1.5 for _ in range(2))
    p, q = torch.softmax(target / temperature, -1), torch.softmax(draft[:2] / temperature, -1)
    seeds = torch.arange(count) * 7 + 1
    positions = torch.arange(3).expand(count, 3) + 40
    if how == "sampled":
        tokens = torch.stack([torch.multinomial(row, count, replacement=True, generator=generator) for row in q], 1)
        drafts = Drafts(tokens, draft[:2].expand(count, 2, 5))
    else:
        best = draft[:2].argmax(-1) if how == "likeliest" else torch.tensor([-1, -1])
        drafts = Drafts(best.expand(count, 2))
    got = Standard(temperature).verify(drafts, target.expand(count, 3, 5), seeds, positions)
    for row, mask in ((0, torch.ones(count, dtype=torch.bool)), (1, got.counts > 1), (2, got.counts > 2)):
        tokens = got.tokens[mask, row]
        if how == "placeholder" and row:
            assert not len(tokens)
            continue
        expected = p[row] * len(tokens)
        counts = torch.bincount(tokens, minlength=5)
        assert ((counts - expected).square() / expected).sum() < 20, (row, counts, expected)  # 4 degrees: 0.0005
    if how == "sampled":
        rate = torch.minimum(p[0], q[0]).sum()
        assert (got.counts > 1).double().mean().item() == pytest.approx(rate.item(), abs=0.01)
    repeat = Standard(temperature).verify(drafts, target.expand(count, 3, 5), seeds, positions)
    assert torch.equal(repeat.tokens, got.tokens)


def test_rates_of_a_length() -> None:
    assert rates_of_length(3.78, 7) == pytest.approx((1, 1, 0.78, 0, 0, 0, 0))
    assert rates_of_length(1, 3) == (0, 0, 0)
    assert rates_of_length(4, 3) == (1, 1, 1)
    assert rates_of_length(6, 7) == (1, 1, 1, 1, 1, 0, 0)
    assert Synthetic.of_length(3.78, 7).length == pytest.approx(3.78)
    assert Synthetic((0.9, 0.6, 0.6, 0.0, 0.0)).conditional == pytest.approx((0.9, 0.6 / 0.9, 1.0, 0.0, 0.0))
    for length, drafts in ((0.9, 7), (8.1, 7), (float("nan"), 7)):
        with pytest.raises(InputError, match=r"lies in 1\.\.8"):
            rates_of_length(length, drafts)
    for rates in ((), (0.5, 0.6), (1.2,), (0.5, -0.1)):
        with pytest.raises(InputError, match=r"lie in 0\.\.1 and do not rise"):
            Synthetic(rates)
    with pytest.raises(InputError, match="temperature is -1"):
        Standard(-1)


@pytest.mark.parametrize(
    "rates", [(1.0, 1.0, 0.78, 0.0), (0.9, 0.5, 0.25, 0.1), (0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0)]
)
def test_synthetic_acceptance_follows_its_rates_whatever_the_target_says(rates: tuple[float, ...]) -> None:
    count = 20_000
    acceptance = Synthetic(rates)
    tokens = torch.tensor([1, 2, 3, 4]).expand(count, 4)
    logits = logits_for([[7, 6, 5, 0, 6]]).expand(count, 5, 8)  # the target wants none of the drafts
    got = acceptance.verify(Drafts(tokens), logits, torch.arange(count), torch.arange(5).expand(count, 5))
    for index, rate in enumerate(rates):
        assert (got.counts > index + 1).double().mean().item() == pytest.approx(rate, abs=0.012)
    assert got.counts.double().mean().item() == pytest.approx(acceptance.length, abs=0.03)
    emitted = {tuple(row) for row in got.lists()}
    drafted, wanted = (1, 2, 3, 4), (7, 6, 5, 0, 6)
    assert emitted <= {(*drafted[:n], wanted[n]) for n in range(5)}  # drafts as they are, then the target's token
    filled = tokens.clone()
    filled[:, 1] = -1
    assert (
        acceptance.verify(Drafts(filled), logits, torch.arange(count), torch.arange(5).expand(count, 5)).counts.max()
        <= 2
    )
    with pytest.raises(InputError, match="3 drafts a request, but 4 synthetic"):
        acceptance.verify(Drafts(tokens[:, :3]), logits[:, :4], torch.arange(count), torch.arange(4).expand(count, 4))


def test_every_acceptance_says_what_it_is() -> None:
    assert Standard().label == "standard acceptance, greedy"
    assert Standard(0.7).label == "standard acceptance, sampled at temperature 0.7"
    label = Synthetic.of_length(3.78, 7).label
    assert label.startswith("SYNTHETIC acceptance of mean length 3.78")
    assert "does not follow the target" in label


# -- decoding ----------------------------------------------------------------------------------------
