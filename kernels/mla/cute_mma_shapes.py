"""The index arithmetic of the cute_mma engine's launches, of a problem and a config."""

from __future__ import annotations

from dataclasses import replace

from ..space import Config
from ..stamps import build_of
from .around import Around
from .family import Mla
from .layout import Attend
from .ranks import Ranks


def attend_of(problem: Mla, config: Config) -> Attend:
    """The attention's index arithmetic. It is the second launch."""
    splits, queries, tile, stages = (int(config[name]) for name in ("splits", "queries", "tile", "stages"))
    return Attend(
        problem.requests, problem.rows, problem.dcp * problem.heads, problem.q_len, problem.kv_lora, problem.rope, problem.block_size,
        problem.blocks_each, problem.fp8, splits, queries, tile, stages, min(build_of(config, 1), 0),
    )  # fmt: skip


def around_of(problem: Mla, config: Config) -> Around:
    """That of the launches before and after it."""
    return Around(
        problem.rows, problem.heads, problem.q_lora, problem.nope, problem.rope, problem.kv_lora, problem.v_dim,
        problem.q_len, problem.block_size, problem.blocks_each, problem.fp8, int(config["splits"]), int(config["cluster"]),
        problem.eps, config.get("k_order") == "invariant", build=min(build_of(config), 0),
    )  # fmt: skip


def send_of(problem: Mla, config: Config) -> Around:
    """That of the launch that merges this rank's parts of all ranks' heads and sends them; contexts over ranks alone."""
    return replace(around_of(problem, config), heads=problem.dcp * problem.heads)


def value_of(problem: Mla, config: Config) -> Around:
    """That of the last launch, which merges parts of the own attention or rows of all ranks."""
    last = replace(around_of(problem, config), build=min(build_of(config, 2 + (problem.dcp > 1)), 0))
    return replace(last, splits=1, ranks=problem.dcp) if problem.dcp > 1 else last


def ranks_of(problem: Mla, config: Config) -> Ranks:
    """Where what ranks tell each other lies."""
    around, send = around_of(problem, config), send_of(problem, config)
    blocks = (around.head_blocks, attend_of(problem, config).blocks, send.head_blocks, around.head_blocks)
    return Ranks(
        problem.dcp, problem.rows, problem.heads, problem.width, problem.kv_lora, problem.fp8, blocks, build_of(config)
    )  # fmt: skip


def front_registers(around: Around) -> int:
    """A thread's, about: weights in flight, norms, rows, sums, and the rest."""
    return around.steps * 4 * (around.n_tiles + 1 + around.halves) + 4 * around.n_tiles + 48 + 16 * around.halves
