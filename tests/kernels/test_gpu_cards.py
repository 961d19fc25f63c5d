"""GPU cards: every number has a source, and the relations between the numbers hold."""

from __future__ import annotations

import dataclasses

import pytest
from k3lab.kernels import InputError
from k3lab.kernels.gpu_cards import GPU_CARDS, GpuCard, gpu_card

CARDS = list(GPU_CARDS.values())


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_number_has_a_source(card: GpuCard) -> None:
    numbers = {field.name for field in dataclasses.fields(GpuCard)} - {"name", "sources"}
    assert set(card.sources) == numbers
    assert all(len(text) > 10 for text in card.sources.values())
    assert (card.measured_read_bandwidth is None) == card.sources["measured_read_bandwidth"].startswith("not measured")


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_numbers_are_consistent(card: GpuCard) -> None:
    assert card.shared_per_block == card.shared_per_sm - 1024  # the system's share of a block
    assert (card.tmem_per_sm > 0) == card.arch.startswith("sm_10")
    assert card.read_bandwidth <= card.memory_bandwidth
    assert card.nvlink_bandwidth < card.memory_bandwidth / 4


def test_the_floor_uses_the_measured_bandwidth_where_there_is_one() -> None:
    assert gpu_card("h200").read_bandwidth == pytest.approx(4.67e12)
    assert gpu_card("h200").read_bandwidth_source == "measured"
    assert gpu_card("GB300").read_bandwidth == pytest.approx(8.0e12)
    assert gpu_card("GB300").read_bandwidth_source == "nominal"


def test_grid_sizes_of_the_public_plans() -> None:
    assert [gpu_card(name).sms for name in ("gb300", "b300", "b200", "h200", "h100")] == [152, 148, 148, 132, 132]


def test_unknown_card_lists_those_there_are() -> None:
    with pytest.raises(InputError, match="unknown GPU 'a100'; GPUs with a card: GB300, B300, B200, H200, H100"):
        gpu_card("a100")
