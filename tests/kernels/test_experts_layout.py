"""The layout of held experts: a bijection of the checkpoint's bits, and operands that are the codes' values."""

from __future__ import annotations

import struct

import pytest
import torch
from k3lab.kernels import InputError
from k3lab.kernels.experts import layout
from k3lab.kernels.experts.twin import ExpertWeights
from k3lab.kernels.mxfp4 import E2M1, unpack

EXPERTS, INNER, LATENT = 3, 64, 96


def drawn(seed: int = 0) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    up = (EXPERTS, INNER, LATENT // 2), (EXPERTS, INNER, LATENT // 32)
    down = (EXPERTS, LATENT, INNER // 2), (EXPERTS, LATENT, INNER // 32)
    return ExpertWeights(*(some(*shape) for shape in (*up, *up, *down)))


def as_bf16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def test_every_bit_has_one_place() -> None:
    assert sorted(layout.places()) == list(range(128))


def test_loading_and_unloading_lose_no_bit() -> None:
    experts = drawn()
    held = layout.load(experts)
    back = layout.unload(held)
    for name in ExpertWeights.__dataclass_fields__:
        assert torch.equal(getattr(experts, name), getattr(back, name)), name
    assert sum(t.numel() for t in held.values()) == sum(
        getattr(experts, name).numel() for name in ExpertWeights.__dataclass_fields__
    )
    noise = {name: torch.randint(0, 256, tensor.shape, dtype=torch.uint8) for name, tensor in held.items()}
    again = layout.load(layout.unload(noise))
    assert all(torch.equal(noise[name], again[name]) for name in noise)


@pytest.mark.parametrize("code", range(16))
def test_an_operand_is_its_codes_value(code: int) -> None:
    """All codes, subnormal and minus zero too, in both halves of all sixteen operands, beside every other code."""
    for other in range(16):
        codes = torch.full((32, 32), other, dtype=torch.uint8)
        codes[:, 0::2] = code
        words = struct.unpack("<128I", bytes(layout.encode_block(codes).tolist()))
        for lane in range(32):
            for operand in layout.operands(words[4 * lane : 4 * lane + 4]):
                low, high = as_bf16(operand & 0xFFFF), as_bf16(operand >> 16)
                assert low * 2.0**126 == E2M1[code]
                assert high * 2.0**126 == E2M1[other]
                assert struct.pack("<d", low) == struct.pack("<d", E2M1[code] * 2.0**-126)
                assert low * 2.0**layout.LIFTED == E2M1[code] * 2.0**layout.WEIGHT_EXPONENT


def lane_codes(held: torch.Tensor, lane: int) -> list[list[tuple[int, int]]]:
    """[tile][a register's place: k step 2 (or 3 + 2)]: codes of the two halves of each operand of a lane."""
    words = struct.unpack("<4I", bytes(held.view(32, 16)[lane].tolist()))
    pairs = []
    for operand in layout.operands(words):
        halves = ((operand >> shift) & 0xFFFF for shift in (0, 16))
        pairs.append(tuple((bits >> 12 & 8) | (bits >> 6 & 7) for bits in halves))
    return [pairs[:8], pairs[8:]]


@pytest.mark.parametrize("expert", [0, 2])
def test_each_lane_holds_the_operands_of_its_rows_and_columns(expert: int) -> None:
    """Rows g and g + 8 of a tile and columns 8 q to 8 q + 7; a lane's scales are those of its four rows."""
    experts = drawn(1)
    held = layout.load(experts)
    gate, up, down = (unpack(one)[expert] for one in (experts.w1, experts.w3, experts.w2))
    for lane in range(32):
        g, q = divmod(lane, 4)
        for unit, group in ((0, 0), (3, 2), (1, 1)):
            tiles = lane_codes(held["w13"][expert, unit, group], lane)
            scales = held["w13_scale"][expert, unit, group].view(8, 4)[g].tolist()
            for tile, matrix in enumerate((gate, up)):
                for place, pair in enumerate(tiles[tile]):
                    step, after, upper = place // 4, place // 2 % 2, place % 2
                    row, column = 16 * unit + g + 8 * upper, 32 * group + 8 * q + 4 * step + 2 * after
                    assert list(pair) == matrix[row, column : column + 2].tolist()
                for upper in range(2):
                    scale = (experts.w1_scale, experts.w3_scale)[tile][expert, 16 * unit + g + 8 * upper, group]
                    assert scales[2 * tile + upper] == scale
        for task, group in ((0, 0), (2, 1)):
            tiles = lane_codes(held["w2"][expert, task, group], lane)
            scales = held["w2_scale"][expert, task, group].view(8, 4)[g].tolist()
            for tile in range(2):
                for place, pair in enumerate(tiles[tile]):
                    step, after, upper = place // 4, place // 2 % 2, place % 2
                    row, column = 32 * task + 4 * g + 2 * tile + upper, 32 * group + 8 * q + 4 * step + 2 * after
                    assert list(pair) == down[row, column : column + 2].tolist()
                    assert scales[2 * tile + upper] == experts.w2_scale[expert, row, group]


def test_the_shared_expert_loses_no_bit_and_lies_as_its_lanes_read_it() -> None:
    generator = torch.Generator().manual_seed(2)
    gate, up, down = (torch.randn(s, generator=generator).bfloat16() for s in ((64, 96), (64, 96), (96, 64)))
    held = layout.load_shared(gate, up, down)
    assert all(torch.equal(a, b) for a, b in zip((gate, up, down), layout.unload_shared(**held), strict=True))
    assert held["gate_up"].shape == (16, 3, 256) and held["down"].shape == (12, 2, 256)
    for lane in range(32):
        g, q = divmod(lane, 4)
        source = gate if g < 4 else up
        part = held["gate_up"][5, 2].view(32, 8)[lane]
        assert torch.equal(part, source[20 + g % 4, 64 + 8 * q : 72 + 8 * q])
        assert torch.equal(held["down"][7, 1].view(32, 8)[lane], down[56 + g, 32 + 8 * q : 40 + 8 * q])


def test_the_layouts_refuse_widths_that_are_no_whole_groups() -> None:
    experts = drawn()
    narrow = ExpertWeights(*(getattr(experts, name)[:, :48] for name in ExpertWeights.__dataclass_fields__))
    with pytest.raises(InputError, match="both widths must be multiples of 32"):
        layout.load(narrow)
    with pytest.raises(InputError, match="both widths must be multiples of 32"):
        layout.load_shared(torch.zeros(48, 96), torch.zeros(48, 96), torch.zeros(96, 48))
