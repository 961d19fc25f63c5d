"""One worker of the tests' shared studies, as a process: ``python shared_worker.py JSON``; prints its result, or why it was refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import fake_family
from k3lab.kernels import InputError
from k3lab.kernels.device import Device
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import shared_tune
from k3lab.tuning.progress import Lines
from k3lab.tuning.shared_storage import Rhythm
from k3lab.tuning.shared_study import Shared
from k3lab.tuning.supervisor import Limits
from k3lab.tuning.tune import TuneRequest, TuneResult


def request(**asked: Any) -> TuneRequest:
    """What to tune: ``engine``, ``trials``, ``objective``."""
    engine = fake_family.FAMILY.engine(asked.get("engine", "large"))
    return TuneRequest(
        fake_family.FAMILY, engine, fake_family.FakeProblem(1, 8), gpu_card("h200"), asked.get("objective", "measured"),
        asked.get("trials", 40), None, 5, Limits(compile_s=20, measure_s=20), "fake_evaluator",
    )  # fmt: skip


def shared(address: str, folder: str, **asked: Any) -> Shared:
    """Where, with a quick rhythm."""
    rhythm = Rhythm(beat_s=1, grace_s=asked.get("grace_s", 3), lost_s=asked.get("lost_s", 60))
    return Shared(address, asked.get("name"), rhythm, asked.get("canary_s", 3600.0), Path(folder) / "spool")


def work(address: str, folder: str, **asked: Any) -> TuneResult:
    """Tune on a fake H200 with the driver ``driver``."""
    device = Device(
        0, asked.get("gpu", "NVIDIA H200"), "sm_90a", 132, 1, 1, asked.get("driver", "580.1"), gpu_card("h200")
    )
    shared_tune.require_gpu = lambda gpu: device  # type: ignore[assignment]
    return shared_tune.tune_shared(request(**asked), shared(address, folder, **asked), Lines())


if __name__ == "__main__":
    try:
        print(json.dumps(work(**json.loads(sys.argv[1])).to_json()))
    except InputError as error:
        print(json.dumps({"refused": str(error)}))
        sys.exit(2)
