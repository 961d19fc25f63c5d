"""Several ranks on one GPU in one process: a runner and a stream each, mailboxes in one another's reach.

Truly concurrent, so thousands of exchanges take seconds; but all ranks' waiting blocks must be on the GPU together with what
they wait for. Hence few rows, and no programmatic edge between calls: blocks of a launch that only waits for
its predecessor would take the room of a rank that has yet to publish.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from k3lab.kernels import Buffer
from k3lab.kernels.collectives import run_virtual_ranks
from k3lab.kernels.health import check_health
from k3lab.kernels.output_projection.twin import output_projection
from k3lab.kernels.transports import Mailbox, slot_bytes, target_rows

from .output_projection_case import FAMILY, exact_input, worst

BURST = 10
"""Launches between two looks from the host: ranks drift apart as far as the protocol lets them."""


@dataclass
class Group:
    """The mailboxes of all ranks, by buffer name."""

    size: int
    boxes: dict[str, list[torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class VirtualRank:
    """One rank's transport: plain stores into the other ranks' mailboxes on the same device."""

    group: Group
    rank: int
    name: str = "virtual"
    stores: str = "peer"

    @property
    def size(self) -> int:
        return self.group.size

    def mailbox(self, buffer: Buffer, device: str) -> Mailbox:
        dtype, step = getattr(torch, buffer.dtype), slot_bytes(buffer, self.size)
        boxes = self.group.boxes.setdefault(
            buffer.name, [torch.zeros(buffer.shape, dtype=dtype, device=device) for _ in range(self.size)]
        )
        lines = target_rows([box.data_ptr() + self.rank * step for box in boxes], [1.0] * self.size)
        return Mailbox(boxes[self.rank], torch.tensor(lines, dtype=torch.int64, device=device), self.group)

    def barrier(self) -> None:
        """One host thread speaks for all ranks, and it has synchronised with the GPU."""


@cache
def inputs_of(one, rank):
    """Of one rank: x and its columns of the weight are its own, the rest is everyone's; sums are exact in FP32."""
    generator = torch.Generator().manual_seed(100 + rank)
    found = FAMILY.inputs(replace(one, width=32), 99)
    found["x"] = torch.randint(-3, 4, (one.rows, one.width), generator=generator).bfloat16()
    found["w_o"] = (torch.randint(-3, 4, (one.hidden, one.width), generator=generator) / 64).bfloat16()
    return found


@cache
def twin_of(one):
    """(outputs as every rank has them, the MLP's input in FP64, its bound)."""
    inputs = [inputs_of(one, rank) for rank in range(one.tp)]

    def body(comm):
        t = inputs[comm.rank]
        return output_projection(
            t["x"], t["w_o"], t["prefix"], list(t["blocks"]), t["res_norm"], t["res_proj"], t["norm_w"], eps=one.eps, comm=comm
        )  # fmt: skip

    prefix, _ = run_virtual_ranks(one.tp, body)[0]
    return prefix, *exact_input(inputs[0], prefix, one.eps)


class Ranks:
    """Every rank's runner, stream and calls; delays, where asked for, are seeded by rank."""

    family = FAMILY
    inputs_of = staticmethod(inputs_of)

    def __init__(self, device, one, engine, config, *, jitter: int = 0):
        from k3lab.kernels.launch import Runner
        from k3lab.tuning.compiling import compile_config

        group, self.one = Group(one.tp), one
        specs = self.family.output_specs(one)
        self.runners, self.streams, self.outputs, self.calls = [], [], [], []
        for rank in range(one.tp):
            chosen = {**config, "jitter": jitter + rank} if jitter else config
            compiled = compile_config(engine, one, chosen, device.arch)
            runner = Runner(compiled, transport=VirtualRank(group, rank))
            tensors = {name: tensor.cuda() for name, tensor in self.inputs_of(one, rank).items()}
            outputs = [
                {name: torch.empty(shape, dtype=torch.bfloat16, device="cuda") for name, (shape, _) in specs.items()}
                for _ in range(BURST)
            ]
            self.runners.append(runner)
            self.streams.append(torch.cuda.Stream())
            self.outputs.append(outputs)
            self.calls.append([runner.bind({**tensors, **one_set}, pdl=False) for one_set in outputs])
        self.random = random.Random(jitter)

    def launch(self, turn: int, ranks=None):
        """One call on each of the ranks, in any order."""
        order = list(range(self.one.tp) if ranks is None else ranks)
        self.random.shuffle(order)
        for rank in order:
            with torch.cuda.stream(self.streams[rank]):
                self.calls[rank][turn]()

    def poison(self):
        """All outputs NaN, before anything else is launched."""
        for outputs in self.outputs:
            for one_set in outputs:
                for tensor in one_set.values():
                    tensor.fill_(float("nan"))
        torch.cuda.synchronize()

    def burst(self):
        """Outputs poisoned, :data:`BURST` launches, all of them checked for health."""
        self.poison()
        for turn in range(BURST):
            self.launch(turn)
        torch.cuda.synchronize()
        for rank, runner in enumerate(self.runners):
            check_health(runner.buffers, rank)

    def bits(self, rank: int, turn: int):
        return torch.stack([tensor.view(torch.int16) for tensor in self.outputs[rank][turn].values()])

    def same_everywhere(self, wanted=None):
        """All ranks have the same bits in every launch of the burst, and those wanted."""
        first = self.bits(0, 0) if wanted is None else wanted
        for rank in range(self.one.tp):
            for turn in range(BURST):
                assert torch.equal(self.bits(rank, turn), first), f"rank {rank}, launch {turn} has other bits"
        return first

    def judge(self):
        """The twin's bits and numbers, in what rank 0 made first."""
        prefix, value, bound = twin_of(self.one)
        got = {name: tensor.cpu() for name, tensor in self.outputs[0][0].items()}
        assert torch.equal(got["prefix_out"].view(torch.int16), prefix.view(torch.int16))
        reason = worst(got["mlp_input"], value, bound)
        assert reason is None, reason
