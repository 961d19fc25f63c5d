"""The output projection's kernels where copies land late, a warp begins late, or a launch finds that others have given up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .ptx_disorder import Disorder
from .test_output_projection_engines import APART, FUSED, SPLIT
from .test_output_projection_machine import AT_ONCE, Case

TWO_SHOT = {"exchange": "two_shot", "packet": "b32e32"}
CLUSTER = {"row_sums": "cluster", "packet": "b32e32"}
LATE: dict[str, tuple[Any, dict[str, Any], tuple[int, int], str, int]] = {
    "split: a warp of the product": (SPLIT, {"packet": "b32e32"}, (3, 5), "", 0),
    "split, the wait at the consumer's exit: a warp of the consumer": (
        SPLIT, {"packet": "b32e32", "consumer_wait": "exit"}, (1, 2), "", 1,
    ),
    "split, two shots: a warp of a row that does not live, which sums columns": (SPLIT, TWO_SHOT, (3, 1), "", 0),
    "split, clusters: a warp of the consumer": (SPLIT, {**CLUSTER, "consumer_wait": "exit"}, (0, 7), "barrier.cluster.wait", 1),
    "fused: a warp of the product in a block that finishes nothing": (FUSED, {"packet": "b32e32", "rows": 1}, (60, 0), "", 0),
    "fused, early: a mixer": (FUSED, {"packet": "b32e32", "rows": 1}, (7, 6), "", 1),
    "apart: a warp of the product, tiles that come again": (APART, {"rows": 1, "width": 768, "depth": 2}, (20, 3), "", 0),
    "apart, early: a warp of a row": (APART, {"rows": 1, "rehearse": 0}, (2, 1), "barrier.cluster.wait", 1),
}  # fmt: skip
"""Engine, config, (block, warp) that falls behind, where, and whether what is older than the launch before may be read ahead of the
wait: a consumer that waits at its exit always does so."""


class DisorderCase(Case):
    """Runs on that machine."""

    kind = Disorder

    def run_all(self, first: int = 0, early: int = 0) -> bool:
        """All launches from the ``first`` on; a producer's blocks wait for nobody, so not all of them run side by side.

        Returns whether a warp fell behind.
        """
        ran: list[Any] = []
        for place, launch in enumerate(self.compiled.launches[first:], first):
            ran += self.run(place, launch.blocks if launch.needs_residency else AT_ONCE, early=early)
        return any(machine.until < 0 for machine in ran)


@pytest.mark.parametrize("name", LATE)
def test_waits_hold_where_what_they_wait_for_is_late(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """``mutants.json`` takes them out one by one."""
    engine, change, laggard, behind, early = LATE[name]
    case = DisorderCase(monkeypatch, engine, **change)
    monkeypatch.setattr(Disorder, "laggard", laggard)
    monkeypatch.setattr(Disorder, "behind", behind)
    assert case.run_all(early=early)
    case.judge()
    assert (case.memory.get("epochs") == 1).all() and not case.memory.get("health").any()


GIVEN_UP: list[tuple[Any, dict[str, Any], str]] = [
    (FUSED, {"rows": 1}, "mailbox"), (APART, {"rows": 1, "rehearse": 0}, "mailbox"), (SPLIT, {}, "mailbox"),
    (SPLIT, TWO_SHOT, "totals"),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "change", "box"), GIVEN_UP)
@pytest.mark.usefixtures("looks_often")
def test_a_launch_that_finds_the_record_claimed_publishes_nothing_and_ends(
    monkeypatch: pytest.MonkeyPatch, engine: Any, change: dict[str, Any], box: str
) -> None:
    """By a wait of a launch before: what has come of it since may be in x, and in an owner's sums."""
    case = DisorderCase(monkeypatch, engine, **change)
    if box == "totals":  # the partials have come all the same
        case.run(0, AT_ONCE)
        assert case.memory.get("mailbox").any()
    case.memory.data[case.at["health"] :][:4].view(np.int32)[0] = 7
    case.run_all(first=box == "totals")
    assert not case.memory.get(box).any()
    health = case.memory.get("health")
    assert health[0] == 7 and not health[1:].any()  # it is another launch's, and stays as it is
    assert (case.memory.get("epochs") == 1).all()
