"""What the tests of the TMA engines share: problems, engines with their architectures, a config, built kernels."""

from __future__ import annotations

from functools import cache

from k3lab.kernels import K3, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning.compiling import compile_config
from k3lab.tuning.cubin import sass

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


@cache
def built(engine, arch: str, rows: int, **change):
    one = problem(rows)
    config = {**engine.space(one, CARDS[arch]).default, **change}
    (launch,) = compile_config(engine, one, config, arch).launches
    return launch, engine.tiles(one, config), sass(launch.cubin)
