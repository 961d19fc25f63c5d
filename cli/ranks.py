"""``k3lab ranks``: the families that publish on real ranks, checked and timed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, check_file, emit, write_file
from .select import MAX_SEED

if TYPE_CHECKING:
    from rich.console import Console

    from ..tuning.ranks.request import RanksRequest


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("ranks")(ranks)


def ranks(
    gpus: Annotated[int | None, typer.Option("--gpus", help="Ranks, a GPU each; under torchrun those that it started.")] = None,
    families: Annotated[str | None, typer.Option("--families", help="Of output_projection, router, moe_tail (default: all).")] = None,
    rows: Annotated[str, typer.Option("--rows", help="Token rows, such as 1,2,4 or 1-8.")] = "1,2,4,8,16,32,64",
    steps: Annotated[int, typer.Option("--steps", help="Steps that must all give the same bits.")] = 2000,
    seed: Annotated[int, typer.Option("--seed", min=0, max=MAX_SEED, help="Seed of the random inputs.")] = 0,
    time_sliced: Annotated[bool, typer.Option("--time-sliced", help="Let ranks share GPUs: outputs are checked, nothing is timed.")] = False,
    limit: Annotated[float, typer.Option("--limit", help="Seconds that ranks wait for each other.")] = 30.0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="File for all that was found, as JSON.")] = None,
    logs: Annotated[Path | None, typer.Option("--logs", help="Folder for what the ranks print; torchrun has its own.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Check the kernels that publish on several GPUs against the twin, and time them beside NCCL and symmetric memory."""
    from ..kernels.env import torchrun
    from ..kernels.errors import InputError
    from ..tuning.policy import FULL, QUICK
    from ..tuning.ranks.report import cross_overs, merge, reduces, table
    from ..tuning.ranks.request import FAMILIES, RanksRequest
    from .table import numbers

    place = torchrun()
    size = gpus if gpus is not None else place.size if place else None
    if size is None:
        raise InputError("say how many ranks with --gpus, or start them with torchrun")
    names = tuple(dict.fromkeys(one.strip() for one in families.split(","))) if families is not None else FAMILIES
    request = RanksRequest(
        size, names, tuple(numbers(rows, "--rows")), steps=steps, seed=seed, time_sliced=time_sliced, limit_s=limit,
        policy=QUICK if quick else FULL,
    )  # fmt: skip
    if out is not None:
        check_file(out)
    if logs is not None:
        check_file(logs / "0.log")
    found = _found(request, logs)
    if found is None:
        return
    data = merge(request, found)
    unwritten: InputError | None = None
    if out is not None:
        try:
            write_file(out, _text(data))
        except InputError as error:  # told after what was found, which is not lost with a disk
            unwritten = error
    lines = table(data)
    shown = {**data, "table": lines, "cross_overs": cross_overs(lines), "all_reduces": reduces(data)}
    emit(shown, as_json, render)
    if unwritten:
        raise unwritten
    if out is not None and not as_json:
        print(f"written to {out}", file=sys.stderr)


def _found(request: RanksRequest, logs: Path | None) -> list[dict[str, Any]] | None:
    """What all ranks found; None on a rank under torchrun that is not the first."""
    from ..kernels.device import gpu_count
    from ..kernels.env import no_gpu, torchrun
    from ..kernels.errors import InputError
    from ..tuning.ranks import start
    from ..tuning.ranks import torchrun as under_torchrun

    count = 0 if no_gpu() else gpu_count()
    if not count:
        raise InputError("k3lab ranks needs NVIDIA GPUs, and none is visible here")
    if request.size > count and not request.time_sliced:
        there = "1 GPU is" if count == 1 else f"{count} GPUs are"
        raise InputError(
            f"{request.size} ranks are asked for and {there} here; --time-sliced lets them share, for checks alone"
        )
    if request.size <= count and request.time_sliced:
        raise InputError(f"--time-sliced is for more ranks than GPUs: {request.size} ranks have a GPU each here")
    place = torchrun()
    return under_torchrun.run(request, place) if place else start.start(request, logs=logs)


def _text(data: dict[str, Any]) -> str:
    import json

    return json.dumps(data, indent=1) + "\n"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def render(console: Console, data: dict[str, Any]) -> None:
    """Print who wins at how many rows."""
    from rich.table import Table

    gpu = data["environment"]["gpu"]
    shared = f", sharing {data['gpu_count']}" if data["time_sliced"] else ""
    console.print(
        f"{data['ranks']} ranks on {gpu['name'] if gpu else 'no GPU'}{shared}: {len(data['cases'])} cases have the twin's outputs, and the"
        f" same bits on all ranks in {data['steps']} steps",
        markup=False,
    )
    for one in data["missing"]:
        what = one.get("what") or f"{one['family']}/{one['engine']}"
        console.print(f"not run: {what} at {one['rows']} rows: {one['why']}", markup=False)
    if data["time_sliced"]:
        console.print(data["note"], markup=False)
        return
    columns = ("one_shot", "two_shot", "gather", "nccl_chain")
    grid = Table("family", "rows", "one-shot", "two-shot", "gather", "NCCL chain", "wins", title="us a call, cold")
    for line in data["table"]:
        grid.add_row(line["family"], str(line["rows"]), *(_us(line.get(name)) for name in columns), line["wins"] or "-")
    console.print(grid)
    for family, rows in data["cross_overs"].items():
        console.print(f"{family}: two shots win {'nowhere' if rows is None else f'from {rows} rows on'}", markup=False)
    added = Table("case", "rows", "links", "loopback", "added", "over ranks", title="us: over the links and on one GPU")
    for case in data["cases"]:
        real, alone = case["real"], case["loopback"]
        added.add_row(
            f"{case['family']}/{case['engine']} {case['exchange']}", str(case["rows"]), _us(real["us"]), _us(alone["us"]),
            _us(real["us"] - alone["us"]), _us(real["over_ranks_us"]) + ("" if real["stable"] else " unstable"),
        )  # fmt: skip
    console.print(added)
    plain = Table(
        "rows", "NCCL", "symm_mem one-shot", "symm_mem two-shot", title="us: all-reduce of BF16 [rows, 7168], warm"
    )
    for line in data["all_reduces"]:
        names = ("nccl", "symm_mem_one_shot", "symm_mem_two_shot")
        plain.add_row(str(line["rows"]), *(_us(line.get(name)) for name in names))
    console.print(plain)
