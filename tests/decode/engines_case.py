"""Real kernels of every family for a step, untuned: each family's default engine and config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from k3lab.decode.bindings import step_kind
from k3lab.decode.choices import ARGMAX, EMBED, STEP_FAMILIES, Tuned, model_families
from k3lab.decode.sequence import forms, tuned_launches
from k3lab.decode.stock import BEFORE_LAYERS, after_layers, stock_layer
from k3lab.kernels import K3, InputError, ModelCard, family
from k3lab.kernels.gpu_cards import GPU_CARDS


def five_layers(experts: int = 896, vocabulary: int = 16384) -> ModelCard:
    """K3's widths: a dense layer, KDA and MLA, a block saved every two layers."""
    return replace(
        K3, name="five-k3", num_hidden_layers=5, mla_layers=(2, 4), vocab_size=vocabulary, num_experts=experts,
        attn_res_block_size=2, max_position_embeddings=4096, bos_token_id=vocabulary - 4, eos_token_id=vocabulary - 3,
        pad_token_id=vocabulary - 1,
    )  # fmt: skip


def engine_entries(
    card: ModelCard,
    *,
    tp: int,
    rows: int,
    q_len: int,
    arch: str,
    gpu: str = "H200",
    jitter: int = 0,
    exchange: str = "",
    head: str = "logits",
) -> tuple[list[Tuned], list[str]]:
    """Choices as a bundle would give them, and why families have none.

    ``exchange`` in place of the defaults': over loopback a two-shot sum repeats this rank's columns for everybody's,
    so only ``one_shot`` is what a group computes whose other ranks add zeros. ``head``: what the steps hand out.
    """
    chosen, without = [], []
    for name, kind in (*model_families(card, STEP_FAMILIES), ("lm_head", EMBED)):
        found = family(name)
        if (name, kind, head) == ("lm_head", None, "tokens"):
            kind = ARGMAX
        asked = kind or step_kind(found, card, tp=tp, rows=rows, q_len=q_len)
        problem = found.problem(card, tp=tp, rows=rows, kind=asked)
        names = sorted((one.name for one in found.engines), key=lambda one: one != found.default_engine)
        engine, whys = None, []
        for one in map(found.engine, names):
            if why := one.refuses(problem, arch):
                whys.append(str(why))
                continue
            try:
                config: dict[str, Any] = dict(one.space(problem, GPU_CARDS[gpu]).default)
            except InputError as error:  # no config serves it on this GPU
                whys.append(str(error))
                continue
            engine = one
            break
        if engine is None:
            without.append(f"{name} {asked}: {'; '.join(whys)}")
            continue
        if exchange and "exchange" in config:
            config["exchange"] = exchange
            assert not engine.space(problem, GPU_CARDS[gpu]).illegal(config), (name, config)
        if jitter and engine.compiler == "cute":
            config["jitter"] = jitter
        compiled = engine.compile(problem, config, arch)
        place = (name, gpu, str(asked), rows)
        chosen.append(Tuned(name, kind, engine.name, config, "compiled", compiled, place))
    return chosen, without


def planned(card: ModelCard, choices: list[Tuned], rows: int) -> dict[str, int]:
    """Launches a step of every tuned kernel."""
    after = after_layers("tokens" if any(one.kind == ARGMAX for one in choices) else "logits")
    every = [*tuned_launches(BEFORE_LAYERS, choices), *tuned_launches(after, choices)]
    for form in forms(card, choices):
        every += tuned_launches(stock_layer(form.kind, dense=form.dense, rows=rows), choices, form)
    names = [one.kernel for one in every if one.evidence]
    return {name: names.count(name) for name in names}


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
