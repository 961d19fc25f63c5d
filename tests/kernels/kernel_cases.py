"""Kinds with which every kernel of a family runs: for tests, and the sanitizer, that leave no engine out."""

from __future__ import annotations

from typing import Any

from k3lab.kernels import K3, Engine, Family, InputError, Problem, family

KINDS: dict[str, tuple[str | None, ...]] = {
    "output_projection": ("kda", "restart"),
    "router": ("uniform", "front", "choice"),
    "experts": ("routed", "bf16", "mxfp8_floor"),
    "kda": ("plain", "verify8"),
    "mla": ("bf16", "fp8_verify8", "bf16_dcp", "fp8_verify8_dcp"),
    "attn_res": ("blocks", "first", "final"),
    "lm_head": ("shard", "argmax", "embed"),
}
"""Of families for which the first of their kinds is not enough."""
MORE: dict[str, tuple[tuple[str, int, int, dict[str, Any]], ...]] = {
    "output_projection": (
        # tiles of weights that come again into places that were read: twice, and with one place for all
        ("cute_apart", 8, 8, {"depth": 2}),
        ("cute_apart", 8, 16, {"depth": 1, "packet": "b32e32"}),
        ("cute_fused", 8, 8, {"packet": "b32e32", "rehearse": 1}),
        ("cute_split", 16, 8, {"row_sums": "cluster", "mixers": 4, "packet": "b32e32"}),
        ("cute_split", 16, 33, {"consumer_wait": "exit"}),
        ("cute_split", 8, 64, {"exchange": "two_shot", "row_sums": "cluster", "consumer_wait": "exit"}),
        ("cute_split", 16, 17, {"exchange": "two_shot", "packet": "b32e32"}),
    ),
}
"""Configs beside the default, as (engine, TP, rows, changes), whose waits and barriers a default has not."""
CORES = ("kda", "mla", "moe_tail", "attn_res", "lm_head")
"""Families whose kernels stand between the projections and the experts, and at both ends of a step."""


def kinds_of(found: Family) -> tuple[str | None, ...]:
    """See :data:`KINDS`."""
    return KINDS.get(found.name) or (found.kinds[0] if found.kinds else None,)


def engines_of(name: str, rows: int, arch: str, tp: int = 16) -> list[tuple[Engine, Problem]]:
    """Every engine of a family with every problem of its kinds that it serves; kinds of several tokens with whole requests."""
    found, made = family(name), []
    for kind in kinds_of(found):
        try:
            problem = found.problem(K3, tp=tp, rows=rows, kind=kind)
        except InputError:  # a request of this kind has more rows
            problem = found.problem(K3, tp=tp, rows=8 * -(-rows // 8), kind=kind)
        made += [(engine, problem) for engine in found.engines if engine.refuses(problem, arch) is None]
    return made


def case_id(value: Any) -> str | None:
    """Names of engines and problems in test names."""
    return value.name if isinstance(value, Engine) else value.label if isinstance(value, Problem) else None
