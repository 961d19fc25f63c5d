"""Inputs of the tail under which every rounding of the twin is met to the bit, and how outputs are judged."""

from __future__ import annotations

import torch
from k3lab.kernels import K3, family
from k3lab.kernels.collectives import LoopbackGroup, TwoShot
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.moe_tail.twin import moe_tail

from .output_projection_case import exact_input, worst

FAMILY = family("moe_tail")
FUSED = FAMILY.engine("cute_fused")
CARDS = {"sm_90a": gpu_card("H200"), "sm_100a": gpu_card("B200"), "sm_103a": gpu_card("GB300")}


def problem(rows=8, tp=16, **changes):
    import dataclasses

    return dataclasses.replace(FAMILY.problem(K3, tp=tp, rows=rows), **changes)


def config(one, arch="sm_90a", **changes):
    return {**FUSED.space(one, CARDS[arch]).default, **changes}


def factors_of(tp, exchange):
    """Powers of two of both signs whose sum is no zero; with two shots signs alone, so that all latents stay as large."""
    if exchange == "two_shot":
        return [1.0 if rank % 3 else -1.0 for rank in range(tp)]
    return [(-1.0) ** (rank // 2) * 2.0 ** (rank % 3 - 1) for rank in range(tp)]


def whole_numbers(one, exchange, seed=0):
    """Partial latents of plus and minus one, the same for every owner: all latents of a row are as large, so that its factor
    only makes them one; sparse weights, so that sums of products need no more bits than a BF16 value has.
    """
    generator = torch.Generator().manual_seed(seed)

    def some(shape, least, most, scale=1.0):
        return (torch.randint(least, most + 1, shape, generator=generator) * scale).bfloat16()

    inputs = FAMILY.inputs(one, seed)
    copies = one.tp if exchange == "two_shot" else 1
    signs = some((one.rows, one.latent // copies), 0, 1, 2.0) - 1
    inputs["latent_partial"] = signs.repeat(1, copies)
    inputs["shared_partial"] = some((one.rows, one.hidden), -3, 3)
    norm = some((one.latent,), 1, 2)
    inputs["latent_norm"] = norm * (some((one.latent,), 0, 1, 2.0) - 1)
    kept = torch.randint(0, 8, inputs["w_up"].shape, generator=generator) == 0
    inputs["w_up"] = torch.where(kept, some(inputs["w_up"].shape, 0, 1, 2.0) - 1, 0).bfloat16() / 64
    return inputs


def twin(one, inputs, factors, exchange):
    """With the twin's roundings, on the CPU."""
    group = LoopbackGroup(tuple(factors))
    prefix, following = moe_tail(
        inputs["latent_partial"], inputs["shared_partial"], inputs["latent_norm"], inputs["w_up"], inputs["prefix"],
        list(inputs["blocks"]), inputs["res_norm"], inputs["res_proj"], inputs["norm_w"], eps=one.eps,
        comm=TwoShot(group) if exchange == "two_shot" else group,
    )  # fmt: skip
    return {"prefix_out": prefix, "next_input": following}


def judge(one, inputs, got, wanted, rows):
    """The twin's bits of the residual; the next input within its bound; nothing beyond the live rows."""
    prefix, found = got["prefix_out"], got["next_input"]
    differ = (prefix[:rows].view(torch.int16) != wanted["prefix_out"][:rows].view(torch.int16)).nonzero()
    assert not len(differ), (
        f"{len(differ)} of {prefix[:rows].numel()} residuals differ, first at {differ[0].tolist()}: "
        f"{prefix[tuple(differ[0])]} not {wanted['prefix_out'][tuple(differ[0])]}"
    )
    value, bound = exact_input(inputs, wanted["prefix_out"], one.eps)
    reason = worst(found[:rows], value[:rows], bound[:rows])
    assert reason is None, f"next_input: {reason}"
    assert all(tensor[rows:].isnan().all() for tensor in got.values())
