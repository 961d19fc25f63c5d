"""``k3lab trace synthesize``: a trace with known causes planted in it, to see what the other commands make of it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit

if TYPE_CHECKING:
    from rich.console import Console

    from ..traces.synthetic import Faults

_LASTING = ("slow", "bubble", "copy", "flush", "exposed")
_LAYER_ONLY = {"split-k": "extra", "cast": "cast", "missing": "missing", "stock": "stock", "no-overlap": "no_overlap"}
_FORM = f"WORD:LAYER:US with {', '.join(_LASTING)}, or WORD:LAYER with {', '.join(_LAYER_ONLY)}"
_LONGEST_US = 1e6


def read_plants(plants: list[str], layers: int, graphs: int, pause_us: float) -> Faults:
    """What ``--plant`` asks for.

    Raises:
        InputError: a word that is none, no such layer, or no time above 0.
    """
    from ..kernels import InputError
    from ..traces.synthetic import Faults

    lasting: dict[str, list[tuple[int, int]]] = defaultdict(list)
    single: dict[str, list[int]] = defaultdict(list)
    for plant in plants:
        word, *rest = plant.split(":")
        if (len(rest) != 2 or word not in _LASTING) and (len(rest) != 1 or word not in _LAYER_ONLY):
            raise InputError(f"--plant {plant} is not understood; give {_FORM}")
        if not rest[0].isdecimal() or int(rest[0]) >= layers:
            raise InputError(f"--plant {plant}: layers are 0 to {layers - 1}")
        if word in _LAYER_ONLY:
            single[_LAYER_ONLY[word]].append(int(rest[0]))
            continue
        try:
            us = float(rest[1])
        except ValueError:
            us = 0.0
        if not 2 <= us <= _LONGEST_US:
            raise InputError(f"--plant {plant}: the time is 2 to {_LONGEST_US:.0f} us")
        lasting[word].append((int(rest[0]), round(us * 1000)))
    if not 1 <= graphs <= layers:
        raise InputError(f"--graphs is {graphs}; a step of {layers} layers has 1 to {layers}")
    return Faults(
        slow=tuple(lasting["slow"]),
        bubble=tuple(lasting["bubble"]),
        copy=tuple(lasting["copy"]),
        flush=tuple(lasting["flush"]),
        exposed=tuple(lasting["exposed"]),
        extra=tuple(single["extra"]),
        cast=tuple(single["cast"]),
        missing=tuple(single["missing"]),
        stock=tuple(single["stock"]),
        no_overlap=tuple(single["no_overlap"]),
        graphs=graphs,
        pause_ns=round(pause_us * 1000),
    )


def read_kernels(kernels: list[str]) -> tuple[tuple[str, int], ...]:
    """What ``--kernel`` asks for: names and ns.

    Raises:
        InputError: not NAME:US, or no time above 0.
    """
    from ..kernels import InputError

    found = []
    for kernel in kernels:
        name, _, us = kernel.rpartition(":")
        try:
            time = float(us)
        except ValueError:
            time = 0.0
        if not name or not 0.1 <= time <= _LONGEST_US:
            raise InputError(f"--kernel {kernel} is not NAME:US with 0.1 to {_LONGEST_US:.0f} us")
        found.append((name, round(time * 1000)))
    return tuple(found)


def render(console: Console, data: dict[str, Any]) -> None:
    """Say what was written."""
    slow = (
        f", layer {', '.join(map(str, data['slow_layers']))} slow by {data['slow_us']:g} us"
        if data["slow_layers"]
        else ""
    )
    planted = f", planted {', '.join(data['planted'])}" if data["planted"] else ""
    console.print(
        f"wrote {data['trace']}: synthetic, {data['steps']} steps of {data['layers']} layers{slow}{planted}",
        markup=False,
    )


def synthesize_command(
    out: Annotated[Path, typer.Argument(help="Trace to write: .json, or .json.gz.")],
    layers: Annotated[int, typer.Option("--layers", min=1, max=200, help="Layers of a step.")] = 12,
    steps: Annotated[int, typer.Option("--steps", min=1, max=500, help="Decode steps.")] = 25,
    slow_layer: Annotated[
        list[int] | None, typer.Option("--slow-layer", help="Layer, from 0, whose routed experts are slow; repeatable.")
    ] = None,
    slow_us: Annotated[float, typer.Option("--slow-us", min=0.001, max=1e6, help="By how much, in us.")] = 20.0,
    plant: Annotated[
        list[str] | None, typer.Option("--plant", help=f"A cause to plant, like copy:3:20; repeatable. {_FORM}.")
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", help="A kernel more at the end of every layer, NAME:US; repeatable."),
    ] = None,
    graphs: Annotated[int, typer.Option("--graphs", help="Graph launches a step (piecewise graphs).")] = 1,
    pause_us: Annotated[
        float, typer.Option("--pause-us", min=1, max=1e6, help="From a step to the next launch.")
    ] = 60.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the jitter.")] = 0,
    as_json: Json = False,
) -> None:
    """Write a synthetic decode trace, to see what a verdict looks like; it is marked as such and measures nothing."""
    from dataclasses import replace

    from ..kernels import InputError
    from ..traces import synthesize

    slow = sorted(set(slow_layer or ()))
    if absent := [layer for layer in slow if not 0 <= layer < layers]:
        raise InputError(f"--slow-layer is {absent[0]}, layers are 0 to {layers - 1}")
    if not out.name.endswith((".json", ".json.gz")):
        raise InputError(f"{out} is no name of a trace; it ends in .json or .json.gz")
    faults = read_plants(plant or [], layers, graphs, pause_us)
    faults = replace(
        faults,
        kernels=read_kernels(kernel or []),
        slow=(*faults.slow, *((layer, round(slow_us * 1000)) for layer in slow)),
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from error
    synthesize(out, layers=layers, steps=steps, seed=seed, faults=faults)
    data = {"trace": str(out), "synthetic": True, "layers": layers, "steps": steps, "slow_layers": slow,
            "slow_us": slow_us, "planted": plant or [], "kernels": kernel or []}  # fmt: skip
    emit(data, as_json, render)


def register(app: typer.Typer) -> None:
    """Add the command to ``k3lab trace``."""
    app.command("synthesize")(synthesize_command)
