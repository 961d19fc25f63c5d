"""cute_mma: what it refuses, its space, and the machine code of its configs."""

import dataclasses
import itertools
import random

import pytest
from k3lab.kernels import K3, SMALL_K3, family
from k3lab.kernels.attention_projection.cute_mma_engine import INVARIANT, mma_tiles, registers, tile_values
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.compiling import compile_config
from k3lab.tuning.cubin import kernel_resources
from k3lab.tuning.sass_order import order, places, release_fault, wait_fault

FAMILY = family("attention_projection")
ENGINE = FAMILY.engine("cute_mma")
WEIGHTS = r"LDG\.E\.NA\..*128"
CARDS = {"sm_90a": gpu_card("H200"), "sm_100a": gpu_card("B200"), "sm_103a": gpu_card("GB300")}


def problem(rows, tp=16, kind="kda"):
    return FAMILY.problem(K3, tp=tp, rows=rows, kind=kind)


def drawn(rows, card, count, seed=0):
    """Legal configs drawn point by point: the space is too large to list in every test."""
    space, rng, found = ENGINE.space(problem(rows), card), random.Random(seed), []
    while len(found) < count:
        config = {param.name: rng.choice(param.values) for param in space.params}
        if space.illegal(config) is None:
            found.append(config)
    return found


def test_refusals_say_why():
    assert ENGINE.refuses(problem(64), "sm_103a") is None
    assert "multiple of 256" in ENGINE.refuses(dataclasses.replace(problem(1), hidden=7040), "sm_90a")
    assert "float32" in ENGINE.refuses(dataclasses.replace(problem(1), dtype="float32"), "sm_90a")
    assert "sm_80" in ENGINE.refuses(problem(1), "sm_80")


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("kind", ["kda", "mla"])
def test_spaces_are_legal_and_can_be_listed(card, tp, kind):
    from k3lab.tuning.propose import ENUMERABLE

    for rows in (1, 7, 64):
        space = ENGINE.space(problem(rows, tp, kind), card)
        assert space.illegal(space.default) is None
        assert space.size <= ENUMERABLE


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 64])
def test_the_small_model_has_a_default_too(rows):
    space = ENGINE.space(FAMILY.problem(SMALL_K3, tp=4, rows=rows), CARDS["sm_103a"])
    assert space.illegal(space.default) is None


@pytest.mark.parametrize("sms", [132, 148, 152])
@pytest.mark.parametrize("outputs", [2880, 3216, 3648, 6288])
def test_some_tile_covers_n_in_one_wave_of_blocks(sms, outputs):
    blocks = {-(-outputs // tile) * split for tile in tile_values(outputs, sms) for split in (1, 2, 4)}
    assert any(0.95 * sms <= count <= sms for count in blocks)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"k_order": "invariant", "chunks": 2}, "invariant needs chunks 1, split_k 1, warps_k 8"),
        ({"chunks": 4}, "exceed the 16 rows of an MMA"),
        ({"warps_k": 16, "split_k": 4, "chunks": 2}, "do not divide hidden 7168"),
        ({"tile_n": 2}, "less than one load of a warp"),
        ({"warps_n": 2, "tile_n": 4}, "leave one without work"),
        ({"warps_k": 28, "warps_n": 2, "chunks": 1, "depth": 1, "tile_n": 16}, "more than 1024 threads"),
        ({"tile_n": 32, "depth": 6, "warps_k": 16, "chunks": 2}, "exceed a thread's registers"),
        ({"warps_k": 28, "chunks": 2, "depth": 5}, "more steps in flight"),
        ({"tile_n": 32, "split_k": 1}, "too few blocks"),
    ],
)
def test_illegal_configs_are_explained(change, why):
    space = ENGINE.space(problem(8), CARDS["sm_90a"])
    assert why in space.illegal({**space.default, **change})


def test_invariant_configs_share_what_the_sum_depends_on():
    orders = set()
    for rows, tp in ((1, 16), (8, 8), (64, 4)):
        one = problem(rows, tp)
        space = ENGINE.space(one, CARDS["sm_90a"])
        config = {**space.default, **INVARIANT, "k_order": "invariant", "depth": 2}
        assert space.illegal(config) is None
        orders.add(ENGINE.summation_order(one, config))
        assert space.illegal({**config, "warps_k": 4}) is not None
    assert len(orders) == 1


CORNERS = [
    ("sm_90a", 1),
    ("sm_90a", 8),
    ("sm_90a", 16),
    ("sm_90a", 64),
    ("sm_100a", 8),
    ("sm_103a", 2),
    ("sm_103a", 64),
]
"""Every architecture, rows of less than a tile, of one, of two and of several."""


@pytest.mark.parametrize(
    ("arch", "rows"),
    [
        pytest.param(arch, rows, marks=() if (arch, rows) in CORNERS else pytest.mark.slow)
        for arch, rows in itertools.product(CARDS, (1, 2, 4, 8, 16, 64))
    ],
)
def test_machine_code(arch, rows):
    """Configs from all over the space: no spills, weights in flight before the wait, everything else behind it."""
    for config in drawn(rows, CARDS[arch], 2, seed=rows):
        one = problem(rows)
        (launch,) = compile_config(ENGINE, one, config, arch).launches
        found = kernel_resources(launch)
        code = order(launch.cubin)
        n_tiles, m_tiles, halves = mma_tiles(rows, config)
        assert found.kernel.startswith("k3_attention_projection_cute_mma_stream"), config
        assert found.spill_instructions == 0 and found.stack_bytes == 0, config
        assert found.registers * found.threads <= 65536, config
        assert found.dynamic_shared_bytes <= CARDS[arch].shared_per_block
        assert (launch.cluster, launch.pdl) == ((config["split_k"], 1, 1), True)
        assert wait_fault(code, WEIGHTS, ahead=config["depth"] * n_tiles) is None, config
        assert release_fault(code, WEIGHTS, config["release"]) is None, config
        # two MMAs of 16 columns for each pair of tiles and step in the text; nothing is loaded twice for them
        steps = len(places(code, WEIGHTS)) // n_tiles
        assert len(places(code, r"HMMA\.16816\.F32\.BF16")) == 2 * n_tiles * m_tiles * steps, config
        assert len(places(code, r"LDG\.E\.128.*")) == m_tiles * halves * steps, config
        assert len(places(code, r"UCGABAR_WAIT")) == (2 if config["split_k"] > 1 else 0)


@pytest.mark.parametrize(
    ("arch", "split"),
    [
        ("sm_90a", 2),
        ("sm_90a", 4),
        ("sm_103a", 4),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("sm_100a", 2), ("sm_100a", 4), ("sm_103a", 2))),
    ],
)
def test_peers_are_read_between_the_barriers_of_the_cluster(arch, split):
    space = ENGINE.space(problem(8), CARDS[arch])
    config = {**space.default, "tile_n": 24, "split_k": split, "chunks": 1, "warps_k": 4, "depth": 2}
    assert space.illegal(config) is None
    (launch,) = compile_config(ENGINE, problem(8), config, arch).launches
    code = order(launch.cubin)
    first, last = places(code, r"UCGABAR_WAIT")
    reads = places(code, r"LD\.E")
    assert len(reads) == split
    assert first < reads[0] and reads[-1] < last
    assert places(code, r"MEMBAR\.ALL\.GPU") < places(code, r"UCGABAR_ARV"), "a barrier that publishes the sums"


def test_the_register_estimate_is_no_guess():
    """What the space refuses for its registers is near to what the compiler would take."""
    for config in drawn(8, CARDS["sm_90a"], 4, seed=9):
        (launch,) = compile_config(ENGINE, problem(8), config, "sm_90a").launches
        assert kernel_resources(launch).registers <= registers(8, config) + 16
