"""The family: problem, inputs, bytes and tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..contract import Engine, Problem, Tensors, Tolerance, Traffic
from ..errors import InputError
from ..model_card import ModelCard
from ..twin_family import ITEM_BYTES, Draw, TwinFamily, in_fp32, norm_weight, rounding_tolerance

if TYPE_CHECKING:
    import torch

    from ..collectives import Collectives

WEIGHTS = ("q_a_norm", "kv_a_norm", "q_b", "w_uk", "w_uv")
BLOCK_SIZE = 64
"""Tokens of a cache block."""
CONTEXT = 1024
"""Most tokens a request has in the generated inputs; bytes are counted there."""
CACHES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
LENGTHS = {"": CONTEXT, "_8k": 8192, "_128k": 131072}
"""Part of a kind's name to the most tokens a request has before the step."""
KINDS: dict[str, tuple[str, int, int]] = {
    cache + length + ("" if tokens == 1 else f"_verify{tokens}"): (cache, tokens, LENGTHS[length])
    for length in LENGTHS
    for cache in CACHES
    for tokens in (range(1, 9) if length == "" else (1, 8))
}
KINDS |= {kind + "_dcp": which for kind, which in KINDS.items() if which[2] != LENGTHS["_8k"]}
"""Kind to (cache format, new tokens a request, context)."""


@dataclass(frozen=True)
class Mla(Problem):
    """One step of the MLA core on one rank's heads: norms, absorbed attention on a paged cache, gate."""

    kind: str
    """``bf16`` or ``fp8`` cache, then ``_8k`` or ``_128k`` where the context is so long, then ``_verify2`` to ``_verify8``
    (at length 8 alone) for more than one new token a request, then ``_dcp`` where each context lies over all ranks."""
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
        """Requests in the step; rows that are no multiple of a request's tokens end inside the last one."""
        return -(-self.rows // self.q_len)

    @property
    def dcp(self) -> int:
        """Ranks that share each context, token t with rank t % dcp: one, or all."""
        return self.tp if self.kind.endswith("_dcp") else 1

    @property
    def held(self) -> int:
        """Most tokens of a request on this rank, new ones among them."""
        return -(-(self.context + self.q_len) // self.dcp)

    @property
    def blocks_each(self) -> int:
        """Cache blocks of a request on this rank."""
        return -(-self.held // self.block_size)

    @property
    def columns(self) -> int:
        """Of the input projection: q_a | latent | shared key | gate."""
        return self.q_lora + self.kv_lora + self.rope + self.heads * self.v_dim

    @property
    def width(self) -> int:
        """Of a cache row and of an absorbed query."""
        return self.kv_lora + self.rope

    @property
    def fp8(self) -> bool:
        """Whether cache and query are E4M3."""
        return self.cache_dtype != "bfloat16"


class MlaFamily(TwinFamily):
    """See :class:`Mla`. Where contexts lie over ranks, inputs and twin are one rank's alone, which plays all of them as over
    the loopback transport: all ask its own queries, and what it has for rank r's heads comes back from rank r.
    """

    name = "mla"
    title = "multi-head latent attention core, absorbed, paged cache, output gate"
    outputs = ("out",)
    rotated = (*WEIGHTS, "cache")
    constant = ("k_scale",)
    mutated = ("cache",)
    problem_type = Mla
    default_engine = "cute_mma"

    @property
    def engines(self) -> tuple[Engine, ...]:  # type: ignore[override]
        """Built on first use: engine modules are light, their kernels are not."""
        from .engines import ENGINES

        return ENGINES

    @property
    def kinds(self) -> tuple[str, ...]:
        """Cache formats, each with plain and verify steps, at three contexts; at two of them over ranks too."""
        return tuple(KINDS)

    def problem(self, card: ModelCard, *, tp: int, rows: int, kind: str | None = None) -> Mla:
        """See :meth:`Family.problem`; ``kind`` defaults to ``bf16``; rows are a multiple of its tokens."""
        kind = kind or "bf16"
        self.check(card, tp, rows, kind)
        _, tokens, context = KINDS[kind]
        if rows % tokens:
            raise InputError(f"rows is {rows}; {kind} steps have a multiple of {tokens} rows")
        return Mla(
            tp, rows, kind, card.num_attention_heads // tp, card.q_lora_rank, card.kv_lora_rank,
            card.qk_nope_head_dim, card.qk_rope_head_dim, card.v_head_dim, card.mla_low_rank_norm_eps,
            context=min(context, card.max_position_embeddings - tokens),
        )  # fmt: skip

    def draws(self, problem: Problem) -> dict[str, Draw]:
        """Scores of magnitude one, so that the softmax is neither flat nor a single token; an FP8 cache has its scale."""
        assert isinstance(problem, Mla)
        heads, lora, latent = problem.heads, problem.q_lora, problem.kv_lora
        blocks = problem.requests * problem.blocks_each
        scale = {"k_scale": Draw((1,), std=0.1, mean=1.0, dtype="float32")} if problem.fp8 else {}
        return {
            "proj": Draw((problem.rows, problem.columns)),
            "q_a_norm": norm_weight(lora),
            "kv_a_norm": norm_weight(latent),
            "q_b": Draw((heads * (problem.nope + problem.rope), lora), std=lora**-0.5),
            "w_uk": Draw((heads, problem.nope, latent), std=latent**-0.5),
            "w_uv": Draw((heads, problem.v_dim, latent), std=latent**-0.5),
            "cache": Draw((blocks, problem.block_size, latent + problem.rope), dtype=problem.cache_dtype),
            "block_table": Draw((problem.requests, problem.blocks_each), dtype="int32", high=blocks),
            "context": Draw((problem.requests,), dtype="int32", low=1, high=problem.context + 1),
            **scale,
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

    def row_axes(self, problem: Problem) -> dict[str, int]:
        """The projection alone has token rows: table and contexts are a request's, and whole numbers."""
        return {"proj": 0}

    def output_specs(self, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
        """``out``: [rows, h * v]."""
        assert isinstance(problem, Mla)
        return {"out": ((problem.rows, problem.heads * problem.v_dim), "bfloat16")}

    def twin(self, problem: Problem, inputs: Tensors) -> dict[str, torch.Tensor]:
        """In FP32, rounded only where an FP8 cache rounds; the given cache is left as it is.

        Rows that end inside a request are its first ones: no row sees one after it.
        """
        assert isinstance(problem, Mla)
        if problem.dcp > 1:
            return self.over_loopback(problem, inputs)
        return self._over(problem, inputs, None)

    def over_loopback(
        self, problem: Problem, inputs: Tensors, factors: tuple[float, ...] | None = None
    ) -> dict[str, torch.Tensor]:
        """The twin where one GPU plays all ranks that share the contexts; see :func:`.twin_context.mla_context_parallel`.

        Args:
            problem: its context parallelism is the number of slots.
            inputs: this rank's.
            factors: of the loopback transport, if not its usual ones.
        """
        from ..collectives import LoopbackGroup
        from ..transports import loopback_factors

        assert isinstance(problem, Mla)
        return self._over(problem, inputs, LoopbackGroup(factors or loopback_factors(problem.dcp)))

    @staticmethod
    def _over(problem: Mla, inputs: Tensors, group: Collectives | None) -> dict[str, torch.Tensor]:
        from torch.nn.functional import pad

        from .twin import MlaWeights, mla
        from .twin_context import mla_context_parallel

        t = in_fp32(inputs)
        missing = problem.requests * problem.q_len - problem.rows
        sizes: dict[str, Any] = {"q_len": problem.q_len, "eps": problem.eps, "nope": problem.nope, "rope": problem.rope}
        over = mla if group is None else partial(mla_context_parallel, comm=group)
        out = over(
            pad(t["proj"], (0, 0, 0, missing)), MlaWeights(**{name: t[name] for name in WEIGHTS}), t["cache"].clone(),
            t["block_table"], t["context"], k_scale=float(t["k_scale"]) if problem.fp8 else 1.0, **sizes,
        )  # fmt: skip
        return {"out": out[: problem.rows]}

    def alternative(self, problem: Problem, tensors: Tensors) -> Callable[[], None] | None:
        """PyTorch operators; none of contexts over ranks."""
        from .chain import chain_call

        assert isinstance(problem, Mla)
        return chain_call(problem, tensors) if problem.dcp == 1 else None

    def operators(self, problem: Problem) -> Callable[[Tensors], Tensors] | None:
        """The same as a function."""
        from .chain import chain

        assert isinstance(problem, Mla)
        return chain(problem) if problem.dcp == 1 else None

    def flops(self, problem: Problem) -> int:
        """Query up-projection, both absorptions, and both products with every cached token."""
        assert isinstance(problem, Mla)
        query = problem.q_lora * (problem.nope + problem.rope)
        absorb = problem.kv_lora * (problem.nope + problem.v_dim)
        # of all ranks' heads with the tokens held here
        attend = problem.dcp * problem.held * (2 * problem.kv_lora + problem.rope)
        return 2 * problem.rows * problem.heads * (query + absorb + attend)

    def traffic(self, problem: Problem) -> Traffic:
        """The cache is read up to the full context of every request, not to the end of its last block."""
        assert isinstance(problem, Mla)
        whole = super().traffic(problem)
        row = (problem.kv_lora + problem.rope) * ITEM_BYTES[problem.cache_dtype]
        unread = problem.requests * (problem.blocks_each * problem.block_size - problem.held)
        return replace(whole, weight_bytes=whole.weight_bytes - unread * row)

    def tolerance(self, problem: Problem, output: str) -> Tolerance:
        """Both norms, query, absorbed query, latent, head output and gated output are rounded."""
        assert isinstance(problem, Mla)
        rows, ranks = (1, ", ranks' latents") if problem.dcp > 1 else (0, "")
        bound = rounding_tolerance(
            7 + rows, problem.q_lora + problem.context, f"norms, query, absorbed query{ranks}, latent, out, gate"
        )
        if problem.cache_dtype == "bfloat16":
            return bound
        # a BF16 rounding before the E4M3 one moves a value near a tie to the next code, 2^-3 away
        why = bound.why + "; an E4M3 code of some query and new-row values at ties"
        return Tolerance(bound.relative + 2**-5, bound.element + 2**-1, why)


FAMILY = MlaFamily()
