"""Kernels of the router on the PTX machine: problems small and whole, inputs whose sums are exact, what must come out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from k3lab.kernels import K3, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.router.common import board
from k3lab.kernels.router.exact import choose
from k3lab.kernels.router.family import Router
from k3lab.kernels.router.profiles import own_slot
from k3lab.kernels.transports import loopback_factors, target_rows

from .ptx_machine import Machine, Memory

FAMILY = family("router")
FUSED, MMA = FAMILY.engine("cute_fused"), FAMILY.engine("cute_mma")
H200 = gpu_card("H200")


def problem(rows: int, kind: str = "uniform", tp: int = 16, **changes: Any) -> Router:
    made = dataclasses.replace(FAMILY.problem(K3, tp=tp, rows=rows, kind=kind), **changes)
    assert isinstance(made, Router)
    return made


def small(rows: int, kind: str = "uniform", hidden: int = 1792, **changes: Any) -> Router:
    """Four ranks of 24 experts and 32 latents, short sums."""
    return problem(rows, kind, 4, **{"hidden": hidden, "experts": 24, "latent": 32, "top_k": 8, **changes})


def engine_of(one: Router) -> Any:
    return MMA if one.kind in ("front", "choice") else FUSED


def config(one: Router, **changes: Any) -> dict[str, Any]:
    return {**engine_of(one).space(one, H200).default, **changes}


def whole_numbers(one: Router, seed: int) -> dict[str, torch.Tensor]:
    """Inputs whose products and sums are exact in FP32, in any order."""
    generator = torch.Generator().manual_seed(seed)
    inputs = FAMILY.inputs(one, seed)

    def whole(name: str) -> torch.Tensor:
        return torch.randint(-3, 4, inputs[name].shape, generator=generator)

    if "x" in inputs:
        inputs["x"] = whole("x").to(torch.bfloat16)
        inputs |= {name: (whole(name) / 64).to(torch.bfloat16) for name in ("w_router", "w_down")}
    return inputs


def same_weights(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """The same bits, but that a GPU's arithmetic has one NaN and a CPU's another."""
    found, wanted = (torch.where(one.isnan(), torch.nan, one).view(torch.int32) for one in (found.cpu(), wanted))
    return torch.equal(found, wanted)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """As NumPy can hold it."""
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype).numpy()


def compiled_ptx(one: Router, chosen: dict[str, Any], monkeypatch: Any, arch: str = "sm_90a") -> tuple[Any, str]:
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
        compiled = engine_of(one).compile(one, chosen, arch)
    return compiled, texts[-1]


@dataclasses.dataclass
class Run:
    """A launch on the machine, poisoned outputs, dead rows of NaN."""

    one: Router
    live: int
    inputs: dict[str, torch.Tensor]
    memory: Memory
    machine: Machine
    epoch: int

    def get(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.memory.get(name))

    def check_choice(self, logits: torch.Tensor) -> None:
        """Ids and weights are exactly those of the logits."""
        one, live = self.one, self.live
        ids, weights = choose(logits[:live], self.inputs["bias"], one.top_k, one.scaling)
        assert torch.equal(self.get("ids")[:live], ids)
        assert same_weights(self.get("weights")[:live], weights)
        nans = (logits[:live] + self.inputs["bias"]).isnan().sum(-1)
        assert self.get("nans")[:live].tolist() == nans.tolist()
        for name in ("ids", "nans"):
            assert bool((self.get(name).flatten()[live * self.get(name)[0].numel() :] == -7).all()), name
        assert bool(self.get("weights")[live:].isnan().all())

    def check_shard(self) -> None:
        """Logits and latents are the twin's, to the bit; every packet of the mailbox is there, for this epoch alone."""
        one, live = self.one, self.live
        wanted = FAMILY.twin(one, self.inputs)
        latent = self.get("latent").view(torch.bfloat16)
        assert torch.equal(self.get("logits")[:live], wanted["logits"][:live])
        assert torch.equal(latent[:live].float(), wanted["latent"][:live].to(torch.bfloat16).float())
        assert bool(self.get("logits")[live:].isnan().all()) and bool(latent[live:].isnan().all())
        sheet = board(one)
        used = self.get("mailbox")[:, : 4 * one.rows * sheet.words]
        box = used.view(one.tp, 2, one.rows, sheet.words, 2)
        half = self.epoch & 1
        assert bool((box[:, half, ..., 1] == self.epoch).all()) and not bool(box[:, 1 - half].any())
        others = [rank for rank in range(one.tp) if rank != own_slot(one.tp)]
        assert torch.equal(box[others, half, ..., 0], self.inputs["peers"][others])
        assert bool((self.get("epochs") == self.epoch).all())


def run(
    one: Router, monkeypatch: Any, live: int | None = None, inputs: dict[str, torch.Tensor] | None = None, epoch: int = 5,
    seed: int = 1, dead: int | None = None, claimed: bool = False, **changes: Any,
) -> Run:  # fmt: skip
    """One launch over loopback, cluster after cluster where they do not wait for each other; ``dead``: a rank whose packets
    go elsewhere, with a limit of 10 ms; ``claimed``: an earlier launch gave up.
    """
    compiled, text = compiled_ptx(one, config(one, **changes), monkeypatch)
    (launch,) = compiled.launches
    live, inputs = live or one.rows, inputs or whole_numbers(one, seed)
    memory, at = Memory(1 << 25), {}
    for name, tensor in inputs.items():
        given = tensor.clone()
        if name in ("x", "all_logits"):
            given[live:] = float("nan")
        at[name] = memory.add(name, bits(given))
    for name, (shape, dtype) in FAMILY.output_specs(one).items():
        kind = getattr(torch, dtype)
        at[name] = memory.add(name, bits(torch.full(shape, float("nan") if kind.is_floating_point else -7, dtype=kind)))
    for buffer in compiled.buffers:
        if not buffer.targets_of:
            start = 0 if buffer.persistent else -7
            start = epoch - 1 if buffer.name == "epochs" else start
            at[buffer.name] = memory.add(buffer.name, np.full(buffer.shape, start, dtype=np.int32))
    if "mailbox" in at:
        slots = [at["mailbox"] + rank * board(one).slot_bytes for rank in range(one.tp)]
        memory.data[at["health"]] = int(claimed)
        if dead is not None:
            slots[dead] = memory.add("elsewhere", np.zeros(board(one).slot_bytes, dtype=np.uint8))
            memory.data[at["health"] + 40 : at["health"] + 44].view(np.int32)[0] = 10_000_000
        table = np.array(target_rows(slots, loopback_factors(one.tp)), dtype=np.int64)
        at["mailbox_targets"] = memory.add("mailbox_targets", table)
    values = [live if arg.kind == "int32" else at[arg.name] for arg in launch.args]
    cluster, blocks = launch.cluster[0], launch.grid[0]
    machine = Machine(text, memory.data, values, launch.threads, cluster, launch.shared_bytes, seed=seed)
    machine.tick, machine.fair = (0, 16) if dead is None else (200, 2)
    together = blocks if launch.needs_residency else cluster
    for first in range(0, blocks, together):
        machine.run(first, together)
    assert memory.guards_hold()
    return Run(one, live, inputs, memory, machine, epoch)
