"""The TMA engines of the attention projection: index arithmetic, spaces, machine code, tensor maps in bundles."""

from __future__ import annotations

import ctypes
import dataclasses
import random
import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from k3lab.kernels import K3, SMALL_K3, InputError, family
from k3lab.kernels.attention_projection.cute_tma_tiles import BOX, GROUP, TmaTiles, busy, clusters_at_once, layers, up
from k3lab.kernels.bundle.schema import ArgModel
from k3lab.kernels.contract import Arg
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.compiling import compile_config
from k3lab.tuning.cubin import full_mnemonics, kernel_resources, sass
from k3lab.tuning.sass_order import order, wait_fault

FAMILY = family("attention_projection")
CARDS = {"sm_90a": gpu_card("H200"), "sm_100a": gpu_card("B200"), "sm_103a": gpu_card("GB300")}
WGMMA, TCGEN05 = FAMILY.engine("cute_wgmma"), FAMILY.engine("cute_tcgen05")
BUILDS = [(WGMMA, "sm_90a"), (TCGEN05, "sm_100a"), (TCGEN05, "sm_103a")]
SHAPES = [(16, "kda"), (16, "mla"), (8, "kda"), (8, "mla"), (4, "kda"), (4, "mla")]
CONFIG = {
    "tile_rows": 49, "split": 2, "multicast": 1, "k_tile": 128, "stages": 4, "reduce": "pull", "producers": 1,
    "k_start": "first", "release": "loads", "k_order": "free",
}  # fmt: skip


def problem(rows: int, tp: int = 16, kind: str = "kda"):
    return FAMILY.problem(K3, tp=tp, rows=rows, kind=kind)


# --- index arithmetic ---------------------------------------------------------------------------------------------


def odd_tiles(engine, seed: int) -> TmaTiles:
    """A small problem with a short last tile, uneven K ranges and few rows too many."""
    pick = random.Random(seed)
    split, k_tile, stages = pick.choice((1, 2, 3, 5)), pick.choice((64, 128)), pick.choice((2, 3))
    k_tiles = split * stages + pick.randrange(4)
    outputs, tile_rows = 16 * pick.randrange(2, 9), pick.randrange(17, 150)
    rows = pick.randrange(1, 21)
    return TmaTiles(
        outputs, k_tiles * k_tile, rows, tile_rows, split, k_tile, stages, pick.choice((1, 2, 4)),
        pick.choice(("pull", "push")), pick.choice((1, 2)), pick.choice(("first", "spread")),
        engine.mma_rows, engine.n_step, engine.mma_warps,
    )  # fmt: skip


def k_order(tiles: TmaTiles, tile: int, rank: int) -> list[int]:
    """K tiles of a block in the order of its stages, as ``next_tile`` goes on from ``start``."""
    first, last = tiles.first(rank), tiles.first(rank + 1)
    k, order = tiles.start(first, last, tile), []
    for _ in range(first, last):
        order.append(k)
        k = first if k + 1 == last and tiles.k_start == "spread" else k + 1
    return order


def run_block(tiles: TmaTiles, x: torch.Tensor, w: torch.Tensor, tile: int, rank: int) -> torch.Tensor:
    """One block as the kernels run it, on a flat ring: [n, mma_tile] sums; what no copy wrote is NaN."""
    ring = torch.full((tiles.ring_bytes // 2,), float("nan"))
    acc = torch.zeros(tiles.n, tiles.mma_tile)
    w_box, x_box = tiles.w_rows * BOX, tiles.n * BOX
    steps = k_order(tiles, tile, rank)
    assert len(steps) >= tiles.stages and sorted(steps) == list(range(tiles.first(rank), tiles.first(rank + 1)))
    for turn, step in enumerate(steps):
        stage = turn % tiles.stages
        arrived = 0
        for box in range(tiles.boxes):
            column = (step * tiles.boxes + box) * BOX
            place = (stage * tiles.boxes + box) * w_box
            live = w[tile * tiles.tile_rows : (tile + 1) * tiles.tile_rows, column : column + BOX]
            rows = torch.nn.functional.pad(live, (0, 0, 0, tiles.tile_rows - len(live)))
            ring[place : place + rows.numel()] = rows.flatten()
            place = tiles.x_offset + (stage * tiles.boxes + box) * x_box
            tokens = torch.nn.functional.pad(x[:, column : column + BOX], (0, 0, 0, tiles.n - len(x)))
            ring[place : place + x_box] = tokens.flatten()
            arrived += (rows.numel() + x_box) * 2
        assert arrived == tiles.expected_bytes
        for box in range(tiles.boxes):
            place = (stage * tiles.boxes + box) * w_box
            a = ring[place : place + tiles.mma_tile * BOX]
            assert a.numel() == tiles.mma_tile * BOX, "the MMA reads beyond the shared memory of the block"
            place = tiles.x_offset + (stage * tiles.boxes + box) * x_box
            acc += ring[place : place + x_box].view(tiles.n, BOX) @ a.view(tiles.mma_tile, BOX).T
    return acc


def register_places(tiles: TmaTiles) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight row, token row) of each sum in the consumers' registers, [32 x consumers, registers]."""
    thread = torch.arange(32 * tiles.consumers)[:, None]
    i = torch.arange(GROUP * tiles.register_groups)[None, :]
    if tiles.mma_rows == 64:  # wgmma: rows 8 apart and neighbouring columns
        return thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2
    return thread + 0 * i, i + 0 * thread  # a lane of tensor memory


Stored = list[tuple[int, int, float]]


def pulled(tiles: TmaTiles, blocks: list[torch.Tensor], rank: int) -> Stored:
    """(token row, weight row, sum) that a rank stores: sums in shared memory, read from all ranks."""
    assert tiles.n * tiles.pitch * 4 <= tiles.ring_bytes
    sums = [torch.nn.functional.pad(acc, (0, tiles.pitch - tiles.mma_tile), value=float("nan")) for acc in blocks]
    found: Stored = []
    for turn in range(tiles.turns):
        for thread in range(tiles.threads):
            row, within = tiles.at(tiles.group(turn, rank, thread))
            for i in range(GROUP):
                if row < tiles.n and within + i < tiles.tile_rows:
                    found.append((row, within + i, float(sum(block[row, within + i] for block in sums))))
    return found


def pushed(tiles: TmaTiles, blocks: list[torch.Tensor], rank: int) -> Stored:
    """The same by writes into the owner's shared memory: flat, what nobody wrote is NaN."""
    within, row = register_places(tiles)
    live, every = 32 * tiles.live_warps, range(tiles.register_groups)
    assert tiles.incoming_bytes % 16 == 0 and live <= 32 * tiles.consumers
    incoming, sent = torch.full((tiles.incoming_bytes // 4,), float("nan")), 0
    registers = [acc[row, within].view(32 * tiles.consumers, -1, GROUP) for acc in blocks]
    for source in range(tiles.split):
        for group in (g for g in every if source != rank == tiles.owner(g)):
            for thread in range(live):
                slot = tiles.slot(group, source, thread)
                assert slot % GROUP == 0 and bool(incoming[slot : slot + GROUP].isnan().all()), "two sums in one place"
                incoming[slot : slot + GROUP] = registers[source][thread, group]
                sent += 4 * GROUP
    assert sent == tiles.pushed_bytes(rank) <= tiles.incoming_bytes
    found: Stored = []
    for group in (g for g in every if tiles.owner(g) == rank):
        for thread in range(live):
            total = torch.zeros(GROUP)
            for source in range(tiles.split):
                slot = tiles.slot(group, source, thread)
                total += registers[source][thread, group] if source == rank else incoming[slot : slot + GROUP]
            for i, j in enumerate(range(GROUP * group, GROUP * group + GROUP)):
                if within[thread, j] < tiles.tile_rows:
                    found.append((int(row[thread, j]), int(within[thread, j]), float(total[i])))
    return found


@pytest.mark.parametrize("engine", [WGMMA, TCGEN05], ids=lambda engine: engine.name)
@pytest.mark.parametrize("seed", range(16))
def test_the_index_arithmetic_computes_the_product(engine, seed):
    """Every output once, from every K tile once, whatever tile, split and row count; leftovers never reach an output."""
    tiles = odd_tiles(engine, seed)
    generator = torch.Generator().manual_seed(seed)
    live = random.Random(seed).randrange(1, tiles.rows + 1)
    x = torch.randint(-4, 5, (live, tiles.hidden), generator=generator).float()
    w = torch.randint(-4, 5, (tiles.outputs, tiles.hidden), generator=generator).float()
    out = torch.full((tiles.rows, tiles.outputs), float("nan"))
    stored = torch.zeros(tiles.rows, tiles.outputs, dtype=torch.int)
    assert tiles.grid_tiles % tiles.multicast == 0 and tiles.tiles <= tiles.grid_tiles < tiles.tiles + tiles.multicast
    for tile in range(tiles.grid_tiles):
        for rank in range(tiles.split):  # what the tiles of a cluster share comes at the same time
            assert k_order(tiles, tile, rank) == k_order(tiles, tile - tiles.place(tile), rank)
        blocks = [run_block(tiles, x, w, tile, rank) for rank in range(tiles.split)]
        for rank in range(tiles.split):
            for row, within, total in (pushed if tiles.reduce == "push" else pulled)(tiles, blocks, rank):
                output = tile * tiles.tile_rows + within
                if row < live and output < tiles.outputs:
                    out[row, output] = total
                    stored[row, output] += 1
    assert torch.equal(out[:live], x @ w.T)  # small integers: exact in any order
    assert bool((stored[:live] == 1).all()) and not bool(stored[live:].any())


def test_the_arithmetic_meets_odd_cases():
    """What the test above draws includes what can go wrong: else it could not fail."""
    drawn = [odd_tiles(WGMMA, seed) for seed in range(16)]
    assert any(tiles.k_tiles % tiles.split for tiles in drawn)
    assert any(tiles.outputs % tiles.tile_rows for tiles in drawn)
    assert any(tiles.tile_rows % 8 and tiles.mma_tile > tiles.w_rows for tiles in drawn)
    assert any(tiles.tile_rows % GROUP for tiles in drawn)
    assert any(tiles.boxes == 2 for tiles in drawn) and any(tiles.rows % 8 for tiles in drawn)
    assert any(tiles.grid_tiles > tiles.tiles for tiles in drawn)
    pushing = [tiles for tiles in drawn if tiles.reduce == "push" and tiles.split > 1]
    assert any(tiles.register_groups % tiles.split for tiles in pushing)
    assert any(tiles.live_warps < tiles.consumers for tiles in pushing)
    assert any(tiles.k_start == "spread" and tiles.grid_tiles > tiles.multicast for tiles in drawn)


@pytest.mark.parametrize("engine", [WGMMA, TCGEN05], ids=lambda engine: engine.name)
def test_layout_rules_of_the_hardware(engine):
    for seed in range(40):
        tiles = odd_tiles(engine, seed)
        assert tiles.w_rows * BOX * 2 % 1024 == 0 and tiles.x_offset * 2 % 1024 == 0, "swizzle atoms of 1024 bytes"
        assert tiles.n * BOX * 2 % 1024 == 0
        assert tiles.pitch % 16 == 4, "16-byte reads, stores of a warp in 32 banks"
        assert tiles.ring_bytes % 1024 == 0
        assert tiles.consumers % 4 == 0
        assert tiles.pushed_bytes(0) < 2**20 and tiles.expected_bytes < 2**20, "bytes that a barrier counts"
        barriers = {stage + first for first in (0, tiles.stages, tiles.x_empty) for stage in range(tiles.stages)}
        own = 2 if tiles.multicast == 1 else 3
        assert len(barriers | {tiles.finished, tiles.arrived}) == own * tiles.stages + 2
        assert max(barriers | {tiles.finished, tiles.arrived}) < tiles.barriers
        columns = tiles.tmem_columns
        assert columns & (columns - 1) == 0 and 32 <= columns <= 512
        assert columns >= tiles.mma_tile // tiles.mma_rows * tiles.n


# --- refusals and spaces ------------------------------------------------------------------------------------------


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
                legal = [c for c in engine.space(one, card).legal if c["k_order"] == "invariant"]
                assert legal
                for tiles in (engine.tiles(one, c) for c in legal):
                    cuts.add(tuple(tiles.first(r) * tiles.k_tile for r in range(tiles.split + 1)))
    assert cuts == {(0, 1792, 3584, 5376, 7168)}


# --- machine code -------------------------------------------------------------------------------------------------


@cache
def built(engine, arch: str, rows: int, **change):
    one = problem(rows)
    config = {**engine.space(one, CARDS[arch]).default, **change}
    (launch,) = compile_config(engine, one, config, arch).launches
    return launch, engine.tiles(one, config), sass(launch.cubin)


def positions(text: str, mnemonic: str) -> list[int]:
    return [found.start() for found in re.finditer(rf"\b{re.escape(mnemonic)}(?![\w.])", text)]


VARIANTS = {
    "default": {},
    "k64": {"k_tile": 64, "stages": 9, "producers": 2},
    "split1": {"split": 1, "tile_rows": 25, "stages": 2, "release": "entry", "reduce": "push"},
    "split3": {"split": 3, "tile_rows": 134, "stages": 3, "release": "end", "k_start": "spread"},
    "push": {"reduce": "push"},
    "multicast": {"multicast": 2, "producers": 2},
    "all": {
        "multicast": 2,
        "split": 4,
        "tile_rows": 108,
        "stages": 3,
        "reduce": "push",
        "producers": 2,
        "k_start": "spread",
    },
    "one_rank": {"multicast": 4, "split": 1, "tile_rows": 27, "stages": 2},
}


@pytest.mark.parametrize(("engine", "arch"), BUILDS, ids=[arch for _, arch in BUILDS])
@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("rows", [9, 64])
def test_machine_code(engine, arch, rows, change):
    launch, tiles, text = built(engine, arch, rows, **change)
    found = kernel_resources(launch)
    names = full_mnemonics(text)
    assert found.kernel.startswith(f"k3_attention_projection_{engine.name}")
    assert found.spill_instructions == 0 and found.stack_bytes == 0
    assert found.registers <= engine.registers(tiles) <= 128, "registers decide how many blocks an SM holds"
    assert found.dynamic_shared_bytes == tiles.shared_bytes <= CARDS[arch].shared_per_block
    assert (launch.cluster, launch.pdl) == ((tiles.split, tiles.multicast, 1), True)
    assert launch.grid == (tiles.split, tiles.grid_tiles, 1)
    steps = tiles.k_tile // 16
    if engine is WGMMA:
        assert names[f"HGMMA.64x{tiles.n}x16.F32.BF16"] == steps
    else:
        assert sum(count for name, count in names.items() if name.startswith("UTCHMMA")) == steps * (
            tiles.mma_tile // 128
        )
        assert found.instructions["LDTM"] == tiles.n // 16
        assert found.instructions["UTCBAR"] == 2 + (tiles.multicast > 1)
        given = {"FIND_AND_SET": 0, "AND": 0}
        for name in names:
            for kind in given:
                given[kind] += name.startswith(f"UTCATOMSWS.{kind}")
        assert all(given.values()), "tensor memory is taken and given back"
    # the weights of the first stages before the dependency wait; x, the rest and all stores after it
    loads, (wait,) = positions(text, "UTMALDG.2D"), positions(text, "ACQBULK")
    sent = positions(text, "UTMALDG.2D.MULTICAST")
    assert sum(place < wait for place in loads) == tiles.stages * tiles.boxes
    assert wait_fault(order(launch.cubin), r"UTMALDG\.2D", ahead=tiles.stages * tiles.boxes) is None
    behind = {"w": tiles.boxes, "x": (tiles.stages + 1) * tiles.boxes}
    if tiles.multicast > 1:
        assert len(sent) == behind["x"] and min(sent) > wait
        assert sum(place > wait for place in loads) == behind["w"]
    else:
        assert not sent and sum(place > wait for place in loads) == sum(behind.values())
    stores = [place for name in names if name.startswith("STG") for place in positions(text, name)]
    assert stores and min(stores) > wait
    assert not any(name.startswith("LDG") for name in names)
    released = positions(text, "PREEXIT")
    release = change.get("release", "loads")
    assert len(released) == (release != "end")
    if release == "entry":
        assert released[0] < loads[0]
    elif release == "loads":
        only_w = tiles.multicast > 1 or tiles.producers == 1
        assert released[0] > (loads[-1] if only_w else loads[tiles.stages * tiles.boxes])


@pytest.mark.parametrize(("engine", "arch"), BUILDS, ids=[arch for _, arch in BUILDS])
@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS)
def test_peers_are_touched_when_they_are_ready_and_there(engine, arch, change):
    """Barriers of the cluster: before the first access to a peer, and after the last one."""
    _, tiles, text = built(engine, arch, 64, **change)
    names = full_mnemonics(text)
    greeting, waits = positions(text, "UCGABAR_ARV"), positions(text, "UCGABAR_WAIT")
    first_w, wait = positions(text, "UTMALDG.2D")[0], positions(text, "ACQBULK")[0]
    reads, writes = positions(text, "LD.E.128"), positions(text, "STAS.128")
    arrivals = [
        at
        for name in names
        if re.match(r"SYNCS\.ARRIVE\.TRANS64\.RED|UTCBAR\.MULTICAST", name)
        for at in positions(text, name)
    ]
    assert bool(arrivals) == (tiles.multicast > 1)
    assert len(writes) == (tiles.register_groups if tiles.reduce == "push" and tiles.split > 1 else 0)
    assert len(reads) == (tiles.split * tiles.turns if tiles.reduce == "pull" else 0)
    # a barrier that publishes ordinary stores to the cluster is a fence of the whole GPU: only where sums lie in memory
    assert names["MEMBAR.ALL.GPU"] == (1 if tiles.pulls else 0)
    if not tiles.greets and not tiles.pulls:
        assert not greeting and not waits
        return
    if tiles.pulls:
        assert len(waits) == 2 + tiles.greets and waits[-2] < min(reads) and max(reads) < waits[-1]
    if tiles.greets:
        assert greeting[0] < first_w < waits[0], "the first weights wait for no peer"
    if tiles.multicast > 1:
        assert waits[0] < wait, "x and arrivals go to peers after all have met"
        assert min(arrivals) > waits[0]
    if writes:
        assert waits[0] < writes[0] and max(writes) < waits[-1]
    assert (
        waits[-1] > max(at for name in names if name.startswith("STG") for at in positions(text, name)) or tiles.pulls
    )


@pytest.mark.parametrize(("engine", "arch"), BUILDS, ids=[arch for _, arch in BUILDS])
@pytest.mark.parametrize(
    "change", [VARIANTS[name] for name in ("default", "k64", "push", "all")], ids=["default", "k64", "push", "all"]
)
def test_shared_memory_ends_where_it_says(engine, arch, change):
    """Barriers lie behind the ring, pushed sums behind them, and the block asks for no less."""
    _, tiles, text = built(engine, arch, 64, **change)
    found = sorted({int(at, 16) for at in re.findall(r"SYNCS\.EXCH\.64 URZ, \[UR\d+\+(0x[0-9a-f]+)\]", text)})
    used = {i for first in (0, tiles.stages, tiles.x_empty) for i in range(first, first + tiles.stages)}
    used |= {tiles.finished} if engine is TCGEN05 else set()
    used |= {tiles.arrived} if tiles.reduce == "push" and tiles.split > 1 else set()
    assert found == [tiles.ring_bytes + 8 * i for i in sorted(used)]
    assert max(used) < tiles.barriers
    behind = up(tiles.ring_bytes + 8 * (tiles.barriers + 1), 16)
    assert behind + tiles.incoming_bytes == tiles.shared_bytes


# --- tensor maps as arguments -------------------------------------------------------------------------------------


def test_the_launch_names_its_tensor_maps():
    launch, tiles, _ = built(WGMMA, "sm_90a", 9)
    w, x, out, rows = launch.args
    assert w == Arg("tensor_map", "w", box=(tiles.tile_rows, 64), swizzle=128)
    assert x == Arg("tensor_map", "x", box=(16, 64), swizzle=128, extent="rows")
    assert (out, rows) == (Arg("tensor", "out"), Arg("int32", "rows"))


def test_a_bundle_carries_tensor_maps(tmp_path):
    from k3lab.kernels import Evidence
    from k3lab.kernels.bundle.reader import Bundle
    from k3lab.kernels.bundle.schema import BuildModel, ChoiceModel, EntryModel, LaunchModel
    from k3lab.kernels.bundle.writer import cubin_path, write_bundle

    launch, _, _ = built(WGMMA, "sm_90a", 9)
    one, name = problem(9), cubin_path(launch.cubin)
    args = tuple(ArgModel(**dataclasses.asdict(arg)) for arg in launch.args)
    model = LaunchModel(
        kernel=launch.kernel, cubin=name, grid=launch.grid, block=launch.block, cluster=launch.cluster,
        shared_bytes=launch.shared_bytes, pdl=launch.pdl, args=args,
    )  # fmt: skip
    entry = EntryModel(
        family=FAMILY.name, engine=WGMMA.name, key=one.key, rows=9, gpu="H200", arch="sm_90a", config=CONFIG,
        config_digest="0123456789abcdef", evidence=Evidence.PREDICTED, source_digest="0" * 16, compilers={},
        summation_order=WGMMA.summation_order(one, CONFIG),
        choice=ChoiceModel(reason="test", value_us=1.0, default_us=None, margin_over_default=None, tie_band=0.01, runner_up=None, trials={}),
        timing=None, prediction=None, environment=None,
        builds=(BuildModel(arch="sm_90a", evidence=Evidence.PREDICTED, launches=(model,), buffers=(), resources=({},)),),
    )  # fmt: skip
    write_bundle(tmp_path / "b", [entry], {name: launch.cubin})
    (read,) = Bundle.load(tmp_path / "b", accept_predicted=True).entries
    (again,) = read.compiled("sm_90a", one).launches
    assert again == launch


def test_arguments_without_a_tensor_map_are_written_as_before():
    assert ArgModel(kind="tensor", name="x").model_dump(mode="json") == {"kind": "tensor", "name": "x"}
    assert ArgModel.model_validate_json('{"kind": "int32", "name": "rows"}') == ArgModel(kind="int32", name="rows")
    for wrong in ({"kind": "tensor", "box": (8, 64)}, {"kind": "tensor_map", "box": (257, 64)}, {"kind": "tensor_map"}):
        with pytest.raises(ValueError, match="box"):
            ArgModel(name="x", **wrong)


def test_descriptors_lie_on_64_bytes():
    from k3lab.kernels.tensor_map import placed

    for seed in range(8):
        words = [random.Random(seed).getrandbits(64) for _ in range(16)]
        made = placed(SimpleNamespace(opaque=words))
        assert ctypes.addressof(made) % 64 == 0 and ctypes.sizeof(made) == 128
        assert list(made.words) == words


def test_a_tensor_map_wants_a_matrix_and_its_live_rows():
    from k3lab.kernels.tensor_map import encode

    arg = Arg("tensor_map", "x", box=(16, 64), swizzle=128, extent="rows")
    matrix = torch.zeros(4, 128, dtype=torch.bfloat16)
    for wrong, rows, why in (
        (matrix.float(), None, "BF16 matrix"),
        (matrix.view(2, 2, 128), None, "BF16 matrix"),
        (matrix, 5, "has 4 rows; a tensor map of 5"),
        (matrix, 0, "has 4 rows; a tensor map of 0"),
    ):
        with pytest.raises(ValueError, match=why):
            encode(arg, wrong, rows)
