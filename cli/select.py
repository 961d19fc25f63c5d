"""From the words of a command line to a family, an engine, a problem and a config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..kernels import K3, Config, Engine, Family, InputError, ModelCard, Problem, family
from ..kernels.gpu_cards import GPU_CARDS, GpuCard
from ..kernels.space import Space

MAX_SEED = 2**32 - 1
"""Largest seed: what every generator takes, with room for the numbers of trials added to it."""

Tp = Annotated[int, typer.Option("--tp", help="Tensor-parallel size.")]
Rows = Annotated[int, typer.Option("--rows", help="Token rows in the step, 1 to 64.")]
KIND_HELP = (
    "Layer kind or variant (default: the family's first). attention_projection, output_projection: kda, mla; "
    "others: see 'kinds' in `k3lab kernels --json`."
)
GPU_NAMES = ", ".join(card.lower() for card in GPU_CARDS)
"""GPU cards there are, for help texts."""
Kind = Annotated[str | None, typer.Option("--kind", help=KIND_HELP)]
EngineName = Annotated[str | None, typer.Option("--engine", help="Engine; see 'k3lab kernels'.")]
ConfigText = Annotated[
    str | None,
    typer.Option(
        "--config", help="Values that differ from the default config: name=value,name=value or a JSON object."
    ),
]
Model = Annotated[str, typer.Option("--model", help="'k3', 'small', or a config.json in the published form.")]


def model_card(name: str) -> ModelCard:
    """The card of ``k3``, ``small`` or a config.json file."""
    from ..kernels import SMALL_K3

    known = {"k3": K3, K3.name: K3, "small": SMALL_K3, SMALL_K3.name: SMALL_K3}
    if name in known:
        return known[name]
    if name.endswith(".json"):
        return ModelCard.from_file(name)
    raise InputError(f"unknown model {name!r}; it is 'k3', 'small' or the path of a config.json")


def parse_config(text: str | None, space: Space) -> Config:
    """The default config with the given values put in.

    Raises:
        InputError: not name=value pairs or JSON, an unknown name, or an illegal config.
    """
    if not text:
        return dict(space.default)
    try:
        if text.lstrip().startswith("{"):
            given: dict[str, Any] = json.loads(text)
        else:
            pairs = [part.split("=", 1) for part in text.split(",") if part.strip()]
            given = {name.strip(): value.strip() for name, value in pairs}
    except (ValueError, IndexError) as error:
        raise InputError(f"--config is name=value,name=value or a JSON object, not {text!r}") from error
    config = {**space.default, **_typed(given, space)}
    space.check(config)
    return config


def _typed(given: Mapping[str, Any], space: Space) -> dict[str, Any]:
    """Values of a command line as the space's own."""
    params = {param.name: param for param in space.params}
    typed = {}
    for name, value in given.items():
        if name not in params:
            raise InputError(f"unknown parameter {name!r}; the space has {', '.join(params)}")
        legal = {str(option): option for option in params[name].values}
        if str(value) not in legal:
            raise InputError(f"{name} is {value!r}, legal values are {', '.join(legal)}")
        typed[name] = legal[str(value)]
    return typed


def parse_fixed(texts: Sequence[str] | None, space: Space) -> Config:
    """Parameters of ``--fix name=value`` options.

    Raises:
        InputError: not name=value, a name twice, or no such parameter or value.
    """
    given: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise InputError(f"--fix is name=value, not {text!r}")
        if name in given:
            raise InputError(f"--fix names {name} twice; one value each")
        given[name] = value
    return _typed(given, space)


@dataclass(frozen=True)
class Selection:
    """One engine of a family on one problem."""

    family: Family
    engine: Engine
    problem: Problem

    def config(self, text: str | None, card: GpuCard) -> Config:
        """The config of a ``--config`` text on a GPU.

        Raises:
            InputError: the engine refuses the problem, or the text is no legal config.
        """
        return parse_config(text, self.space(card))

    def space(self, card: GpuCard) -> Space:
        """The engine's space for the problem on a GPU.

        Raises:
            InputError: the engine refuses the problem.
        """
        if refusal := self.engine.refuses(self.problem, card.arch):
            raise InputError(f"{self.family.name}/{self.engine.name} refuses {self.problem.label}: {refusal}")
        return self.engine.space(self.problem, card)

    def to_json(self) -> dict[str, Any]:
        """For the head of a command's output."""
        return {"family": self.family.name, "engine": self.engine.name, "problem": self.problem.to_json()}


def select_engines(
    name: str, *, model: str, tp: int, rows: int, kind: str | None, engine: str | None
) -> tuple[Family, Problem, list[Engine]]:
    """The family, its problem, and the engine asked for or all of them.

    Raises:
        InputError: no such family, kind or engine, or the family has no engine yet.
    """
    owner = family(name)
    problem = owner.problem(model_card(model), tp=tp, rows=rows, kind=kind)
    if engine is not None:
        return owner, problem, [owner.engine(engine)]
    if not owner.engines:
        raise InputError(f"family {name} has no engine yet, only its twin; 'k3lab kernels' lists what there is")
    return owner, problem, list(owner.engines)


def select_engine(name: str, *, model: str, tp: int, rows: int, kind: str | None, engine: str | None) -> Selection:
    """As :func:`select_engines`, with the family's default engine where none is named."""
    owner, problem, engines = select_engines(name, model=model, tp=tp, rows=rows, kind=kind, engine=engine)
    if engine is None and owner.default_engine:
        engines = [owner.engine(owner.default_engine)]
    return Selection(owner, engines[0], problem)


def card_of_arch(arch: str) -> GpuCard:
    """The first card of an architecture, for the limits a space needs.

    Raises:
        InputError: no card has that architecture.
    """
    for card in GPU_CARDS.values():
        if card.arch == arch:
            return card
    raise InputError(
        f"unknown architecture {arch!r}; architectures: {', '.join(sorted({c.arch for c in GPU_CARDS.values()}))}"
    )
