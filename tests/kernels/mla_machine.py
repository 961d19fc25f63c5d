"""Kernels of the MLA core on the PTX machine: matrices, asynchronous copies that land when they are waited for, clusters."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from k3lab.kernels.mla.family import Mla
from k3lab.kernels.numerics import round_e4m3

from .mla_case import FAMILY, H200, drawn, exact_inputs, written
from .ptx_arithmetic import COMPARE
from .ptx_machine import PEER, Machine, Memory
from .ptx_text import Step

ENGINE = FAMILY.engine("cute_mma")


class MatrixMachine(Machine):
    """Also knows ldmatrix, cp.async, FP16 products and E4M3."""

    def run(self, first: int, blocks: int) -> None:
        self.early: list[int] = getattr(self, "early", [])
        self.open: dict[int, list] = defaultdict(list)
        self.closed: dict[int, list] = defaultdict(list)
        super().run(first, blocks)

    def execute(self, place: int, who: np.ndarray) -> None:
        step = self.steps[place]
        if step.name[0] == "ldmatrix":
            self.do_ldmatrix(step, who, place)
        else:
            super().execute(place, who)

    def do_ldmatrix(self, step: Step, who: np.ndarray, place: int) -> None:
        names, turned = self.words(step.args[0]), "trans" in step.name
        who = self.whole_warps(who, place).ravel()
        at = self.address(step.args[1], who, "u32")
        assert (at % 16 == 0).all(), "misaligned matrix row"
        block, at = self.local[who[::32]], at.reshape(-1, 32)
        for matrix, name in enumerate(names):
            rows = at[:, 8 * matrix : 8 * matrix + 8]
            found = self.shared[block[:, None, None], rows[:, :, None] + np.arange(16)]
            values = np.ascontiguousarray(found).view(np.uint16)
            values = values.swapaxes(1, 2) if turned else values
            pair = values.reshape(-1, 2).astype(np.uint32)
            self.put(name, who, pair[:, 0] | pair[:, 1] << np.uint32(16))

    def do_cp(self, step: Step, who: np.ndarray) -> None:
        if step.name[2] == "commit_group":
            for one in who:
                self.closed[int(one)].append(self.open.pop(int(one), []))
        elif step.name[2] == "wait_group":
            for one in who:
                groups, keep = self.closed[int(one)], int(step.args[0])
                while len(groups) > keep:
                    for to, data in groups.pop(0):
                        self.shared[self.local[one], to : to + 16] = data
        else:
            to, source = self.address(step.args[0], who, "u32"), self.address(step.args[1], who, "u64")
            size = self.get(step.args[3], who, "u32")
            assert (to % 16 == 0).all() and (source % 16 == 0).all(), "misaligned copy"
            self.note(step, who)
            self.early += [int(at) for at, waited in zip(source, self.waited[who], strict=True) if not waited]
            for one, target, at, count in zip(who, to, source, size, strict=True):
                data = np.zeros(16, dtype=np.uint8)
                data[:count] = self.memory[at : at + int(count)]
                self.open[int(one)].append((target, data))

    def bf16(self, name: str, who: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self.half:
            return super().bf16(name, who)
        both = self.get(name, who, "u32").reshape(-1, 1).view(np.float16).astype(np.float32)
        return both[:, 0], both[:, 1]

    def do_mma(self, step: Step, who: np.ndarray, place: int) -> None:
        self.half = "f16" in step.name
        super().do_mma(step, who, place)

    def do_mov(self, step: Step, who: np.ndarray) -> None:
        target = self.words(step.args[0])
        if len(target) == 2 and step.name[-1] == "b32":
            word = self.get(step.args[1], who, "u32")
            self.put(target[0], who, word.astype(np.uint16))
            self.put(target[1], who, (word >> np.uint32(16)).astype(np.uint16))
        else:
            super().do_mov(step, who)

    def do_st(self, step: Step, who: np.ndarray) -> None:
        if "shared_cluster" not in step.name:
            super().do_st(step, who)
            return
        at, value = self.address(step.args[0], who, "u32"), self.get(step.args[1], who, "u32")
        assert (at % 4 == 0).all()
        for thread, to, word in zip(who, at, value, strict=True):
            within = int(to & ((1 << PEER) - 1))
            cell = self.shared[int(self.home[thread] + (to >> PEER)), within : within + 4]
            cell[:] = np.frombuffer(np.uint32(word).tobytes(), dtype=np.uint8)

    def do_rsqrt(self, step: Step, who: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            self.put(step.args[0], who, np.float32(1) / np.sqrt(self.get(step.args[1], who, "f32")))

    def do_setp(self, step: Step, who: np.ndarray) -> None:
        unordered = re.fullmatch(r"(lt|le|gt|ge|eq|ne)u", step.name[1])
        if unordered is None:
            super().do_setp(step, who)
            return
        first, second = (self.get(arg, who, step.name[-1]) for arg in step.args[1:3])
        self.put(step.args[0], who, np.isnan(first) | np.isnan(second) | COMPARE[unordered[1]](first, second))

    def do_prmt(self, step: Step, who: np.ndarray) -> None:
        low, high = (self.get(arg, who, "u32").astype(np.uint64) for arg in step.args[1:3])
        whole, select = low | high << np.uint64(32), int(step.args[3], 0)
        found = np.zeros(len(who), dtype=np.uint64)
        for byte in range(4):
            shift = np.uint64((select >> 4 * byte & 7) * 8)
            found |= (whole >> shift & np.uint64(0xFF)) << np.uint64(8 * byte)
        self.put(step.args[0], who, found.astype(np.uint32))

    def do_cvt(self, step: Step, who: np.ndarray) -> None:
        if step.name[-1] == "e4m3x2":
            codes = self.get(step.args[1], who, "u16")
            both = torch.from_numpy(codes.copy().view(np.uint8)).view(torch.float8_e4m3fn).half().numpy()
            self.put(step.args[0], who, both.view(np.uint32))
        elif "e4m3x2" in step.name:
            high, low = (torch.from_numpy(self.get(arg, who, "f32").copy()) for arg in step.args[1:3])
            codes = [
                round_e4m3(one).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint16)
                for one in (low, high)
            ]
            self.put(step.args[0], who, codes[0] | codes[1] << np.uint16(8))
        elif "f16x2" in step.name and "bf16x2" not in step.name:
            high, low = (self.get(arg, who, "f32").astype(np.float16).view(np.uint16) for arg in step.args[1:3])
            self.put(step.args[0], who, high.astype(np.uint32) << np.uint32(16) | low)
        else:
            super().do_cvt(step, who)

    def do_ex2(self, step: Step, who: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            self.put(step.args[0], who, np.exp2(self.get(step.args[1], who, "f32")))

    def do_lg2(self, step: Step, who: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            self.put(step.args[0], who, np.log2(self.get(step.args[1], who, "f32")))


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """As NumPy can hold it."""
    return tensor.contiguous().view(torch.uint8).numpy()


def query_of(one: Mla, seed: int) -> torch.Tensor:
    """Absorbed queries [rows, heads, width] in the cache's dtype."""
    made = torch.randn(one.rows, one.heads, one.width, generator=torch.Generator().manual_seed(seed))
    return made.to(getattr(torch, one.cache_dtype))


def parts_wanted(one: Mla, inputs: dict, query: torch.Tensor, live: int, tile: int, splits: int) -> tuple:
    """(partial, lse) in FP64; NaN where nothing is written, minus infinity where a query sees none of a part."""
    partial = torch.full((splits, one.rows, one.heads, one.kv_lora), torch.nan, dtype=torch.float64)
    lse = torch.full((splits, one.rows, one.heads), torch.nan, dtype=torch.float64)
    scale = (one.nope + one.rope) ** -0.5 * (float(inputs["k_scale"]) if one.fp8 else 1.0)
    for request in range(-(-live // one.q_len)):
        rows = range(request * one.q_len, min((request + 1) * one.q_len, live))
        before = int(inputs["context"][request])
        tokens = before + len(rows)
        table = inputs["block_table"][request].long()
        keys = inputs["cache"].double()[table].flatten(0, 1)[:tokens]
        size = -(-tokens // (splits * tile)) * tile
        for split in range(splits):
            own = torch.arange(min(split * size, tokens), min((split + 1) * size, tokens))
            for j, row in enumerate(rows):
                seen = keys[own[own <= before + j]]
                scores = query[row].double() @ seen.T * scale
                lse[split, row] = torch.logsumexp(scores, -1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
                if len(seen):
                    partial[split, row] = scores.softmax(-1) @ seen[:, : one.kv_lora]
    return partial, lse


@dataclasses.dataclass
class Run:
    """What a launch left."""

    partial: torch.Tensor
    lse: torch.Tensor
    out: torch.Tensor
    cache: torch.Tensor
    before: torch.Tensor
    """The cache as the launch found it."""
    inputs: dict[str, torch.Tensor]
    query: torch.Tensor


def compiled_ptx(one: Mla, chosen: dict[str, Any], monkeypatch: Any, arch: str = "sm_90a") -> list[tuple[Any, str]]:
    """(launch, PTX text) of each kernel."""
    import k3lab.kernels.cute_compile as compiler
    from cutlass import cute

    texts = []

    def compile_(*args: Any, **options: Any) -> Any:
        made = cute.compile(*args, **options)
        text = made.artifacts.PTX
        texts.append(text if isinstance(text, str) else text.decode())
        return made

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "cute", type("cute", (), {"compile": staticmethod(compile_)}))
        compiled = ENGINE.compile(one, chosen, arch)
    return list(zip(compiled.launches, texts, strict=True))


def run(
    one: Mla, monkeypatch: Any, contexts: list[int], live: int | None = None, seed: int = 1, whole: bool = False,
    exact: bool = False, **changes: Any,
) -> Run:  # fmt: skip
    """The attention on the machine, or the whole step: cache rows that no live row sees are NaN, so are dead rows, and
    dead requests' tables lead nowhere. The whole step finds the new rows of the cache NaN too.
    """
    space = ENGINE.space(one, H200)
    chosen = {**space.default, **changes}
    assert space.illegal(chosen) is None, space.illegal(chosen)
    kernels = compiled_ptx(one, chosen, monkeypatch)
    live = one.rows if live is None else live
    inputs, query = exact_inputs(one, contexts) if exact else drawn(one, seed), query_of(one, seed)
    inputs["context"] = torch.tensor(contexts, dtype=torch.int32)
    alive = -(-live // one.q_len)
    seen = torch.zeros(inputs["cache"].shape[:2], dtype=torch.bool)
    for request in range(alive):
        tokens = contexts[request] + (0 if whole else min(one.q_len, live - request * one.q_len))
        for token in range(tokens):
            seen[inputs["block_table"][request, token // one.block_size].long(), token % one.block_size] = True
    given = {**inputs, "cache": inputs["cache"].clone(), "proj": inputs["proj"].clone()}
    given["cache"].view(torch.uint8)[~seen] = 0xFF  # NaN in both formats
    given |= {name: inputs[name].clone() for name in ("block_table", "context")}
    given["block_table"][alive:], given["context"][alive:] = 2**30, 2**30
    given["proj"][live:] = torch.nan
    asked = torch.zeros_like(query) if whole else query.clone()
    asked.view(torch.uint8)[0 if whole else live :] = 0xFF
    splits, slot = int(chosen["splits"]), one.rows * one.heads
    memory = Memory(1 << 26)
    at = {name: memory.add(name, bytes_of(tensor)) for name, tensor in {**given, "query": asked}.items()}
    at["partial"] = memory.add("partial", np.full((splits, slot, one.kv_lora), np.nan, dtype=np.float32))
    at["lse"] = memory.add("lse", np.full((splits, slot), np.nan, dtype=np.float32))
    at["out"] = memory.add("out", np.full((one.rows, one.heads * one.v_dim * 2), 0xFF, dtype=np.uint8))
    for launch, text in kernels if whole else kernels[1:2]:
        values = [live if arg.kind == "int32" else at[arg.name] for arg in launch.args]
        cluster = launch.cluster[0]
        machine = MatrixMachine(text, memory.data, values, launch.threads, cluster, launch.shared_bytes, seed=seed)
        for first in range(0, launch.grid[0], cluster):
            machine.run(first, cluster)
        early = {name.split(".")[0] for name in machine.before_wait}
        if launch.kernel.count("attend"):
            # no key that this step writes, or may still write
            old = written(one, inputs).flatten().logical_not()
            rows = {(place - at["cache"]) // (one.width * inputs["cache"].element_size()) for place in machine.early}
            assert bool(rows) == (chosen["early"] == "keys" and max(contexts[:alive]) >= int(chosen["tile"]))
            assert all(bool(old[row]) for row in rows)
            assert early <= ({"ld", "cp"} if chosen["early"] == "keys" else set())
        else:
            assert early == ({"ld", "cp"} if launch.kernel.count("query") else {"ld"})
        assert memory.guards_hold()
    partial = torch.from_numpy(memory.get("partial")).view(splits, one.rows, one.heads, one.kv_lora)
    lse = torch.from_numpy(memory.get("lse")).view(splits, one.rows, one.heads)
    out = torch.from_numpy(memory.get("out")).view(torch.bfloat16)
    cache = torch.from_numpy(memory.get("cache")).view(inputs["cache"].dtype).view(inputs["cache"].shape)
    return Run(partial, lse, out, cache, given["cache"], inputs, query)


def judge(one: Mla, done: Run, live: int, tile: int, splits: int) -> None:
    """Logarithms and sums are those of FP64 within the rounding of weights; what has no tokens or is dead is as it should be."""
    partial, lse = parts_wanted(one, done.inputs, done.query, live, tile, splits)
    assert torch.equal(done.lse.isnan(), lse.isnan())
    assert torch.equal(done.lse == -torch.inf, lse == -torch.inf)
    finite = lse.isfinite()
    torch.testing.assert_close(done.lse.double()[finite], lse[finite], rtol=2e-5, atol=2e-5)
    assert torch.equal(done.partial.isnan(), partial.isnan())
    held = ~partial.isnan()
    error = done.partial.double()[held] - partial[held]
    assert float(error.norm() / partial[held].norm()) < (2**-11 if one.fp8 else 2**-9)
    assert float(error.abs().max()) < 2**-6
