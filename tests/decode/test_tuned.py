"""The tuned operators on the CPU, a twin in place of each launch: what a kernel is handed, layer by layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from k3lab.decode import tuned
from k3lab.decode.auto import AutoOperators
from k3lab.decode.caches import DecodeCache
from k3lab.decode.choices import Tuned
from k3lab.decode.packing import pack
from k3lab.decode.sharding import ModelTensors, shard
from k3lab.decode.step import step
from k3lab.kernels import Compiled, InputError, ModelCard, family
from k3lab.kernels.collectives import CollectiveError, SingleRank, StandIn
from k3lab.kernels.health import BUFFER, EPOCH, PHASE
from k3lab.kernels.output_projection.twin import output_projection

FAMILY = family("output_projection")
KINDS = ("kda", "mla", "restart")
ROWS = 8


class TwinRunner:
    """Checks what it is bound to and computes the twin; dead rows and blocks beyond the live ones are poison."""

    calls: list[tuple[str, int, int]]

    def __init__(self, compiled: Compiled, device: str, transport: Any) -> None:
        self.compiled, self.transport = compiled, transport
        self.buffers = {BUFFER.name: torch.zeros(BUFFER.shape, dtype=torch.int32)}

    def bind(self, tensors: dict[str, torch.Tensor], *, rows: int, fewer: dict[str, int], early: bool = False) -> Any:
        one = self.compiled.problem
        assert ("prefix" in tensors) == (one.kind != "restart")
        assert tuple(tensors["blocks"].shape) == (one.blocks, ROWS, one.hidden)
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        live = fewer["blocks"]
        assert 1 <= live <= one.blocks

        def call() -> None:
            TwinRunner.calls.append((one.kind, rows, live))
            prefix, mlp_input = output_projection(
                tensors["x"], tensors["w_o"], tensors.get("prefix"), list(tensors["blocks"][:live, :rows]), tensors["res_norm"],
                tensors["res_proj"], tensors["norm_w"], eps=one.eps, comm=StandIn(0, one.tp),
            )  # fmt: skip
            tensors["prefix_out"].copy_(prefix)
            tensors["mlp_input"].copy_(mlp_input)

        return call


def choice(card: ModelCard, kind: str, tp: int) -> Tuned:
    """An entry for more rows than the step has: its problem is the step's, its strides are the entry's."""
    problem = FAMILY.problem(card, tp=tp, rows=6, kind=kind)
    compiled = Compiled("output_projection", "cute_fused", problem, {}, "sm_90a", ())
    return Tuned(
        "output_projection", kind, "cute_fused", {}, "measured", compiled, ("output_projection", "", kind, ROWS)
    )


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch, tiny: ModelCard) -> Any:
    monkeypatch.setattr(tuned, "Runner", TwinRunner)
    TwinRunner.calls = []

    def make(kinds: tuple[str, ...] = KINDS, tp: int = 1, **more: Any) -> tuned.TunedOperators:
        choices = [choice(tiny, kind, tp) for kind in kinds]
        return tuned.TunedOperators(tiny, choices, dtype=torch.float64, device="cpu", **more)

    return make


def steps(card: ModelCard, tensors: ModelTensors, used: Any) -> torch.Tensor:
    weights = pack(shard(tensors, card, tp=1, rank=0), card, tp=1, rank=0)
    cache = DecodeCache(card, max_requests=3, max_context=20, max_verify=2, dtype=torch.float64)
    slots, found = [cache.add() for _ in range(3)], []
    for tokens in ([[1], [2], [3]], [[4, 5], [6, 7], [8, 9]], [[4], [5], [6]]):
        found.append(step(weights, cache, torch.tensor(tokens), slots, used, SingleRank()).flatten(0, 1))
        cache.accept(slots, [1] * 3)
    return torch.cat(found)


@pytest.mark.parametrize("kinds", [KINDS, ("mla",), ("kda", "restart")])
def test_a_step_with_the_familys_kernels_is_the_step_without(
    tiny: ModelCard, tiny_tensors: ModelTensors, operators: Any, kinds: tuple[str, ...]
) -> None:
    want = steps(tiny, tiny_tensors, AutoOperators(tiny, dtype=torch.float64, device="cpu"))
    got = steps(tiny, tiny_tensors, operators(kinds))
    assert ((got - want).norm() / want.norm()).item() < 1e-11
    # six layers, a block saved every two: the layer that saves one restarts the residual
    layers = [("restart" if at % 2 == 0 else "mla" if at in tiny.mla_layers else "kda", at // 2 + 1) for at in range(6)]
    wanted = [(kind, rows, live) for rows in (3, 6, 3) for kind, live in layers if kind in kinds]
    assert TwinRunner.calls == wanted


def test_a_block_is_copied_once_a_step(tiny: ModelCard) -> None:
    saved = tuned.SavedBlocks(3, 4, 2, dtype=torch.float32, device="cpu")
    first, second, other = (torch.full((3, 2), float(value)) for value in (1, 2, 3))
    memory = saved.side_by_side([first])
    assert saved.side_by_side([first, second]) is memory
    assert memory[:, :3].mean((1, 2)).tolist() == [1.0, 2.0, 0.0] and not memory[:, 3].any()
    memory[0] = 9.0
    saved.side_by_side([first, second])
    assert memory[0, 0, 0] == 9.0  # seen before: not copied again
    saved.forget()
    saved.side_by_side([first])
    assert memory[0, 0, 0] == 1.0  # a step of its own, such as one that is captured
    saved.side_by_side([other])
    assert memory[0, 0, 0] == 3.0
    saved.side_by_side([other, second])
    assert memory[1, 0, 0] == 2.0


def test_a_real_group_needs_a_transport(tiny: ModelCard, tiny_tensors: ModelTensors, operators: Any) -> None:
    used, group = operators(tp=2), SimpleNamespace(rank=0, size=2)
    layer = pack(shard(tiny_tensors, tiny, tp=2, rank=0), tiny, tp=2, rank=0).layers[1]
    x, prefix = torch.zeros(1, layer.attention.o_proj.shape[1]).double(), torch.zeros(1, tiny.hidden_size).double()
    with pytest.raises(InputError, match="a group of 2 ranks needs a transport"):
        used.output_projection(x, layer.attention, prefix, [prefix], layer.mlp_mix, group)
    assert used._kernels["output_projection", "kda"].runner.transport.factors == (
        1.0,
        0.0,
    )  # what the stand-in's sum is
    used.output_projection(x, layer.attention, prefix, [prefix], layer.mlp_mix, StandIn(0, 2))
    assert len(TwinRunner.calls) == 1


def test_a_step_that_begins_copies_its_first_block_whatever_was_copied_before(
    tiny: ModelCard, tiny_tensors: ModelTensors, operators: Any
) -> None:
    """A captured step must hold the copy, even of a block that an eager step had copied."""
    used = operators()
    layer = pack(shard(tiny_tensors, tiny, tp=1, rank=0), tiny, tp=1, rank=0).layers[2]
    x, block = torch.ones(1, layer.attention.o_proj.shape[1]).double(), torch.ones(1, tiny.hidden_size).double()
    for _ in range(2):
        used._saved[ROWS]._memory.zero_()
        used.output_projection(x, layer.attention, None, [block], layer.mlp_mix, SingleRank())
        assert torch.equal(used._saved[ROWS]._memory[0, :1], block)


def test_a_rank_that_gave_up_is_told_where_the_host_synchronises(operators: Any) -> None:
    used = operators()
    used.check()
    used._kernels["output_projection", "mla"].runner.buffers[BUFFER.name][[EPOCH, PHASE]] = torch.tensor(
        [7, 3], dtype=torch.int32
    )
    with pytest.raises(CollectiveError, match="launch 7"):
        used.check()
