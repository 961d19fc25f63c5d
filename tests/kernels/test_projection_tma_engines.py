"""The TMA engines of the attention projection: what they refuse, and their spaces."""

from __future__ import annotations

import dataclasses
import random

import pytest
from k3lab.kernels import SMALL_K3, InputError
from k3lab.kernels.attention_projection.cute_tma_tiles import busy, clusters_at_once, layers

from .tma_case import CARDS, CONFIG, FAMILY, SHAPES, TCGEN05, WGMMA, problem


def test_refusals_say_why():
    one = problem(16)
    assert WGMMA.refuses(one, "sm_90a") is None
    assert TCGEN05.refuses(one, "sm_100a") is None and TCGEN05.refuses(one, "sm_103a") is None
    assert "not among sm_90a" in WGMMA.refuses(one, "sm_103a")
    assert "not among sm_100a, sm_103a" in TCGEN05.refuses(one, "sm_90a")
    assert "float32" in WGMMA.refuses(dataclasses.replace(one, dtype="float32"), "sm_90a")
    assert "multiple of 64" in WGMMA.refuses(dataclasses.replace(one, hidden=7200), "sm_90a")
    assert "from 128 on" in WGMMA.refuses(dataclasses.replace(one, hidden=64), "sm_90a")


@pytest.mark.parametrize("arch", CARDS)
@pytest.mark.parametrize(("tp", "kind"), SHAPES)
@pytest.mark.parametrize("rows", [9, 64])
def test_spaces_fit_the_gpu(arch, tp, kind, rows):
    card, engine = CARDS[arch], WGMMA if arch == "sm_90a" else TCGEN05
    one = problem(rows, tp, kind)
    space = engine.space(one, card)
    assert len(space.legal) >= 200
    best = max(busy(one.outputs, c["tile_rows"], c["split"], c["multicast"], card) for c in space.legal)
    assert best > 0.9
    for config in random.Random(rows).sample(space.legal, 60):
        tiles = engine.tiles(one, config)
        assert tiles.shared_bytes <= card.shared_per_block
        assert tiles.tiles * tiles.tile_rows >= one.outputs > (tiles.tiles - 1) * tiles.tile_rows
        assert min(tiles.first(r + 1) - tiles.first(r) for r in range(tiles.split)) >= tiles.stages
        filling = (one.outputs, tiles.tile_rows, tiles.split, tiles.multicast, card)
        assert busy(*filling) >= 0.79 * best
        layer = layers(*filling)
        if layer > 1 and (config["k_order"] == "free" or one.outputs <= 64 * card.sms):
            assert layer * (tiles.shared_bytes + 1024) <= card.shared_per_sm, "one layer waits for another"
            assert layer * tiles.threads * engine.registers(tiles) <= card.registers_per_sm, "the same"
    for name, values in (("multicast", {1, 2, 4}), ("reduce", {"pull", "push"}), ("producers", {1, 2}), ("k_start", {"first", "spread"})):  # fmt: skip
        assert {c[name] for c in space.legal} == values
    assert {layers(one.outputs, c["tile_rows"], c["split"], c["multicast"], card) for c in space.legal} == {1, 2}


def test_the_small_model_has_a_default_too():
    for rows in (1, 5, 16):
        for kind in ("kda", "mla"):
            one = FAMILY.problem(SMALL_K3, tp=4, rows=rows, kind=kind)
            assert WGMMA.space(one, CARDS["sm_90a"]).legal


def test_defaults_fill_an_h200():
    assert WGMMA.space(problem(64), CARDS["sm_90a"]).default == CONFIG  # 66 clusters of 2
    few = WGMMA.space(problem(16), CARDS["sm_90a"]).default
    assert few == {**CONFIG, "k_tile": 64, "stages": 9}
    eight = WGMMA.space(problem(64, tp=8), CARDS["sm_90a"]).default
    assert (eight["tile_rows"], eight["split"]) == (48, 1)  # 131 blocks


def test_clusters_lie_in_one_gpc():
    card = CARDS["sm_90a"]
    for split in (2, 3, 4, 5, 8):
        assert clusters_at_once(card, split) == sum(sms // split for sms in card.gpc_sms) <= card.sms // split
    assert clusters_at_once(card, 1) == card.sms


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stages": 8}, "exceeds the 232448 bytes"),
        ({"k_tile": 64, "stages": 12, "split": 4, "tile_rows": 108, "multicast": 4}, "4 x 4 blocks exceed the 8"),
        ({"stages": 12, "split": 3, "tile_rows": 77}, "exceeds the 232448 bytes"),
        ({"tile_rows": 64, "split": 1}, "leave more SMs of H200 idle"),
        ({"tile_rows": 25, "stages": 6}, "do not fit beside each other"),
        ({"k_order": "invariant"}, "invariant: K is cut where 4 blocks"),
        (
            {"tile_rows": 108, "split": 4, "k_start": "spread", "stages": 2, "k_order": "invariant"},
            "begins with its first",
        ),
        ({"tile_rows": 200}, "legal values are"),
        ({"stages": 1}, "legal values are"),
    ],
)
def test_illegal_configs_are_explained(change, why):
    space = WGMMA.space(problem(64), CARDS["sm_90a"])
    with pytest.raises(InputError, match=why):
        space.check({**CONFIG, **change})


def test_blocks_beside_each_other_share_the_registers_of_an_sm():
    """TP4, 60 clusters of 4 in two layers: two blocks of 18 warps with 32 sums a thread exceed 65536, with 16 they do not."""
    for rows, fits in ((64, False), (32, True)):
        space = WGMMA.space(problem(rows, tp=4), CARDS["sm_90a"])
        config = {**CONFIG, "tile_rows": 208, "split": 4, "k_tile": 64, "stages": 2, "producers": 2}
        why = space.illegal(config)
        assert (why is None) == fits
        assert fits or "rings and registers do not fit" in why


def test_invariant_configs_cut_k_in_one_way():
    cuts = set()
    for card, engine in ((CARDS["sm_90a"], WGMMA), (CARDS["sm_103a"], TCGEN05)):
        for tp, kind in SHAPES:
            for rows in (1, 16, 64):
                one = problem(rows, tp, kind)
                # neither when the next kernel may start nor how many warps copy has a say in where K is cut
                legal = (
                    engine.space(one, card)
                    .restricted({"k_order": "invariant", "release": "loads", "producers": 1})
                    .legal
                )
                assert legal
                for tiles in (engine.tiles(one, c) for c in legal):
                    cuts.add(tuple(tiles.first(r) * tiles.k_tile for r in range(tiles.split + 1)))
    assert cuts == {(0, 1792, 3584, 5376, 7168)}
