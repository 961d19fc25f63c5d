"""MXFP4 and MXFP8 against tables and searches written here, not against the code's own arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from k3lab.kernels import InputError
from k3lab.kernels.mxfp4 import E2M1, decode_scale, dequantize, pack, quantize, quantize_mxfp8, unpack

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def _table_value(nibble: int) -> float:
    return -MAGNITUDES[nibble - 8] if nibble >= 8 else MAGNITUDES[nibble]


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("scale", [1, 60, 119, 127, 128, 140, 250])
def test_every_byte_decodes_to_the_table(scale: int, dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)  # 32 columns a row
    got = dequantize(packed, torch.full((16, 1), scale, dtype=torch.uint8), dtype).view(256, 2).to(F64)
    for byte in range(256):
        even, odd = _table_value(byte & 15), _table_value(byte >> 4)
        assert got[byte].tolist() == [even * 2.0 ** (scale - 127), odd * 2.0 ** (scale - 127)], byte


def test_scales_decode_exactly() -> None:
    got = decode_scale(torch.arange(256, dtype=torch.int32).to(torch.uint8)).double()
    assert got[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert got[255].isnan()


def test_low_nibble_is_the_even_column() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = pack(codes)
    assert packed[0].item() == 0x10
    assert packed[7].item() == 0xFE
    assert torch.equal(unpack(packed), codes)


def test_each_scale_covers_its_own_32_columns() -> None:
    packed = torch.full((2, 48), 0x22, dtype=torch.uint8)  # all ones, 96 columns
    scale = torch.tensor([[127, 128, 129], [120, 121, 122]], dtype=torch.uint8)
    got = dequantize(packed, scale, F32)
    for row in range(2):
        for column in range(96):
            assert got[row, column] == 2.0 ** (int(scale[row, column // 32]) - 127)


def test_dequantize_works_on_stacked_experts() -> None:
    torch.manual_seed(0)
    packed = torch.randint(0, 256, (3, 4, 32), dtype=torch.uint8)
    scale = torch.randint(100, 140, (3, 4, 2), dtype=torch.uint8)
    whole = dequantize(packed, scale, F64)
    for expert in range(3):
        assert torch.equal(whole[expert], dequantize(packed[expert], scale[expert], F64))


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="64 columns need 2 scales"):
        dequantize(torch.zeros(1, 32, dtype=torch.uint8), torch.zeros(1, 4, dtype=torch.uint8), F32)
    with pytest.raises(InputError, match="even"):
        pack(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(InputError, match="multiple of 32"):
        quantize(torch.zeros(1, 48))
    with pytest.raises(InputError, match="multiple of 32"):
        quantize_mxfp8(torch.zeros(1, 48), "floor")
    with pytest.raises(InputError, match="floor and ceil"):
        quantize_mxfp8(torch.zeros(1, 32), "nearest")  # type: ignore[arg-type]


def test_quantize_finds_the_nearest_code_under_its_scale() -> None:
    torch.manual_seed(1)
    weight = torch.randn(40, 64, dtype=F64) * 0.03
    packed, scale = quantize(weight)
    step = decode_scale(scale).double().repeat_interleave(32, dim=-1)
    grid = torch.tensor(sorted(set(E2M1)), dtype=F64) * step[..., None]
    nearest = (grid - weight[..., None]).abs().amin(-1)
    torch.testing.assert_close((dequantize(packed, scale, F64) - weight).abs(), nearest, rtol=1e-12, atol=1e-15)
    largest = weight.view(40, 2, 32).abs().amax(-1) / decode_scale(scale).double()
    assert ((largest >= 4) & (largest < 8)).all()


def test_quantize_keeps_representable_weights_and_breaks_ties_to_the_even_code() -> None:
    row = torch.tensor([6.0, -6, 4, -4, 3, -3, 2, -2, 1.5, -1.5, 1, -1, 0.5, -0.5, 0, 0] * 2, dtype=F64)
    for power in (-20, 0, 9):
        assert torch.equal(dequantize(*quantize(row * 2.0**power), F64), row * 2.0**power)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4, dtype=F64)
    assert dequantize(*quantize(ties), F64)[:8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    assert torch.equal(dequantize(*quantize(torch.zeros(1, 32)), F32), torch.zeros(1, 32))


def _e4m3_values() -> np.ndarray:
    values = [m * 2.0**-9 for m in range(8)]  # subnormals
    values += [(8 + m) / 8 * 2.0**e for e in range(-6, 9) for m in range(8)]
    return np.array(sorted(value for value in values if value <= 448))


def _mxfp8_by_search(row: np.ndarray, rounding: str) -> np.ndarray:
    """Independent of the code under test: the scale by a loop over exponents, the codes by search."""
    grid, out = _e4m3_values(), []
    for group in row.reshape(-1, 32):
        largest = np.abs(group).max()
        if rounding == "floor":
            exponent = max(e for e in range(-127, 128) if 2.0 ** (e + 8) <= largest)
        else:
            exponent = min(e for e in range(-127, 128) if 448 * 2.0**e >= largest)
        for value in group:
            scaled = min(abs(value) / 2.0**exponent, 448)
            out.append(np.sign(value) * grid[np.abs(grid - scaled).argmin()] * 2.0**exponent)
    return np.array(out)


@pytest.mark.parametrize("rounding", ["floor", "ceil"])
def test_mxfp8_agrees_with_a_search_over_all_codes(rounding: str) -> None:
    rng = np.random.default_rng(0)
    row = rng.normal(size=32 * 24) * np.repeat(2.0 ** rng.uniform(-12, 12, 24), 32)
    got = quantize_mxfp8(torch.tensor(row), rounding)  # type: ignore[arg-type]
    np.testing.assert_array_equal(got.numpy(), _mxfp8_by_search(row, rounding))


def test_mxfp8_roundings_differ_only_past_mantissa_1_75() -> None:
    for largest, floor, ceil in ((1.75, 1.75, 1.75), (1.76, 1.75, 1.75), (1.9375, 1.75, 2.0), (1.99, 1.75, 2.0)):
        row = torch.zeros(32, dtype=F64)
        row[3], row[4] = largest, 2.0**-14
        assert quantize_mxfp8(row, "floor")[3].item() == floor, largest
        assert quantize_mxfp8(row, "ceil")[3].item() == ceil, largest
    # past 1.75 the step of small values doubles: 2^-17 is floor's smallest code and half of ceil's
    row = torch.zeros(32, dtype=F64)
    row[0], row[1] = 1.9, 2.0**-17
    assert quantize_mxfp8(row, "floor")[1].item() == 2.0**-17
    assert quantize_mxfp8(row, "ceil")[1].item() == 0.0
    row[0] = 1.7
    assert torch.equal(quantize_mxfp8(row, "floor"), quantize_mxfp8(row, "ceil"))


def test_mxfp8_groups_are_independent_and_non_finite_ones_are_nan() -> None:
    x = torch.ones(2, 96)
    x[0, 32:64] *= 1e-30
    x[1, 40] = float("nan")
    x[1, 70] = float("inf")
    got = quantize_mxfp8(x, "ceil")
    assert torch.allclose(got[0, 32:64], torch.full((32,), 1e-30), rtol=2**-4, atol=0)
    assert torch.equal(got[:, :32], x[:, :32])
    assert got[1, 32:].isnan().all()
    assert torch.equal(quantize_mxfp8(torch.zeros(32), "floor"), torch.zeros(32))
    assert quantize_mxfp8(x.to(BF16), "ceil").dtype == BF16
