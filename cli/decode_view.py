"""How ``k3lab decode`` prints plans and runs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .words import counted

if TYPE_CHECKING:
    from rich.console import Console

Data = dict[str, Any]


def _say(console: Console, text: str) -> None:
    """A line as it is: never wrapped, so that commands can be copied."""
    console.print(text, markup=False, soft_wrap=True)


def _title(layer: Data) -> str:
    target = f", target {layer['target']['kernels']}" if layer["target"] else ""
    most = layer["kernels_at_most"]
    more = f" (up to {most} with split-K reductions)" if most > layer["kernels"] else ""
    launches = counted(layer["kernels"], "launch", "launches")
    return f"{layer['kind']} {layer['mlp']} layer, {len(layer['layers'])} of them: {launches}{more}{target}"


def _parts(data: Data) -> list[tuple[str, list[Data]]]:
    """Name and launches of every part of a step."""
    layers = [(f"{layer['kind']} {layer['mlp']}", layer["launches"]) for layer in data["layers"]]
    return [("before layers", data["before"]), *layers, ("after layers", data["after"])]


def _every_launch(console: Console, title: str, launches: list[Data]) -> None:
    from rich.table import Table

    _say(console, title)
    table = Table()
    for column in ("#", "kernel", "family", "stream", "engine", "evidence"):
        table.add_column(column, overflow="fold")
    for launch in launches:
        table.add_row(
            str(launch["position"]), launch["kernel"], launch["family"], launch["stream"], launch["engine"],
            launch["evidence"] or ("untuned" if launch["fallback"] else "-"),
        )  # fmt: skip
    console.print(table)


def _tuned_launches(console: Console, data: Data) -> None:
    from rich.table import Table

    table = Table(title="Tuned launches", title_justify="left")
    for column in ("part", "#", "kernel", "family", "engine", "evidence", "config"):
        table.add_column(column, overflow="fold")
    for part, launches in _parts(data):
        for one in (launch for launch in launches if launch["evidence"]):
            config = " ".join(f"{name}={value}" for name, value in (one["config"] or {}).items())
            table.add_row(
                part, str(one["position"]), one["kernel"], one["family"], one["engine"], one["evidence"], config
            )
    if table.row_count:
        console.print(table)


def _counts(console: Console, data: Data) -> None:
    """Launches by family and part; the tuned ones among them."""
    from rich.table import Table

    parts = _parts(data)
    every = {name: Counter(launch["family"] for launch in launches) for name, launches in parts}
    tuned = {name: Counter(one["family"] for one in launches if one["evidence"]) for name, launches in parts}
    table = Table("family", title="Launches by family", title_justify="left")
    for name, _ in parts:
        table.add_column(name, justify="right")
    for family in dict.fromkeys(launch["family"] for _, launches in parts for launch in launches):
        cells = []
        for name, _ in parts:
            of = f" ({tuned[name][family]} tuned)" if tuned[name][family] else ""
            cells.append(f"{every[name][family]}{of}" if every[name][family] else "")
        table.add_row(family, *cells)
    console.print(table)


def show_unused(console: Console, data: Data) -> None:
    """Entries of the bundle that nothing launches."""
    for one in data["unused_entries"]:
        what = f"{one['family']} {one['problem']} on {one['gpu']} ({one['evidence']}, engine {one['engine']})"
        _say(console, f"unused: bundle entry {what}: {one['reason']}")


def show_fallbacks(console: Console, fallbacks: list[Data]) -> None:
    """Why families are not tuned, and what to type; families that need the same work share a line."""
    if not fallbacks:
        return
    _say(console, "Not tuned, and what would change it:")
    alike: dict[tuple[str, str], list[str]] = {}
    typed: dict[str, list[Data]] = {}
    for one in fallbacks:
        if one["commands"]:
            typed.setdefault(one["reason"], []).append(one)
        else:
            cure = one["cure"].replace(f"kernels/{one['family']}/", "kernels/FAMILY/")
            name = " ".join(filter(None, (one["family"], one["kind"])))
            alike.setdefault((one["reason"], cure), []).append(name)
    for reason, those in typed.items():
        names = [" ".join(filter(None, (one["family"], one["kind"]))) for one in those]
        count = f" ({counted(those[0]['count'], 'step')})" if those[0].get("count") else ""
        _say(console, f"  {', '.join(names)}: {reason}{count}")
        # what they all end with, looking again, is typed once
        last = {one["commands"][-1] for one in those}
        for one in those:
            for command in one["commands"][: -1 if len(last) == 1 else None]:
                _say(console, f"    {command}")
        if len(last) == 1:
            _say(console, f"    {last.pop()}")
    for (reason, cure), names in alike.items():
        _say(console, f"  {', '.join(names)}: {reason}")
        _say(console, f"    {cure}")


def render_plan(console: Console, data: Data, *, full: bool = False) -> None:
    """Counts and targets, the tuned launches or all of them, what the bundle has for nothing, the fallbacks."""
    shared = "" if data["dcp"] == 1 else f" DCP{data['dcp']}"
    where = f"{data['model']} TP{data['tp']}{shared} rows {data['rows']} on {data['gpu']}"
    launches = counted(data["launches_per_step"], "launch", "launches")
    _say(console, f"{where}, backend {data['backend']}: {launches} a step")
    for note in data["notes"]:
        _say(console, f"note: {note}")
    if full:
        _every_launch(
            console, f"before the layers: {counted(len(data['before']), 'launch', 'launches')}", data["before"]
        )
    for layer in data["layers"]:
        if full:
            _every_launch(console, _title(layer), layer["launches"])
        else:
            _say(console, _title(layer))
    if full:
        _every_launch(console, f"after the layers: {counted(len(data['after']), 'launch', 'launches')}", data["after"])
    if targets := [layer["target"] for layer in data["layers"] if layer["target"]]:
        _say(console, f"target: {targets[0]['conditions']}")
    if not full:
        _tuned_launches(console, data)
        _counts(console, data)
    stand_in = "launches that are not tuned are PyTorch operators in place of the stock kernel"
    _say(console, f"{stand_in}; one may be several device kernels" + ("" if full else "; --full lists every launch"))
    show_unused(console, data)
    show_fallbacks(console, data["fallbacks"])


def render_checkpoint(console: Console, data: Data) -> None:
    """What it is, then its faults, or what a rank would hold."""
    shards = counted(data["shards"], "shard")
    _say(console, f"{data['folder']}: {data['model']}, {counted(data['text_tensors'], 'text tensor')} in {shards}")
    for line in data["faults"]:
        _say(console, line)
    if data["faults"]:
        _say(console, counted(data["faults_found"], "fault"))
        return
    for tp, size in data["rank_bytes"].items():
        _say(console, f"  TP {tp}: {size / 1e9:.3f} GB a rank")


def render_scope(console: Console, data: Data) -> None:
    """The share that is served, then every reason with its count and cure."""
    steps = counted(data["steps"], "step")
    served = f"latency_specialized serves {data['served']} of {steps} ({data['share']:.1%})"
    _say(console, f"{data['workload']}, {data['model']} TP{data['tp']} on {data['gpu']}: {served}, auto the others")
    for one in data["fallbacks"]:
        _say(console, f"  {counted(one['count'], 'step')} ({one['share']:.1%}): {one['reason']}")
        _say(console, f"    {one['cure']}")


def render_run(console: Console, data: Data) -> None:
    """Head lines, tokens, times, fallbacks."""
    for line in data["head"]:
        _say(console, f"note: {line}")
    each = f"{counted(data['rows'], 'request')}, {counted(data['tokens_per_request'], 'token')} each"
    shared = "" if data["dcp"] == 1 else f" DCP{data['dcp']}"
    _say(
        console,
        f"{data['model']} TP{data['tp']}{shared} ({data['ranks']}), {each},"
        f" backend {data['backend']} on {data['device']}, operators: {data['operators']}",
    )
    for request, tokens in enumerate(data["tokens"][:4]):
        shown = " ".join(map(str, tokens[:16])) + (" ..." if len(tokens) > 16 else "")
        _say(console, f"  request {request}: {shown}")
    if (more := len(data["tokens"]) - 4) > 0:
        _say(console, f"  and {counted(more, 'more request', 'more requests')}")
    if data["step_ns"]:
        _say(console, f"eager step: {data['step_ns_median'] / 1e6:.3f} ms (median, wall time)")
    if data["graph_step_ns"]:
        verdict = "the same tokens" if data["graph_agrees"] else "OTHER TOKENS"
        clock = "wall time: verify, accept, inject, draft" if data["speculation"] else "device time"
        _say(
            console,
            f"graph step: {data['graph_step_ns_median'] / 1e6:.3f} ms (median, {clock}), {verdict} as eager",
        )
    if made := data["launches"]:
        _say(
            console,
            f"captured step: {counted(made['kernels'], 'kernel')}, {made['tuned']} of them tuned, {made['planned']} planned",
        )
        for line in made["differences"]:
            _say(console, f"  against the plan: {line}")
    for one in (data["backend_steps"] or {}).get("fallbacks", []):
        _say(console, f"  auto ran {counted(one['count'], 'step')}: {one['reason']}; {one['cure']}")
    if told := data["speculation"]:
        mean = f", {told['mean_tokens_a_step']:.2f} tokens a step" if told["mean_tokens_a_step"] else ""
        drafter = f"drafter {told['drafter']} ({told['drafter_weights']} weights)"
        _say(console, f"{told['acceptance']}; {counted(told['drafts'], 'draft')} a step by {drafter}{mean}")
        if told.get("drafter_ns"):
            _say(console, f"drafting a block alone: {told['drafter_ns'] / 1e6:.3f} ms")
        for one in (told["backend_steps"] or {}).get("fallbacks", []):
            _say(console, f"  auto ran {counted(one['count'], 'step')}: {one['reason']}; {one['cure']}")
    where = "process, its ranks together" if data["device"] == "cpu" else "GPU"
    weights, peak = data["weight_bytes"] / 1e9, data["peak_memory_bytes"] / 1e9
    _say(console, f"weights of one rank: {weights:.3f} GB; peak memory of the {where}: {peak:.3f} GB")
    for one in data["tuned"]:
        what = " ".join(filter(None, (one["family"], one["kind"])))
        _say(console, f"tuned: {what} engine {one['engine']} ({one['evidence']})")
    if data["trace"]:
        _say(console, f"trace: {data['trace']}")
    show_unused(console, data)
    show_fallbacks(console, data["fallbacks"])
