"""A fuzzer of the trace check: ``python tests/traces/fuzz.py --count 20000 --out results/traces_fuzz.json``.

It damages sound synthetic traces of every kind, and holds that the check never raises anything but one-line
TraceErrors, never takes longer than a limit, and never passes a trace from which a kernel, a layer or a step was
removed without saying that something is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from fuzz_mutants import REMOVED, ROWS, damage_bytes  # noqa: E402
from fuzz_samples import Rows, samples  # noqa: E402
from k3lab.traces import Report, TraceError, check_trace  # noqa: E402
from k3lab.tuning.alternatives import Late, within  # noqa: E402

LIMIT_S = 20
SHOWN = 20


def admits(report: Report) -> bool:
    """Whether a report says that something is missing from the trace."""
    words = ("cut off by the capture", "no kernels in the file")
    found = [item.kind for device in report.devices for item in device.findings]
    return "missing" in found or any(word in note for note in report.notes for word in words)


def outcome(path: Path, layers: int | None) -> tuple[str, Report | None]:
    """The verdict, or ``refused``, and the report."""
    try:
        report = check_trace(path, "gb300-tp16", layers=layers)
    except TraceError as error:
        if "\n" in str(error) or not str(error):
            raise AssertionError(f"not one line: {error!r}") from None
        return "refused", None
    json.dumps(report.to_json())
    return report.verdict, report


def one(sample: Rows, folder: Path, rng: random.Random) -> tuple[str, str, str | None]:
    """Damage a sample and check it.

    Returns:
        The mutation, the outcome, and what went wrong (None where nothing did).
    """
    path = folder / f"mutant{sample.suffix}"
    removed = rng.random() < 0.4
    mutant = sample.copy()
    damaged = not removed and rng.random() < 0.45
    if damaged:
        sample.write(path, mutant.rows)
        name = damage_bytes(path, rng)
    else:
        lost = REMOVED if sample.launches else REMOVED[:-1]  # nothing else tells that there was a step
        mutation = rng.choice(lost if removed else ROWS)
        name = mutation.__name__
        try:
            sample.write(path, mutation(mutant, rng))
        except (ArithmeticError, ValueError, KeyError, TypeError, OverflowError):
            return name, "not writable", None  # no such file can be
    try:
        with within(LIMIT_S):
            verdict, report = outcome(path, sample.layers)
    except Late:
        return name, "slow", f"over {LIMIT_S} s"
    except Exception:
        return name, "raised", traceback.format_exc(limit=-4)
    if verdict == "pass" and removed and report is not None and not admits(report):
        return name, "passed", f"{verdict}: {report.notes}"
    return name, verdict, None


def fuzz(make: Any, folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Run the fuzzer.

    Args:
        make: the generators of conftest.py.
        folder: where mutants are written, one after the other.
        count: how many.
        seed: of the random numbers; every input has its own, told with a failure.
    """
    began = time.monotonic()
    kinds = samples(make, folder)
    for sample in kinds:
        verdict, report = outcome(sample.write(folder / f"sound{sample.suffix}", sample.copy().rows), sample.layers)
        if verdict != "pass":
            raise AssertionError(f"the sound sample {sample.kind} is {verdict}: {report and report.reasons}")
    verdicts: Counter[str] = Counter()
    mutations: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    slowest = 0.0
    for number in range(count):
        sample = kinds[number % len(kinds)]
        at = time.monotonic()
        name, verdict, wrong = one(sample, folder, random.Random(f"{seed}/{number}"))
        slowest = max(slowest, time.monotonic() - at)
        verdicts[verdict] += 1
        mutations[name] += 1
        by_kind[sample.kind] += 1
        if wrong is not None:
            failures.append(
                {"number": number, "kind": sample.kind, "mutation": name, "outcome": verdict, "what": wrong}
            )
    return {
        "count": count,
        "seed": seed,
        "failures": len(failures),
        "seconds": round(time.monotonic() - began, 1),
        "slowest_input_s": round(slowest, 3),
        "outcomes": dict(sorted(verdicts.items())),
        "samples": dict(sorted(by_kind.items())),
        "mutations": dict(sorted(mutations.items())),
        "failed": failures[:SHOWN],
    }


def provenance() -> dict[str, Any]:
    """Where a result comes from: commit, Python, processor."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    models = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "traces_changed_since": bool(git("status", "--porcelain", "--", "../../traces")),
        "python": platform.python_version(),
        "cpu": models[0] if models else "unknown",
        "cores": len(models),
    }


def _make() -> Any:
    spec = importlib.util.spec_from_file_location("traces_conftest", HERE / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Make


def main() -> int:
    """Command line: exit 1 where an input did wrong."""
    parser = argparse.ArgumentParser(description="fuzz the trace check")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where the outcome is written as JSON")
    wanted = parser.parse_args()
    origin = provenance()
    with tempfile.TemporaryDirectory() as folder:
        result = fuzz(_make(), Path(folder), wanted.count, wanted.seed)
    data = {
        "evidence": "measured",
        "what": "mutants of synthetic traces of every kind through the trace check",
        "made_by": f"python tests/traces/fuzz.py --count {wanted.count} --seed {wanted.seed}",
        "environment": origin,
        **result,
    }
    text = json.dumps(data, indent=1) + "\n"
    print(text)
    if wanted.out is not None:
        wanted.out.write_text(text)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
