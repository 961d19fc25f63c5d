"""Every engine of a family launched once on a few problems, for compute-sanitizer: no test, a script.

``compute-sanitizer --tool memcheck --report-api-errors no python tests/kernels/sanitize.py FAMILY [ROWS,...] [KIND,...]``
(or ``--tool racecheck``, which sees shared memory only). Kinds left out are those with which every kernel
of the family runs, rows :data:`ROWS`. Prints a line a launch; exit 1 if one could not run.
"""

from __future__ import annotations

import sys

import torch
from k3lab.kernels import K3, Config, Engine, Family, InputError, Problem, family
from k3lab.kernels.device import Device, require
from k3lab.kernels.health import NAME, check_health, set_limit
from k3lab.kernels.launch import LaunchError, Runner
from k3lab.tuning.compiling import compile_config
from kernel_cases import MORE, kinds_of

ROWS = (1, 5, 8, 33, 64)
PATIENT_S = 60.0
"""For waits inside a kernel: under the sanitizer everything takes a hundred times as long."""


def launched(found: Family, engine: Engine, problem: Problem, change: Config, device: Device) -> bool:
    """One launch, where the engine serves it; whether it failed."""
    label = f"{problem.label} {engine.name}{f' {change}' if change else ''}"
    if why := engine.refuses(problem, device.arch):
        print(f"{label}: refused ({why})")
        return False
    try:
        config = {**engine.space(problem, device.need_card()).default, **change}
        runner = Runner(compile_config(engine, problem, config, device.arch))
        if NAME in runner.buffers:
            set_limit(runner.buffers, PATIENT_S)
        outputs = {
            output: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
            for output, (shape, dtype) in found.output_specs(problem).items()
        }
        inputs = found.inputs(problem, 1, "cuda")
        runner.bind({**inputs, **outputs})()
        torch.cuda.synchronize()
        check_health(runner.buffers)
        print(f"{label}: ran", flush=True)
    except (InputError, LaunchError, RuntimeError) as error:
        print(f"{label}: FAILED {error}", flush=True)
        return True
    return False


def main(name: str, rows_of: list[int], kinds: list[str]) -> int:
    """Launch; what failed, counted. Configs beside the default come where no kind is chosen, at rows of their own."""
    device = require("the sanitizer")
    found, failed = family(name), 0
    for kind in kinds or kinds_of(found):
        for rows in rows_of:
            try:
                problem = found.problem(K3, tp=16, rows=rows, kind=kind)
            except InputError as error:
                print(f"{name} {kind} {rows} rows: none ({error})")
                continue
            failed += sum(launched(found, engine, problem, {}, device) for engine in found.engines)
    for engine, tp, rows, change in () if kinds else MORE.get(name, ()):
        failed += launched(found, found.engine(engine), found.problem(K3, tp=tp, rows=rows), change, device)
    return failed


if __name__ == "__main__":
    words = [*sys.argv[1:], "", "", ""]
    chosen = [int(word) for word in words[1].split(",") if word] or list(ROWS)
    sys.exit(bool(main(words[0], chosen, [word for word in words[2].split(",") if word])))
