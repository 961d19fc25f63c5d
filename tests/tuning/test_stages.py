"""From stamps of the GPU's clocks to when warps pass their stages."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from k3lab.kernels import InputError, Launch
from k3lab.kernels.stamps import BLOCKS, STAGES, WARPS
from k3lab.tuning.stages import Stages, check_blocks, roles_of, stamps_of

GHZ = 1.98
COARSE_NS = 32


def table(passes: dict[str, dict[tuple[int, int], float]], coarse_ns: int = COARSE_NS) -> np.ndarray:
    """Stamps of (block, warp) at so many nanoseconds, a timer that steps, and a count of ticks of each block's own."""
    stamps = np.zeros((len(STAGES), BLOCKS, WARPS, 2), dtype=np.int64)
    for stage, warps in passes.items():
        for (block, warp), ns in warps.items():
            stamps[STAGES.index(stage), block, warp] = (
                (1_000_000_000 + int(ns)) // coarse_ns * coarse_ns, 7_000_000 * (block + 1) + round(ns * GHZ),
            )  # fmt: skip
    return stamps


def launch(start: float = 0.0) -> dict[str, dict[tuple[int, int], float]]:
    warps = [(block, warp) for block in range(100) for warp in range(4)]
    generator = np.random.default_rng(3)
    late = {key: start + 900 * generator.random() for key in warps}
    return {
        "begin": late,
        "asked": {key: ns + 411 for key, ns in late.items()},
        "told": {key: ns + 3217 for key, ns in late.items() if key[1] < 2},
        "finished": {key: ns + 5003 for key, ns in late.items() if key[1] >= 2},
    }


@pytest.mark.parametrize("coarse_ns", [1, 32, 1024])
def test_times_are_those_of_the_clocks_however_coarse_the_timer(coarse_ns: int) -> None:
    times, tick_ns = stamps_of(table(launch(), coarse_ns))
    assert tick_ns == pytest.approx(1 / GHZ, rel=0.02 if coarse_ns > 100 else 0.002)
    begin, told = times[STAGES.index("begin")], times[STAGES.index("told")]
    assert (told - begin)[:100, :2] == pytest.approx(3.217, rel=0.02)
    assert np.isnan(told[:, 2:]).all()
    assert np.nanmin(times) == 0


def test_roles_are_the_warps_that_pass_the_same_stages() -> None:
    roles = roles_of(np.stack([stamps_of(table(launch(start)))[0] for start in (0.0, 5e5, 9e5)]))
    assert [(role.warps, role.blocks, [one.stage for one in role.stages]) for role in roles] == [
        (200, 100, ["begin", "asked", "finished"]),
        (200, 100, ["begin", "asked", "told"]),
    ]
    last = roles[1].stages[-1]
    assert last.first_us < last.median_us < last.last_us
    assert last.median_us == pytest.approx(3.217 + 0.45, abs=0.1)
    assert (
        json.loads(json.dumps(Stages(("kernel",), roles, 5.0, 9.0, 3).to_json()))["roles"][0]["stages"][2]["stage"]
        == "finished"
    )


def test_stamps_of_a_launch_before_are_left_out() -> None:
    """A warp that had work then and has none now."""
    stamps = table({**launch(5e5), "sent": {(7, 3): 4e5}})
    assert np.isnan(stamps_of(stamps)[0][STAGES.index("sent")]).all()


def test_no_beginning_is_an_error() -> None:
    with pytest.raises(ValueError, match="stamped its beginning"):
        stamps_of(table({"told": {(0, 0): 5.0}}))


def test_a_launch_of_more_blocks_than_stamps_are_kept_of_is_refused() -> None:
    """Its roles would be those of a part of it."""
    most = Launch("k3_x", b"", (BLOCKS // 2, 2, 1), (32, 1, 1), 0, ())
    check_blocks([most])
    with pytest.raises(InputError, match=f"k3_x has {BLOCKS + 2} blocks, and stamps are kept of {BLOCKS}"):
        check_blocks([most, replace(most, grid=(BLOCKS // 2 + 1, 2, 1))])


def test_launches_of_an_engine_have_a_table_each() -> None:
    """The second launch's stamps count from the first one's beginning; its own blocks are no blocks of the first."""
    first, second = table(launch()), table({"begin": {(0, 0): 7000.0}, "finished": {(0, 0): 9000.0}})
    roles = roles_of(stamps_of(np.concatenate([first, second], axis=1))[0][None])
    assert [(role.launch, role.warps) for role in roles] == [(0, 200), (0, 200), (1, 1)]
    assert [one.median_us for one in roles[2].stages] == pytest.approx([7.0, 9.0], abs=0.05)
