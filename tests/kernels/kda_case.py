"""The KDA kernel on the PTX machine: small problems, a cache updated in place or not, what must come out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from k3lab.kernels import K3, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.kda.family import Kda
from k3lab.kernels.stamps import TABLE_BYTES

from .ptx_machine import PEER, Machine, Memory
from .ptx_text import DTYPES, Step

FAMILY = family("kda")
ENGINE = FAMILY.engine("cute")
H200 = gpu_card("H200")
PASSED = ["begin", "asked", "woken", "sent", "product", "listening", "heard", "finished"]
"""Stages of every warp, in the order of a launch."""
READ_EARLY = {"f_b", "conv_q", "conv_k", "conv_v", "a_log", "dt_bias", "o_norm", "conv_state", "state", "slots"}
"""What the family declares as written by no kernel of a step but by the step before."""


def problem(rows: int, kind: str = "plain", tp: int = 16, **changes: Any) -> Kda:
    made = dataclasses.replace(FAMILY.problem(K3, tp=tp, rows=rows, kind=kind), **changes)
    assert isinstance(made, Kda)
    return made


def config(one: Kda, **changes: Any) -> dict[str, Any]:
    return {**ENGINE.space(one, H200).default, **changes}


class KdaMachine(Machine):
    """With the special functions, rounded correctly, and the tensors that are touched before the dependency wait."""

    stamps: int = 1 << 62
    """Where the table of a build with stamps begins: it may be written at any time."""

    def get(self, name: str, who: np.ndarray, kind: str) -> np.ndarray:
        """Also FP32 literals as 32 bits."""
        return (
            super().get(name, who, kind).view(DTYPES[kind])
            if name[:2] in ("0f", "0F")
            else super().get(name, who, kind)
        )

    def do_ex2(self, step: Step, who: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            self.put(step.args[0], who, np.exp2(self.get(step.args[1], who, "f32")))

    def do_rsqrt(self, step: Step, who: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            self.put(step.args[0], who, np.float32(1) / np.sqrt(self.get(step.args[1], who, "f32")))

    def do_cp(self, step: Step, who: np.ndarray) -> None:
        """Asynchronous copies, done at once."""
        if step.name[2] == "cg":
            self.note(step, who)
            to, source = self.address(step.args[0], who, "u32"), self.address(step.args[1], who, "u64")
            assert (to % 16 == 0).all() and (source % 16 == 0).all()
            span = np.arange(16)
            self.shared[self.local[who][:, None], to[:, None] + span] = self.memory[source[:, None] + span]

    def do_mapa(self, step: Step, who: np.ndarray) -> None:
        """Also of peers that there are not, since the compiler asks for addresses ahead of the branch; a store there fails."""
        at, peer = self.get(step.args[1], who, "u32"), self.get(step.args[2], who, "u32")
        self.put(step.args[0], who, np.minimum(peer, np.uint32(self.cluster)) << np.uint32(PEER) | at)

    def note(self, step: Step, who: np.ndarray) -> None:
        early = who[~self.waited[who]]
        if step.name[0] == "st" and (self.address(step.args[0], who, "u64") >= self.stamps).all():
            return
        if len(early):
            assert step.name[0] in ("ld", "cp"), f"{'.'.join(step.name)} before the dependency wait"
            address = step.args[1]
            self.touched.update(int(one) for one in self.address(address, early, "u64"))
        self.times = getattr(self, "times", 0) + 1

    def run(self, first: int, blocks: int) -> None:
        if not hasattr(self, "touched"):
            self.touched: set[int] = set()
        super().run(first, blocks)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """As NumPy can hold it."""
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype).numpy()


def compiled_ptx(one: Kda, chosen: dict[str, Any], monkeypatch: Any, arch: str = "sm_90a") -> tuple[Any, str]:
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
        compiled = ENGINE.compile(one, chosen, arch)
    return compiled, texts[-1]


@dataclasses.dataclass
class Run:
    """A launch on the machine: poisoned outputs, rows that are not live of NaN."""

    one: Kda
    live: int
    inputs: dict[str, torch.Tensor]
    memory: Memory
    machine: KdaMachine
    in_place: bool

    def get(self, name: str) -> torch.Tensor:
        """An output; of a cache updated in place that of the state it replaces."""
        if self.in_place and name != "out":
            name = name.removesuffix("s")
        found = torch.from_numpy(self.memory.get(name))
        return found.view(torch.bfloat16) if found.dtype == torch.int16 else found

    def early(self) -> set[str]:
        """Tensors read before the dependency wait."""
        places = sorted((at, name) for name, (at, _, _) in self.memory.places.items())
        return {[name for at, name in places if at <= one][-1] for one in self.machine.touched}


def run(
    one: Kda, monkeypatch: Any, live: int | None = None, inputs: dict[str, torch.Tensor] | None = None, seed: int = 1,
    in_place: bool = False, **changes: Any,
) -> Run:  # fmt: skip
    """One launch, cluster after cluster. ``in_place``: states are written to the tensors they are read from."""
    compiled, text = compiled_ptx(one, config(one, **changes), monkeypatch)
    (launch,) = compiled.launches
    live, inputs = live or one.rows, inputs or FAMILY.inputs(one, seed)
    total = sum(tensor.numel() * tensor.element_size() for tensor in inputs.values())
    stamps = int(changes.get("stamps", 0))
    size = 3 * total + one.rows * one.heads * (1 << 17) + (1 << 20)
    assert not stamps or stamps >= size
    memory, at = Memory(stamps + TABLE_BYTES if stamps else size), {}
    for name, tensor in inputs.items():
        given = tensor.clone()
        if name == "proj":
            given[live:] = float("nan")
        at[name] = memory.add(name, bits(given))
    for name, (shape, dtype) in FAMILY.output_specs(one).items():
        if in_place and name != "out":
            at[name] = at[name.removesuffix("s")]
        else:
            at[name] = memory.add(name, bits(torch.full(shape, float("nan"), dtype=getattr(torch, dtype))))
    values = [live if arg.kind == "int32" else at[arg.name] for arg in launch.args]
    cluster, blocks = launch.cluster[0], launch.grid[0]
    machine = KdaMachine(text, memory.data, values, launch.threads, cluster, launch.shared_bytes, seed=seed, tick=7)
    if stamps:
        machine.stamps = stamps
        memory.data[stamps : stamps + TABLE_BYTES] = 0
    for first in range(0, blocks, cluster):
        machine.run(first, cluster)
    assert memory.guards_hold()
    return Run(one, live, inputs, memory, machine, in_place)


def check(done: Run) -> None:
    """Live rows agree with the twin, the others still hold poison."""
    from k3lab.tuning.compare import compare

    wanted = FAMILY.twin(done.one, done.inputs)
    for name in FAMILY.output_specs(done.one):
        got = done.get(name)
        result = compare(name, got[: done.live], wanted[name][: done.live], FAMILY.tolerance(done.one, name))
        assert result.ok, result.message
        assert bool(got[done.live :].isnan().all()), name


def pool(one: Kda, slots: list[list[int]], entries: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """Inputs with a cache of ``entries`` entries and these slots."""
    inputs = FAMILY.inputs(one, seed)
    generator = torch.Generator().manual_seed(seed)
    history = torch.randn((entries, 3, 3 * one.width), generator=generator).to(torch.bfloat16)
    state = torch.randn((entries, one.heads, 128, 128), generator=generator) * 0.2
    return {**inputs, "conv_state": history, "state": state, "slots": torch.tensor(slots, dtype=torch.int32)}


def expected_in_place(
    one: Kda, inputs: dict[str, torch.Tensor], live: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, history, state) of a cache updated in place; ``out`` of padding is zero."""
    history, state, slots = inputs["conv_state"].clone(), inputs["state"].clone(), inputs["slots"]
    safe = {**inputs, "slots": slots.clone().clamp(min=1)}
    wanted = FAMILY.twin(one, safe)
    out, q_len = wanted["out"].clone(), one.q_len
    for row in range(live):
        request, token = row // q_len, row % q_len
        if slots[request, 0] <= 0:
            out[row] = 0
        elif (to := int(slots[request, 1 + token])) > 0:
            history[to - 1], state[to - 1] = wanted["conv_states"][row].to(torch.bfloat16), wanted["states"][row]
    return out, history, state


def exact(one: Kda, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """States after every token in FP64."""
    from k3lab.kernels.kda.family import WEIGHTS
    from k3lab.kernels.kda.twin import KdaWeights, kda

    wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    read = inputs["slots"][:, 0].long() - 1
    _, _, states = kda(
        wide["proj"], KdaWeights(**{name: wide[name] for name in WEIGHTS}), wide["conv_state"][read], wide["state"][read],
        q_len=one.q_len, lower_bound=one.lower_bound, eps=one.eps,
    )  # fmt: skip
    return states.flatten(0, 1)
