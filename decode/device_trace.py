"""Recording a device trace of decode steps with torch.profiler."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..kernels import InputError
from ..kernels.device import discover


def check_trace_path(path: Path) -> None:
    """Raise InputError unless a trace can be written there; called before anything runs."""
    if path.is_dir():
        raise InputError(
            f"cannot write the trace to {path}: it is a folder; name a file that ends in .json or .json.gz"
        )
    if not str(path).endswith((".json", ".json.gz")):
        raise InputError(f"cannot write the trace to {path}: the name must end in .json or .json.gz")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write the trace to {path}: {path.parent} is no folder that can be written")


def record_trace(run: Callable[[], object], path: Path) -> Path:
    """Run under torch.profiler (host and device activity) and write a Chrome trace, whole or not at all.

    Args:
        run: what is recorded; on a GPU, after a warm-up outside.
        path: ``.json`` or ``.json.gz``.

    Raises:
        InputError: the file cannot be written.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    check_trace_path(path)
    gpu = discover() is not None
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])], acc_events=True
    ) as recorded:
        run()
        if gpu:
            torch.cuda.synchronize()
    suffix = ".json.gz" if path.name.endswith(".gz") else ".json"
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=suffix)
    os.close(handle)
    try:
        recorded.export_chrome_trace(partial)
        os.replace(partial, path)
    except OSError as error:
        raise InputError(f"cannot write the trace to {path}: {error.strerror}") from error
    finally:
        Path(partial).unlink(missing_ok=True)
    return path
