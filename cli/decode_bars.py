"""``k3lab decode bars``: the decode path's bars, measured on the GPU here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .decode_inputs import Accept, BundlePath, Dcp, bundle_of, progress_bar, real_card
from .output import Json, check_file, emit, write_file

if TYPE_CHECKING:
    from rich.console import Console


def bars_command(
    model: str = typer.Option("k3", "--model", help="k3, small, or the path of a config.json."),
    rank: int = typer.Option(0, "--rank", help="The rank that runs, alone, over loopback."),
    of: int = typer.Option(16, "--of", help="Ranks of its group."),
    drafts: int = typer.Option(7, "--drafts", help="Of the verify step: one request with so many drafts."),
    context: int = typer.Option(512, "--context", help="Tokens of a made-up context."),
    dcp: Dcp = 1,
    samples: int = typer.Option(30, "--samples", min=4, help="Replays of each graph that are timed."),
    seed: int = typer.Option(0, "--seed", help="Of weights, ids and routing."),
    bundle: BundlePath = None,
    accept: Accept = None,
    out: Path | None = typer.Option(
        None, "--out", help="File, in a folder that is there: the table with GPU, driver and versions."
    ),
    as_json: Json = False,
) -> None:
    """Time a layer, as a slope, and whole steps of one rank alone, on both backends, against the bars; exit 1 where one is missed."""
    import json

    from ..decode.measure_bars import Load
    from ..decode.run_bars import check_bars, run_bars
    from ..decode.scope import MAX_DRAFTS
    from ..kernels import Evidence, InputError, device
    from ..tuning.environment import environment
    from ..tuning.gpus import measuring

    if not 0 <= drafts <= MAX_DRAFTS or context < 0:
        raise InputError(
            f"drafts {drafts} and context {context}: a step verifies 0 to {MAX_DRAFTS} drafts, behind 0 tokens or more"
        )
    if out:
        check_file(out)
    card, loaded = real_card(model, of), bundle_of(bundle, accept)
    widths = dict.fromkeys((drafts + 1, 1))
    loads = [Load(1, q_len, context, dcp) for q_len in widths]
    check_bars(card, loads, tp=of, rank=rank, seed=seed)
    here = device.require("decode bars times kernels and")
    with measuring(here.index), progress_bar() as told:
        found = run_bars(card, here, loaded, loads, tp=of, rank=rank, seed=seed, samples=samples, say=told)
    data = {**found, "evidence": Evidence.MEASURED.value, "environment": environment(here)}
    try:
        if out:
            write_file(out, json.dumps(data, indent=1) + "\n")
    finally:  # what took long to measure is told, whatever became of the disk
        emit(data, as_json, render_bars)
    if data["faults"]:
        raise typer.Exit(1)


def render_bars(console: Console, data: dict[str, Any]) -> None:
    """Notes, a table of layers and steps, verdicts, faults."""
    from rich.table import Table

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    for line in data["notes"]:
        say(f"note: {line}")
    table = Table("rows", "what", "backend", "us", "launches", "of the byte floor", "times as fast as auto")
    for one in data["rows"]:
        for name, own in one["backends"].items():
            for kind, layer in own["layers"].items():
                ratio = one["ratios"].get(f"{kind} layer") if name != "auto" else None
                launches = "-" if layer["launches"] is None else f"{layer['launches']:.2f}"
                share = "-" if layer["share_of_floor"] is None else f"{layer['share_of_floor']:.0%}"
                table.add_row(
                    str(one["rows"]), f"{kind} MoE layer", name, f"{layer['us']:.1f}", launches, share,
                    f"{ratio:.2f}" if ratio else "",
                )  # fmt: skip
            ratio = one["ratios"].get("step") if name != "auto" else None
            table.add_row(
                str(one["rows"]), "whole step", name, f"{own['step_us']:.0f}", str(own["step_launches"] or "-"),
                f"{own['step_floor_us'] / own['step_us']:.0%}", f"{ratio:.2f}" if ratio else "",
            )  # fmt: skip
    console.print(table)
    for one in data["verdicts"]:
        say(
            f"{one['verdict']:7} {one['what']}: {one['got']:.1f} {one['unit']} (to close {one['close']:g}, aim {one['aim']:g})"
        )
        for own in one["made_of"]:
            say(
                f"        {own['family']}: {own['us']:.1f} us in {own['launches']:.1f} launches, {own['above_floor_us']:.1f} above its bytes' floor"
            )
    for line in data["faults"]:
        say(f"fault: {line}")
