"""Bulk copies into shared memory on the PTX machine; machines of several kernels share them."""

from __future__ import annotations

import numpy as np

from .ptx_machine import PEER, Step
from .test_output_projection_machine import ProjectionMachine


class Copies(ProjectionMachine):
    """With bulk copies into shared memory, which land at once, and the instructions that go with them."""

    def execute(self, place: int, who: np.ndarray) -> None:
        """One lane of a warp is elected when all of it have come."""
        step = self.steps[place]
        if step.name[0] != "elect":
            super().execute(place, who)
            return
        who = self.whole_warps(who, place).ravel()
        self.put(step.args[0].split("|")[1], who, who % 32 == 0)

    def do_cvta(self, step: Step, who: np.ndarray) -> None:
        self.put(step.args[0], who, self.get(step.args[1], who, "u64"))

    def do_mov(self, step: Step, who: np.ndarray) -> None:
        if len(step.args) > 1 and step.args[1] in self.parameters:  # the descriptor's address stands for the tensor's
            self.put(step.args[0], who, np.full(len(who), self.parameters[step.args[1]], dtype=np.uint64))
            return
        super().do_mov(step, who)

    def do_vote(self, step: Step, who: np.ndarray, place: int) -> None:
        if "any" not in step.name:
            super().do_vote(step, who, place)
            return
        who = self.whole_warps(who, place).ravel()
        self.put(step.args[0], who, self.flag(step.args[1], who).reshape(-1, 32).any(1).repeat(32))

    def do_cp(self, step: Step, who: np.ndarray) -> None:
        self.note(Step("", ("cp", "bulk"), ()), who)
        to, bar = (self.address(step.args[place], who, "u32") for place in (0, 2 if "tensor" in step.name else 3))
        for place, thread in enumerate(who):
            one = who[place : place + 1]
            if "tensor" in step.name:
                base, corner = step.args[1].strip("[]").split(",", 1)
                start = int(self.get(base.strip(), one, "u64")[0])
                (rows, width), (height, columns) = self.maps[start]
                x, y = (int(self.get(name.strip(), one, "s32")[0]) for name in corner.strip(" {}").split(","))
                assert 0 <= x <= width - columns and 0 <= y <= rows - height
                lines = np.arange(y, y + height)[:, None] * (width * 2) + np.arange(x * 2, (x + columns) * 2)
                at = (start + lines).ravel()
            else:
                start = int(self.address(step.args[1], one, "u64")[0])
                size = int(self.get(step.args[2], one, "u32")[0])
                assert start % 16 == size % 16 == to[place] % 16 == 0
                at = start + np.arange(size)
            if not self.waited[thread]:
                self.ahead |= {int(at[0])}
            self.land(int(self.local[thread]), int(to[place]), int(bar[place] & ((1 << PEER) - 1)), at)
        self.wake()

    def land(self, block: int, to: int, bar: int, at: np.ndarray) -> None:
        """What lies at some addresses of memory is in a block's shared memory, and its barrier has counted it."""
        self.shared[block, to + np.arange(len(at))] = self.memory[at]
        self.barriers[block, bar].bytes -= len(at)
