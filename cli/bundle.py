"""``k3lab bundle``: show, verify, compare, merge and warm bundles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .export import render_entries
from .output import Json, emit
from .tune import Jobs
from .words import counted

if TYPE_CHECKING:
    from rich.console import Console

BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Bundle directory.")]
app = typer.Typer(no_args_is_help=True, help="Look at bundles, compare, merge and warm them.")


def render_verified(console: Console, data: dict[str, Any]) -> None:
    """Print that a bundle is whole, and which entries do not fit what is here."""
    console.print(
        f"{data['path']}: {counted(len(data['entries']), 'entry', 'entries')}, {counted(data['files'], 'file')},"
        " every checksum holds",
        markup=False,
    )
    for one in data["keys"]:
        for line in one["stale"]:
            console.print(f"stale: {one['entry']}: {line}", markup=False)
        for line in one["warnings"]:
            console.print(f"warning: {one['entry']}: {line}", markup=False)


def render_rechecked(console: Console, data: dict[str, Any]) -> None:
    """Print old and new times."""
    from rich.table import Table

    if data["ended"] == "interrupted":
        console.print("interrupted: what is below is kept, the other entries are as they were", markup=False)
    elif not data["rechecked"]:
        console.print(f"{data['path']}: no measured entry is stale on {data['gpu']}", markup=False)
    if not data["rechecked"]:
        return
    table = Table("entry", "old us", "new us", "noise", "verdict", "flip", title=f"measured again on {data['gpu']}")
    for one in data["rechecked"]:
        old, new, noise = one.get("old_us"), one.get("new_us"), one.get("noise")
        table.add_row(
            one["entry"], "-" if old is None else f"{old:.2f}", "-" if new is None else f"{new:.2f}", "-" if noise is None else f"{noise:.1%}",
            one["verdict"] + (f": {one['reason']}" if one.get("reason") else ""), f"the {one['flip']} is faster now" if one.get("flip") else "-",
        )  # fmt: skip
    console.print(table)


def render_diff(console: Console, data: dict[str, Any]) -> None:
    """Print what differs."""
    for word, which in (("only_first", "first"), ("only_second", "second")):
        for label in data[word]:
            console.print(f"only in {data[which]}: {label}", markup=False)
    for one in data["changed"]:
        console.print(one["entry"], markup=False)
        for field, (there, here) in one["fields"].items():
            console.print(f"  {field}: {there} -> {here}", markup=False)
    if data["same"]:
        console.print(f"{data['first']} and {data['second']} hold the same entries", markup=False)


def render_merged(console: Console, data: dict[str, Any]) -> None:
    """Print what was written."""
    console.print(f"{data['bundle']}: {counted(data['entries'], 'entry', 'entries')}", markup=False)
    for line in (*data["left_out"], *(f"warning: {text}" for text in data["warnings"])):
        console.print(line, markup=False)


def render_warm(console: Console, data: dict[str, Any]) -> None:
    """Print what was compiled."""
    rest = "".join(f", {len(data[word])} {word}" for word in ("failed", "stale") if data[word])
    console.print(
        f"{data['path']}: {counted(data['compiled'], 'compilation')} in {data['seconds']:.1f} s, {data['jobs']} at a time{rest}",
        markup=False,
    )


def _say(as_json: bool) -> Callable[[str], None]:
    return (lambda text: None) if as_json else (lambda text: print(text, file=sys.stderr, flush=True))


@app.command("show")
def show_command(path: BundlePath, as_json: Json = False) -> None:
    """List a bundle's entries with their evidence."""
    from ..kernels.bundle.reader import Bundle, describe

    emit(describe(Bundle.load(path)), as_json, render_entries)


@app.command("verify")
def verify_command(
    path: BundlePath,
    stale: Annotated[
        bool,
        typer.Option(
            "--stale", help="Check and time again, on the GPU here, what was measured under other conditions."
        ),
    ] = False,
    here: Annotated[
        bool, typer.Option("--here", help="Exit 1 where an entry's kernel or compiler is another than here.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check every byte of a bundle, and say which entries rest on another kernel, compiler, GPU or driver than is here."""
    from ..kernels.bundle.reader import Bundle, describe
    from ..kernels.device import discover
    from ..tuning.bundle_check import recheck, state_of

    if stale:
        done = recheck(path, say=_say(as_json))
        emit(done, as_json, render_rechecked)
        raise typer.Exit(130 if done["ended"] == "interrupted" else 1 if done["regressions"] else 0)
    bundle, device = Bundle.load(path), discover()
    keys = [
        state_of(entry.model, device=device if device and device.arch == entry.model.arch else None)
        for entry in bundle.entries
    ]
    emit(
        {**describe(bundle), "keys": [one for one in keys if one["stale"] or one["warnings"]]}, as_json, render_verified
    )
    raise typer.Exit(1 if here and any(one["stale"] for one in keys) else 0)


@app.command("diff")
def diff_command(
    first: BundlePath,
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="The bundle to compare it with.")],
    as_json: Json = False,
) -> None:
    """What two bundles do not have alike; exits 1 where they differ."""
    from ..tuning.bundle_tools import diff

    data = diff(first, second)
    emit(data, as_json, render_diff)
    raise typer.Exit(0 if data["same"] else 1)


@app.command("merge")
def merge_command(
    paths: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Bundle directories.")],
    out: Annotated[Path, typer.Option("--out", help="Bundle directory to write.")],
    prefer: Annotated[
        str | None,
        typer.Option("--prefer", help="first or last: of two entries for one problem the bundle that counts."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write the entries of several bundles as one; measured before predicted."""
    from ..tuning.bundle_tools import merge

    emit(merge(paths, out, prefer=prefer, force=force), as_json, render_merged)


@app.command("warm")
def warm_command(
    path: BundlePath,
    arch: Annotated[
        list[str] | None, typer.Option("--arch", help="Compile for this architecture (default: each entry's own).")
    ] = None,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Compile all kernels of a bundle into the cache, several at a time."""
    from ..tuning.bundle_tools import warm
    from ..tuning.workers import default_jobs

    data = warm(path, archs=arch or (), jobs=default_jobs() if jobs is None else jobs, say=_say(as_json))
    emit(data, as_json, render_warm)
    raise typer.Exit(1 if data["failed"] or data["stale"] else 0)
