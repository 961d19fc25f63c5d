"""The exchange's protocol, explored in every order; and each wait, check and fence of it, taken out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from k3lab.kernels import health
from k3lab.kernels.output_projection import mailbox
from k3lab.kernels.output_projection.model.explore import Explorer, Violation
from k3lab.kernels.output_projection.model.memory import empty, flushed, outcomes, stored
from k3lab.kernels.output_projection.model.programs import FAULTS, Setting, setting_of

PAGE = Path(mailbox.__file__).with_name("PROTOCOL.md")
RIGHT = [
    Setting("fused", steps=4),
    Setting("split", steps=4),
    Setting("two_shot", steps=4),
    Setting("fused", ranks=3, steps=3),
    Setting("split", ranks=3, steps=4),
    Setting("two_shot", ranks=3, steps=4),
    Setting("fused", form="pairs", steps=4),
    Setting("split", form="pairs", steps=3),
    Setting("two_shot", form="pairs", steps=3),
    Setting("fused", form="flag", steps=4),
    Setting("split", form="flag", steps=4),
    Setting("two_shot", form="flag", steps=4),
    Setting("fused", idle=True),
    Setting("split", steps=4, consumer_waits="start"),
    Setting("two_shot", steps=4, consumer_waits="start"),
    Setting("fused", steps=9, rows=(2, 1, 1, 1, 1, 1, 1, 1, 2), tag_bits=3, lands=2),
    Setting("fused", steps=10, tag_bits=2),
    Setting("two_shot", steps=4, parities=1),  # a rank sends partials only after all owners had read the last ones
]


@cache
def verdict(setting: Setting) -> str:
    """What breaks, or nothing."""
    try:
        return "" if Explorer(setting).explore() > setting.steps else "nothing was explored"
    except Violation as broken:
        return str(broken)


def name(setting: Setting) -> str:
    base = Setting(setting.shape)
    changes = {key: value for key, value in vars(setting).items() if value != vars(base)[key]}
    return " ".join([setting.shape, *(f"{key}={value}" for key, value in changes.items())])


@pytest.mark.parametrize("setting", RIGHT, ids=name)
def test_no_order_breaks_the_protocol(setting: Setting) -> None:
    """No block reads a torn packet or one of another epoch, none waits for ever, a rank's slots are free when reused."""
    assert not verdict(setting)


@pytest.mark.parametrize("shape", ["fused", "split", "two_shot"])
def test_steps_that_are_taken_together_hide_nothing(shape: str) -> None:
    """Reads and ends of launches as steps of their own: more states, no other verdict."""
    setting = Setting(shape, steps=2)  # type: ignore[arg-type]
    assert Explorer(setting, careful=True).explore() > Explorer(setting).explore()


@pytest.mark.parametrize(
    ("shape", "form"), [("fused", "epoch"), ("split", "epoch"), ("two_shot", "epoch"), ("split", "pairs")]
)
def test_a_dead_rank_ends_every_launch_and_is_named(shape: str, form: str) -> None:
    """Killed at any moment, its last stores arriving or not: every rank ends, and all together name it."""
    assert not verdict(Setting(shape, steps=2, ends="dead", form=form))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["split", pytest.param("two_shot", marks=pytest.mark.slow)])
def test_two_living_ranks_agree_on_the_dead_one(shape: str) -> None:
    assert not verdict(Setting(shape, ranks=3, steps=1, ends="dead"))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["fused", "split", "two_shot"])
def test_a_wait_that_ends_too_soon_spoils_no_other_rank_unnoticed(shape: str) -> None:
    """The rank was only late: who gave up on it publishes no more, so the others give up too, or were right."""
    assert not verdict(Setting(shape, steps=2, ends="late"))  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_removal_is_caught(fault: str) -> None:
    setting = setting_of(fault)
    assert verdict(setting)
    assert not verdict(replace(setting, fault="", parities=2, ends="" if setting.ends == "stale" else setting.ends))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("no epoch check", "step 2: mail of 0 holds (1, 0, 0, True)"),  # two epochs old
        ("a packet in two accesses", "holds (0, -1, -1, True)"),  # the epoch is there, a word is not
        ("one parity", "waits for ever"),  # overwritten before it was read
        ("a payload like the sentinel", "waits for ever: poll mail"),
        ("who gave up goes on publishing", "False)"),
        ("the first to give up names the rank", "rank 1 died, and rank 0 names (0,)"),
        ("later launches add to the ranks that were missed", "all together name (0, 1)"),
    ],
)
def test_a_removal_shows_as_what_it_is(fault: str, says: str) -> None:
    assert says in verdict(setting_of(fault))


def test_two_shots_need_the_second_parity_where_data_is_the_flag() -> None:
    """A sum may come back before its place is armed again; an epoch needs no arming (see RIGHT)."""
    assert "waits for ever: poll totals" in verdict(Setting("two_shot", steps=4, parities=1, form="flag"))


def test_dead_rows_are_safe_only_where_their_stores_arrive_within_the_tags_period() -> None:
    """Nobody waits for the packets of rows that are not live: the page says what is relied on instead."""
    rows = (2, 1, 1, 1, 1, 1, 1, 1, 2)
    assert "step 8" in verdict(Setting("fused", steps=9, rows=rows, tag_bits=3))


def test_the_page_lists_every_removal() -> None:
    text = " ".join(PAGE.read_text().split())
    assert [fault for fault in FAULTS if fault not in text] == []
    assert len(FAULTS) >= 10


def test_a_store_arrives_when_it_likes_but_in_order_at_one_address() -> None:
    cell = stored(stored(empty("old"), 1, "first", 0), 1, "second", 1)
    assert [value for value, _ in outcomes(cell)] == ["old", "first", "second"]
    _, after = next(one for one in outcomes(cell) if one[0] == "second")
    assert after == empty("second")  # the first can no longer come
    two = stored(cell, 0, "mine", 1)
    seen = {(value, rest) for value, (_, rest) in outcomes(two)}
    assert ("mine", ((1, (("first", 0), ("second", 1))),)) in seen  # before the others', or
    assert ("mine", ()) in seen  # after both
    assert {now for now, _ in flushed(two, 0, 1)} == {"mine"}
    assert len(flushed(two, 0, 1)) == 3
    assert flushed(two, 0, 0) == [two]


def test_all_reports_together_name_the_first_cause() -> None:
    """Rank 2 died; rank 0 had its packet and missed rank 1, which had not, a launch later."""

    def report(epoch: int, phase: health.Phase, **missed: int) -> health.Report:
        words = [epoch, int(phase), 0, 0, missed.get("partial", 0), missed.get("total", 0), *[0] * 10]
        found = health.read(words)
        assert found is not None
        return found

    partial, total, row = health.Phase.PARTIAL, health.Phase.TOTAL, health.Phase.ROW
    assert health.culprits({0: report(6, partial, partial=0b110), 1: report(5, partial, partial=0b100)}) == (2,)
    assert health.culprits({0: report(5, total, total=0b110), 1: report(5, total, partial=0b100, total=0b101)}) == (2,)
    assert health.culprits({0: report(5, total, total=0b100)}) == (2,)
    assert health.culprits({0: report(5, row)}) == ()
    assert health.culprits({}) == ()
