"""The bars of the attention projection on an H200: the recorded table's winners, compiled and timed here.

Each case is a problem of the committed table that has a bar. What the table itself records as missed is expected
to fail, with its number; a case that the table holds must hold again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from k3lab.cli.kernel_page import table_path
from k3lab.cli.page_data import bar_of, beside, load_bars, load_table
from k3lab.kernels import family
from k3lab.kernels.device import Device
from k3lab.tuning.alternatives import PYTORCH

from .device_stats import record

pytestmark = pytest.mark.gpu
FAMILY = family("attention_projection")
BARS = load_bars(FAMILY.name)
TABLE = Path(__file__).resolve().parents[2] / table_path(FAMILY.name, BARS)


def cases(rows: list[dict[str, Any]]) -> list[Any]:
    """One test a row with a bar, named by its problem; an expected failure where the row itself misses."""
    found = []
    for row in rows:
        bar, other = bar_of(BARS, row), beside(row)
        if bar is None:
            continue
        missed = []
        if row["us"] > bar:
            missed.append(f"the table has {row['us']:.2f} us against a bar of {bar} us")
        if other is not None and row["us"] > other:
            missed.append(f"the table has {row['us']:.2f} us against {other:.2f} us of {BARS['beside']}")
        marks = [pytest.mark.xfail(reason="; ".join(missed), strict=True, raises=AssertionError)] if missed else []
        problem = FAMILY.problem_from_json(row["problem"])
        found.append(pytest.param(row, bar, id=problem.label, marks=marks))
    return found


def recorded() -> list[Any]:
    """The cases of the committed table, or one that says there is none."""
    if not TABLE.is_file():
        return [pytest.param(None, 0.0, marks=pytest.mark.skip(reason=f"{TABLE.name} is not recorded yet"))]
    return cases(load_table(TABLE)["rows"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("row", "bar"), recorded())
def test_the_winner_holds_its_bar(device: Device, row: dict[str, Any], bar: float, benchmark: Any) -> None:
    from k3lab.tuning.compiling import compile_config
    from k3lab.tuning.policy import FULL
    from k3lab.tuning.timing import time_compiled

    if device.card is None or device.card.name != BARS["gpu"]:
        pytest.skip(f"the bars are of one {BARS['gpu']}")
    problem = FAMILY.problem_from_json(row["problem"])
    compiled = compile_config(FAMILY.engine(row["engine"]), problem, row["config"], device.arch)
    timing = time_compiled(FAMILY, compiled, FULL, alternative=True)
    if not timing.stable:
        pytest.fail(f"no figure: {'; '.join(timing.notes)}")
    record(benchmark, timing)
    benchmark.extra_info.update(bar_us=bar, table_us=row["us"])
    other = timing.alternatives[PYTORCH]
    assert timing.cold_us <= bar, f"{timing.cold_us:.2f} us against a bar of {bar} us (table: {row['us']:.2f})"
    assert timing.cold_us <= other, f"{timing.cold_us:.2f} us against {other:.2f} us of {BARS['beside']}"
