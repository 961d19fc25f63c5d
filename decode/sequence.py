"""The launches of a layer on the tuned path, in the order in which :func:`~k3lab.decode.step.forward` makes them.

The stock sequence is the frame: a tuned family's kernels stand where its first stock launch stood. Where they differ
from it: a tuned tail makes the next layer's AttnRes too, and a layer that saves a block copies it beside the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..kernels import ModelCard
from ..kernels.model_card import LayerKind
from .choices import ARGMAX, EMBED, Choice, Fallback, Tuned
from .stock import StockLaunch

STAND_IN = "torch"
"""Engine name of untuned launches: PyTorch operators in place of the stock kernel, maybe several kernels each."""
GLUE = "glue"
"""Engine name of the copies that tuned kernels need; one device kernel each."""
UNSERVED = frozenset(
    (
        "logits_all_gather",
        "next_token",
        "dense_gate_up_gemm",
        "dense_situ",
        "dense_down_gemm",
        "mlp_all_reduce",
    )
)
"""Stock launches that no kernel of its own stands for; those behind the head's product are part of an argmax."""
HEAD = ("lm_head_gemm", "logits_all_gather", "next_token")
"""What one kernel does where a step hands out tokens alone."""
EMBEDDING = ("embedding", "embedding_all_reduce")
"""What one kernel does where a step begins."""
UNSERVED_NOTE = "the dense layer and a gather of logits are PyTorch operators: no kernel is launched for them"


@dataclass(frozen=True)
class PlannedLaunch:
    """One launch."""

    kernel: str
    """The symbol of a tuned kernel; for others what the launch computes."""
    family: str
    what: str
    stream: str
    engine: str
    config: dict[str, Any] | None = None
    evidence: str | None = None
    """``measured``, ``predicted`` or ``compiled`` for a tuned kernel."""
    fallback: Fallback | None = None
    """Why it is not tuned; None in ``auto``, where nothing is expected to be."""

    def to_json(self, position: int) -> dict[str, Any]:
        """With its place in the layer, from 1."""
        return {
            "position": position, "kernel": self.kernel, "family": self.family, "what": self.what, "stream": self.stream,
            "engine": self.engine, "config": self.config, "evidence": self.evidence,
            "fallback": self.fallback.to_json() if self.fallback else None,
        }  # fmt: skip


@dataclass(frozen=True)
class LayerForm:
    """What decides the launches of a layer."""

    kind: LayerKind
    dense: bool
    restarts: bool = False
    """It saves a block, and the residual starts anew; told apart only where that changes launches."""
    head: str | None = "blocks"
    """The AttnRes at its head, by the family's kinds; None: the tail of the layer before made it."""


def forms(card: ModelCard, choices: Sequence[Choice]) -> list[LayerForm]:
    """Of every layer."""
    tuned = {(one.family, one.kind) for one in choices if isinstance(one, Tuned)}
    tail = ("moe_tail", None) in tuned
    first = ("attn_res", "first") in tuned
    told = bool(_copies(choices)) or ("output_projection", "restart") in tuned
    made = []
    for layer, kind in enumerate(card.layer_kinds):
        follows_tail = tail and layer and not card.is_dense(layer - 1)
        head = None if follows_tail else "first" if layer == 0 and first else "blocks"
        made.append(LayerForm(kind, card.is_dense(layer), told and card.starts_block(layer), head))
    return made


def _copies(choices: Iterable[Choice]) -> int:
    """Copies of a block when it is saved: one for each row count that kernels which read blocks were compiled for."""
    readers = [one for one in choices if isinstance(one, Tuned) and getattr(one.compiled.problem, "blocks", None)]
    return len({one.place[3] for one in readers})


def stock_launches(stock: Iterable[StockLaunch]) -> tuple[PlannedLaunch, ...]:
    """As ``auto`` makes them."""
    return tuple(PlannedLaunch(one.kernel, one.family, one.what, one.stream, STAND_IN) for one in stock)


def tuned_launches(
    stock: Iterable[StockLaunch], choices: Sequence[Choice], form: LayerForm | None = None
) -> tuple[PlannedLaunch, ...]:
    """The stock launches with tuned kernels in place of their families'.

    Args:
        stock: the frame.
        choices: of the step.
        form: of the layer; None before and after the layers.
    """
    chosen = {(one.family, one.kind): one for one in choices}

    def choice_of(launch: StockLaunch) -> Choice | None:
        wide = chosen.get((launch.family, None))
        if launch.kernel in EMBEDDING:
            return chosen.get(("lm_head", EMBED))
        if launch.kernel in HEAD:
            tokens = chosen.get(("lm_head", ARGMAX))
            if isinstance(tokens, Tuned):
                return tokens
            return wide if launch.kernel == "lm_head_gemm" and isinstance(wide, Tuned) else tokens or wide
        if launch.family == "attn_res":
            return chosen.get(("attn_res", form.head if form else "final"), wide)
        if launch.family != "output_projection" or form is None:
            return chosen.get((launch.family, form.kind), wide) if form else wide
        own = chosen.get(("output_projection", "restart" if form.restarts else form.kind), wide)
        mix = chosen.get(("attn_res", "blocks"))
        # untuned, it ends with an AttnRes of its own, and that may be tuned
        return mix if launch.kernel == "mlp_attn_res" and isinstance(mix, Tuned) and not isinstance(own, Tuned) else own

    planned: list[PlannedLaunch] = []
    placed: set[tuple[int, bool]] = set()
    for launch in stock:
        if launch.family == "attn_res" and form and form.head is None:
            continue
        choice = choice_of(launch)
        if launch.kernel in UNSERVED and isinstance(choice, Tuned) and choice.kind != ARGMAX:
            choice = None
        if not isinstance(choice, Tuned):
            planned.append(PlannedLaunch(launch.kernel, launch.family, launch.what, launch.stream, STAND_IN, fallback=choice))  # fmt: skip
            continue
        # a layer may have two mixes of one kind: its head's, and one behind an untuned projection
        place = id(choice), launch.family == choice.family
        if place in placed:
            continue
        placed.add(place)
        if choice.kind == EMBED:
            planned.append(PlannedLaunch("token_ids", choice.family, "token ids in 32 bits", "main", GLUE))
        planned += [
            PlannedLaunch(
                own.kernel, choice.family, choice.label, "main", choice.engine, choice.config, choice.evidence
            )
            for own in choice.compiled.launches
        ]
    if form and form.restarts:
        copy = PlannedLaunch("saved_block", "attn_res", "the saved block beside the others", "main", GLUE)
        first = next((at for at, one in enumerate(planned) if one.family == "output_projection"), 0)
        planned[first:first] = [copy] * _copies(choices)
    return tuple(planned)
