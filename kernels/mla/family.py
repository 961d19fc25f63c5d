"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..contract import Problem, Tensors, Tolerance, Traffic
from ..errors import InputError
from ..model_card import ModelCard
from ..twin_family import ITEM_BYTES, Draw, TwinFamily, in_fp32, norm_weight, rounding_tolerance

if TYPE_CHECKING:
    import torch

WEIGHTS = ("q_a_norm", "kv_a_norm", "q_b", "w_uk", "w_uv")
BLOCK_SIZE = 64
"""Tokens of a cache block."""
CONTEXT = 1024
"""Most tokens a request has in the generated inputs; bytes are counted there."""
CACHES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
KINDS: dict[str, tuple[str, int]] = {
    cache + ("" if tokens == 1 else f"_verify{tokens}"): (cache, tokens) for cache in CACHES for tokens in range(1, 9)
}
"""Kind to (cache format, new tokens a request)."""


@dataclass(frozen=True)
class Mla(Problem):
    """One step of the MLA core on one rank's heads: norms, absorbed attention on a paged cache, gate."""

    kind: str
    """``bf16`` or ``fp8`` cache, with ``_verify2`` to ``_verify8`` for more than one new token a request."""
    heads: int
    """Heads of one rank."""
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    eps: float
    context: int = CONTEXT
    block_size: int = BLOCK_SIZE

    @property
    def label(self) -> str:
        """E.g. ``fp8-tp16-rows8``."""
        return f"{self.kind}-tp{self.tp}-rows{self.rows}"

    @property
    def cache_dtype(self) -> str:
        """Name of the cache's torch dtype."""
        return CACHES[KINDS[self.kind][0]]

    @property
    def q_len(self) -> int:
        """New tokens a request."""
        return KINDS[self.kind][1]

    @property
    def requests(self) -> int:
        """Requests in the step."""
        return self.rows // self.q_len

    @property
    def blocks_each(self) -> int:
        """Cache blocks of a request."""
        return -(-(self.context + self.q_len) // self.block_size)


class MlaFamily(TwinFamily):
    """See :class:`Mla`."""

    name = "mla"
    title = "multi-head latent attention core, absorbed, paged cache, output gate"
    outputs = ("out",)
    rotated = (*WEIGHTS, "cache")
    mutated = ("cache",)
    problem_type = Mla

    @property
    def kinds(self) -> tuple[str, ...]:
        """Cache formats, each with plain and verify steps."""
        return tuple(KINDS)

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> Mla:
        """See :meth:`Family.problem`; ``kind`` defaults to ``bf16``; rows are a multiple of its tokens."""
        kind = kind or "bf16"
        self.check(card, tp, rows, kind)
        tokens = KINDS[kind][1]
        if rows % tokens:
            raise InputError(f"rows is {rows}; {kind} steps have a multiple of {tokens} rows")
        return Mla(
            tp, rows, kind, card.num_attention_heads // tp, card.q_lora_rank, card.kv_lora_rank,
            card.qk_nope_head_dim, card.qk_rope_head_dim, card.v_head_dim, card.mla_low_rank_norm_eps,
            context=min(CONTEXT, card.max_position_embeddings - tokens),
        )  # fmt: skip

    def draws(self, problem: Problem) -> dict[str, Draw]:
        """Scores of magnitude one, so that the softmax is neither flat nor a single token."""
        assert isinstance(problem, Mla)
        heads, lora, latent = problem.heads, problem.q_lora, problem.kv_lora
        columns = lora + latent + problem.rope + heads * problem.v_dim
        blocks = problem.requests * problem.blocks_each
        return {
            "proj": Draw((problem.rows, columns)),
            "q_a_norm": norm_weight(lora),
            "kv_a_norm": norm_weight(latent),
            "q_b": Draw((heads * (problem.nope + problem.rope), lora), std=lora**-0.5),
            "w_uk": Draw((heads, problem.nope, latent), std=latent**-0.5),
            "w_uv": Draw((heads, problem.v_dim, latent), std=latent**-0.5),
            "cache": Draw((blocks, problem.block_size, latent + problem.rope), dtype=problem.cache_dtype),
            "block_table": Draw((problem.requests, problem.blocks_each), dtype="int32", high=blocks),
            "context": Draw((problem.requests,), dtype="int32", low=1, high=problem.context + 1),
        }

    def inputs(self, problem: Problem, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
        """As drawn, but no block belongs to two requests, and the first request has the full context."""
        import torch

        assert isinstance(problem, Mla)
        inputs = super().inputs(problem, seed, device)
        generator = torch.Generator(device).manual_seed(seed)
        order = torch.randperm(problem.requests * problem.blocks_each, generator=generator, device=device)
        inputs["block_table"] = order.view(problem.requests, -1).to(torch.int32)
        inputs["context"][0] = problem.context
        return inputs

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """``out``: [rows, h * v]."""
        assert isinstance(problem, Mla)
        return {"out": ((problem.rows, problem.heads * problem.v_dim), "bfloat16")}

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """In FP32, rounded only where an FP8 cache rounds; the given cache is left as it is."""
        from .twin import MlaWeights, mla

        assert isinstance(problem, Mla)
        t = in_fp32(inputs)
        out = mla(
            t["proj"], MlaWeights(**{name: t[name] for name in WEIGHTS}), t["cache"].clone(), t["block_table"],
            t["context"], q_len=problem.q_len, eps=problem.eps, nope=problem.nope, rope=problem.rope,
        )  # fmt: skip
        return {"out": out}

    def flops(self, problem: Problem) -> int:
        """Query up-projection, both absorptions, and both products with every cached token."""
        assert isinstance(problem, Mla)
        query = problem.q_lora * (problem.nope + problem.rope)
        absorb = problem.kv_lora * (problem.nope + problem.v_dim)
        attend = (problem.context + problem.q_len) * (2 * problem.kv_lora + problem.rope)
        return 2 * problem.rows * problem.heads * (query + absorb + attend)

    def traffic(self, problem: Problem) -> Traffic:
        """The cache is read up to the full context of every request, not to the end of its last block."""
        assert isinstance(problem, Mla)
        whole = super().traffic(problem)
        row = (problem.kv_lora + problem.rope) * ITEM_BYTES[problem.cache_dtype]
        unread = problem.requests * (problem.blocks_each * problem.block_size - problem.context - problem.q_len)
        return replace(whole, weight_bytes=whole.weight_bytes - unread * row)

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """Both norms, query, absorbed query, latent, head output and gated output are rounded."""
        assert isinstance(problem, Mla)
        bound = rounding_tolerance(
            7, problem.q_lora + problem.context, "norms, query, absorbed query, latent, out, gate"
        )
        if problem.cache_dtype == "bfloat16":
            return bound
        # a BF16 rounding before the E4M3 one moves a value near a tie to the next code, 2^-3 away
        why = bound.why + "; an E4M3 code of some query and new-row values at ties"
        return Tolerance(bound.relative + 2**-5, bound.element + 2**-1, why)


FAMILY = MlaFamily()
