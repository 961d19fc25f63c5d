"""The TMA engines of the attention projection: machine code."""

from __future__ import annotations

import re

import pytest
from k3lab.kernels.attention_projection.cute_tma_tiles import up
from k3lab.tuning.cubin import full_mnemonics, kernel_resources
from k3lab.tuning.sass_order import order, wait_fault

from .tma_case import BUILDS, CARDS, TCGEN05, WGMMA, built


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


def is_a_corner(name: str, arch: str, rows: int) -> bool:
    """Hopper and one Blackwell have every variant at many rows, the others and few rows those that differ most."""
    if arch == "sm_100a":
        return (name, rows) in (("default", 64), ("all", 9))
    return rows == 64 or name in ("default", "multicast") or (arch == "sm_90a" and name in ("push", "all"))


@pytest.mark.parametrize(
    ("engine", "arch", "rows", "change"),
    [
        pytest.param(
            engine, arch, rows, change,
            id=f"{rows}-{name}-{arch}", marks=() if is_a_corner(name, arch, rows) else pytest.mark.slow,
        )
        for rows in (9, 64) for name, change in VARIANTS.items() for engine, arch in BUILDS
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(("engine", "arch"), BUILDS, ids=[arch for _, arch in BUILDS])
def test_a_single_row_is_copied_as_a_matrix(engine, arch):
    """Its tensor map has two dimensions: a copy of one is an illegal instruction to it."""
    _, tiles, text = built(engine, arch, 1)
    names = full_mnemonics(text)
    copies = {name for name in names if name.startswith("UTMALDG")}
    assert copies == {"UTMALDG.2D"}
    assert names["UTMALDG.2D"] >= 2 * tiles.stages * tiles.boxes
