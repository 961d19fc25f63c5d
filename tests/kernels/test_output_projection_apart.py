"""The output projection with blocks of their own for rows: refusals, space, machine code."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise

import pytest
from k3lab.kernels.gpu_cards import GPU_CARDS
from k3lab.kernels.output_projection import common
from k3lab.kernels.output_projection.cute_apart_engine import fit_together, room, shared
from k3lab.tuning.cost_features import resident_blocks
from k3lab.tuning.cubin import kernel_resources, sass
from k3lab.tuning.evaluate import not_together
from k3lab.tuning.sass_order import WAIT, order, places, unwaited

from .test_output_projection_engines import (
    APART,
    CARDS,
    SLOW_PATHS,
    SPLIT,
    config,
    packets_of,
    problem,
    stores_and_loads,
)

TILE = r"UTMALDG\..*"
SLICE = r"UBLKCP\..*"
GLOBAL = r"(LDG|LD|LDGSTS|STG|ST|ATOM|ATOMG|RED|REDG|UTMALDG|UTMASTG|UTMAREDG|UBLKCP|UBLKRED)(\..*)?"


def test_refusals_say_why():
    assert APART.refuses(problem(), "sm_103a") is None
    assert APART.refuses(problem(rows=16, tp=8), "sm_90a") is None
    assert "sm_80" in APART.refuses(problem(), "sm_80")
    assert "hidden 4096" in APART.refuses(problem(hidden=4096), "sm_90a")
    assert "width 100 is a multiple of neither 192 nor 256" in APART.refuses(problem(width=100), "sm_90a")
    assert "9 saved blocks" in APART.refuses(problem(blocks=9), "sm_90a")
    assert "at most 16 ranks" in APART.refuses(problem(tp=32, width=384), "sm_90a")
    assert "17 rows: at most 16 have blocks of their own" in APART.refuses(problem(rows=17), "sm_90a")


@pytest.mark.parametrize(
    ("rows", "change", "why"),
    [
        (8, {"k_order": "invariant", "warps_k": 8, "depth": 3}, "invariant needs warps_k 6"),
        (8, {"depth": 6}, "more tiles in flight than a warp has"),
        (8, {"warps_k": 4, "row_blocks": 4, "rehearse": 1}, "no warp of a row's block has nothing to finish"),
        (8, {"warps_k": 6, "row_blocks": 4, "rehearse": 1}, "no warp of a row's block has nothing to finish"),
        (16, {"row_blocks": 8}, "more clusters of 8 than the GPCs of H200 hold at two blocks an SM"),
    ],
)
def test_illegal_configs_are_explained(rows, change, why):
    space = APART.space(problem(rows), CARDS["sm_90a"])
    assert why in space.illegal({**space.default, **change})


def test_two_blocks_of_many_tiles_exceed_an_sm():
    space = APART.space(problem(16, 8), CARDS["sm_90a"])
    chosen = {**space.default, "warps_k": 8, "depth": 4}
    assert "two blocks of so many tiles exceed the shared memory of an SM of H200" in space.illegal(chosen)


def test_warps_that_do_not_divide_the_width_are_explained():
    space = APART.space(problem(8, width=192), CARDS["sm_90a"])
    assert "8 warps of 32 columns do not divide width 192" in space.illegal({**space.default, "warps_k": 8})


@pytest.mark.parametrize("card", GPU_CARDS.values(), ids=lambda card: card.name)
def test_what_is_legal_fits_at_two_blocks_an_sm(card):
    """By the card's GPCs and shared memory; both sizes of clusters are legal for few rows, the smaller for all."""
    for rows in range(1, 17):
        for tp in (4, 8, 16):
            space = APART.space(problem(rows, tp), card)
            legal = {size: {**space.default, "row_blocks": size, "rehearse": 0} for size in (4, 8)}
            legal = {size: c for size, c in legal.items() if space.illegal(c) is None}
            assert 4 in legal and (8 in legal or rows > 8)
            for size, c in legal.items():
                assert fit_together(rows, c, card) and shared(rows, c) <= room(card)
                clusters = rows + 128 // size
                assert clusters <= sum(2 * (sms // size) for sms in card.gpc_sms)
    assert 2 * (room(card) + 1024) <= card.shared_per_sm


def test_a_default_is_eight_blocks_a_row_where_they_fit():
    for rows, size in ((1, 8), (8, 8), (14, 8), (15, 4), (16, 4)):
        chosen = APART.space(problem(rows), CARDS["sm_90a"]).default
        assert chosen["row_blocks"] == size and chosen["rehearse"] == (size == 8)


# -- machine code --------------------------------------------------------------------------------
def not_early(code):
    """The code as a launch takes it that is not early: branches that go around a dependency wait alone are not taken."""
    found = []
    for one, wait, behind in zip(code, code[1:], code[2:], strict=False):
        around = wait.mnemonic == WAIT and one.target == behind.address and one.falls_through
        found.append(dataclasses.replace(one, target=None) if around else one)
    return found + code[-2:]


def asked(code):
    """What a path from the entry asks memory for, or stores, ahead of a dependency wait."""
    ahead = [code[place].mnemonic for place in unwaited(code)]
    assert "EXIT" not in ahead
    return [name for name in ahead if re.fullmatch(GLOBAL, name)]


MACHINE = [
    (16, 8, "kda", {}),
    (16, 1, "restart", {"release": "entry", "rehearse": 0}),
    (8, 8, "kda", {"depth": 2}),
    (4, 16, "kda", {"release": "end", "warps_k": 8, "depth": 2}),
    (16, 8, "mla", {"packet": "b32e32", "row_blocks": 4, "rehearse": 0, "backoff": 20}),
    (16, 8, "kda", {"packet": "b32e32"}),
]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize(("tp", "rows", "kind", "change"), MACHINE)
def test_machine_code(arch, tp, rows, kind, change):
    """No spills, and room for two blocks an SM; nothing but weights ahead of the wait; packets are single accesses."""
    one, card = problem(rows, tp, kind), CARDS[arch]
    chosen = config(one, APART, **change)
    assert APART.space(one, card).illegal(chosen) is None
    compiled = APART.compile(one, chosen, arch)
    (launch,) = compiled.launches
    found, code = kernel_resources(launch), order(launch.cubin)
    size, depth, steps = chosen["row_blocks"], chosen["depth"], one.width // common.gemm_columns(chosen)
    assert launch.kernel.startswith("k3_output_projection_cute_apart_step")
    assert (launch.blocks, launch.cluster) == (128 + rows * size, (size, 1, 1))
    assert launch.pdl and launch.needs_residency
    # two blocks an SM, or a row's wait for blocks that never come
    assert found.spill_instructions == 0 and found.stack_bytes == 0
    assert found.dynamic_shared_bytes == launch.shared_bytes == shared(rows, chosen)
    assert resident_blocks(found, card) >= 2 and not_together(compiled, [found], card) is None
    assert not SLOW_PATHS.search(sass(launch.cubin))
    # the dependency wait
    waits = places(code, WAIT)
    assert waits and not any(code[wait].predicated for wait in waits)
    late = sorted(asked(not_early(code)))
    assert [name for name in late if re.fullmatch(TILE, name)] == ["UTMALDG.2D"] * depth
    assert len(late) == depth + 3 and all(re.fullmatch(SLICE, name) for name in late if "UTMALDG" not in name)
    # an early launch asks for a row's slices there too, and for its counter
    more = asked(code)
    slices = 3 + one.blocks + (kind != "restart")
    assert sum(bool(re.fullmatch(SLICE, name)) for name in more) == len(places(code, SLICE)) == slices
    rest = [name for name in more if not re.fullmatch(f"{TILE}|{SLICE}", name)]
    assert rest == ["LDG.E.STRONG.GPU"]
    # a tile comes again when what was there is read
    tiles = places(code, TILE)
    assert len(tiles) == steps and len(places(code, r"MEMBAR\.ALL\.CTA")) == steps - depth
    for before, again in pairwise(tiles):
        if again > waits[0]:
            read = max(place for place in places(code, r"LDS\.128") if place < again)
            (fence,) = (
                place for place in places(code, r"FENCE\.VIEW\.ASYNC.*") if before < place < again and place > waits[0]
            )
            assert read < fence < again
    # PDL
    releases = places(code, "PREEXIT")
    # of the product, of a row, and of one that does not live: without those of rows the next launch waits for their ends
    assert len(releases) == {"end": 0, "entry": 2, "loads": 3}[chosen["release"]]
    if chosen["release"] == "entry":
        assert releases[0] < tiles[0] and releases[1] < places(code, SLICE)[0]
    if chosen["release"] == "loads":
        assert tiles[depth - 1] < releases[0] < places(code, r"STG\..*")[0]
        assert not set(releases) & set(unwaited(code))
    # packets: whole, to and from the other ranks at system scope; a row's sums in its blocks' shared memory
    turns = -(-rows // chosen["warps_k"])
    assert stores_and_loads(code) == packets_of(chosen, turns * (tp // 4), tp)
    assert not places(code, r"(LDG|STG)\.E\.(64|128)\.STRONG\.GPU|MEMBAR\.(?!ALL\.CTA).*|ERRBAR.*")
    assert len(places(code, r"STAS\.128")) == 3 * size and len(places(code, r"UCGABAR_WAIT.*")) == 1
    # each wait for ranks, of so many as a thread has registers for, looks at the clock and can claim the record
    at_once = {192: 8, 256: 4}[launch.threads] if chosen["packet"] == "b32e32" else 16
    assert len(places(code, r"ATOMG\.E\.CAS\.STRONG\.GPU")) == -(-tp // at_once)
    assert bool(places(code, "NANOSLEEP")) == (chosen["backoff"] > 0)
    n_tiles, m_tiles, _ = common.gemm_tiles(rows, chosen)
    assert len(places(code, r"HMMA\.16816\.F32\.BF16")) == 2 * n_tiles * m_tiles * steps


@pytest.mark.parametrize(("warps", "size"), [(4, 4), (4, 8), (8, 4), (8, 8)])
@pytest.mark.parametrize("packet", ["bf16x7e16", "b32e32"])
def test_two_blocks_share_an_sm_at_any_number_of_warps(warps, size, packet):
    one = problem(8, 16)
    chosen = config(one, APART, warps_k=warps, row_blocks=size, packet=packet, rehearse=0, depth=2)
    assert APART.space(one, CARDS["sm_90a"]).illegal(chosen) is None
    (launch,) = APART.compile(one, chosen, "sm_90a").launches
    found = kernel_resources(launch)
    assert found.spill_instructions == 0 and found.stack_bytes == 0
    assert resident_blocks(found, CARDS["sm_90a"]) >= 2


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize("change", [{}, {"exchange": "two_shot"}], ids=str)
def test_a_consumer_whose_rows_are_clusters_asks_for_weights_alone_ahead_of_its_wait(arch, change):
    """Where it waits at its start. At its exit all slices are there before, and behind it only the counter is stored."""
    one = problem(17, 16)
    for wait in ("start", "exit"):
        chosen = config(one, SPLIT, row_sums="cluster", mixers=8, consumer_wait=wait, **change)
        assert SPLIT.space(one, CARDS[arch]).illegal(chosen) is None
        code = order(SPLIT.compile(one, chosen, arch).launches[1].cubin)
        ahead = asked(code)
        slices = [name for name in ahead if re.fullmatch(SLICE, name)]
        assert not any(code[place].predicated for place in places(code, WAIT))
        if wait == "start":
            assert ahead == slices and len(slices) == 3
        else:
            assert len(slices) == len(places(code, SLICE)) == 3 + one.blocks + 1
            (last,) = places(code, WAIT)
            stores = [
                code[place].mnemonic for place in places(code, r"(STG|ST|RED|REDG|ATOM|ATOMG)(\..*)?") if place > last
            ]
            assert "STG.E.STRONG.GPU" in stores and not [name for name in stores if "SYS" in name]
