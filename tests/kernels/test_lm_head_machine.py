"""The head's CuTe DSL kernels as the compiler made them, run on the CPU: logits and tokens, to the bit."""

from __future__ import annotations

import math

import pytest
import torch

from .lm_head_case import FAMILY, exchange, own_slot, run, small, whole_numbers

BEFORE = {"ld.global.L1_no_allocate.L2_cache_hint.v4.u32"}
# (rows, live rows, config): every shape of MMA, several warps of rows and of K, a last tile that is not full
CONFIGS = [
    (1, 1, {"tile": 8, "chunks": 8, "depth": 1, "warps_n": 1, "warps_k": 2}),
    (3, 2, {"tile": 12, "chunks": 4, "depth": 1, "warps_n": 1, "warps_k": 2}),
    (8, 5, {"tile": 20, "chunks": 2, "depth": 2, "warps_n": 1, "warps_k": 4}),
    (16, 16, {"tile": 24, "chunks": 1, "depth": 3, "warps_n": 2, "warps_k": 2}),
    (40, 33, {"tile": 40, "chunks": 1, "depth": 1, "warps_n": 4, "warps_k": 2}),
    (64, 64, {"tile": 16, "chunks": 1, "depth": 2, "warps_n": 1, "warps_k": 8}),
]


@pytest.mark.parametrize(("rows", "live", "change"), CONFIGS)
def test_logits_are_the_twins(monkeypatch, rows, live, change):
    done = run(small(rows, "shard"), monkeypatch, live=live, **change)
    done.check()
    assert set(done.machine.before_wait) == BEFORE


@pytest.mark.parametrize(("rows", "live", "change"), CONFIGS)
def test_tokens_are_the_twins_whoever_comes_last(monkeypatch, rows, live, change):
    one = small(rows)
    tiles = -(-one.vocab // change["tile"])
    order = list(range(tiles))[::-1] if rows % 2 else list(range(tiles))
    done = run(one, monkeypatch, live=live, epoch=2**31 - 1 + rows % 2, order=order, **change)
    done.check()
    assert set(done.machine.before_wait) == BEFORE


def own_best(one, inputs):
    """The inputs with the other ranks' tokens made unlikely."""
    inputs["peers"][..., 0] = torch.full((), -100.0).view(torch.int32)
    return inputs


def test_equal_logits_give_the_lowest_id_on_one_rank_and_over_ranks(monkeypatch):
    one = small(8)
    inputs = own_best(one, whole_numbers(one, 2))
    inputs["w"][:] = inputs["w"][3]  # all equal
    done = run(one, monkeypatch, inputs=inputs)
    done.check()
    assert done.get("ids").tolist() == [0] * 8
    best = FAMILY.twin(one, inputs)["best"]
    slots = [slot for slot in range(4) if slot != own_slot(4)]
    for place, slot in enumerate(slots):  # the same logit on other ranks: their ids are higher, but for rank 0's
        inputs["peers"][slot, :, 0] = best.view(torch.int32)
        inputs["peers"][slot, :, 1] = 50 * (place + 1) + 7
    done = run(one, monkeypatch, inputs=inputs, rank=3)
    assert done.get("ids").tolist() == [57] * 8, "rank 3 has ids from 150 on"


def test_negative_zero_equals_zero_and_infinities_are_ordered(monkeypatch):
    one = small(8, vocab=16, hidden=256)
    inputs = own_best(one, whole_numbers(one, 3))
    inputs["h"][:], inputs["w"][:] = 0.0, 0.0
    inputs["h"][:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    inputs["w"][:, 0] = 2.0**-133  # BF16's least; a part of it is a number in FP32 and rounds to a zero
    inputs["h"][:, 0] *= 2.0**-7
    inputs["w"][9, 0] = float("inf")
    inputs["w"][12, 0] = float("-inf")
    inputs["w"][10:12, 0] = float("inf")
    done = run(one, monkeypatch, inputs=inputs)
    done.check()
    assert done.get("ids").tolist() == [9, 12] * 4
    inputs["w"][9:13, 0] = 2.0**-133
    inputs["w"][5, 0] *= -1  # the only zero of its sign: equal to the others, so not likeliest
    inputs["w"][0, 0] *= -1
    done = run(one, monkeypatch, inputs=inputs)
    done.check()
    assert done.get("ids").tolist() == [0] * 8


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_row_with_nan_gives_the_last_id_and_says_so(monkeypatch, where):
    one = small(8)
    inputs = whole_numbers(one, 4)
    if where == "here":
        inputs["h"][2] = float("nan")
        inputs["w"][49, 0] = float("nan")  # then every row
    else:
        slot = 1 if own_slot(4) != 1 else 3
        inputs["peers"][slot, 5, 0] = torch.full((), -math.nan).view(torch.int32)
    done = run(one, monkeypatch, inputs=inputs)
    done.check()
    odd = done.get("best").isnan()
    assert odd.tolist() == ([True] * 8 if where == "here" else [row == 5 for row in range(8)])
    assert bool((done.get("ids")[odd] == 199).all())


@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_never_publishes_is_named_and_the_step_ends(monkeypatch):
    from k3lab.kernels.health import Phase, read

    done = run(small(1), monkeypatch, dead=3, **CONFIGS[0][2])
    report = read(done.get("health").tolist())
    assert report is not None
    assert (report.phase, report.late, report.epoch) == (Phase.PARTIAL, (3,), 5)
    assert not bool(done.get("keys").any()) and not bool(done.get("arrived").any())


def test_after_a_rank_gave_up_nothing_is_published(monkeypatch):
    done = run(small(2), monkeypatch, claimed=True, **CONFIGS[0][2])
    assert not bool(done.get("mailbox").any())
    assert not bool(done.get("keys").any()) and not bool(done.get("arrived").any())


@pytest.mark.usefixtures("looks_often")
def test_every_rank_of_a_group_finds_the_token_of_the_whole_vocabulary(monkeypatch):
    from k3lab.kernels.lm_head.twin import best_token

    one = small(3, tp=2)
    everyone = [dict(whole_numbers(one, 30 + rank), h=whole_numbers(one, 41)["h"]) for rank in range(2)]
    logits = torch.cat([inputs["h"].float() @ inputs["w"].float().T for inputs in everyone], dim=-1)
    best, ids = best_token(logits.to(torch.bfloat16).float(), 0, 100)
    assert len({int(token) // 50 for token in ids}) > 1, "tokens of several ranks"
    for found in exchange(one, monkeypatch, everyone):
        assert found["ids"].tolist() == ids.tolist()
        assert torch.equal(found["best"], best)


@pytest.mark.parametrize(("rows", "live", "threads"), [(1, 1, 64), (5, 3, 64), (4, 4, 128)])
def test_embedding_rows_come_from_the_ranks_that_hold_them(monkeypatch, rows, live, threads):
    done = run(small(rows, "embed", hidden=264), monkeypatch, live=live, epoch=2**31 - 1 + rows % 2, threads=threads)
    done.check()
    assert not done.machine.before_wait
    owners = {int(token) // 50 for token in done.inputs["tokens"][:live]}
    assert len(owners) == min(live, 3), "this rank's rows and others'"


@pytest.mark.usefixtures("looks_often")
def test_every_rank_of_a_group_has_the_whole_tables_rows(monkeypatch):
    one = small(4, "embed", tp=2, hidden=64)
    everyone = [FAMILY.inputs(one, rank) for rank in range(2)]
    tokens = torch.tensor([3, 77, 50, 0], dtype=torch.int32)
    for inputs in everyone:
        inputs["tokens"], inputs["peers"] = tokens, inputs["peers"] * float("nan")
    whole = torch.cat([inputs["table"] for inputs in everyone])
    for found in exchange(one, monkeypatch, everyone):
        assert torch.equal(found["x"], whole[tokens.long()])


def test_a_token_outside_the_vocabulary_gives_a_row_of_nan(monkeypatch):
    one = small(4, "embed", hidden=64)
    inputs = FAMILY.inputs(one, 1)
    inputs["tokens"][1:3] = torch.tensor([-1, 200])
    done = run(one, monkeypatch, inputs=inputs)
    found = done.get("x").view(torch.bfloat16)
    assert bool(found[1:3].isnan().all()) and not bool(found[[0, 3]].isnan().any())


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("dead", [1, 3])
def test_a_rank_that_does_not_send_its_rows_or_is_not_there_is_named(monkeypatch, dead):
    from k3lab.kernels.health import Phase, read

    one = small(1, "embed", hidden=64)
    inputs = FAMILY.inputs(one, 1)
    inputs["tokens"][:] = 60 if dead == 1 else 7  # rank 1's, or this rank's own
    done = run(one, monkeypatch, inputs=inputs, dead=dead, threads=64)
    report = read(done.get("health").tolist())
    assert report is not None
    assert (report.phase, report.late) == (Phase.PARTIAL, (dead,))
