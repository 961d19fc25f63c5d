"""``k3lab prefetch``: the weights that follow the experts brought into the L2 beside them, tuned in the chain."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .select import Model, Tp

if TYPE_CHECKING:
    from rich.console import Console


def render(console: Console, data: dict[str, Any]) -> None:
    """Print one line for each rows value, then what the chain was."""
    console.print(
        f"prefetch behind the experts, tp{data['tp']}, next layer {data['kind']}, on {data['gpu']}, measured",
        markup=False,
    )
    for row in data["table"]:
        config = " ".join(f"{name}={value}" for name, value in row["config"].items()) if row["worth_it"] else "off"
        console.print(
            f"  rows {row['rows']:<3} {row['off_us']:8.2f} us without, {row['on_us']:8.2f} us with the best of {row['timed']}: "
            f"{row['gain_us']:+.2f} (noise {row['band_us']:.2f})  {config}",
            markup=False,
        )
    for link in data["table"][0]["chain"] if data["table"] else ():
        console.print(f"  chain: {link['family']}/{link['engine']} {link['problem']}", markup=False)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("prefetch")
    def prefetch_command(
        tp: Tp = 16,
        rows: Annotated[str, typer.Option("--rows", help="Token rows of the step: numbers and ranges such as 1-8,16.")] = "1,2,4,8",
        kind: Annotated[str, typer.Option("--kind", help="Of the layer behind the experts: kda or mla.")] = "kda",
        config: Annotated[
            str | None, typer.Option("--config", help="Time this prefetch alone: name=value,name=value that differ from the default.")
        ] = None,
        chain: Annotated[
            str | None, typer.Option("--chain", help="JSON object: by family, engine and what differs from the default config of the chain's kernels.")
        ] = None,
        model: Model = "k3",
        as_json: Json = False,
    ) -> None:  # fmt: skip
        """Tune the prefetch of the next kernels' weights on the GPU here: what the chain gains, for each rows value; off where it loses."""
        from ..kernels.device import require
        from ..kernels.experts.prefetch import space
        from ..tuning.environment import environment
        from ..tuning.prefetch_tune import tune_prefetch
        from .select import model_card, parse_config
        from .table import numbers

        wanted = numbers(rows, "--rows")
        given = parse_config(config, space()) if config else None
        configs = chain_configs(chain)
        card = model_card(model)
        device = require("a prefetch")

        def say(text: str) -> None:
            print(text, file=sys.stderr)

        table = [tune_prefetch(device, card, tp, one, kind, configs, given, say) for one in wanted]
        data = {
            "tp": tp, "kind": kind, "gpu": device.name, "evidence": "measured", "table": table, "environment": environment(device),
        }  # fmt: skip
        emit(data, as_json, render)


def chain_configs(text: str | None) -> dict[str, dict[str, Any]]:
    """Configs by family of a ``--chain`` text.

    Raises:
        InputError: not a JSON object of objects, or a family that the chain does not have.
    """
    from ..kernels.errors import InputError

    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise InputError(f"--chain is a JSON object of families and configs, not {text!r}")
    if unknown := sorted(set(found) - {"experts", "attention_projection", "output_projection"}):
        raise InputError(
            f"--chain names {unknown[0]!r}; the chain has experts, attention_projection and output_projection"
        )
    return found
