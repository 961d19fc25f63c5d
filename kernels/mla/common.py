"""What the engines of this family share: first refusals, defaults by reasoning, buffers between their launches."""

from __future__ import annotations

from ..contract import Buffer, Engine, Problem
from .family import Mla

MOST_SPLITS = 264
"""Parts of a context: two for each SM of an H200."""


def mla(problem: Problem) -> Mla:
    """The problem as this family's own type."""
    assert isinstance(problem, Mla)
    return problem


def power_of_two(n: int) -> int:
    """The least that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def refuses_always(engine: Engine, problem: Mla, arch: str) -> str | None:
    """What no engine of this family serves."""
    if arch not in engine.archs:
        return f"architecture {arch} is not among {', '.join(engine.archs)}"
    for name in ("kv_lora", "rope", "nope"):
        size = getattr(problem, name)
        if size & (size - 1) or size < 16:
            return f"{name} {size} is not a power of two of 16 at least, as the MMA's tiles are"
    if problem.v_dim % 16:
        return f"v_dim {problem.v_dim} is not a multiple of 16, the rows of an MMA"
    if problem.block_size & (problem.block_size - 1) or problem.block_size < 16:
        return f"cache blocks of {problem.block_size} tokens: a power of two of 16 at least"
    return None


def splits_wanted(problem: Mla, groups: int, tile: int, sms: int) -> int:
    """Parts that fill the GPU about once, of at least one tile each: what 128k tokens of one request need, and what keeps the
    merge of many requests short.

    Args:
        problem: requests and context.
        groups: blocks of a request that share a part's tokens.
        tile: tokens of a tile.
        sms: of the GPU.
    """
    return max(1, min(sms // (problem.requests * groups), -(-problem.held // tile)))


def parts_buffers(problem: Mla, splits: int) -> tuple[Buffer, Buffer]:
    """What attention leaves to the merge: normalised sums [splits, rows * heads, kv_lora] and base-2 logarithms of their
    weights; where contexts lie over ranks of all ranks' heads.
    """
    queries = problem.rows * problem.heads * problem.dcp
    return (
        Buffer("partial", (splits, queries, problem.kv_lora), "float32"),
        Buffer("lse", (splits, queries), "float32"),
    )


def merge_order(splits: int) -> str:
    """How parts of a context become one, in words."""
    return f"{splits} runs of a context, each normalised, ascending with their shares of the whole sum of weights"
