"""The KDA kernel as the compiler made it, run on the CPU: against the twin, in place, padded, and what it reads early."""

from __future__ import annotations

import pytest
import torch

from .kda_case import FAMILY, READ_EARLY, check, problem, run

FEW = {"parts": 8, "together": 1, "warps": 8, "lanes": 16, "depth": 1}
MANY = {"parts": 2, "together": 3, "warps": 8, "lanes": 8, "depth": 2, "release": "entry"}


@pytest.mark.parametrize(
    ("rows", "live", "kind", "heads", "change"),
    [
        (1, 1, "plain", 2, FEW),
        (1, 1, "plain", 1, {"parts": 1, "together": 1, "warps": 8, "lanes": 8, "depth": 1}),
        (1, 1, "plain", 1, {"parts": 16, "together": 1, "warps": 4, "lanes": 32, "depth": 1}),
        (3, 2, "plain", 1, {"parts": 4, "together": 1, "warps": 4, "lanes": 16, "depth": 1}),
        (5, 5, "plain", 1, MANY),
        (5, 4, "plain", 2, MANY),
        (9, 7, "plain", 1, {"parts": 4, "together": 8, "warps": 4, "lanes": 8, "depth": 1, "release": "end"}),
        (4, 4, "plain", 1, {"parts": 8, "together": 4, "warps": 2, "lanes": 8, "depth": 4, "release": "loads"}),
        (8, 8, "verify8", 2, FEW),
        (8, 5, "verify8", 1, {"parts": 4, "warps": 8, "lanes": 8}),
        (4, 3, "verify2", 1, {"parts": 4, "warps": 8, "lanes": 8}),
        (6, 6, "verify3", 1, {"parts": 2, "warps": 8, "lanes": 8}),
        (6, 6, "verify6", 1, {"parts": 16, "warps": 2, "lanes": 8}),
    ],
)  # fmt: skip
def test_agrees_with_the_twin(monkeypatch, rows, live, kind, heads, change):
    done = run(problem(rows, kind, heads=heads), monkeypatch, live=live, **change)
    check(done)
    assert done.early() == READ_EARLY == {*FAMILY.rotated, *FAMILY.constant}
