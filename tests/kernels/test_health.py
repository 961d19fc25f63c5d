"""The health record: who is named, limits, and what re-arming clears."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from k3lab.kernels import Buffer, Compiled, InputError, Problem, health
from k3lab.kernels.collectives import CollectiveError
from k3lab.kernels.health import Phase
from k3lab.kernels.transports import Loopback, own_buffers


def record(**words: int) -> torch.Tensor:
    made = torch.zeros(health.WORDS, dtype=torch.int32)
    places = {"epoch": health.EPOCH, "phase": health.PHASE, "slot": health.SLOT, "block": health.BLOCK}
    for name, value in words.items():
        place = places.get(name) if name in places else health.MISSED + Phase[name.upper()] - 1
        made[place] = value - (1 << 32) if value >> 31 else value
    return made


def test_a_clean_record_and_no_record_pass() -> None:
    health.check_health({})
    health.check_health({"health": record(slot=3)})  # what is behind an unclaimed word says nothing


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"phase": 1, "slot": 5, "partial": 1 << 5}, "rank 5 did not publish its partial sums within 10 s: launch 7"),
        ({"phase": 1, "slot": 5, "partial": 1 << 5 | 1 << 31}, "rank 5, 31 did not publish its partial sums"),
        ({"phase": 1, "slot": 2}, "rank 2 did not publish its partial sums"),
        ({"phase": 2, "slot": 1, "total": 1 << 1}, "rank 1 did not publish the sums of its columns"),
        ({"phase": 4, "slot": 1, "columns": 1 << 1}, "rank 1 did not publish its columns"),
        ({"phase": 4, "slot": 0, "columns": 0b1111, "total": 1 << 2}, "rank 2 did not publish the sums of its columns"),
        ({"phase": 5, "slot": 6, "queries": 1 << 6, "partial": 0b1111}, "rank 6 did not publish its queries"),
        ({"phase": 3, "slot": 9}, "a block of this GPU did not publish its part of a row"),
    ],
)
def test_the_late_rank_is_named(words: dict[str, int], says: str) -> None:
    with pytest.raises(CollectiveError, match=says):
        health.check_health({"health": record(epoch=7, block=11, **words)})
    with pytest.raises(CollectiveError, match=r"block 11 \(seen by rank 0\)$"):
        health.check_health({"health": record(epoch=7, block=11, **words)}, rank=0)


@pytest.mark.parametrize("first", [{"phase": 2, "slot": 1}, {"phase": 3, "slot": 40}])
def test_who_waited_for_a_rank_that_waited_itself_is_not_named(first: dict[str, int]) -> None:
    """Rank 3 is dead; the owner of the columns waits for it, and a wait for the owner's sums ended first."""
    words = record(epoch=1, partial=1 << 3, total=0b1011, **first)
    with pytest.raises(CollectiveError, match=r"^rank 3 did not publish its partial sums"):
        health.check_health({"health": words})


def test_an_epoch_above_two_to_the_31_counts() -> None:
    with pytest.raises(CollectiveError, match=f"launch {2**32 - 1}"):
        health.check_health({"health": record(epoch=2**32 - 1, phase=1, slot=0)})


def test_a_damaged_record_is_no_clean_one() -> None:
    with pytest.raises(CollectiveError, match="phase 77"):
        health.check_health({"health": record(epoch=1, phase=77)})
    with pytest.raises(InputError, match="16 words, not 4"):
        health.read([0] * 4)


@pytest.mark.parametrize("seconds", [1e-3, 0.25, 3.0, 10.0, 3600.0])
def test_the_limit_is_read_as_it_was_set(seconds: float) -> None:
    buffers = {"health": record(epoch=1, phase=1)}
    health.set_limit(buffers, seconds)
    assert health.read(buffers["health"].tolist()).limit_s == seconds
    low, high = (int(word) & 0xFFFFFFFF for word in buffers["health"][health.LIMIT : health.LIMIT + 2])
    assert buffers["health"].view(torch.int64)[health.LIMIT // 2] == low | high << 32 == round(seconds * 1e9)
    assert health.read(record(epoch=1, phase=1).tolist()).limit_s == health.DEFAULT_LIMIT_S


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-4, 7200.0, float("nan")])
def test_a_limit_nobody_could_mean_is_refused(seconds: float) -> None:
    with pytest.raises(InputError, match="a wait may last"):
        health.set_limit({"health": record()}, seconds)


def test_without_a_record_there_is_no_limit() -> None:
    with pytest.raises(InputError, match="no health record: out"):
        health.set_limit({"out": record()}, 1.0)


def test_rearming_clears_what_launches_leave_each_other_between_two_barriers() -> None:
    buffers = (
        health.BUFFER,
        Buffer("epochs", (4,), "int32", persistent=True),
        Buffer("arrived", (4,), "int32", zeroed=True),
        Buffer("scratch", (4,), "int32"),
        Buffer("mail", (2, 16), "uint8", persistent=True),
        Buffer("mail_targets", (2, 2), "int64", targets_of="mail"),
    )
    compiled = Compiled("f", "e", Problem(2, 1), {}, "sm_90a", (), buffers)
    held, boxes = own_buffers(compiled, Loopback(2), "cpu")
    steps: list[object] = []
    transport = SimpleNamespace(barrier=lambda: steps.append(bool(held["epochs"].any())))
    targets = held["mail_targets"].clone()
    health.set_limit(held, 0.5)
    for name in ("epochs", "arrived", "scratch", "mail"):
        held[name].fill_(3)
    held["health"][: health.LIMIT] = 1
    places = {name: tensor.data_ptr() for name, tensor in held.items()}
    health.rearm(SimpleNamespace(compiled=compiled, buffers=held, transport=transport))
    health.check_health(held)
    assert steps == [True, False]  # every rank's launches are over before any is cleared; all are before any goes on
    assert not any(held[name].any() for name in ("epochs", "arrived", "mail"))
    assert torch.equal(held["mail_targets"], targets)
    assert held["health"][health.LIMIT] == 500_000_000
    assert not held["health"][: health.LIMIT].any()
    assert {name: tensor.data_ptr() for name, tensor in held.items()} == places  # captured graphs go on
    assert len(boxes) == 1


def test_kernels_and_the_host_read_one_record() -> None:
    """Kernels have its places and the default limit as numbers of their own."""
    from k3lab.kernels import cute_waits

    assert (health.PHASE, health.SLOT, health.BLOCK, health.MISSED, health.LIMIT) == (
        cute_waits.CLAIM_PHASE, cute_waits.CLAIM_SLOT, cute_waits.CLAIM_BLOCK, cute_waits.MISSED, cute_waits.LIMIT,
    )  # fmt: skip
    phases = (health.Phase.PARTIAL, health.Phase.TOTAL, health.Phase.ROW)
    assert phases == (cute_waits.PARTIAL, cute_waits.TOTAL, cute_waits.ROW)
    assert health.default_limit_ns() == cute_waits.DEFAULT_LIMIT_NS == 10 * 10**9
    assert health.POLLS_A_LOOK == cute_waits.POLLS_A_LOOK
