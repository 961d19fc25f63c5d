"""The exchanges of contexts over ranks, explored in every order; and each wait and check of them, taken out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from k3lab.kernels.mla import common
from k3lab.kernels.output_projection.model.context import FAULTS, setting_of
from k3lab.kernels.output_projection.model.explore import Explorer, Violation
from k3lab.kernels.output_projection.model.programs import Setting

PAGE = Path(common.__file__).with_name("NOTES.md")


def verdict(setting: Setting) -> str:
    """What breaks, or nothing; reads and ends of launches are steps of their own."""
    try:
        return "" if Explorer(setting, careful=True).explore() > setting.steps else "nothing was explored"
    except Violation as broken:
        return str(broken)


@pytest.mark.parametrize(
    "change", [{}, {"steps": 7, "tag_bits": 2}, {"parities": 1}, {"ranks": 3, "steps": 2}], ids=str
)
def test_no_order_breaks_the_protocol(change) -> None:
    """One parity would do: who has all ranks' rows knows that all have had its queries."""
    assert not verdict(replace(Setting("context"), **change))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("ends", ["dead", "late"])
def test_a_rank_that_stops_ends_every_launch_and_spoils_no_other_unnoticed(ends, steps) -> None:
    assert not verdict(Setting("context", steps=steps, ends=ends))


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["dead", "late"])
def test_nor_does_one_of_three(ends) -> None:
    assert not verdict(Setting("context", ranks=3, steps=1, ends=ends))


@pytest.mark.parametrize("fault", FAULTS)
def test_each_removal_is_caught(fault: str) -> None:
    setting = setting_of(fault)
    assert verdict(setting)
    assert not verdict(replace(setting, fault=""))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("the sending launch does not wait", "read the activation of step 0 in step"),
        ("rows sent whatever the attention waited for", "mail of 1 holds (1, 0, 1, False)"),
        ("queries are taken for rows", "all together name (0, 1, 2)"),
    ],
)
def test_a_removal_shows_as_what_it_is(fault: str, says: str) -> None:
    assert says in verdict(setting_of(fault))


def test_the_page_lists_every_removal() -> None:
    text = " ".join(PAGE.read_text().split())
    assert [fault for fault in FAULTS if fault not in text] == []
