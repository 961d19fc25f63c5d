"""Reader of .ncu-rep files, through NVIDIA's package ncu-report in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..errors import TraceError
from .csv_tables import exact
from .ncu import WANTED, NcuReport, Value, launch_of, unknown_units
from .ncu_dump import MISSING
from .stamps import BadStamp

MAGIC = b"NVR\x00"
SUFFIXES = (".ncu-rep", ".ncu-repz")
SECONDS = 300.0
_INSTEAD = "ncu --import FILE --csv --page raw"


def read_ncu_report(path: Path, seconds: float = SECONDS) -> NcuReport:
    """Read the launches of a report of Nsight Compute.

    Args:
        path: the report.
        seconds: how long reading it may take.

    Raises:
        TraceError: ncu-report is not installed, or it finds no launch in the file.
    """
    # -P: the folder of the script holds modules of ours, one of them by the package's name
    command = [sys.executable, "-P", str(Path(__file__).with_name("ncu_dump.py")), str(path.resolve()), *sorted(WANTED)]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise TraceError(f"{path.name}: ncu-report took over {seconds:g} s; give the output of {_INSTEAD}") from None
    if done.returncode == MISSING:
        raise TraceError(
            f"{path.name}: a report of Nsight Compute needs ncu-report: pip install 'k3lab[ncu]'; or give the output of {_INSTEAD}"
        )
    try:
        data: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    except ValueError:
        data = {}
    if not data.get("launches"):
        raise TraceError(f"{path.name}: ncu-report finds no kernel launch in it: damaged, or newer than ncu-report; "
                         f"give the output of {_INSTEAD}")  # fmt: skip
    launches, strange = [], []
    for number, item in enumerate(data["launches"]):
        values: dict[str, list[Value]] = {}
        for name, (unit, text) in item["metrics"].items():
            try:
                values[name] = [(unit, exact(text, "value"))]
            except BadStamp:
                continue  # not a number: not measured
        strange.extend(unknown_units(values))
        launches.append(launch_of(str(number), item["name"], item["grid"], item["block"], values))
    notes = (f"not used, the unit is not known: {', '.join(list(dict.fromkeys(strange))[:5])}",) if strange else ()
    return NcuReport(path.name, "Nsight Compute report", tuple(launches), tuple(data["gpus"]), notes)
