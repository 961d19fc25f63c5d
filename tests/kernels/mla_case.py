"""Problems of the MLA core small enough for the CPU, and what every engine must leave."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from k3lab.kernels import K3, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.mla.family import WEIGHTS, Mla
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


def judge(one: Mla, inputs: dict[str, torch.Tensor], out: torch.Tensor, live: int | None = None) -> None:
    """Live rows within tolerance of the twin, the others still poison."""
    live = one.rows if live is None else live
    wanted = FAMILY.twin(one, inputs)["out"]
    result = compare("out", out[:live], wanted[:live], FAMILY.tolerance(one, "out"))
    assert result.ok, result.message
    assert bool(out[live:].isnan().all())
