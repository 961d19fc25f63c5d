"""The model card: every dimension of the Kimi K3 text model as one typed object.

The numbers are those of the published ``config.json`` (architecture
``KimiK3ForConditionalGeneration``, text model ``kimi_linear``). Layer indices are zero-based here;
the published lists are one-based. Bytes and flops are in :mod:`k3lab.kernels.accounting`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from .errors import InputError
from .mxfp4 import GROUP as MXFP4_GROUP

LayerKind = Literal["kda", "mla"]

_LARGEST = 2**24
"""Bound of any one size: far above every model, and small enough to compute with."""
_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "kda_num_heads",
    "kda_head_dim", "kda_conv_size", "kda_gate_rank", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "num_experts", "num_experts_per_token", "num_shared_experts",
    "moe_intermediate_size", "routed_expert_hidden_size", "attn_res_block_size", "max_position_embeddings",
)  # fmt: skip
_POSITIVE = ("routed_scaling_factor", "situ_beta", "situ_linear_beta", "rms_norm_eps", "mla_low_rank_norm_eps")


@dataclass(frozen=True)
class ModelCard:
    """Dimensions of one model of the Kimi K3 structure; :data:`K3` is the published one."""

    name: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    mla_layers: tuple[int, ...]
    """Zero-based indices of the MLA layers; every other layer is KDA."""
    num_attention_heads: int
    intermediate_size: int
    """Width of the dense MLP of the first ``first_k_dense`` layers."""
    first_k_dense: int
    # KDA
    kda_num_heads: int
    kda_head_dim: int
    kda_conv_size: int
    kda_gate_lower_bound: float
    kda_gate_rank: int
    """Rank of the low-rank decay gate (rows of f_a)."""
    # MLA
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    # MoE
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    """Width of the latent that the routed experts read and write."""
    routed_scaling_factor: float
    mxfp4_group_size: int
    # the rest
    situ_beta: float
    situ_linear_beta: float
    attn_res_block_size: int
    rms_norm_eps: float
    mla_low_rank_norm_eps: float
    """Eps of the q_a and kv_a norms: the official code's default is 1e-6, serving stacks pass 1e-5."""
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if not 1 <= size <= _LARGEST:
                raise InputError(f"model card {self.name!r}: {name} is {size}, must be 1 to {_LARGEST}")
        if not 0 <= self.first_k_dense <= self.num_hidden_layers:
            raise InputError(
                f"model card {self.name!r}: first_k_dense is {self.first_k_dense}, must be 0 to {self.num_hidden_layers}"
            )
        for name in _POSITIVE:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"model card {self.name!r}: {name} is {value}, must be a number above 0")
        if not (math.isfinite(self.kda_gate_lower_bound) and self.kda_gate_lower_bound < 0):
            raise InputError(
                f"model card {self.name!r}: kda_gate_lower_bound is {self.kda_gate_lower_bound}, must be a number below 0"
            )
        if self.mxfp4_group_size != MXFP4_GROUP:
            raise InputError(
                f"model card {self.name!r}: mxfp4_group_size is {self.mxfp4_group_size}, MXFP4 has {MXFP4_GROUP}"
            )
        for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
            if getattr(self, name) % MXFP4_GROUP:
                raise InputError(
                    f"model card {self.name!r}: {name} is {getattr(self, name)}, must be a multiple of {MXFP4_GROUP}"
                )
        if self.num_experts_per_token > self.num_experts:
            raise InputError(f"model card {self.name!r}: more experts per token than experts")
        outside = [layer for layer in self.mla_layers if not 0 <= layer < self.num_hidden_layers]
        if outside:
            raise InputError(
                f"model card {self.name!r}: MLA layers {outside} lie outside 0..{self.num_hidden_layers - 1}"
            )

    # -- derived dimensions -------------------------------------------------------------------
    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Attention kind of every layer, in order."""
        mla = set(self.mla_layers)
        return tuple("mla" if layer in mla else "kda" for layer in range(self.num_hidden_layers))

    @property
    def kda_dim(self) -> int:
        """Width of q, k, v and g of a KDA layer over all ranks (12288 for K3)."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def mla_dim(self) -> int:
        """Width of the MLA output, gate and o-proj input over all ranks (12288 for K3)."""
        return self.num_attention_heads * self.v_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the fused shared expert (6144 for K3)."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def num_attn_res_blocks(self) -> int:
        """Saved blocks at the end of a step: one per ``attn_res_block_size`` layers, begun ones too."""
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    def is_dense(self, layer: int) -> bool:
        """Whether the layer has a dense MLP in place of the MoE."""
        return layer < self.first_k_dense

    def kind_of(self, layer: int) -> LayerKind:
        """``"kda"`` or ``"mla"``."""
        return self.layer_kinds[layer]

    def starts_block(self, layer: int) -> bool:
        """Whether the running residual is saved and restarted at this layer (l % block size == 0)."""
        return layer % self.attn_res_block_size == 0

    def check_tp(self, tp: int) -> None:
        """Raise unless every sharded dimension divides by ``tp``."""
        sharded = {
            "kda_num_heads": self.kda_num_heads,
            "num_attention_heads": self.num_attention_heads,
            "vocab_size": self.vocab_size,
            "num_experts": self.num_experts,
            "routed_expert_hidden_size": self.routed_expert_hidden_size,
            "moe_intermediate_size / mxfp4_group_size": self.moe_intermediate_size // self.mxfp4_group_size,
            "shared intermediate size": self.shared_intermediate_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
        }
        bad = [f"{name} {size}" for name, size in sharded.items() if tp < 1 or size % tp]
        if bad:
            legal = [t for t in (1, 2, 4, 8, 16, 32) if all(size % t == 0 for size in sharded.values())]
            raise InputError(
                f"TP {tp} does not divide {bad[0]} of {self.name}; TP sizes that do: {', '.join(map(str, legal))}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "config") -> ModelCard:
        """Read a ``config.json`` in the published form (the whole file or its ``text_config``).

        Raises:
            InputError: a key is missing, has the wrong type, or names a structure K3 does not have.
        """
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise InputError(f"{name}: text_config is no object; a Kimi K3 config.json has the text model there")

        def get(key: str, kind: type | tuple[type, ...], source: Mapping[str, Any] = text) -> Any:
            if key not in source:
                raise InputError(f"{name}: key {key!r} is missing; a Kimi K3 config.json has it under text_config")
            value = source[key]
            huge = isinstance(value, int) and abs(value) >= 2**63  # no float need hold it
            if not isinstance(value, kind) or isinstance(value, bool) or huge:
                raise InputError(
                    f"{name}: key {key!r} is {value!r}, which is not the type a Kimi K3 config.json has there"
                )
            return value

        if text.get("model_type") != "kimi_linear":
            raise InputError(
                f"{name}: model_type is {text.get('model_type')!r}, a Kimi K3 text config says 'kimi_linear'"
            )
        linear = get("linear_attn_config", Mapping)
        layers = get("num_hidden_layers", int)
        full, delta = get("full_attn_layers", list, linear), get("kda_layers", list, linear)
        counted = len(full) + len(delta) == layers and all(type(layer) is int for layer in (*full, *delta))
        if not counted or sorted([*full, *delta]) != list(range(1, layers + 1)):
            raise InputError(f"{name}: kda_layers and full_attn_layers do not cover 1..{layers} once each")
        mla = tuple(sorted(layer - 1 for layer in full))
        required = {
            "hidden_act": "situ", "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc",
            "moe_renormalize": True, "mla_use_nope": True, "mla_use_output_gate": True,
            "latent_moe_use_norm": True, "num_expert_group": 1, "topk_group": 1, "moe_layer_freq": 1,
            "tie_word_embeddings": False,
        }  # fmt: skip
        for key, value in required.items():
            if text.get(key, value) != value:
                raise InputError(f"{name}: {key} is {text[key]!r}; k3lab implements Kimi K3, where it is {value!r}")
        group = MXFP4_GROUP
        if "quantization_config" in text:
            groups = get("quantization_config", Mapping).get("config_groups", {})
            for entry in groups.values() if isinstance(groups, Mapping) else [groups]:
                weights = entry.get("weights", {}) if isinstance(entry, Mapping) else None
                if not isinstance(weights, Mapping):
                    raise InputError(f"{name}: quantization_config is not of the form of a Kimi K3 config.json")
                if "group_size" in weights:
                    group = get("group_size", int, weights)
        head_dim = get("head_dim", int, linear)
        return cls(
            name=name,
            vocab_size=get("vocab_size", int),
            hidden_size=get("hidden_size", int),
            num_hidden_layers=layers,
            mla_layers=mla,
            num_attention_heads=get("num_attention_heads", int),
            intermediate_size=get("intermediate_size", int),
            first_k_dense=get("first_k_dense_replace", int),
            kda_num_heads=get("num_heads", int, linear),
            kda_head_dim=head_dim,
            kda_conv_size=get("short_conv_kernel_size", int, linear),
            kda_gate_lower_bound=float(get("gate_lower_bound", (int, float), linear)),
            kda_gate_rank=head_dim,  # the published f_a has head_dim rows; the config names no rank of its own
            q_lora_rank=get("q_lora_rank", int),
            kv_lora_rank=get("kv_lora_rank", int),
            qk_nope_head_dim=get("qk_nope_head_dim", int),
            qk_rope_head_dim=get("qk_rope_head_dim", int),
            v_head_dim=get("v_head_dim", int),
            num_experts=get("num_experts", int),
            num_experts_per_token=get("num_experts_per_token", int),
            num_shared_experts=get("num_shared_experts", int),
            moe_intermediate_size=get("moe_intermediate_size", int),
            routed_expert_hidden_size=get("routed_expert_hidden_size", int),
            routed_scaling_factor=float(get("routed_scaling_factor", (int, float))),
            mxfp4_group_size=group,
            situ_beta=float(get("activation_situ_beta", (int, float))),
            situ_linear_beta=float(get("activation_situ_linear_beta", (int, float))),
            attn_res_block_size=get("attn_res_block_size", int),
            rms_norm_eps=float(get("rms_norm_eps", (int, float))),
            mla_low_rank_norm_eps=1e-6,
            max_position_embeddings=get("max_position_embeddings", int),
            bos_token_id=get("bos_token_id", int, text if "bos_token_id" in text else config),
            eos_token_id=get("eos_token_id", int, text if "eos_token_id" in text else config),
            pad_token_id=get("pad_token_id", int, text if "pad_token_id" in text else config),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> ModelCard:
        """Read a ``config.json`` file; see :meth:`from_config`."""
        path = Path(path)
        try:
            config = json.loads(path.read_text())
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise InputError(f"{path} holds a {type(config).__name__}, a config.json holds an object")
        return cls.from_config(config, name=path.stem if path.stem != "config" else path.parent.name or "config")


K3 = ModelCard(
    name="kimi-k3",
    vocab_size=163840,
    hidden_size=7168,
    num_hidden_layers=93,
    mla_layers=(*range(3, 92, 4), 92),
    num_attention_heads=96,
    intermediate_size=33792,
    first_k_dense=1,
    kda_num_heads=96,
    kda_head_dim=128,
    kda_conv_size=4,
    kda_gate_lower_bound=-5.0,
    kda_gate_rank=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_experts=896,
    num_experts_per_token=16,
    num_shared_experts=2,
    moe_intermediate_size=3072,
    routed_expert_hidden_size=3584,
    routed_scaling_factor=1.0,
    mxfp4_group_size=32,
    situ_beta=4.0,
    situ_linear_beta=25.0,
    attn_res_block_size=12,
    rms_norm_eps=1e-5,
    mla_low_rank_norm_eps=1e-6,
    max_position_embeddings=1048576,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
)
"""The published Kimi K3 text model."""

SMALL_K3 = ModelCard(
    name="small-k3",
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=9,
    mla_layers=(3, 7, 8),
    num_attention_heads=16,
    intermediate_size=512,
    first_k_dense=1,
    kda_num_heads=16,
    kda_head_dim=16,
    kda_conv_size=4,
    kda_gate_lower_bound=-5.0,
    kda_gate_rank=16,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    num_experts=32,
    num_experts_per_token=4,
    num_shared_experts=2,
    moe_intermediate_size=512,
    routed_expert_hidden_size=64,
    routed_scaling_factor=1.0,
    mxfp4_group_size=32,
    situ_beta=4.0,
    situ_linear_beta=25.0,
    attn_res_block_size=4,
    rms_norm_eps=1e-5,
    mla_low_rank_norm_eps=1e-6,
    max_position_embeddings=4096,
    bos_token_id=508,
    eos_token_id=509,
    pad_token_id=511,
)
"""Every structural feature of K3 (both layer kinds, two MLA in a row at the end, dense first layer,
AttnRes blocks, latent MoE) at a size a CPU runs; divides by TP 1, 2, 4, 8 and 16."""
