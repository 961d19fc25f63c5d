"""A recorded space: every config (or a fair sample) with what became of it, as one compressed file.

The file is data to keep: it holds the space, the environment and every outcome, so that samplers and
cost models can be judged later without a GPU.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..kernels.errors import InputError
from ..kernels.space import Space, config_digest
from ..kernels.whole_file import write_whole
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
    check_replaceable(out, request)
    space = check_request(replace(request, trials=1))
    wanted = propose.sample(space, sample, request.seed)
    whole = replace(request, study=request.study or default_study(request), trials=sys.maxsize, proposer=wanted)
    tuned = tune(whole, progress)
    legal = len(space.legal) if space.size <= propose.ENUMERABLE else None
    if tuned.ended == "interrupted":
        return RecordResult(None, sum(tuned.statuses.values()), legal, tuned)
    with TuningStudy.for_reading(whole.path) as study:
        data = _data(study, space, sample, request.seed, legal, wanted)
    write(out, data)
    return RecordResult(out, len(data["configs"]), legal, tuned)


def _data(
    study: TuningStudy, space: Space, sample: int | None, seed: int, legal: int | None, wanted: propose.Listed
) -> dict[str, Any]:
    """The recording. The study may hold more, of a search or of another sample: that is no part of a fair one."""
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
        "configs": [trial.to_json() for trial in study.trials() if trial.digest in wanted.digests],
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


def check_replaceable(path: Path, request: TuneRequest) -> None:
    """Make sure that nothing is lost: a recording is replaced only by one of the same thing.

    Raises:
        InputError: a file is there that is no recording, or one of another family, engine, problem, GPU,
            objective or fixed parameters.
    """
    if not path.exists() or not path.stat().st_size:
        return
    there = read(path)["identity"]
    here = {
        "family": request.family.name,
        "engine": request.engine.name,
        "problem": request.problem.to_json(),
        "gpu": request.gpu.name,
        "objective": request.objective,
        "fixed": dict(request.fixed),
    }
    for field, value in here.items():
        was = there.get(field, {} if field == "fixed" else None)
        if was != value:
            raise InputError(
                f"{path} is a recording of another {field} ({was!r}, now {value!r}): name another --out file"
            )


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a recording atomically; the same data gives the same bytes.

    Raises:
        InputError: the disk is full, or the folder is gone.
    """
    text = json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n"
    try:
        write_whole(path, gzip.compress(text.encode(), mtime=0))
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); the study has it all, record again") from error


def unpacked(path: Path, else_it_is: str = "not a recording") -> Any:
    """What a compressed JSON file holds.

    Raises:
        InputError: no such file, or no compressed JSON.
    """
    try:
        packed = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no recording {path}; `k3lab study record` makes one") from None
    except OSError as error:
        raise InputError(f"recording {path} cannot be read ({error.strerror}); name a .json.gz file") from None
    try:
        return json.loads(gzip.decompress(packed))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error):
        raise InputError(f"{path} is {else_it_is}: it is no whole gzip file of JSON") from None


def read(path: Path) -> dict[str, Any]:
    """Read a recording.

    Raises:
        InputError: no such file, not a recording, another schema, or a config twice.
    """
    return checked(unpacked(path), path)


def checked(data: Any, path: Path) -> dict[str, Any]:
    """The recording that a file was found to hold.

    Raises:
        InputError: it is none, of another schema, or has a config twice.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(f"{path} is not a recording of `k3lab study record`")
    if data.get("schema") != SCHEMA:
        raise InputError(f"recording {path} has schema {data.get('schema')!r}, this k3lab reads schema {SCHEMA}")
    if not isinstance(data.get("identity"), dict) or not isinstance(data.get("configs"), list):
        raise InputError(f"recording {path} is damaged: it holds no identity or no configs")
    if data.get("evidence") != data["identity"].get("objective"):
        raise InputError(
            f"recording {path} says {data.get('evidence')!r}, its study was {data['identity'].get('objective')!r}"
        )
    if not all(isinstance(one, dict) and isinstance(one.get("config"), dict) for one in data["configs"]):
        raise InputError(f"recording {path} is damaged: an outcome has no config")
    counts = Counter(config_digest(one["config"]) for one in data["configs"])
    if twice := [digest for digest, count in counts.items() if count > 1]:
        raise InputError(f"recording {path} holds config {twice[0]} twice")
    return data
