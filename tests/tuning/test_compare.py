"""A comparison says how far, where, and tells a missing store from a rounding."""

import torch
from k3lab.kernels import Tolerance
from k3lab.tuning.compare import compare

TOLERANCE = Tolerance(1e-3, 1e-2, "test")


def outputs(rows: int = 4, columns: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    twin = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return twin.clone(), twin


def test_equal_is_ok():
    got, twin = outputs()
    assert compare("out", got, twin, TOLERANCE).ok


def test_poison_left_behind_fails_and_is_located():
    got, twin = outputs()
    got[2, 40:] = float("nan")
    result = compare("out", got, twin, TOLERANCE)
    assert not result.ok
    assert "24 of 256 elements are NaN" in result.message
    assert "[2, 40]" in result.message
    assert "rows 2..2, columns 40..63" in result.message


def test_a_wrong_tile_is_located():
    got, twin = outputs()
    got[:, 16:32] *= 1.5
    result = compare("out", got, twin, TOLERANCE)
    assert not result.ok
    assert "all rows, columns 16..31" in result.message


def test_an_error_everywhere_is_told_from_one_that_stands_out():
    got, twin = outputs()
    result = compare("out", got * 1.002, twin, TOLERANCE)
    assert not result.ok
    assert "no element stands out" in result.message


def test_one_element_can_fail_the_check_alone():
    got, twin = outputs(64, 1024)
    got[3, 5] += 0.05
    result = compare("out", got, twin, TOLERANCE)
    assert result.relative < 1e-3
    assert not result.ok


def test_nan_and_infinity_of_the_twin_are_no_fault_of_the_engine():
    got, twin = outputs()
    got[0, 0] = twin[0, 0] = float("nan")
    got[0, 1] = twin[0, 1] = float("inf")
    assert compare("out", got, twin, TOLERANCE).ok
    got[0, 1] = -float("inf")
    assert not compare("out", got, twin, TOLERANCE).ok


def test_shape_is_checked():
    got, twin = outputs()
    assert "shape" in compare("out", got[:2], twin, TOLERANCE).message
