"""``k3lab study watch``: what the workers of a database do, on a screen that keeps up."""

from __future__ import annotations

from time import sleep
from typing import TYPE_CHECKING, Any

from .output import console, emit

if TYPE_CHECKING:
    from rich.console import Console, Group


def watch(address: str, study: str | None, once: bool, every_s: float, as_json: bool) -> None:
    """Print a snapshot once, or again and again until nothing is left to do or Ctrl-C; a database that goes away is waited for.

    Raises:
        InputError: no such database or study, or it does not come back.
    """
    from ..tuning.shared_storage import Patience, Rhythm
    from ..tuning.watch import snapshot

    if once:
        emit(snapshot(address, study), as_json, render)
        return
    from rich.live import Live

    data = snapshot(address, study)
    with Live(view(data), console=console(), auto_refresh=False) as live:
        patience = Patience(Rhythm(), lambda text: live.console.print(text, markup=False))
        while data["left_s"] != 0.0 or data["workers"]:
            sleep(every_s)
            data = patience(lambda: snapshot(address, study))
            live.update(view(data), refresh=True)


def clock(seconds: float | None) -> str:
    """Seconds as hours and minutes; a dash for what is not known."""
    if seconds is None:
        return "-"
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def render(console: Console, data: dict[str, Any]) -> None:
    """Print a snapshot."""
    console.print(view(data))


def view(data: dict[str, Any]) -> Group:
    """A snapshot as two tables."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    studies = Table(
        "study",
        "trials",
        "running",
        "an hour",
        "best us",
        "evidence",
        "best config",
        "left",
        title=escape(data["storage"]),
    )
    workers = Table(
        "worker",
        "study",
        "GPU",
        "trials",
        "last heard of",
        "canary us",
        "state",
        title=f"{data['workers']} workers at work",
    )
    for one in data["studies"]:
        best = " ".join(f"{name}={value}" for name, value in (one["best"] or {}).items())
        studies.add_row(
            escape(one["study"]), f"{one['trials']} of {one['wanted']}", str(one["running"]), "-" if one["rate"] is None else f"{one['rate']:.0f}",
            "-" if one["best_us"] is None else f"{one['best_us']:.2f}", one["evidence"], escape(best), clock(one["left_s"]),
        )  # fmt: skip
        for row in one["workers"]:
            state = row["ended"] or ("works" if row["alive"] else "not heard of any more")
            workers.add_row(
                escape(row["worker"]), escape(one["study"]), escape(str(row["gpu"] or "-")), str(row["trials"]), f"{clock(row['seen_s'])} ago",
                "-" if row["canary_us"] is None else f"{row['canary_us']:.2f}", escape(state),
            )  # fmt: skip
    return Group(studies, workers)


def render_pulled(console: Console, data: dict[str, Any]) -> None:
    """Print what was copied."""
    for one in data["studies"]:
        whole = "" if one["whole"] else ", not finished yet"
        console.print(f"{one['file']}: {one['trials']} trials{whole}", markup=False)
