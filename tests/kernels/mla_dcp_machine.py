"""All ranks' launches of the MLA core with contexts over ranks, on the PTX machine: one memory, mailboxes in one another's reach."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from k3lab.kernels.mla.family import Mla
from k3lab.kernels.transports import target_rows

from .mla_case import FAMILY, H200
from .mla_dcp_case import ENGINE, judge_rank, rank_inputs, twins
from .mla_machine import MatrixMachine, bytes_of, compiled_ptx
from .ptx_machine import Memory
from .test_moe_tail_machine import TailMachine


class RanksMachine(MatrixMachine, TailMachine):
    """Matrices and asynchronous copies; packets, polls and the clock."""

    half = False


COMPILED: dict[Any, list] = {}


def kernels_of(one: Mla, config: dict[str, Any], monkeypatch: Any) -> list:
    """(launch, PTX text) of each kernel, made once."""
    key = one, tuple(config.items())
    if key not in COMPILED:
        COMPILED[key] = compiled_ptx(one, config, monkeypatch)
    return COMPILED[key]


class Case:
    """Every rank's tensors and buffers in one memory; ``factors`` are of one rank that plays all of them over loopback."""

    def __init__(
        self, monkeypatch: Any, one: Mla, contexts: list[int], live: int | None = None, seed: int = 0,
        factors: tuple[float, ...] = (), **change: Any,
    ) -> None:  # fmt: skip
        self.one, self.live, self.contexts, self.factors = one, live or one.rows, contexts, factors
        space = ENGINE.space(one, H200)
        self.config = {**space.default, **change}
        legal = {name: value for name, value in self.config.items() if name != "jitter"}
        assert space.illegal(legal) is None, space.illegal(legal)
        self.kernels = kernels_of(one, self.config, monkeypatch)
        self.ranks = range(1 if factors else one.tp)
        self.inputs = [rank_inputs(one, contexts, rank, self.live, seed) for rank in self.ranks]
        self.memory = Memory(1 << 26)
        self.at: list[dict[str, int]] = []
        for rank in self.ranks:
            at = {
                name: self.memory.add(f"{name} {rank}", bytes_of(tensor)) for name, tensor in self.inputs[rank].items()
            }
            ((self.shape, _),) = FAMILY.output_specs(one).values()
            at["out"] = self.memory.add(
                f"out {rank}", np.full((self.shape[0], 2 * self.shape[1]), 0xFF, dtype=np.uint8)
            )
            for buffer in self.buffers:
                if not buffer.targets_of:
                    made = (
                        np.zeros(buffer.shape, dtype=np.int32)
                        if buffer.persistent
                        else np.full(buffer.shape, np.nan, np.float32)
                    )
                    at[buffer.name] = self.memory.add(f"{buffer.name} {rank}", made)
            self.at.append(at)
        for rank in self.ranks:
            for buffer in self.buffers:
                if buffer.targets_of:
                    self.at[rank][buffer.name] = self.memory.add(
                        f"{buffer.name} {rank}", np.array(self.targets(buffer.targets_of, rank), dtype=np.int64)
                    )

    @property
    def buffers(self) -> tuple[Any, ...]:
        return ENGINE._buffers(self.one, self.config)

    def targets(self, name: str, rank: int) -> list[list[int]]:
        """Lines of a rank's table: its own slot on every rank, or every slot of the own mailbox."""
        (buffer,) = (one for one in self.buffers if one.name == name)
        step = 4 * math.prod(buffer.shape[1:])
        if self.factors:
            return target_rows([self.at[0][name] + slot * step for slot in range(self.one.tp)], self.factors)
        return target_rows([at[name] + rank * step for at in self.at], [1.0] * self.one.tp)

    def launch(self, role: int, rank: int, live: int | None = None, tick: int = 0, seed: int = 0) -> RanksMachine:
        """One launch of one rank, all of its blocks at once."""
        launch, text = self.kernels[role]
        integers = {"rows": live or self.live, "rank": rank}
        values = [integers[arg.name] if arg.kind == "int32" else self.at[rank][arg.name] for arg in launch.args]
        machine = RanksMachine(
            text,
            self.memory.data,
            values,
            launch.threads,
            launch.cluster_blocks,
            launch.shared_bytes,
            seed=seed,
            tick=tick,
        )
        machine.run(0, launch.blocks)
        assert self.memory.guards_hold()
        return machine

    def step(self, live: int | None = None, seed: int = 0) -> None:
        """All four launches of all ranks, the ranks in another order each time: no launch waits for its like."""
        for role in range(4):
            for rank in sorted(self.ranks, key=lambda one: (one * 5 + role + seed) % 7):
                machine = self.launch(role, rank, live, seed=seed)
                early = {name.split(".")[0] for name in machine.before_wait}
                assert early <= {"ld", "cp"} and (role != 2 or not early)
                if role == 1:
                    self.no_early_key_is_new(machine, rank, live or self.live)

    def no_early_key_is_new(self, machine: RanksMachine, rank: int, live: int) -> None:
        """What was asked for before the wait is no row that this step writes."""
        from .mla_dcp_case import own_rows

        written = own_rows(self.one, self.inputs[rank], rank, live).flatten()
        size = self.one.width * self.inputs[rank]["cache"].element_size()
        assert not any(bool(written[(place - self.at[rank]["cache"]) // size]) for place in machine.early)

    def got(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, cache)."""
        before = self.inputs[rank]["cache"]
        out = torch.from_numpy(self.memory.get(f"out {rank}")).view(torch.bfloat16).view(self.shape)
        return out, torch.from_numpy(self.memory.get(f"cache {rank}")).view(before.dtype).view(before.shape)

    def judge(self) -> None:
        """Every rank as its twin, no wait given up, every block's launches counted."""
        for rank, wanted in enumerate(twins(self.one, self.inputs, self.live)):
            judge_rank(self.one, rank, self.inputs[rank], *self.got(rank), wanted, self.live)
            assert not self.memory.get(f"health {rank}").any()
