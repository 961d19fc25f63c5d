"""Which of the table's problems are held to a bar, and which of them are expected to miss it."""

from __future__ import annotations

from typing import Any

from k3lab.cli.page_data import load_bars

from .test_projection_bars_gpu import FAMILIES, ROOT, cases, factor


def row(us: float, rows: int = 2, outputs: int = 3216, other: float | None = 17.0) -> dict[str, Any]:
    problem = {"tp": 16, "rows": rows, "kind": "kda", "hidden": 7168, "outputs": outputs, "dtype": "bfloat16"}
    return {"problem": problem, "us": us, "alternatives": {} if other is None else {"PyTorch": other}}


def test_only_what_the_table_records_as_missed_may_miss() -> None:
    found = cases(
        "attention_projection",
        load_bars("attention_projection"),
        [
            row(12.1),
            row(12.41),
            row(11.0, outputs=3648),
            row(12.0, other=11.5),
            row(12.0, rows=64, other=None),
            row(12.4),
        ],
    )
    assert [case.id for case in found] == [
        f"attention_projection-kda-tp16-rows{count}" for count in (2, 2, 2, 64, 2)
    ]  # no bar for 3648
    held, missed, slower, alone, close = (case.marks for case in found)
    assert not held
    assert not alone
    for (mark,), words in (
        (missed, "12.41 us against a bar of 12.4 us"),
        (slower, "12.00 us against 11.50 us of cuBLAS"),
    ):
        assert (mark.name, mark.kwargs["strict"], mark.kwargs["raises"]) == ("xfail", True, AssertionError)
        assert words in mark.kwargs["reason"]
    assert [(mark.name, mark.kwargs["strict"]) for mark in close] == [("xfail", False)]  # two runs differ by more


def test_every_family_that_has_bars_is_held_to_them() -> None:
    assert sorted(FAMILIES) == sorted(path.parent.name for path in (ROOT / "kernels").glob("*/bars.json"))


def test_a_bar_is_of_one_kind_and_without_a_mean_pytorch_is_matched() -> None:
    bars = load_bars("attn_res")

    def one(us: float, kind: str) -> dict[str, Any]:
        problem = {"kind": kind, "tp": 16, "rows": 1, "hidden": 7168, "blocks": 8, "eps": 1e-5}
        return {"problem": problem, "us": us, "alternatives": {"PyTorch": 3.4}}

    found = cases("attn_res", bars, [one(3.3, "blocks"), one(3.45, "blocks"), one(3.3, "final")])
    assert [bool(case.marks) for case in found] == [False, True]
    assert "3.45 us against 3.40 us of PyTorch" in found[1].marks[0].kwargs["reason"]
    projection = load_bars("output_projection")
    asked = [{"problem": {"tp": 16, "rows": 1, "kind": kind}} for kind in ("kda", "mla")]
    assert [factor(projection, row) for row in asked] == [2.5, 1.0]


def test_few_rows_of_the_output_projection_must_be_two_and_a_half_times_quicker() -> None:
    bars = load_bars("output_projection")

    def one(us: float, rows: int, other: float, tp: int = 16, kind: str = "kda") -> dict[str, Any]:
        problem = {"tp": tp, "rows": rows, "kind": kind, "width": 12288 // tp, "hidden": 7168, "blocks": 8, "eps": 1e-5}
        return {"problem": problem, "us": us, "alternatives": {"PyTorch": other}}

    rows = [
        one(6.3, 1, 16.3), one(6.6, 1, 16.3), one(6.5, 1, 16.2), one(7.8, 8, 20.0), one(15.6, 64, 17.0, tp=8),
        one(15.6, 64, 15.0, tp=8), one(9.0, 64, 90.0), one(6.0, 1, 60.0, kind="mla"),
    ]  # fmt: skip
    found = cases("output_projection", bars, rows)
    # no bar at TP 16 beyond 8 rows, nor of another kind
    assert [bool(case.marks) for case in found] == [False, True, True, False, False, True]
    assert "6.50 us against 16.20 us of PyTorch chain" in found[2].marks[0].kwargs["reason"]
