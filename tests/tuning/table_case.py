"""What the tests of tables share: requests of the fake family, and what their studies hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.study import TrialRecord, TuningStudy
from k3lab.tuning.supervisor import Limits
from k3lab.tuning.table import TableRequest

ENGINES = (fake_family.SMALL, fake_family.LARGE)


def problems(*rows: int, widths: tuple[int, ...] = (64,)) -> tuple[fake_family.FakeProblem, ...]:
    return tuple(fake_family.FakeProblem(1, count, width) for width in widths for count in rows)


def request(folder: Path, *rows: int, **changes: Any) -> TableRequest:
    fields = {
        "family": fake_family.FAMILY, "problems": problems(*rows), "engines": ENGINES, "gpu": gpu_card("h200"),
        "objective": "measured", "trials": 30, "folder": folder, "limits": Limits(compile_s=10, measure_s=10),
        "evaluator": "fake_evaluator", "jobs": 2,
    }  # fmt: skip
    return TableRequest(**{**fields, **changes})


def trials_of(folder: Path, engine: str, rows: int) -> list[TrialRecord]:
    (path,) = folder.glob(f"fake-{engine}-tp1-rows{rows}-*.sqlite3")
    with TuningStudy.for_reading(path) as study:
        return study.trials()
