"""torch.profiler around a block or a script. Also run as a file by ``k3lab trace capture``, under the Python of the script.

Therefore it imports nothing of this package: that Python need not have it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_TORCH = "no torch"


@contextmanager
def profiled(path: str | Path) -> Iterator[bool]:
    """Profile the block with torch.profiler, host and GPU, and write a Chrome trace when it ends, however it ends.

    Yields whether the GPU is recorded; without one the trace holds the host side only.

    Args:
        path: ``.json`` or ``.json.gz``, written as it is: the caller sees to it that no half of it is taken for a trace.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, supported_activities

    gpu = ProfilerActivity.CUDA in supported_activities()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities, acc_events=True) as recorded:
        try:
            yield gpu
        finally:
            if gpu:
                torch.cuda.synchronize()  # replays still under way belong to the block
    recorded.export_chrome_trace(str(path))


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _run(words: list[str]) -> None:
    """Run what follows ``python`` on a command line: a script, ``-m module`` or ``-c code``, with its arguments."""
    if words[0] == "-m":
        sys.argv = [words[1], *words[2:]]
        _first_on_path(os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        _first_on_path("")
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(words)
        _first_on_path(str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1


def main(trace: str, status: str, words: list[str]) -> int:
    """Profile a script; returns its exit code.

    Args:
        trace: where to write the Chrome trace.
        status: where to write what was recorded, as JSON, once the trace is whole.
        words: what follows ``python`` on the script's command line.
    """
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file holds modules that are none of the script's
    code = 0
    try:
        import torch  # noqa: F401
    except ImportError:
        Path(status).write_text(json.dumps({"error": NO_TORCH}))
        return 1
    with profiled(trace) as gpu:
        try:
            _run(words)
        except SystemExit as stop:
            code = _code(stop)
        except KeyboardInterrupt:
            code = 130
        except BaseException:  # as Python itself: the traceback, and exit code 1
            traceback.print_exc()
            code = 1
    Path(status).write_text(json.dumps({"gpu": gpu}))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
