"""The ``k3lab`` command: finds the module of a subcommand, and turns errors into one line and an exit code.

Exit codes: 0 success, 1 a check failed, 2 the call or the input was wrong. Each module of a subcommand
has either ``app`` (a typer group, named after the command) or ``register(app)``, which adds its commands.
Only the module of the command that was asked for is imported.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

import typer

from ..kernels.errors import InputError, KernelError
from .output import drop_output, visible

COMMANDS: dict[str, str] = {
    "kernels": "kernels",
    "check": "bench",
    "time": "bench",
    "stages": "bench",
    "ranks": "ranks",
    "compile": "bench",
    "predict": "predict",
    "tune": "tune",
    "tune-table": "table",
    "prefetch": "prefetch",
    "study": "study",
    "export": "export",
    "bundle": "bundle",
    "decode": "decode",
    "gate": "gate",
    "trace": "trace",
    "report": "report",
    "demo": "demo",
    "new": "new",
    "doctor": "doctor",
}
"""Command to the module of this package that defines it, in the order ``--help`` lists them."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of a disk, not of this program."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
GRACE_S = 10.0
"""After SIGTERM, for what runs outside Python, such as a wait for a kernel that does not end, to come back."""

DESCRIPTION = "Kernel workbench and autotuner for the decode path of Kimi K3."


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"k3lab {version('k3lab')}")
        raise typer.Exit


def build_app(only: str | None = None) -> typer.Typer:
    """The typer app with the commands of one module, or with all of them."""
    app = typer.Typer(
        name="k3lab", help=DESCRIPTION, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )

    @app.callback()
    def root(
        version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    ) -> None:
        pass

    modules = dict.fromkeys([COMMANDS[only]] if only else COMMANDS.values())
    for name in modules:
        if importlib.util.find_spec(f"{__package__}.{name}") is None:
            continue
        module = importlib.import_module(f".{name}", __package__)
        if hasattr(module, "register"):
            module.register(app)
        else:
            app.add_typer(module.app, name=name)
    return app


def _first_word(argv: Sequence[str]) -> str | None:
    return next((word for word in argv if not word.startswith("-")), None)


def _one_line(text: object) -> str:
    return visible(" ".join(str(text).split()))


def _fail(message: object, code: int = 2) -> int:
    print(f"k3lab: {_one_line(message)}", file=sys.stderr)
    return code


def _input_errors() -> tuple[type[Exception], ...]:
    """Exceptions that mean the call or the input was wrong; traces has its own, it imports nothing of ours."""
    kinds: list[type[Exception]] = [InputError]
    traces = sys.modules.get(f"{__package__.rpartition('.')[0]}.traces")
    if traces is not None and hasattr(traces, "TraceError"):
        kinds.append(traces.TraceError)
    return tuple(kinds)


FAULTS = (
    ("kernels.collectives", "CollectiveError"),
    ("kernels.launch", "ResidencyError"),
    ("tuning.timing", "BrokenMeasurement"),
)
"""Exceptions that are no fault of the call: a rank was waited for in vain, blocks do not fit on this GPU together, a figure cannot be true."""


def _is_fault(error: Exception) -> bool:
    """Whether it is one of them; whoever raises one has its module."""
    package = __package__.rpartition(".")[0]
    modules = ((sys.modules.get(f"{package}.{module}"), name) for module, name in FAULTS)
    return any(module is not None and isinstance(error, getattr(module, name)) for module, name in modules)


def run(argv: Sequence[str]) -> int:
    """Run one command line (without the program's name); returns the exit code."""
    if sys.stdout is None:  # closed by the caller, who wants no output
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
    word = _first_word(argv)
    if word is not None and word not in COMMANDS:
        return _fail(f"unknown command {word!r}; commands: {', '.join(COMMANDS)}")
    try:
        command = typer.main.get_command(build_app(word if word in COMMANDS else None))
        code = command.main(args=list(argv), prog_name="k3lab", standalone_mode=False)
        return _fail("interrupted", INTERRUPTED) if code == INTERRUPTED else code if isinstance(code, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    except KernelError as error:
        return _fail(error, 1)
    except Exception as error:
        if isinstance(error, _input_errors()):
            return _fail(error)
        if _is_fault(error):
            return _fail(error, 1)
        if isinstance(error, BrokenPipeError):
            drop_output()
            return 141
        if isinstance(error, MemoryError):
            return _fail("not enough memory for this input; give a smaller one, or run where there is more")
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            drop_output()
            named = f": {error.filename}" if error.filename else ""
            return _fail(f"cannot write ({error.strerror}){named}; make room or write elsewhere")
        if isinstance(error, OSError) and not _is_there():
            return _fail("the working folder is gone; change to one that is there")
        usage = getattr(error, "format_message", None)  # typer's usage errors
        if usage is not None and hasattr(error, "exit_code"):
            # empty where a group was called without a command: its help was printed
            return _fail(usage() or "name a command; they are listed above")
        raise


def _is_there() -> bool:
    """Whether the working folder still exists."""
    try:
        os.getcwd()
    except OSError:
        return False
    return True


_heard = threading.Event()


def _terminated(number: int, frame: FrameType | None) -> None:
    _heard.set()
    signal.default_int_handler(number, frame)


def _end_the_deaf(told: int) -> None:
    """End the process where a SIGTERM is not heard: Python's handlers run between its instructions only."""
    while number := os.read(told, 1):
        ours = number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _terminated
        if ours and not _heard.wait(GRACE_S):
            os.write(2, b"k3lab: interrupted\n")
            os._exit(INTERRUPTED)


def main() -> None:
    """Entry point of the ``k3lab`` script; SIGTERM ends it as Ctrl-C does, with a line and whole files."""
    signal.signal(signal.SIGTERM, _terminated)
    opened = os.pipe()  # where a standard stream is closed it has that one's number, which others write to
    told, tell = (fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 3) for one in opened)
    for one in opened:
        os.close(one)
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    threading.Thread(target=_end_the_deaf, args=(told,), daemon=True).start()
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
