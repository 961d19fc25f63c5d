"""What the ``k3lab decode`` commands take alike: a model, a bundle, a GPU's name; and the bar that tells how far they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import console

if TYPE_CHECKING:
    from ..kernels.bundle.reader import Bundle
    from ..kernels.model_card import ModelCard

BundlePath = Annotated[Path | None, typer.Option("--bundle", help="Folder that `k3lab export` wrote.")]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        "--accept", help="Also use bundle entries that are only 'predicted', or only 'compiled' for this GPU."
    ),
]
Dcp = Annotated[
    int,
    typer.Option("--dcp", help="Ranks that share each context (decode context parallelism): 1, or all, as --tp says."),
]
KvDtype = Annotated[
    str, typer.Option("--kv-dtype", help="Of the MLA cache: bfloat16, or float8_e4m3fn (FP8 E4M3, scale 1).")
]
Gpu = Annotated[str, typer.Option("--gpu", help="GPU whose bundle entries are used where none is here.")]


def card_of(model: str, tp: int) -> ModelCard:
    """``k3``, ``small``, ``demo``, or the path of a config.json."""
    from ..kernels import K3, SMALL_K3, InputError, ModelCard

    if model == "k3":
        return K3
    if model == "small":
        return SMALL_K3
    if model == "demo":
        from ..decode.demo import demo_card

        return demo_card(tp=tp)
    if not model.endswith(".json"):
        raise InputError(f"unknown model {model!r}; models: k3, small, demo, or the path of a config.json")
    return ModelCard.from_file(model)


def real_card(model: str, tp: int) -> ModelCard:
    """As :func:`card_of`, for commands that do not know the model made to fit a GPU's memory."""
    from ..kernels import InputError

    if model == "demo":
        raise InputError(
            "model demo is made for `decode run` alone; models here: small, k3, or the path of a config.json"
        )
    return card_of(model, tp)


@contextmanager
def kept_alone(path: Path | None) -> Iterator[None]:
    """No second run writes to the same place meanwhile.

    Raises:
        InputError: one does.
    """
    from ..kernels import InputError
    from ..tuning.locks import ProcessLock

    if path is None:
        yield
        return
    lock = ProcessLock(Path(f"{path}.lock"))
    try:
        free = lock.take()
    except OSError as error:
        raise InputError(f"cannot write {lock.path} ({error.strerror})") from None
    if not free:
        raise InputError(f"another run (process {lock.holder}) writes to {path} now")
    try:
        yield
    finally:
        lock.release()


def bundle_of(path: Path | None, accept: list[str] | None) -> Bundle | None:
    """The bundle of ``--bundle`` with what ``--accept`` adds; None without one."""
    from ..kernels import InputError

    words = set(accept or ())
    if unknown := sorted(words - {"predicted", "compiled"}):
        raise InputError(f"--accept {unknown[0]} is unknown; it takes predicted or compiled")
    if path is None:
        if words:
            raise InputError("--accept speaks of a bundle's entries; give the bundle with --bundle")
        return None
    from ..kernels.bundle.reader import Bundle

    return Bundle.load(path, accept_predicted="predicted" in words, accept_compiled="compiled" in words)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error, for people; gives what is called with (what, done, of)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=shown, transient=True, disable=not shown.file.isatty()) as bar:
        task = bar.add_task("starting", total=None)
        before = ""

        def told(what: str, done: int, of: int) -> None:
            nonlocal before
            if what != before:  # another rate, another rest
                bar.reset(task)
                before = what
            bar.update(task, description=what, completed=done, total=of)

        yield told
