"""The launches of a stock engine's layer and of the target layer, as data.

``auto`` follows the sequence of vLLM 0.33.0's stock Kimi K3 path: 21 launches a KDA MoE layer, and up to
two split-K reductions beside them ("23" in the published comparison). The target is the sequence of its
latency-specialised path: 13 launches. Both were counted from that release's code, and the names here
say what a launch computes; they are no symbols of that release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..kernels.model_card import LayerKind

OVERLAP_ROWS = 14
"""Up to this many rows the stock projection is two GEMMs on two streams; above, one packed GEMM."""
SPLIT_K_REDUCES = 2
"""Launches a stock MoE layer may have beside those listed: cuBLAS split-K reductions."""


@dataclass(frozen=True)
class StockLaunch:
    """One launch."""

    kernel: str
    family: str
    what: str
    stream: Literal["main", "aux"] = "main"


_MIX = StockLaunch("attn_res", "attn_res", "pending add, AttnRes over the saved blocks, input norm")
_OUT = (
    StockLaunch("o_proj_gemm", "output_projection", "o-proj on this rank's heads"),
    StockLaunch("attention_all_reduce", "output_projection", "sum over ranks"),
    StockLaunch("mlp_attn_res", "output_projection", "residual add, AttnRes, post-attention norm"),
)
_PROJECT_KDA_SPLIT = (
    StockLaunch("qkvg_gemm", "attention_projection", "q, k, v and gate rows"),
    StockLaunch("f_a_beta_gemm", "attention_projection", "decay gate's down-projection and beta rows", "aux"),
)
_PROJECT_KDA_PACKED = (StockLaunch("in_proj_gemm", "attention_projection", "packed q, k, v, gate, f_a and beta rows"),)
_PROJECT_MLA = (
    StockLaunch("qkv_a_gemm", "attention_projection", "q_a and kv_a rows"),
    StockLaunch("output_gate_gemm", "attention_projection", "gate rows", "aux"),
)
_KDA = (
    StockLaunch("f_b_gemm", "kda", "decay gate's up-projection", "aux"),
    StockLaunch("kda_decode", "kda", "conv, gates, delta rule, gated norm"),
)
_MLA = (
    StockLaunch("low_rank_norms", "mla", "q_a and kv_a norms"),
    StockLaunch("q_b_gemm", "mla", "query up-projection"),
    StockLaunch("w_uk_bmm", "mla", "query absorbed into the latent"),
    StockLaunch("kv_insert", "mla", "new rows quantised and inserted into the paged cache"),
    StockLaunch("mla_core", "mla", "attention over the latent (a split adds a merge)"),
    StockLaunch("w_uv_bmm", "mla", "latent to head values"),
    StockLaunch("gate_multiply", "mla", "sigmoid output gate"),
)
_MLA_SHARED = (
    StockLaunch("low_rank_norms", "mla", "q_a and kv_a norms"),
    StockLaunch("q_b_gemm", "mla", "query up-projection"),
    StockLaunch("w_uk_bmm", "mla", "query absorbed into the latent"),
    StockLaunch("kv_insert", "mla", "those new rows that this rank keeps, quantised and inserted into the paged cache"),
    StockLaunch("query_all_gather", "mla", "queries of all ranks' heads"),
    StockLaunch("mla_core", "mla", "attention of all heads over this rank's part of each context"),
    StockLaunch("weights_all_gather", "mla", "sums of weights of all ranks' parts"),
    StockLaunch("share_multiply", "mla", "this rank's share of each row"),
    StockLaunch("latent_reduce_scatter", "mla", "rows summed at the owners of their heads"),
    StockLaunch("w_uv_bmm", "mla", "latent to head values"),
    StockLaunch("gate_multiply", "mla", "sigmoid output gate"),
)
"""Where all ranks share each context: as ``auto`` computes it."""
_MOE = (
    StockLaunch("router_gemm", "router", "logits of all experts"),
    StockLaunch("latent_down_gemm", "router", "latent down-projection", "aux"),
    StockLaunch("shared_gate_up_gemm", "experts", "shared expert, gate and up", "aux"),
    StockLaunch("shared_situ", "experts", "shared expert's activation", "aux"),
    StockLaunch("shared_down_gemm", "experts", "shared expert, down", "aux"),
    StockLaunch("quantize_latent", "experts", "latent to MXFP8"),
    StockLaunch("routing_choice", "router", "top-k of the biased scores and weights"),
    StockLaunch("routing_layout", "router", "tokens sorted by expert"),
    StockLaunch("experts_fc1", "experts", "w1, w3 and activation of the chosen experts"),
    StockLaunch("experts_fc2", "experts", "w2 of the chosen experts"),
    StockLaunch("tail_collective", "moe_tail", "weighted sum, latent all-reduce and norm, shared reduce-scatter"),
    StockLaunch("latent_up_gemm", "moe_tail", "sharded latent up-projection, multicast"),
    StockLaunch("tail_copy", "moe_tail", "gathered rows copied out"),
)
_DENSE = (
    StockLaunch("dense_gate_up_gemm", "experts", "dense MLP, gate and up"),
    StockLaunch("dense_situ", "experts", "dense MLP's activation"),
    StockLaunch("dense_down_gemm", "experts", "dense MLP, down"),
    StockLaunch("mlp_all_reduce", "experts", "sum over ranks"),
)
BEFORE_LAYERS = (
    StockLaunch("embedding", "lm_head", "rows of this rank's part of the table"),
    StockLaunch("embedding_all_reduce", "lm_head", "sum over ranks"),
)
AFTER_LAYERS = (
    StockLaunch("output_attn_res", "attn_res", "AttnRes over all blocks, final norm"),
    StockLaunch("lm_head_gemm", "lm_head", "logits of this rank's part of the vocabulary"),
    StockLaunch("logits_all_gather", "lm_head", "logits of all ranks"),
)
NEXT_TOKEN = StockLaunch("next_token", "lm_head", "the likeliest token of each row")
"""Behind the logits, where a step hands out no more than that."""


def after_layers(head: Literal["logits", "tokens"] = "logits") -> tuple[StockLaunch, ...]:
    """Launches behind the last layer, by what the step hands out."""
    return (*AFTER_LAYERS, NEXT_TOKEN) if head == "tokens" else AFTER_LAYERS


def stock_layer(kind: LayerKind, *, dense: bool, rows: int, dcp: int = 1) -> tuple[StockLaunch, ...]:
    """Launches of one layer in order; ``dcp``: ranks that share each context."""
    attention: tuple[StockLaunch, ...]
    if kind == "mla":
        attention = (*_PROJECT_MLA, *(_MLA if dcp == 1 else _MLA_SHARED))
    elif rows <= OVERLAP_ROWS:
        attention = (*_PROJECT_KDA_SPLIT, *_KDA)
    else:
        attention = (*_PROJECT_KDA_PACKED, StockLaunch(_KDA[0].kernel, "kda", _KDA[0].what), _KDA[1])
    return (_MIX, *attention, *_OUT, *(_DENSE if dense else _MOE))


@dataclass(frozen=True)
class Target:
    """What a layer should come to."""

    kernels: int
    sequence: tuple[StockLaunch, ...]
    conditions: str


_TARGET_KDA = (StockLaunch("kda", "kda", "conv, gates, delta rule, gated norm"),)
_TARGET_MLA = (
    StockLaunch("mla_query", "mla", "norms, q_b, absorption, paged insert"),
    StockLaunch("mla_core", "mla", "attention over the latent"),
    StockLaunch("mla_value", "mla", "values and output gate"),
)
_TARGET_HEAD = (StockLaunch("projection", "attention_projection", "packed input projection"),)
_TARGET_REST = (
    StockLaunch("o_proj_partial", "output_projection", "o-proj, partial rows pushed to all ranks"),
    StockLaunch("o_proj_sum", "output_projection", "sum over ranks, residual, AttnRes, norm"),
    StockLaunch("shared_gate_up", "experts", "shared expert, gate and up", "aux"),
    StockLaunch("shared_situ", "experts", "shared expert's activation", "aux"),
    StockLaunch("shared_down", "experts", "shared expert, down", "aux"),
    StockLaunch("shared_push", "moe_tail", "shared partial pushed to the owners of its columns", "aux"),
    StockLaunch("front", "router", "sharded router and latent-down rows"),
    StockLaunch("route", "router", "top-k, weights, latent copied in"),
    StockLaunch("experts", "experts", "chosen experts, weighted sum published"),
    StockLaunch("tail", "moe_tail", "latent sum and norm, up-projection, rows published"),
    StockLaunch("next_attn_res", "attn_res", "residual, AttnRes, input norm of the next layer"),
)
TARGET_CONDITIONS = (
    "latency-specialised path of vLLM 0.33.0, KDA MoE layer: 13 launches, published beside 69 us a layer from a GB300"
    " trace (stock: 23 launches, 130 us); an MLA layer has two more"
)


def target_layer(kind: LayerKind, *, dense: bool) -> Target | None:
    """The target of a MoE layer; a dense layer has none."""
    if dense:
        return None
    sequence = (*_TARGET_HEAD, *(_TARGET_KDA if kind == "kda" else _TARGET_MLA), *_TARGET_REST)
    return Target(len(sequence), sequence, TARGET_CONDITIONS)
