"""Speed of the trace check on large generated files: ``python tests/traces/speed.py --out results/traces_speed.json``.

Each file is checked in a fresh process, which tells its wall time, processor time and greatest memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from big import write_json, write_sqlite  # noqa: E402
from fuzz import provenance  # noqa: E402

MILLIONS, MEGABYTES = 1_300_000, 150_000_000
BARS = {"nsys_node_mode": (8.0, 1_500), "nsys_eager": (None, None), "torch_json": (12.0, None)}
"""Seconds and MB that the check may take at most; None where no bar was set."""

_CHECK = """
import json, re, sys, time
begin = time.perf_counter(), time.process_time()
from k3lab.traces import check_trace
report = check_trace(sys.argv[1], "gb300-tp16")
text = json.dumps(report.to_json())
device = report.devices[0].layers
# not ru_maxrss: that begins with what the parent process held when it started this one
peak = re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())
print(json.dumps({
    "seconds": round(time.perf_counter() - begin[0], 2), "cpu_seconds": round(time.process_time() - begin[1], 2),
    "peak_rss_mb": int(peak[1]) // 1024, "kernels": len(report.trace.kernels),
    "verdict": report.verdict, "layers": len(device.layers), "steps": device.counts.found, "method": device.method,
}))
"""


def measure(path: Path) -> dict[str, Any]:
    """Check a file in a process of its own, the import included."""
    done = subprocess.run(
        [sys.executable, "-c", _CHECK, str(path)], capture_output=True, text=True, timeout=600, check=True
    )
    return json.loads(done.stdout)


def write(kind: str, folder: Path, scale: float = 1.0) -> Path:
    """Generate the file of a kind, ``scale`` times as large as that of the bars."""
    if kind == "torch_json":
        path = folder / "big.json"
        write_json(path, round(MEGABYTES * scale))
        return path
    path = folder / "big.sqlite"
    write_sqlite(path, round(MILLIONS * scale), eager=kind == "nsys_eager")
    return path


def main() -> int:
    """Command line: exit 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="measure the trace check on large files")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    results, missed = {}, []
    for kind, (seconds, memory) in BARS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write(kind, Path(folder))
            load = os.getloadavg()[0]
            runs = sorted((measure(path) for _ in range(wanted.repeats)), key=lambda run: run["seconds"])
            best = runs[0]
            results[kind] = {
                **best,
                "all_seconds": [run["seconds"] for run in runs],
                "file_mb": path.stat().st_size // 10**6,
                "load_before": round(load, 2),
                "bar_seconds": seconds,
                "bar_rss_mb": memory,
            }
        if (seconds and best["seconds"] >= seconds) or (memory and best["peak_rss_mb"] >= memory):
            missed.append(kind)
    data = {
        "evidence": "measured",
        "what": "the trace check on large generated files, best of the repeats; import and JSON output included",
        "made_by": f"python tests/traces/speed.py --repeats {wanted.repeats}",
        "environment": provenance(),
        "missed": missed,
        "results": results,
    }
    text = json.dumps(data, indent=1) + "\n"
    print(text)
    if wanted.out is not None:
        wanted.out.write_text(text)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
