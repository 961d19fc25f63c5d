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
from k3lab.kernels.attention_projection.cute_tma_engine import BOX, GROUP, TmaTiles, busy, clusters_at_once
from k3lab.kernels.bundle.schema import ArgModel
from k3lab.kernels.contract import Arg
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.compiling import compile_config
from k3lab.tuning.cubin import full_mnemonics, kernel_resources, sass

FAMILY = family("attention_projection")
CARDS = {"sm_90a": gpu_card("H200"), "sm_100a": gpu_card("B200"), "sm_103a": gpu_card("GB300")}
WGMMA, TCGEN05 = FAMILY.engine("cute_wgmma"), FAMILY.engine("cute_tcgen05")
BUILDS = [(WGMMA, "sm_90a"), (TCGEN05, "sm_100a"), (TCGEN05, "sm_103a")]
SHAPES = [(16, "kda"), (16, "mla"), (8, "kda"), (8, "mla"), (4, "kda"), (4, "mla")]
CONFIG = {"tile_rows": 201, "split": 8, "k_tile": 64, "stages": 4, "release": "loads", "k_order": "free"}


def problem(rows: int, tp: int = 16, kind: str = "kda"):
    return FAMILY.problem(K3, tp=tp, rows=rows, kind=kind)


# --- index arithmetic ---------------------------------------------------------------------------------------------


def odd_tiles(engine, seed: int) -> TmaTiles:
    """A small problem with a short last tile, uneven K ranges and few rows too many."""
    pick = random.Random(seed)
    split, k_tile, stages = pick.choice((1, 2, 3, 5)), pick.choice((64, 128)), pick.choice((2, 3))
    k_tiles = split * stages + pick.randrange(4)
    outputs, tile_rows = 16 * pick.randrange(2, 9), pick.randrange(17, 150)
    return TmaTiles(
        outputs, k_tiles * k_tile, pick.randrange(1, 21), tile_rows, split, k_tile, stages,
        engine.mma_rows, engine.n_step, engine.extra_warps,
    )  # fmt: skip


def run_block(tiles: TmaTiles, x: torch.Tensor, w: torch.Tensor, tile: int, rank: int) -> torch.Tensor:
    """One block as the kernels run it, on a flat ring: [n, pitch] sums; what no copy wrote is NaN."""
    ring = torch.full((tiles.ring_bytes // 2,), float("nan"))
    acc = torch.zeros(tiles.n, tiles.mma_tile)
    w_box, x_box = tiles.w_rows * BOX, tiles.n * BOX
    steps = list(range(tiles.first(rank), tiles.first(rank + 1)))
    assert len(steps) >= tiles.stages
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
    assert tiles.n * tiles.pitch * 4 <= tiles.ring_bytes
    sums = torch.full((tiles.n, tiles.pitch), float("nan"))
    sums[:, : tiles.mma_tile] = acc
    return sums


@pytest.mark.parametrize("engine", [WGMMA, TCGEN05], ids=lambda engine: engine.name)
@pytest.mark.parametrize("seed", range(12))
def test_the_index_arithmetic_computes_the_product(engine, seed):
    """Every output once, from every K tile once, whatever tile, split and row count; leftovers never reach an output."""
    tiles = odd_tiles(engine, seed)
    generator = torch.Generator().manual_seed(seed)
    live = random.Random(seed).randrange(1, tiles.rows + 1)
    x = torch.randint(-4, 5, (live, tiles.hidden), generator=generator).float()
    w = torch.randint(-4, 5, (tiles.outputs, tiles.hidden), generator=generator).float()
    out = torch.full((tiles.rows, tiles.outputs), float("nan"))
    stored = torch.zeros(tiles.rows, tiles.outputs, dtype=torch.int)
    for tile in range(tiles.tiles):
        blocks = [run_block(tiles, x, w, tile, rank) for rank in range(tiles.split)]
        for rank in range(tiles.split):
            for turn in range(tiles.turns):
                for thread in range(tiles.threads):
                    row, within = tiles.place(tiles.group(turn, rank, thread))
                    output = tile * tiles.tile_rows + within
                    if row >= live or output >= tiles.outputs:
                        continue
                    for i in range(GROUP):
                        if within + i < tiles.tile_rows and output + i < tiles.outputs:
                            out[row, output + i] = sum(sums[row, within + i] for sums in blocks)
                            stored[row, output + i] += 1
    assert torch.equal(out[:live], x @ w.T)  # small integers: exact in any order
    assert bool((stored[:live] == 1).all()) and not bool(stored[live:].any())


def test_the_arithmetic_meets_odd_cases():
    """What the test above draws includes what can go wrong: else it could not fail."""
    drawn = [odd_tiles(WGMMA, seed) for seed in range(12)]
    assert any(tiles.k_tiles % tiles.split for tiles in drawn)
    assert any(tiles.outputs % tiles.tile_rows for tiles in drawn)
    assert any(tiles.tile_rows % 8 and tiles.mma_tile > tiles.w_rows for tiles in drawn)
    assert any(tiles.tile_rows % GROUP for tiles in drawn)
    assert any(tiles.boxes == 2 for tiles in drawn) and any(tiles.rows % 8 for tiles in drawn)


@pytest.mark.parametrize("engine", [WGMMA, TCGEN05], ids=lambda engine: engine.name)
def test_layout_rules_of_the_hardware(engine):
    for seed in range(40):
        tiles = odd_tiles(engine, seed)
        assert tiles.w_rows * BOX * 2 % 1024 == 0 and tiles.x_offset * 2 % 1024 == 0, "swizzle atoms of 1024 bytes"
        assert tiles.n * BOX * 2 % 1024 == 0
        assert tiles.pitch % 16 == 4, "16-byte reads, stores of a warp in 32 banks"
        assert tiles.ring_bytes % 1024 == 0
        assert tiles.consumers % 4 == 0
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
    best = max(busy(one.outputs, c["tile_rows"], c["split"], card) for c in space.legal)
    assert best > 0.9
    for config in random.Random(rows).sample(space.legal, 60):
        tiles = engine.tiles(one, config)
        assert tiles.shared_bytes <= card.shared_per_block
        assert tiles.tiles * tiles.tile_rows >= one.outputs > (tiles.tiles - 1) * tiles.tile_rows
        assert min(tiles.first(r + 1) - tiles.first(r) for r in range(tiles.split)) >= tiles.stages
        assert busy(one.outputs, tiles.tile_rows, tiles.split, card) >= 0.79 * best


def test_the_small_model_has_a_default_too():
    for rows in (1, 5, 16):
        for kind in ("kda", "mla"):
            one = FAMILY.problem(SMALL_K3, tp=4, rows=rows, kind=kind)
            assert WGMMA.space(one, CARDS["sm_90a"]).legal


def test_defaults_fill_an_h200():
    space = WGMMA.space(problem(64), CARDS["sm_90a"])
    assert space.default == {**CONFIG, "stages": 6}  # 16 clusters of 8, 205 of 227 KB
    eight = WGMMA.space(problem(64, tp=8), CARDS["sm_90a"]).default
    assert (eight["tile_rows"], eight["split"]) == (197, 4)  # 32 clusters of 4


def test_clusters_lie_in_one_gpc():
    card = CARDS["sm_90a"]  # 6 GPCs of 16 SMs and 2 of 18
    assert [clusters_at_once(card, split) for split in (1, 2, 3, 4, 5, 8)] == [132, 66, 42, 32, 24, 16]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stages": 12}, "exceeds the 232448 bytes"),
        ({"k_tile": 128, "stages": 8}, "fewer tiles than 8 stages"),
        ({"tile_rows": 64, "split": 1}, "leave more SMs of H200 idle"),
        ({"k_order": "invariant"}, "invariant: K is cut where 4 blocks"),
        ({"tile_rows": 200}, "legal values are"),
        ({"stages": 1}, "legal values are"),
    ],
)
def test_illegal_configs_are_explained(change, why):
    space = WGMMA.space(problem(64), CARDS["sm_90a"])
    with pytest.raises(InputError, match=why):
        space.check({**CONFIG, **change})


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
    return [found.start() for found in re.finditer(rf"\b{re.escape(mnemonic)}\b", text)]


VARIANTS = [{}, {"k_tile": 128, "stages": 2}, {"split": 1, "tile_rows": 64, "stages": 2, "release": "entry"}, {"split": 5, "tile_rows": 134, "stages": 3, "release": "end"}]  # fmt: skip


@pytest.mark.parametrize(("engine", "arch"), BUILDS, ids=[arch for _, arch in BUILDS])
@pytest.mark.parametrize("change", VARIANTS, ids=["default", "k128", "split1", "split5"])
@pytest.mark.parametrize("rows", [9, 64])
def test_machine_code(engine, arch, rows, change):
    launch, tiles, text = built(engine, arch, rows, **change)
    found = kernel_resources(launch)
    names = full_mnemonics(text)
    assert found.kernel.startswith(f"k3_attention_projection_{engine.name}")
    assert found.spill_instructions == 0 and found.stack_bytes == 0
    assert found.registers * found.threads <= 65536 and found.registers <= 128
    assert found.dynamic_shared_bytes == tiles.shared_bytes <= CARDS[arch].shared_per_block
    assert (launch.cluster, launch.pdl) == ((tiles.split, 1, 1), True)
    steps = tiles.k_tile // 16
    if engine is WGMMA:
        assert names[f"HGMMA.64x{tiles.n}x16.F32.BF16"] == steps
    else:
        assert sum(count for name, count in names.items() if name.startswith("UTCHMMA")) == steps * (
            tiles.mma_tile // 128
        )
        assert found.instructions["LDTM"] == tiles.n // 16
        assert found.instructions["UTCBAR"] == 2
        given = {"FIND_AND_SET": 0, "AND": 0}
        for name in names:
            for kind in given:
                given[kind] += name.startswith(f"UTCATOMSWS.{kind}")
        assert all(given.values()), "tensor memory is taken and given back"
    # the weights of the first stages before the dependency wait; x, the rest and all stores after it
    loads, (wait,) = positions(text, "UTMALDG.2D"), positions(text, "ACQBULK")
    assert sum(place < wait for place in loads) == tiles.stages * tiles.boxes
    assert sum(place > wait for place in loads) == (tiles.stages + 2) * tiles.boxes
    stores = [place for name in names if name.startswith("STG") for place in positions(text, name)]
    assert stores and min(stores) > wait
    assert not any(name.startswith("LDG") for name in names)
    released = positions(text, "PREEXIT")
    release = change.get("release", "loads")
    assert len(released) == (release != "end")
    if release == "entry":
        assert released[0] < loads[0]
    elif release == "loads":
        assert released[0] > loads[-1]


@pytest.mark.parametrize(("engine", "arch"), BUILDS, ids=[arch for _, arch in BUILDS])
def test_peers_are_read_between_the_cluster_barriers(engine, arch):
    _, tiles, text = built(engine, arch, 64)
    waits = positions(text, "UCGABAR_WAIT")
    assert len(waits) == 2
    reads = positions(text, "LD.E.128")
    assert len(reads) == tiles.split * tiles.turns
    assert waits[0] < min(reads) and max(reads) < waits[1]


@pytest.mark.parametrize(("engine", "arch"), BUILDS, ids=[arch for _, arch in BUILDS])
@pytest.mark.parametrize("change", VARIANTS[:2], ids=["default", "k128"])
def test_shared_memory_ends_where_it_says(engine, arch, change):
    """Barriers lie behind the ring, and the block asks for what lies behind the last one."""
    _, tiles, text = built(engine, arch, 64, **change)
    barriers = sorted({int(at, 16) for at in re.findall(r"SYNCS\.EXCH\.64 URZ, \[UR\d+\+(0x[0-9a-f]+)\]", text)})
    assert barriers[0] == tiles.ring_bytes
    used = 2 * tiles.stages + (engine is TCGEN05)
    assert barriers == [tiles.ring_bytes + 8 * i for i in range(used)]
    assert tiles.ring_bytes + 8 * (tiles.barriers + 1) <= tiles.shared_bytes


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
