"""Whether a run fits here, asked before anything is made."""

from __future__ import annotations

import os
import resource

from ..kernels import InputError, ModelCard
from ..kernels.device import Device
from .tensors import EXPERT_ROWS, rank_bytes


def free_memory(device: Device | None) -> int:
    """Bytes that can be allocated now: the GPU's, or the host's."""
    if device is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    import torch

    return torch.cuda.mem_get_info(device.index)[0]


def watch_memory(device: Device | None) -> None:
    """From here on :func:`peak_memory` counts anew; a process without a GPU cannot, and counts from its start."""
    if device is not None:
        import torch

        torch.cuda.reset_peak_memory_stats(device.index)


def peak_memory(device: Device | None) -> int:
    """The most bytes that were in use at once: allocated on the GPU, or resident of this process without one."""
    if device is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import torch

    return torch.cuda.max_memory_allocated(device.index)


def memory_needed(card: ModelCard, tp: int, *, on_gpu: bool, whole: bool = True) -> int:
    """Bytes a run takes: one rank's weights and scratch on a GPU; all ranks on a CPU.

    ``whole``: on a CPU also the whole that the ranks are cut from, as random weights are.
    """
    if not on_gpu:
        return int((2.5 if whole else 1.25) * tp * rank_bytes(card, tp))
    # auto dequantises the chosen experts of a few rows at a time: packed, widened index and value of every weight
    chosen = EXPERT_ROWS * card.num_experts_per_token
    scratch = 8 * chosen * 3 * card.moe_intermediate_size // tp * card.routed_expert_hidden_size
    return int(1.05 * rank_bytes(card, tp)) + scratch


def cache_bytes(card: ModelCard, tp: int, requests: int, context: int, verify: int = 1) -> int:
    """Bytes of one rank's BF16 caches, as :class:`~k3lab.decode.caches.DecodeCache` makes them for ``verify`` tokens a step."""
    heads, dim = card.kda_num_heads // tp, card.kda_head_dim
    state = 4 * heads * dim * dim + 2 * (card.kda_conv_size - 1) * 3 * heads * dim
    rows = 2 * context * (card.kv_lora_rank + card.qk_rope_head_dim)
    kda = card.layer_kinds.count("kda")
    return requests * (kda * verify * state + (card.num_hidden_layers - kda) * rows)


def check_memory(
    card: ModelCard,
    tp: int,
    device: Device | None,
    *,
    whole: bool = True,
    requests: int = 0,
    context: int = 0,
    verify: int = 1,
    one_rank: bool = False,
) -> None:
    """Raise InputError unless a run of the model fits on the GPU, or on this machine without one.

    Args:
        card: the model.
        tp: tensor-parallel size.
        device: the GPU; None without one.
        whole: as above.
        requests: whose caches are made.
        context: tokens of each.
        verify: tokens a request and step.
        one_rank: this process has one rank alone, without a GPU too.
    """
    single = device is not None or one_rank
    need, free = memory_needed(card, tp, on_gpu=single, whole=whole), free_memory(device)
    need += cache_bytes(card, tp, requests, context, verify) * (1 if single else tp)
    if need > free:
        where = device.name if device else "this machine"
        raise InputError(
            f"{card.name} at TP {tp} needs {need / 1e9:.1f} GB, {where} has {free / 1e9:.1f} GB free; --model small runs anywhere"
        )
