"""Problems of the MLA core small enough for the CPU, and what every engine must leave."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from k3lab.kernels import K3, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.mla.family import KINDS, WEIGHTS, Mla
from k3lab.kernels.mla.twin import MlaWeights, mla
from k3lab.tuning.compare import compare

FAMILY = family("mla")
H200 = gpu_card("H200")
SMALL = {"heads": 3, "q_lora": 64, "kv_lora": 32, "nope": 16, "rope": 16, "v_dim": 32, "context": 100, "block_size": 16}


def problem(rows: int, kind: str = "bf16", tp: int = 16, **changes: Any) -> Mla:
    made = dataclasses.replace(FAMILY.problem(K3, tp=tp, rows=rows, kind=kind), **changes)
    assert isinstance(made, Mla)
    return made


def small(rows: int, kind: str = "bf16", **changes: Any) -> Mla:
    return problem(rows, kind, **{**SMALL, **changes})


def drawn(one: Mla, seed: int) -> dict[str, torch.Tensor]:
    """The family's inputs; the scale of an E4M3 cache so far from one that no tolerance hides it."""
    inputs = FAMILY.inputs(one, seed)
    return {**inputs, "k_scale": torch.full((1,), 0.625)} if one.fp8 else inputs


def row_counts(kind: str) -> list[int]:
    """Few, some and the most rows of a kind: whole requests."""
    tokens = KINDS[kind][1]
    return sorted({tokens * max(rows // tokens, 1) for rows in (1, 2, 8, 16, 64)})


def inserted(one: Mla, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The cache after the step, as a twin of BF16 numbers leaves it."""
    cache = inputs["cache"].clone()
    mla(
        inputs["proj"], MlaWeights(**{name: inputs[name] for name in WEIGHTS}), cache, inputs["block_table"],
        inputs["context"], q_len=one.q_len, eps=one.eps, nope=one.nope, rope=one.rope,
        k_scale=float(inputs["k_scale"]) if one.fp8 else 1.0,
    )  # fmt: skip
    return cache


def written(one: Mla, inputs: dict[str, torch.Tensor], live: int | None = None) -> torch.Tensor:
    """Which rows of the cache [blocks, block_size] the live rows of a step write."""
    mask = torch.zeros(inputs["cache"].shape[:2], dtype=torch.bool)
    for row in range(one.rows if live is None else live):
        request = row // one.q_len
        at = int(inputs["context"][request]) + row % one.q_len
        mask[int(inputs["block_table"][request, at // one.block_size]), at % one.block_size] = True
    return mask


def same_cache(got: torch.Tensor, wanted: torch.Tensor, before: torch.Tensor, mask: torch.Tensor) -> None:
    """Rows of the mask are the twin's within one code, the others untouched to the bit."""
    assert torch.equal(got[~mask].view(torch.uint8), before[~mask].view(torch.uint8))
    new, right = got[mask].float(), wanted[mask].float()
    code = 2**-3 if got.dtype == torch.float8_e4m3fn else 2**-8
    assert bool(((new - right).abs() <= code * right.abs() + 2**-9).all())
    # a code apart only where a rounding before it met a tie
    assert float((new != right).float().mean()) < 0.05


def exact_inputs(one: Mla, contexts: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs whose every step is exact: the twin's numbers, rounded once, are the engine's to the bit.

    Queries are zero, so that all tokens weigh the same; every fourth token, the last of a request among them, is zero, and
    the others repeat three rows of whole numbers; a request has a power of two of tokens, and equal parts.
    """
    assert one.q_len == 1 and all((tokens + 1) & tokens == 0 for tokens in contexts)
    generator = torch.Generator().manual_seed(seed)
    inputs = FAMILY.inputs(one, seed)
    inputs["context"] = torch.tensor(contexts, dtype=torch.int32)
    inputs["proj"] = torch.zeros_like(inputs["proj"])
    inputs["w_uv"] = (torch.randint(-2, 3, inputs["w_uv"].shape, generator=generator) / 16).to(torch.bfloat16)
    four = torch.randint(-3, 4, (4, one.width), generator=generator).float()
    four[3] = 0
    cache = torch.full(inputs["cache"].shape, torch.nan)
    for request, tokens in enumerate(contexts):
        place = torch.arange(tokens)
        where = inputs["block_table"][request, place // one.block_size].long(), place % one.block_size
        cache[where] = four[place % 4]
    inputs["cache"] = cache.to(inputs["cache"].dtype)
    if one.fp8:
        inputs["k_scale"] = torch.full((1,), 0.5)
    return inputs


def judge_exact(one: Mla, inputs: dict[str, torch.Tensor], out: torch.Tensor) -> None:
    """To the bit."""
    wanted = FAMILY.twin(one, inputs)["out"].to(torch.bfloat16)
    assert bool(wanted.any()) and torch.equal(out.cpu(), wanted)


def judge(one: Mla, inputs: dict[str, torch.Tensor], out: torch.Tensor, live: int | None = None) -> None:
    """Live rows within tolerance of the twin, the others still poison."""
    live = one.rows if live is None else live
    wanted = FAMILY.twin(one, inputs)["out"]
    result = compare("out", out[:live], wanted[:live], FAMILY.tolerance(one, "out"))
    assert result.ok, result.message
    assert bool(out[live:].isnan().all())
