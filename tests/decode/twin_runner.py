"""What runs a twin in place of a family's kernels: handed what they would be, and writing where they would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from k3lab.decode.choices import Tuned
from k3lab.kernels import Arg, Compiled, Launch, ModelCard, family
from k3lab.kernels.health import BUFFER
from k3lab.kernels.mla.twin import MlaWeights, mla

ROWS = 8


class AnyTwinRunner:
    """Every tensor must be contiguous and of the family's shape; dead rows and blocks are left out."""

    calls: list[tuple[str, str, int]]
    early: list[tuple[str, int, bool]] = []  # noqa: RUF012  # of all runners; emptied by the test that looks at it
    """Of each call of kernels that may read older inputs ahead of their wait: family, saved blocks, whether told to."""

    def __init__(self, compiled: Compiled, device: str, transport: Any) -> None:
        self.compiled, self.transport = compiled, transport
        self.family = family(compiled.family)
        self.buffers = {BUFFER.name: torch.zeros(BUFFER.shape, dtype=torch.int32)}

    def bind(
        self, tensors: dict[str, torch.Tensor], *, rows: int, fewer: dict[str, int] | None = None, early: bool = False
    ) -> Any:
        assert not early or self.family.older
        if self.family.older:
            AnyTwinRunner.early.append((self.family.name, (fewer or {}).get("blocks", 0), early))
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        own = replace(self.compiled.problem, rows=rows)
        shapes = self.family.input_shapes(own)
        for name, axis in self.family.row_axes(self.compiled.problem).items():
            if name not in ("state", "conv_state", "cache"):  # pools have as many entries as they have
                assert tensors[name].shape[axis] in (
                    (ROWS,) if axis else (rows, own.rows // getattr(own, "q_len", 1))
                ), name
        for name in {"ids", "tokens"} & shapes.keys():  # where kernels read 32 bits, 64 are other ids
            assert tensors[name].dtype == torch.int32
        live = (fewer or {}).get("blocks")
        given = {name: tensors[name] for name in shapes}
        if live is not None:
            given["blocks"] = given["blocks"][:live, :rows]
        if "peers" in tensors and self.family.row_axes(own).get("peers") != 0:  # [ranks, rows, ..]
            given["peers"] = tensors["peers"][:, :rows]

        def call() -> None:
            AnyTwinRunner.calls.append((self.family.name, getattr(own, "kind", ""), rows))
            if own.__class__.__name__ == "Mla":
                weights = MlaWeights(**{name: given[name] for name in ("q_a_norm", "kv_a_norm", "q_b", "w_uk", "w_uv")})
                width = own.blocks_each
                assert given["block_table"].shape == (own.requests, width)
                made = {"out": mla(
                    given["proj"], weights, given["cache"], given["block_table"], given["context"], q_len=own.q_len,
                    eps=own.eps, nope=own.nope, rope=own.rope,
                )}  # fmt: skip
            else:
                made = self.family.twin(own, given)
            for name, value in made.items():
                if name in ("states", "conv_states"):
                    assert tensors[name] is tensors[name.removesuffix("s")]
                    tensors[name][tensors["slots"][:, 1:].flatten().long() - 1] = value.to(tensors[name].dtype)
                else:
                    tensors[name].copy_(value)

        return call


def entry(
    card: ModelCard, name: str, *, kind: str | None = None, problem_kind: str | None = None, tp: int = 1
) -> Tuned:
    """An entry for :data:`ROWS` rows; ``kind`` as the choice has it, ``problem_kind`` where the step decides it."""
    found = family(name)
    problem = found.problem(card, tp=tp, rows=ROWS, kind=problem_kind or kind)
    args = tuple(Arg("tensor", one) for one in (*found.input_shapes(problem), *found.output_specs(problem)))
    launch = Launch(f"k3_{name}_twin_{kind or 'all'}", b"", (1, 1, 1), (32, 1, 1), 0, args)
    compiled = Compiled(name, "twin", problem, {}, "sm_90a", (launch,))
    return Tuned(name, kind, "twin", {}, "measured", compiled, (name, "H200", str(kind or problem_kind), ROWS))


def every_entry(card: ModelCard, q_len: int = 1) -> list[Tuned]:
    """One for every family and kind of a step."""
    verify = "" if q_len == 1 else f"_verify{q_len}"
    kinds = {"attention_projection": ("kda", "mla"), "output_projection": ("kda", "mla", "restart"), "attn_res": ("blocks", "first", "final")}  # fmt: skip
    made = [entry(card, name, kind=kind) for name, those in kinds.items() for kind in those]
    made.append(entry(card, "kda", problem_kind=f"verify{q_len}" if q_len > 1 else "plain"))
    made.append(entry(card, "mla", problem_kind=f"bf16{verify}"))
    made += [entry(card, name) for name in ("router", "experts", "moe_tail", "lm_head")]
    return [*made, entry(card, "lm_head", kind="embed")]
