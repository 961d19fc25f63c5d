"""Writing small checkpoints in the published form: names, shards, index, ``config.json``; for tests and trials."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels import InputError, ModelCard
from ...kernels.whole_file import write_whole
from ..sharding import ModelTensors, Tensors
from .names import STORED_BYTES, StoredTensor, layer_tensors, outside_tensors
from .shards import INDEX

if TYPE_CHECKING:
    import torch


def published_config(card: ModelCard) -> dict[str, Any]:
    """A ``config.json`` that :meth:`~k3lab.kernels.ModelCard.from_config` reads as the card.

    The published form has no key for the low-rank norms' eps of MLA layers: it is read as 1e-6.

    Raises:
        InputError: the card has a rank of the decay gate that the form cannot say.
    """
    if card.kda_gate_rank != card.kda_head_dim:
        raise InputError(f"{card.name}: a config.json has no key for a decay gate of rank {card.kda_gate_rank}")
    text = {name: getattr(card, name) for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "q_lora_rank",
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts", "num_experts_per_token",
        "num_shared_experts", "moe_intermediate_size", "routed_expert_hidden_size", "routed_scaling_factor",
        "attn_res_block_size", "rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    )}  # fmt: skip
    text |= {
        "model_type": "kimi_linear", "num_key_value_heads": card.num_attention_heads, "dtype": "bfloat16",
        "first_k_dense_replace": card.first_k_dense, "moe_layer_freq": 1, "hidden_act": "situ",
        "activation_situ_beta": card.situ_beta, "activation_situ_linear_beta": card.situ_linear_beta,
        "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc", "moe_renormalize": True, "mla_use_nope": True,
        "mla_use_output_gate": True, "latent_moe_use_norm": True, "num_expert_group": 1, "topk_group": 1,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "num_heads": card.kda_num_heads, "head_dim": card.kda_head_dim, "short_conv_kernel_size": card.kda_conv_size,
            "gate_lower_bound": card.kda_gate_lower_bound, "use_full_rank_gate": True,
            "full_attn_layers": [layer + 1 for layer, kind in enumerate(card.layer_kinds) if kind == "mla"],
            "kda_layers": [layer + 1 for layer, kind in enumerate(card.layer_kinds) if kind == "kda"],
        },
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                "num_bits": 4, "type": "float", "group_size": card.mxfp4_group_size, "strategy": "group", "symmetric": True,
                "scale_dtype": "uint8",
            }}},
        },
    }  # fmt: skip
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}


def _value(one: StoredTensor, tensors: Tensors) -> torch.Tensor:
    import torch

    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
    tensor = tensors[one.spec] if one.expert is None else tensors[one.spec][one.expert]
    out = torch.zeros(one.shape, dtype=dtypes[one.dtype])  # what the form pads, it pads with zeros
    out[tuple(slice(0, size) for size in tensor.shape)] = tensor.to(out.dtype)
    return out


def stored_values(card: ModelCard, tensors: ModelTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Every text tensor under its published name, from whole tensors of the model."""
    for layer, own in enumerate(tensors.layers):
        for one in layer_tensors(card, layer):
            yield one.name, _value(one, own)
    for one in outside_tensors(card):
        yield one.name, _value(one, tensors.outside)


def write_shards(
    folder: Path, values: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int = 2**31
) -> dict[str, str]:
    """Shards of about ``shard_bytes`` with an index; returns name to file. One shard at a time is in memory."""
    from safetensors.torch import save

    shards: list[dict[str, torch.Tensor]] = [{}]
    files: list[list[str]] = []
    total = held = 0

    def flush() -> None:
        files.append(list(shards[0]))
        write_whole(folder / f".{len(files)}.part", save(shards[0], metadata={"format": "pt"}))
        shards[0] = {}

    for name, tensor in values:
        size = tensor.numel() * tensor.element_size()
        if shards[0] and held + size > shard_bytes:
            flush()
            held = 0
        shards[0][name] = tensor.contiguous()
        held, total = held + size, total + size
    flush()
    places = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):06}.safetensors"
        (folder / f".{number}.part").replace(folder / file)
        places.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_whole(folder / INDEX, json.dumps(index, indent=1))
    return places


def write_checkpoint(
    folder: Path,
    card: ModelCard,
    tensors: ModelTensors,
    *,
    shard_bytes: int = 2**31,
    others: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a checkpoint of a small model.

    Args:
        folder: made if it is not there; must hold nothing.
        card: the model.
        tensors: whole, as :func:`~k3lab.decode.random_weights.random_tensors` makes them.
        shard_bytes: about how many bytes a shard may have.
        others: tensors that are no part of the text model, by their whole names.

    Raises:
        InputError: the folder holds something, or the card cannot be said in the published form.
    """
    config = published_config(card)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise InputError(f"{folder} is not empty")
    values = [*stored_values(card, tensors), *(others or {}).items()]
    write_shards(folder, values, shard_bytes=shard_bytes)
    write_whole(folder / "config.json", json.dumps(config, indent=1))


def stored_bytes(tensors: Iterable[StoredTensor]) -> int:
    """Bytes of tensors as stored."""
    return sum(math.prod(one.shape) * STORED_BYTES[one.dtype] for one in tensors)
