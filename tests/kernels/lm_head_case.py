"""Kernels of the head on the PTX machine: problems small and whole, inputs whose sums are exact, what must come out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from k3lab.kernels import K3, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.lm_head.cute_rows_engine import lookup
from k3lab.kernels.lm_head.family import LmHead
from k3lab.kernels.lm_head.layout import Board
from k3lab.kernels.lm_head.peers import own_slot
from k3lab.kernels.transports import loopback_factors, target_rows

from .ptx_machine import Memory, Step
from .test_experts_machine import ExpertsMachine, bits

FAMILY = family("lm_head")
CUTE, ROWS, TRITON = FAMILY.engine("cute_mma"), FAMILY.engine("cute_rows"), FAMILY.engine("triton")
H200 = gpu_card("H200")


class HeadMachine(ExpertsMachine):
    """The machine, and the atomics that blocks of a head meet by."""

    def do_atom(self, step: Step, who: np.ndarray) -> None:
        if "global" not in step.name or "add" not in step.name:
            super().do_atom(step, who)
            return
        assert "acq_rel" in step.name, "arrivals order what was raised before them"
        self.note(step, who)
        for thread, one in zip(who, self.address(step.args[1], who, "u64"), strict=True):
            cell = self.memory[one : one + 4].view(np.uint32)
            self.put(step.args[0], np.array([thread]), cell.copy())
            cell[0] += self.get(step.args[2], np.array([thread]), "u32")[0]

    def do_red(self, step: Step, who: np.ndarray) -> None:
        if "max" not in step.name:
            super().do_red(step, who)
            return
        self.note(step, who)
        for one, value in zip(self.address(step.args[0], who, "u64"), self.get(step.args[1], who, "u64"), strict=True):
            cell = self.memory[one : one + 8].view(np.uint64)
            cell[0] = max(cell[0], value)


def problem(rows: int, kind: str = "argmax", tp: int = 16, **changes: Any) -> LmHead:
    made = dataclasses.replace(FAMILY.problem(K3, tp=tp, rows=rows, kind=kind), **changes)
    assert isinstance(made, LmHead)
    return made


def small(rows: int, kind: str = "argmax", tp: int = 4, vocab: int = 50, hidden: int = 512) -> LmHead:
    return problem(rows, kind, tp, vocab=vocab, hidden=hidden)


def engine_of(one: LmHead) -> Any:
    return ROWS if one.kind == "embed" else CUTE


def config(one: LmHead, **changes: Any) -> dict[str, Any]:
    return {**engine_of(one).space(one, H200).default, **changes}


def slot_bytes(one: LmHead, chosen: dict[str, Any]) -> int:
    """From a rank's slot of the mailbox to the next."""
    return lookup(one, chosen).slot_bytes if one.kind == "embed" else Board(one.tp, one.rows).slot_bytes


def whole_numbers(one: LmHead, seed: int, most: int = 3) -> dict[str, torch.Tensor]:
    """Inputs whose products and sums are exact in FP32, in any order; of few values, so that logits are often equal."""
    generator = torch.Generator().manual_seed(seed)
    inputs = FAMILY.inputs(one, seed)
    if one.kind == "embed":
        return inputs
    for name, scale in (("h", 1), ("w", 64)):
        whole = torch.randint(-most, most + 1, inputs[name].shape, generator=generator)
        inputs[name] = (whole / scale).to(torch.bfloat16)
    if "peers" in inputs:  # near the best that such sums give, and often equal to each other
        theirs = torch.randint(1, 4, inputs["peers"].shape[:2], generator=generator).float()
        inputs["peers"][..., 0] = (theirs * one.hidden**0.5 / 16).to(torch.bfloat16).float().view(torch.int32)
    return inputs


def compiled_ptx(engine: Any, one: Any, chosen: dict[str, Any], monkeypatch: Any, arch: str = "sm_90a") -> tuple[Any, str]:  # fmt: skip
    """(compiled, PTX text of its kernel)."""
    import k3lab.kernels.cute_compile as compiler
    from cutlass import cute

    texts = []

    def compile_(*args: Any, **options: Any) -> Any:
        made = cute.compile(*args, **options)
        text = made.artifacts.PTX
        texts.append(text if isinstance(text, str) else text.decode())
        return made

    fake = type("cute", (), {"compile": staticmethod(compile_)})
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "cute", fake)
        compiled = engine.compile(one, chosen, arch)
    return compiled, texts[-1]


@dataclasses.dataclass
class Run:
    """A launch on the machine, poisoned outputs, dead rows of NaN."""

    one: LmHead
    live: int
    inputs: dict[str, torch.Tensor]
    memory: Memory
    machine: HeadMachine
    epoch: int

    def get(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.memory.get(name))

    def check(self) -> None:
        """Outputs are the twin's, to the bit; nothing else was written; the launch after this one finds all in order."""
        one, live = self.one, self.live
        wanted = FAMILY.twin(one, self.inputs)
        for name, (_, dtype) in FAMILY.output_specs(one).items():
            kind, found = getattr(torch, dtype), self.get(name)
            value = wanted[name][:live].to(kind)
            where = found[:live] if kind != torch.bfloat16 else found[:live].view(torch.bfloat16)
            assert torch.equal(where.isnan(), value.isnan()), name
            assert torch.equal(where[~where.isnan()], value[~value.isnan()]), name
            dead = found[live:].view(torch.bfloat16) if kind == torch.bfloat16 else found[live:]
            assert bool((dead == -7).all() if dtype == "int32" else dead.isnan().all()), name
        if one.kind == "argmax":
            self.check_exchange()
        if one.kind == "embed":
            assert len(set(self.get("epochs").tolist())) == 1
            assert int(self.get("epochs")[0]) & 0xFFFFFFFF == self.epoch

    def check_exchange(self) -> None:
        """Every packet is there, for this epoch alone; keys and arrivals are zeros."""
        one, half = self.one, self.epoch & 1
        assert not bool(self.get("keys").any()) and not bool(self.get("arrived").any())
        assert self.get("epochs").tolist() == [self.epoch - (1 << 32) if self.epoch >> 31 else self.epoch]
        box = self.get("mailbox").view(one.tp, 2, one.rows, 4)
        assert bool((box[:, half, :, 3] == self.get("epochs")[0]).all()) and not bool(box[:, 1 - half].any())
        others = [rank for rank in range(one.tp) if rank != own_slot(one.tp)]
        assert torch.equal(box[others, half, :, :2], self.inputs["peers"][others])


def run(
    one: LmHead, monkeypatch: Any, live: int | None = None, inputs: dict[str, torch.Tensor] | None = None, epoch: int = 5,
    seed: int = 1, dead: int | None = None, claimed: bool = False, order: list[int] | None = None, rank: int = 0, **changes: Any,
) -> Run:  # fmt: skip
    """One launch over loopback, block after block; ``order``: in which they run; ``dead``: a rank whose packets go elsewhere,
    with a limit of 10 ms; ``claimed``: an earlier launch gave up.
    """
    chosen = config(one, **changes)
    compiled, text = compiled_ptx(engine_of(one), one, chosen, monkeypatch)
    (launch,) = compiled.launches
    live, inputs = live or one.rows, inputs or whole_numbers(one, seed)
    memory, at = Memory(1 << 23), {}
    for name, tensor in inputs.items():
        given = tensor.clone()
        if name == "h":
            given[live:] = float("nan")
        if name == "tokens":
            given[live:] = -1
        at[name] = memory.add(name, bits(given))
    for name, (shape, dtype) in FAMILY.output_specs(one).items():
        kind = getattr(torch, dtype)
        at[name] = memory.add(name, bits(torch.full(shape, float("nan") if kind.is_floating_point else -7, dtype=kind)))
    for buffer in compiled.buffers:
        if not buffer.targets_of:
            start = np.uint32(epoch - 1).view(np.int32) if buffer.name == "epochs" else 0
            at[buffer.name] = memory.add(buffer.name, np.full(buffer.shape, start, dtype=buffer.dtype))
    if "mailbox" in at:
        step = slot_bytes(one, chosen)
        slots = [at["mailbox"] + slot * step for slot in range(one.tp)]
        memory.data[at["health"]] = int(claimed)
        if dead is not None:
            slots[dead] = memory.add("elsewhere", np.zeros(step, dtype=np.uint8))
            memory.data[at["health"] + 40 : at["health"] + 44].view(np.int32)[0] = 10_000_000
        table = np.array(target_rows(slots, loopback_factors(one.tp)), dtype=np.int64)
        at["mailbox_targets"] = memory.add("mailbox_targets", table)
    numbers = {"rows": live, "rank": rank}
    values = [numbers[arg.name] if arg.kind == "int32" else at[arg.name] for arg in launch.args]
    machine = HeadMachine(text, memory.data, values, launch.threads, 1, launch.shared_bytes, seed=seed)
    machine.tick = 0 if dead is None else 5000
    for block in order or range(launch.grid[0]):
        machine.run(block, 1)
    assert memory.guards_hold()
    return Run(one, live, inputs, memory, machine, epoch)


def exchange(one: LmHead, monkeypatch: Any, everyone: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Outputs of every rank of a real group, each with mailboxes in the others' reach; one rank after the other.

    First each publishes, and gives up on those that are still to come; then each runs again. Records are cleared meanwhile.
    """
    compiled, text = compiled_ptx(engine_of(one), one, config(one), monkeypatch)
    (launch,) = compiled.launches
    memory, places = Memory(1 << 23), []
    for inputs in everyone:
        at = {name: memory.add(f"{name}", bits(tensor)) for name, tensor in inputs.items()}
        for name, (shape, dtype) in FAMILY.output_specs(one).items():
            at[name] = memory.add(name, bits(torch.full(shape, -7, dtype=getattr(torch, dtype))))
        for buffer in compiled.buffers:
            if not buffer.targets_of:
                at[buffer.name] = memory.add(buffer.name, np.zeros(buffer.shape, dtype=buffer.dtype))
        memory.data[at["health"] + 40 : at["health"] + 44].view(np.int32)[0] = 1_000_000
        places.append(at)
    step = slot_bytes(one, config(one))
    counters = next(4 * buffer.shape[0] for buffer in compiled.buffers if buffer.name == "epochs")
    for rank, at in enumerate(places):
        lines = target_rows([other["mailbox"] + rank * step for other in places], [1.0] * one.tp)
        at["mailbox_targets"] = memory.add("targets", np.array(lines, dtype=np.int64))
    for again in range(2):
        for rank, at in enumerate(places):
            memory.data[at["epochs"] : at["epochs"] + counters] = 0
            numbers = {"rows": one.rows, "rank": rank}
            values = [numbers[arg.name] if arg.kind == "int32" else at[arg.name] for arg in launch.args]
            machine = HeadMachine(text, memory.data, values, launch.threads, 1, launch.shared_bytes)
            machine.tick = 200
            gave_up = False
            for block in range(launch.grid[0]):
                memory.data[at["health"] : at["health"] + 40] = (
                    0  # or the blocks after one that gave up would not publish
                )
                machine.run(block, 1)
                gave_up |= bool(memory.data[at["health"]])
            assert gave_up == (not again and rank < one.tp - 1), "only who comes before the others misses them"
    found = []
    for at in places:
        outputs = {}
        for name, (shape, dtype) in FAMILY.output_specs(one).items():
            kind = getattr(torch, dtype)
            raw = memory.data[at[name] : at[name] + int(np.prod(shape)) * kind.itemsize].copy()
            outputs[name] = torch.from_numpy(raw).view(kind).view(shape)
        found.append(outputs)
    return found
