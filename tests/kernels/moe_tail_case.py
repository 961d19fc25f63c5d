"""Inputs of the tail under which every rounding of the twin is met to the bit, and how outputs are judged."""

from __future__ import annotations

import dataclasses
from functools import cache

import torch
from k3lab.kernels import K3, family
from k3lab.kernels.collectives import LoopbackGroup, TwoShot, run_virtual_ranks
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.health import check_health
from k3lab.kernels.moe_tail.twin import moe_tail
from k3lab.kernels.transports import Loopback

from .output_projection_case import exact_input, worst
from .virtual_ranks import Ranks

FAMILY = family("moe_tail")
FUSED = FAMILY.engine("cute_fused")
CARDS = {"sm_90a": gpu_card("H200"), "sm_100a": gpu_card("B200"), "sm_103a": gpu_card("GB300")}


def problem(rows=8, tp=16, **changes):
    return dataclasses.replace(FAMILY.problem(K3, tp=tp, rows=rows), **changes)


def config(one, arch="sm_90a", **changes):
    return {**FUSED.space(one, CARDS[arch]).default, **changes}


def factors_of(tp, exchange):
    """Powers of two of both signs whose sum is no zero; with two shots signs alone, so that all latents stay as large."""
    if exchange == "two_shot":
        return [-1.0 if rank % 4 == 1 and tp > 2 else 1.0 for rank in range(tp)]
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


class Case:
    """A compiled engine, its runner over loopback, tensors on the GPU and what they should become."""

    def __init__(self, device, one, chosen, factors=None, *, seed=0):
        from k3lab.kernels.launch import Runner
        from k3lab.tuning.compiling import compile_config

        self.exchange = chosen["exchange"]
        self.factors = factors or factors_of(one.tp, self.exchange)
        self.one, self.inputs = one, whole_numbers(one, self.exchange, seed)
        self.wanted = twin(one, self.inputs, self.factors, self.exchange)
        self.compiled = compile_config(FUSED, one, chosen, device.arch)
        self.runner = Runner(self.compiled, transport=Loopback(one.tp, tuple(self.factors)))
        self.outputs = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
            for name, (shape, dtype) in FAMILY.output_specs(one).items()
        }
        self.tensors = {**{name: tensor.cuda() for name, tensor in self.inputs.items()}, **self.outputs}

    def poison(self):
        for tensor in self.outputs.values():
            tensor.fill_(float("nan"))

    def run(self, rows=None, pdl=None, tensors=None, fewer=None):
        self.poison()
        self.runner.bind({**self.tensors, **(tensors or {})}, rows=rows, pdl=pdl, fewer=fewer)()
        torch.cuda.synchronize()
        check_health(self.runner.buffers)

    def with_dead_rows(self, rows):
        """Activations whose rows from ``rows`` on are NaN."""
        found = {}
        for name, axis in FAMILY.row_axes(self.one).items():
            found[name] = self.tensors[name].clone()
            found[name].narrow(axis, rows, self.one.rows - rows).fill_(float("nan"))
        return found

    def judge(self, rows=None):
        got = {name: tensor.cpu() for name, tensor in self.outputs.items()}
        judge(self.one, self.inputs, got, self.wanted, rows or self.one.rows)

    def bits(self):
        return [tensor.view(torch.int16).clone() for tensor in self.outputs.values()]


@cache
def rank_inputs(one, rank):
    """Of one rank of several: partial latents of a size of its own, of the same signs on all; its own shared expert and weights."""
    everyone, mine = whole_numbers(one, "one_shot", 99), whole_numbers(one, "one_shot", 100 + rank)
    return {
        **everyone,
        "latent_partial": everyone["latent_partial"] * (2.0 ** (rank % 3 - 1) if rank % 4 != 2 else -0.5),
        "shared_partial": mine["shared_partial"],
        "w_up": mine["w_up"],
    }


@cache
def ranks_twin(one):
    """Outputs as every rank has them."""
    inputs = [rank_inputs(one, rank) for rank in range(one.tp)]

    def body(comm):
        t = inputs[comm.rank]
        return moe_tail(
            t["latent_partial"], t["shared_partial"], t["latent_norm"], t["w_up"], t["prefix"], list(t["blocks"]),
            t["res_norm"], t["res_proj"], t["norm_w"], eps=one.eps, comm=comm,
        )  # fmt: skip

    return dict(zip(FAMILY.outputs, run_virtual_ranks(one.tp, body)[0], strict=True))


class TailRanks(Ranks):
    """The tail's."""

    family = FAMILY
    inputs_of = staticmethod(rank_inputs)

    def judge(self):
        got = {name: tensor.cpu() for name, tensor in self.outputs[0][0].items()}
        judge(self.one, rank_inputs(self.one, 0), got, ranks_twin(self.one), self.one.rows)
