"""Check Triton engines on the CPU: a process of its own, since TRITON_INTERPRET is read at decoration.

``python -m k3lab.tuning.interpret`` reads one JSON job on stdin and writes one JSON result on stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from ..kernels import Config, Engine, Family, InputError, Problem
from .check import CheckResult, interpreted_comparisons, row_cases
from .jobs import find_family, location_of
from .supervisor import module_path

LIMIT_S = 600.0


def check_interpreted(
    owner: Family, engine: Engine, problem: Problem, config: Config, seed: int = 0, *, limit_s: float = LIMIT_S
) -> CheckResult:
    """Check a config on Triton's interpreter, in a child process with a wall limit.

    Raises:
        InputError: the family cannot be reached from another process.
    """
    job = {
        "family": owner.name,
        "location": location_of(owner),
        "engine": engine.name,
        "problem": problem.to_json(),
        "config": dict(config),
        "seed": seed,
        "rows": row_cases(problem.rows)[:2],
    }
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": module_path()}
    command = [sys.executable, "-P", "-m", "k3lab.tuning.interpret"]
    try:
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, timeout=limit_s, env=environment
        )
    except subprocess.TimeoutExpired:
        return CheckResult(False, "interpreter", f"the interpreter did not finish within {limit_s:.0f} s")
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return CheckResult(
            False, "interpreter", lines[-1] if lines else f"the interpreter exited with {done.returncode}"
        )
    try:
        return CheckResult(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):  # it ended, but not by its own end
        return CheckResult(False, "interpreter", "the interpreter ended without an answer")


def run_job(job: dict[str, Any]) -> CheckResult:
    """One job in this process."""
    owner = find_family(job["family"], job["location"])
    engine, problem = owner.engine(job["engine"]), owner.problem_from_json(job["problem"])
    return interpreted_comparisons(owner, engine, problem, job["config"], job["seed"], job["rows"])


def main() -> int:
    """Entry point of the child process."""
    answer = sys.stdout
    sys.stdout = sys.stderr  # whatever the libraries print must not reach the answer
    try:
        result = run_job(json.load(sys.stdin))
    except InputError as error:
        print(f"k3lab: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result.to_json()), file=answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
