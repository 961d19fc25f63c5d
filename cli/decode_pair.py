"""``k3lab decode pair``: a KDA and an MLA layer of real widths on all of torchrun's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .decode_inputs import Accept, BundlePath, Dcp, bundle_of, progress_bar, real_card
from .output import Json, check_file, emit, plain, write_file

if TYPE_CHECKING:
    from rich.console import Console

    from ..decode.group import Group
    from ..decode.run_pair import Traces
    from ..kernels.device import Device


def pair_command(
    model: str = typer.Option("k3", "--model", help="k3, small, or the path of a config.json."),
    drafts: int = typer.Option(7, "--drafts", help="Of the verify step: one request with so many drafts."),
    context: int = typer.Option(512, "--context", help="Tokens of a made-up context."),
    dcp: Dcp = 1,
    pairs: int = typer.Option(3, "--pairs", help="Layers of each kind in the larger graphs, 2 to 16."),
    samples: int = typer.Option(30, "--samples", min=4, max=1000, help="Replays of each graph that are timed."),
    seed: int = typer.Option(0, "--seed", help="Of weights, ids and contexts."),
    bundle: BundlePath = None,
    accept: Accept = None,
    default_engines: bool = typer.Option(
        False, "--default-engines", help="In place of a bundle: default engines and configs, compiled here, not tuned."
    ),
    limit: float = typer.Option(300.0, "--limit", help="Seconds that ranks wait for each other outside kernels."),
    time_sliced: bool = typer.Option(
        False, "--time-sliced", help="Let ranks share GPUs: launches and logits are checked, nothing is timed."
    ),
    traces: Path | None = typer.Option(
        None, "--traces", help="Folder that is there: a device trace a rank, rank0.json.gz and so on; needs GPUs."
    ),
    budget: str | None = typer.Option(
        None, "--budget", help="With --traces: hold all ranks' layers against it, as k3lab trace ranks does: h200-tp8."
    ),
    out: Path | None = typer.Option(
        None, "--out", help="File, in a folder that is there: all of it, with GPUs, links, driver and versions."
    ),
    as_json: Json = False,
) -> None:
    """Time a KDA and an MLA layer on all ranks at once, over their links; check launches, traces and that ranks agree; exit 1 on a fault."""
    import json

    from ..decode.measure_bars import Load
    from ..decode.run_pair import check_pair, run_pair
    from ..decode.scope import MAX_DRAFTS
    from ..kernels import InputError, device
    from ..kernels.env import torchrun
    from ..traces import load_budget
    from ..tuning.environment import environment
    from ..tuning.ranks.links import links

    place = torchrun()
    if place is None or place.size < 2:
        raise InputError(
            "decode pair measures ranks together: torchrun --nproc-per-node 8 -m k3lab.cli.main decode pair"
        )
    if not 0 <= drafts <= MAX_DRAFTS or context < 0 or not 1 <= limit <= 600:
        raise InputError(
            f"drafts {drafts}, context {context}, limit {limit:g}: a step verifies 0 to {MAX_DRAFTS} drafts, behind 0"
            " tokens or more; ranks wait 1 to 600 s"
        )
    if default_engines and bundle:
        raise InputError("--default-engines stands in place of a bundle; give one of them")
    if budget and not traces:
        raise InputError("--budget judges traces; give a folder for them with --traces")
    if budget and time_sliced:
        raise InputError(
            "--budget judges times, and ranks that are time-sliced have none; give it without --time-sliced"
        )
    if budget:
        load_budget(budget)
    if out:
        check_file(out)
    loads = [Load(1, width, context, dcp) for width in dict.fromkeys((drafts + 1, 1))]
    card, loaded = real_card(model, place.size), bundle_of(bundle, accept)
    check_pair(card, loads, tp=place.size, pairs=pairs, seed=seed)
    here = device.discover()
    if traces is not None and (here is None or not traces.is_dir()):
        why = "needs NVIDIA GPUs, and none is visible here" if here is None else f"{traces} is no folder"
        raise InputError(f"--traces: {why}")
    own: Any = loaded
    if default_engines:
        from .default_engines import DefaultEngines

        own = DefaultEngines()
    group = _group(place.size, here, limit, time_sliced)
    try:
        with progress_bar() as told:
            found = run_pair(
                card, group, own, loads, pairs=pairs, seed=seed, samples=samples, time_sliced=time_sliced,
                traces=_traces(traces), model=model, say=told if group.rank == 0 else None,
            )  # fmt: skip
        data = {**found, "default_engines": default_engines, "environment": environment(group.device)}
        try:
            if group.rank == 0:  # of torchrun's processes one tells
                data["environment"]["links"] = links(device.gpu_count()) if here else None
                if traces and not time_sliced:
                    data["trace"] = _side_by_side(data, traces, budget)
                    data["faults"] += _trace_faults(data["trace"], budget)
                try:
                    if out:
                        write_file(out, json.dumps(plain(data), indent=1) + "\n")
                finally:  # what took long to measure is told, whatever became of the disk
                    emit(data, as_json, render_pair)
        finally:  # torchrun ends all ranks with the first that exits with 1
            group.meet()
    finally:
        group.close()
    if data["faults"]:
        raise typer.Exit(1)


def _traces(folder: Path | None) -> Traces | None:
    from ..decode.run_pair import Traces

    return Traces(folder, _recorded, _differences) if folder else None


@contextmanager
def _recorded(path: Path) -> Iterator[None]:
    from ..kernels import InputError
    from ..traces import TraceError
    from ..traces.capture import recording

    try:
        with recording(path):
            yield
    except TraceError as error:
        raise InputError(str(error)) from None


def _differences(path: Path, planned: Mapping[str, int], steps: int) -> list[str]:
    from ..kernels import InputError
    from ..traces import TraceError
    from .decode_trace import traced_differences

    try:
        return traced_differences(path, planned, steps)
    except TraceError as error:
        raise InputError(str(error)) from None


def _side_by_side(data: dict[str, Any], folder: Path, budget: str | None) -> dict[str, Any]:
    from ..decode.pair_rank import PLAN
    from .decode_trace import ranks_together

    lost = [
        f"rank {rank} has none"
        for rank, one in enumerate(data["each"])
        if one.get("trace", {"lost": ""})["lost"] is not None
    ]
    if lost:  # files that lie there are of another run
        return {"error": "; ".join(lost)}
    traced = data["each"][0]["trace"]
    plan = folder / PLAN if traced["planned"] else None
    return ranks_together(
        folder, ranks=data["tp"], layers=2 * data["pairs"], rows=traced["rows"], plan=plan, budget=budget
    )


def _trace_faults(report: dict[str, Any], budget: str | None) -> list[str]:
    """Why a budget is not kept; without one nothing is."""
    if budget is None or report.get("verdict") == "pass":
        return []
    why = report.get("error") or "; ".join(report["reasons"])
    return [f"traces against {budget}: {report.get('verdict', 'no verdict')}: {why}"]


def _group(size: int, here: Device | None, limit: float, time_sliced: bool) -> Group:
    """Torchrun's ranks; a GPU each, unless they may share."""
    from ..decode.group import join
    from ..kernels import InputError
    from ..kernels.device import gpu_count
    from ..tuning.ranks.group import OVERLAPPING, SETTINGS

    if here and size > gpu_count() and not time_sliced:
        raise InputError(
            f"{size} ranks and {gpu_count()} GPUs here; --time-sliced lets them share, for launches and logits alone"
        )
    if time_sliced and (here is None or size <= gpu_count()):
        raise InputError("--time-sliced is for more ranks than GPUs")
    os.environ.update({**SETTINGS, **(OVERLAPPING if time_sliced else {})})
    group = join(size, here, limit_s=limit)
    assert group
    return group


def render_pair(console: Console, data: dict[str, Any]) -> None:
    """Notes, a table of layers over the ranks, fallbacks, faults."""
    from rich.table import Table

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(f"{data['model']} TP{data['tp']} DCP{data['dcp']}: {data['ranks']}")
    for line in data["notes"]:
        say(f"note: {line}")
    columns = ("rows", "what", "backend", "us", "medians apart", "widest spread", "launches", "of the byte floor")
    clock = "" if data["each"][0]["gpu"] else ", by the host's clock"
    table = Table(*columns, title=f"us of the slowest rank, medians of {data['samples']} replays{clock}")
    for row in data["rows"]:
        for name, own in row["backends"].items():
            for kind, layer in own["layers"].items():
                launches = "-" if layer["launches"] is None else f"{layer['launches']:.2f}"
                us, floor = layer.get("us"), layer.get("floor_us")
                timed = ("-",) * 3
                if us is not None:
                    widest = max(one["spread"] for graph in layer["graphs"] for one in graph["ranks"])
                    timed = (f"{us:.1f}", f"{layer['over_ranks_us']:.1f}", f"{widest:.0%}")
                share = f"{floor / us:.0%}" if us and floor and us > 0 else "-"
                table.add_row(str(row["rows"]), f"{kind} MoE layer", name, *timed, launches, share)
    console.print(table)
    for one in (data.get("trace") or {}).get("classes", ()):
        say(
            f"traced, {one['name']}: {one['largest_ns'] / 1e3:.1f} us on the slowest rank, {one['spread_ns'] / 1e3:.1f} apart"
        )
    if error := (data.get("trace") or {}).get("error"):
        say(f"nothing can be said of the traces: {error}")
    for row in data["rows"]:
        for one in row["fallbacks"]:
            say(f"{row['rows']} rows: {one['family']} runs untuned: {one['reason']}")
        for name, own in row["backends"].items():
            if own["off_auto"] is not None:
                say(f"{row['rows']} rows, {name}: logits {own['off_auto']:.2g} from auto's, relatively")
            if own["routing_fault"]:
                say(f"{row['rows']} rows, {name}: {own['routing_fault']}")
    for line in data["faults"]:
        say(f"fault: {line}")
