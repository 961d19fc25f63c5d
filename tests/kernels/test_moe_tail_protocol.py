"""The tail's exchanges, explored in every order; and each wait, check and order of them, taken out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from k3lab.kernels.moe_tail import common
from k3lab.kernels.output_projection.model.explore import Explorer, Violation
from k3lab.kernels.output_projection.model.programs import Setting
from k3lab.kernels.output_projection.model.tail import FAULTS, setting_of

PAGE = Path(common.__file__).with_name("NOTES.md")
RIGHT = [
    Setting("tail", steps=4),
    Setting("tail_two_shot", steps=4),
    Setting("tail", steps=7, tag_bits=2),
    Setting("tail", steps=4, parities=1),
    Setting("tail_two_shot", steps=4, parities=1),
]


@cache
def verdict(setting: Setting) -> str:
    """What breaks, or nothing."""
    try:
        return "" if Explorer(setting).explore() > setting.steps else "nothing was explored"
    except Violation as broken:
        return str(broken)


def name(setting: Setting) -> str:
    changes = {key: value for key, value in vars(setting).items() if value != vars(Setting(setting.shape))[key]}
    return " ".join([setting.shape, *(f"{key}={value}" for key, value in changes.items())])


@pytest.mark.parametrize("setting", RIGHT, ids=name)
def test_no_order_breaks_the_protocol(setting: Setting) -> None:
    """Any number of layers: a launch's parity is that of its own number, and one parity would do as well."""
    assert not verdict(setting)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tail", "tail_two_shot"])
def test_no_order_of_three_ranks_breaks_the_protocol(shape: str) -> None:
    assert not verdict(Setting(shape, ranks=3, steps=3))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["tail", "tail_two_shot"])
def test_a_dead_rank_ends_every_launch_and_is_named(shape: str) -> None:
    """Killed at any moment, its last stores arriving or not: every rank ends, and all together name it."""
    assert not verdict(Setting(shape, steps=1, ends="dead"))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["tail", pytest.param("tail_two_shot", marks=pytest.mark.slow)])
def test_a_wait_that_ends_too_soon_spoils_no_other_rank_unnoticed(shape: str) -> None:
    assert not verdict(Setting(shape, steps=1, ends="late"))  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_removal_is_caught(fault: str) -> None:
    setting = setting_of(fault)
    assert verdict(setting)
    assert not verdict(replace(setting, fault=""))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("columns sent before the cluster's sums", "deltas of 0 holds (1, 0, 0, False)"),
        ("lateness is not told in the cluster", "deltas of 1 holds (1, 0, 1, False)"),
        ("columns are taken for sums", "all together name (0, 1)"),
        ("the finishing block does not wait", "read the activation of step 0 in step 2"),
    ],
)
def test_a_removal_shows_as_what_it_is(fault: str, says: str) -> None:
    assert says in verdict(setting_of(fault))


def test_the_page_lists_every_removal() -> None:
    text = " ".join(PAGE.read_text().split())
    assert [fault for fault in FAULTS if fault not in text] == []
