"""The router's CuTe DSL kernels as the compiler made them, run on the CPU: shards, packets, choices, to the bit."""

from __future__ import annotations

import pytest
import torch
from k3lab.kernels.router.exact import sigmoid

from .router_case import FAMILY, problem, run, small
from .router_hard import INF, NAN, adversarial, hard_step, near_ties_at_every_place, odd_biases

BEFORE = {"ld.global.L1_no_allocate.L2_cache_hint.v4.u32"}
BIAS = {"ld.global.L1_no_allocate.v2.u32"}


def choice_inputs(logits: torch.Tensor, bias: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    return {"all_logits": logits, "bias": torch.zeros(logits.shape[1]) if bias is None else bias}


@pytest.mark.parametrize(("blocks", "warps"), [(8, 14), (4, 7), (1, 8)])
def test_random_rows_are_chosen_to_the_bit(monkeypatch, blocks, warps):
    generator = torch.Generator().manual_seed(warps)
    inputs = choice_inputs(torch.randn(8, 896, generator=generator), torch.randn(896, generator=generator) * 0.3)
    done = run(problem(8, "choice"), monkeypatch, live=7, inputs=inputs, blocks=blocks, warps=warps)
    done.check_choice(inputs["all_logits"])
    assert set(done.machine.before_wait) == BIAS


def test_ties_infinities_and_nan_are_chosen_as_the_twin_does(monkeypatch):
    inputs = choice_inputs(adversarial())
    done = run(problem(8, "choice"), monkeypatch, inputs=inputs)
    done.check_choice(inputs["all_logits"])
    wanted = FAMILY.twin(problem(8, "choice"), inputs)
    assert torch.equal(done.get("ids"), wanted["ids"])
    torch.testing.assert_close(done.get("weights"), wanted["weights"], rtol=1e-6, atol=0, equal_nan=True)
    assert done.get("nans").tolist() == [0, 0, 0, 895, 0, 0, 448, 0]
    assert bool(done.get("weights")[3].isnan().all())


def test_neighbours_one_unit_apart_at_every_place_are_told_apart(monkeypatch):
    """Near ties at the last chosen place, wherever in the lanes, warps and groups the rivals sit."""
    rows = 8
    logits = torch.full((rows, 896), -5.0)
    generator = torch.Generator().manual_seed(3)
    level = torch.tensor(1.0)
    for row in range(rows):
        rivals = torch.randperm(896, generator=generator)[:40]
        value = level
        for expert in rivals:
            logits[row, expert] = value
            value = torch.nextafter(value, torch.tensor(0.0))
    inputs = choice_inputs(logits)
    run(problem(rows, "choice"), monkeypatch, inputs=inputs).check_choice(logits)


def test_near_ties_between_each_place_and_the_next(monkeypatch):
    """The p-th and the next expert, for all p up to the last chosen one, the lower id ahead and behind."""
    logits = near_ties_at_every_place()
    run(problem(32, "choice"), monkeypatch, inputs=choice_inputs(logits)).check_choice(logits)


def test_biases_that_are_no_numbers_or_cancel_the_score(monkeypatch):
    logits = torch.zeros(2, 896)
    logits[1, 703] = -INF  # a score of zero beside a bias of minus zero
    inputs = choice_inputs(logits, odd_biases())
    done = run(problem(2, "choice"), monkeypatch, inputs=inputs)
    done.check_choice(logits)
    assert torch.equal(done.get("ids"), FAMILY.twin(problem(2, "choice"), inputs)["ids"])
    assert done.get("ids")[0, :6].tolist() == [3, 700, 10, 8, 9, 703] and done.get("nans").tolist() == [2, 2]


@pytest.mark.parametrize("choosers", [1, 2, 4])
def test_a_step_chooses_from_packets_that_tempt_it_to_be_wrong(monkeypatch, choosers):
    """All equal, near ties on both sides of every rank's first expert, infinities and NaN, in the ranks' packets."""
    one = small(8)
    inputs = hard_step(one)
    change = {"tile": 8, "split_k": 2, "chunks": 1, "depth": 1, "warps_n": 1, "warps_k": 7}
    done = run(one, monkeypatch, inputs=inputs, choosers=choosers, **change)
    logits = done.get("logits")
    wanted = FAMILY.twin(one, inputs)
    torch.testing.assert_close(logits, wanted["logits"], rtol=0, atol=0, equal_nan=True)
    done.check_choice(logits)
    assert torch.equal(done.get("ids"), wanted["ids"])
    assert done.get("ids")[0].tolist() == done.get("ids")[1].tolist() == list(range(one.top_k))
    # this rank's logits of the NaN row, and of every other expert of the other ranks
    assert done.get("nans").tolist() == [0, 0, 0, one.all_experts - 1, 0, 0, (one.all_experts - one.experts) // 2, 0]


def test_many_rows_share_blocks_and_both_words_of_a_mask(monkeypatch):
    one = problem(64, "choice")
    inputs = choice_inputs(torch.randn(64, 896, generator=torch.Generator().manual_seed(1)) * 2)
    for live in (64, 33):
        run(one, monkeypatch, live=live, inputs=inputs).check_choice(inputs["all_logits"])


@pytest.mark.parametrize(
    ("rows", "live", "change"),
    [
        (1, 1, {"tile": 2, "split_k": 1, "chunks": 8, "depth": 1, "warps_n": 1, "warps_k": 7}),
        (2, 1, {"tile": 4, "split_k": 1, "chunks": 8, "depth": 1, "warps_n": 1, "warps_k": 7}),
        (8, 5, {"tile": 16, "split_k": 4, "chunks": 2, "depth": 1, "warps_n": 1, "warps_k": 7}),
        (9, 9, {"tile": 24, "split_k": 2, "chunks": 1, "depth": 2, "warps_n": 2, "warps_k": 4}),
        (40, 33, {"tile": 40, "split_k": 8, "chunks": 1, "depth": 1, "warps_n": 2, "warps_k": 7}),
        (64, 64, {"tile": 56, "split_k": 1, "chunks": 1, "depth": 1, "warps_n": 1, "warps_k": 8}),
    ],
)  # fmt: skip
def test_a_front_publishes_its_shard_once(monkeypatch, rows, live, change):
    done = run(small(rows, "front"), monkeypatch, live=live, epoch=rows, **change)
    done.check_shard()
    assert set(done.machine.before_wait) == BEFORE


@pytest.mark.parametrize(
    ("rows", "live", "change"),
    [
        (1, 1, {"tile": 2, "split_k": 1, "chunks": 8, "depth": 1, "warps_n": 1, "warps_k": 7}),
        (8, 6, {"tile": 8, "split_k": 8, "chunks": 1, "depth": 1, "warps_n": 1, "warps_k": 7}),
        (9, 7, {"tile": 16, "split_k": 4, "chunks": 1, "depth": 2, "warps_n": 2, "warps_k": 7, "choosers": 2}),
        (33, 33, {"tile": 16, "split_k": 4, "chunks": 1, "depth": 2, "warps_n": 2, "warps_k": 7}),
    ],
)
def test_a_step_chooses_from_all_ranks_packets(monkeypatch, rows, live, change):
    done = run(small(rows), monkeypatch, live=live, epoch=2**31 - 1 + rows % 2, **change)
    done.check_shard()
    done.check_choice(done.get("logits"))
    assert set(done.machine.before_wait) == BEFORE | BIAS


def test_the_whole_step_of_a_rank_of_sixteen(monkeypatch):
    done = run(problem(8, hidden=1792, latent=32), monkeypatch, live=5, depth=1, chunks=1)
    done.check_shard()
    done.check_choice(done.get("logits"))


@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_never_publishes_is_named_and_the_step_ends(monkeypatch):
    from k3lab.kernels.health import Phase, read

    change = {"tile": 8, "split_k": 1, "chunks": 8, "depth": 1, "warps_n": 1, "warps_k": 7}
    done = run(small(1), monkeypatch, dead=3, **change)
    report = read(done.get("health").tolist())
    assert report is not None
    assert (report.phase, report.slot, report.late) == (Phase.PARTIAL, 3, (3,))
    assert report.epoch == done.epoch and report.limit_s == 0.01


def test_nothing_is_published_once_a_wait_has_given_up(monkeypatch):
    done = run(small(2, "front"), monkeypatch, claimed=True, chunks=1, depth=1, warps_k=7, split_k=8, tile=16)
    assert not bool(done.get("mailbox").any())


def test_the_sigmoid_is_one_and_close():
    logits = torch.cat([torch.linspace(-87, 40, 100_001), torch.randn(50_000) * 4])
    found, wanted = sigmoid(logits), torch.sigmoid(logits.double())
    unit = torch.nextafter(wanted.float(), torch.tensor(2.0)).double() - wanted.float().double()
    assert float(((found.double() - wanted).abs() / unit).max()) < 3
    assert sigmoid(torch.tensor([INF, -INF, -100.0, 0.0])).tolist() == [1.0, 0.0, 0.0, 0.5]
    assert bool(sigmoid(torch.tensor([NAN])).isnan().all())
