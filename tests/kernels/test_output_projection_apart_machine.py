"""The output projection with blocks of their own for rows, as the compiler made it, run on the CPU: the twin's bits over loopback."""

from __future__ import annotations

from typing import Any

import pytest

from .test_moe_tail_machine import TailMachine
from .test_output_projection_engines import APART, SPLIT
from .test_output_projection_machine import AT_ONCE, Case, names_who_did_not_publish


class ApartCase(Case):
    kind = TailMachine


@pytest.mark.parametrize(
    ("rows", "change", "early"),
    [
        (1, {"rehearse": 1}, 0),
        (2, {"rehearse": 0, "width": 768, "depth": 2}, 1),
        pytest.param(1, {"rehearse": 0, "row_blocks": 4, "packet": "b32e32"}, 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_blocks_of_the_product_and_of_rows_have_the_twins_bits(
    monkeypatch: pytest.MonkeyPatch, rows: int, change: dict[str, Any], early: int
) -> None:
    """Tiles brought again into a place that was read (four steps through two places); a row that does not live; early reads."""
    case = ApartCase(monkeypatch, APART, rows=rows, **change)
    (machine,) = case.run(0, case.compiled.launches[0].blocks, early=early)
    case.judge()
    weights = {"w_o", "res_norm", "res_proj", "norm_w"}
    older = {"prefix", "blocks", "epochs"} if early else set()
    assert case.memory.touched(machine.ahead) == weights | older
    assert (case.memory.get("epochs") == 1).all() and not case.memory.get("health").any()


@pytest.mark.parametrize(
    "change",
    [
        {"row_sums": "cluster", "packet": "b32e32"},
        {"row_sums": "cluster", "exchange": "two_shot"},
    ],
    ids=str,
)
def test_a_consumer_whose_rows_are_clusters_has_the_twins_bits(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """Slices of a row come by copies, as in cute_apart."""
    case = ApartCase(monkeypatch, SPLIT, **change)
    case.run(0, AT_ONCE)
    case.run(1, case.compiled.launches[1].blocks)
    case.judge()
    assert (case.memory.get("epochs") == 1).all() and not case.memory.get("health").any()


@pytest.mark.slow
@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_did_not_publish_is_named_where_rows_are_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    names_who_did_not_publish(ApartCase(monkeypatch, SPLIT, packet="b32e32", row_sums="cluster"))
