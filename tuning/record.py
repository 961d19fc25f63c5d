"""A recorded space: every config (or a fair sample) with what became of it, as one compressed file.

The file is data to keep: it holds the space, the environment and every outcome, so that samplers and
cost models can be judged later without a GPU.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..kernels.errors import InputError
from ..kernels.space import Space, config_digest
from . import propose
from .progress import Progress
from .study import TuningStudy
from .tune import TuneRequest, TuneResult, check_request, tune

FORMAT = "k3lab-space"
SCHEMA = 1


@dataclass(frozen=True)
class RecordResult:
    """What was recorded."""

    path: Path | None
    """The file; None where the recording was interrupted and the study must be resumed first."""
    configs: int
    legal: int | None
    tuned: TuneResult

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "record": str(self.path) if self.path else None,
            "evidence": self.tuned.identity["objective"],
            "configs": self.configs,
            "legal_configs": self.legal,
            **self.tuned.to_json(),
        }


def default_study(request: TuneRequest) -> Path:
    """The study a recording works in: apart from that of a search, whose trials are no fair sample."""
    path = request.path
    return path.with_name(f"{path.stem}-space.sqlite3")


def record(
    request: TuneRequest, out: Path, *, sample: int | None = None, progress: Progress | None = None
) -> RecordResult:
    """Evaluate a whole space, or a seeded sample of it, and write the data; resumable like a search.

    Args:
        request: as for :func:`k3lab.tuning.tune.tune`; its number of trials is not used.
        out: the ``.json.gz`` file.
        sample: configs to draw beside the default; None takes all legal ones.
        progress: who watches.

    Raises:
        InputError: as for tune; or the file cannot be written.
    """
    if sample is not None and sample < 1:
        raise InputError(f"sample is {sample}, must be at least 1")
    if out.suffixes[-2:] != [".json", ".gz"]:
        raise InputError(f"a recording is a .json.gz file, {out} is not named so")
    check_writable(out)
    space = check_request(replace(request, trials=1))
    whole = replace(
        request,
        study=request.study or default_study(request),
        trials=sys.maxsize,
        proposer=propose.sample(space, sample, request.seed),
    )
    tuned = tune(whole, progress)
    legal = len(space.legal) if space.size <= propose.ENUMERABLE else None
    done = sum(tuned.statuses.values())
    if tuned.ended == "interrupted":
        return RecordResult(None, done, legal, tuned)
    with TuningStudy.for_reading(whole.path) as study:
        write(out, _data(study, space, sample, request.seed, legal))
    return RecordResult(out, done, legal, tuned)


def _data(study: TuningStudy, space: Space, sample: int | None, seed: int, legal: int | None) -> dict[str, Any]:
    identity = study.identity
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "evidence": identity["objective"],
        "identity": identity,
        "environment": study.note("environment"),
        "space": {
            "params": [
                {"name": param.name, "values": list(param.values), "help": param.help} for param in space.params
            ],
            "default": dict(space.default),
            "points": space.size,
            "legal": legal,
        },
        "coverage": {
            "kind": "whole" if sample is None or (legal is not None and sample >= legal) else "sample",
            "sample": sample,
            "seed": seed,
        },
        "finals": study.note("finals"),
        "configs": [trial.to_json() for trial in study.trials()],
    }


def check_writable(path: Path) -> None:
    """Make sure a file can be written; creates its folder.

    Raises:
        InputError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}): name a file in a folder you can write"
        ) from error
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file")


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a recording atomically; the same data gives the same bytes."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n"
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(gzip.compress(text.encode(), mtime=0))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """Read a recording.

    Raises:
        InputError: no such file, not a recording, another schema, or a config twice.
    """
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
    except FileNotFoundError:
        raise InputError(f"there is no recording {path}; `k3lab study record` makes one") from None
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path} is not a recording: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(f"{path} is not a recording of `k3lab study record`")
    if data.get("schema") != SCHEMA:
        raise InputError(f"recording {path} has schema {data.get('schema')!r}, this k3lab reads schema {SCHEMA}")
    counts = Counter(config_digest(one["config"]) for one in data["configs"])
    if twice := [digest for digest, count in counts.items() if count > 1]:
        raise InputError(f"recording {path} holds config {twice[0]} twice")
    return data
