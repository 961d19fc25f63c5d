"""Check an engine against its twin: on the GPU here, or on Triton's interpreter without one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..kernels import Compiled, Config, Engine, Family, Problem
from ..kernels.collectives import CollectiveError
from ..kernels.device import discover
from ..kernels.gpu_cards import GB300
from ..kernels.health import check_health
from .compare import Comparison, compare
from .compiling import compile_config

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check."""

    ok: bool
    how: Literal["gpu", "interpreter", "compiled"]
    """Where it ran; ``compiled``: nothing could run here, the config was only built (ok is then False)."""
    reason: str | None
    """One line where ok is False."""
    errors: dict[str, float] = field(default_factory=dict)
    """Output name to relative error of the full-row run."""
    cases: list[dict[str, Any]] = field(default_factory=list)
    """Every comparison made."""

    def to_json(self) -> dict[str, Any]:
        """Field name to value."""
        return asdict(self)


def row_cases(rows: int) -> list[int]:
    """Row counts to run with one compiled object: all, odd ones and one, each at most ``rows``."""
    return list(dict.fromkeys(r for r in (rows, rows - 1, (rows + 1) // 2, 1) if 1 <= r <= rows))


def check(
    family: Family, engine: Engine, problem: Problem, config: Config, seed: int = 0, *, compiled: Compiled | None = None
) -> CheckResult:
    """Check on the GPU if there is one, else on the interpreter, else only compile.

    Raises:
        InputError: the engine refuses the problem.
    """
    device = discover()
    if device is not None:
        compiled = compiled or compile_config(engine, problem, config, device.arch)
        return check_compiled(family, compiled, seed)
    if engine.compiler == "triton":
        from .interpret import check_interpreted

        return check_interpreted(family, engine, problem, config, seed)
    arch = GB300.arch if GB300.arch in engine.archs else engine.archs[0]
    compile_config(engine, problem, config, arch)
    return CheckResult(
        False, "compiled", f"built for {arch}, not run: {engine.compiler} kernels run on a GPU, and none is here"
    )


GUARD = 4096
"""Elements behind each output that no kernel may touch."""


def poison_value(dtype: torch.dtype) -> float | int:
    """What an element that was never written still holds."""
    import torch

    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def guarded_output(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole, view): a contiguous output tensor at the start of a poisoned one that is :data:`GUARD` elements longer."""
    import torch

    count = math.prod(shape)
    whole = torch.full((count + GUARD,), poison_value(dtype), dtype=dtype, device=device)
    return whole, whole[:count].view(shape)


def written(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements no longer hold poison: boolean, of the same shape."""
    return ~tensor.isnan() if tensor.is_floating_point() else tensor != poison_value(tensor.dtype)


def written_beyond(whole: torch.Tensor, view: torch.Tensor) -> int | None:
    """The first element behind the view that no longer holds poison, or None."""
    touched = written(whole[view.numel() :])
    return view.numel() + int(touched.nonzero()[0]) if bool(touched.any()) else None


def check_compiled(family: Family, compiled: Compiled, seed: int) -> CheckResult:
    """Run on the GPU: poisoned outputs, fresh inputs, fewer rows, a repeat, a graph replay, scratch left clean.

    Kernels launched with programmatic edges also run in chains of them, and must give the bits they give without.
    """
    import torch

    from ..kernels.launch import Runner

    problem = compiled.problem
    inputs = family.inputs(problem, seed, "cuda")
    guarded = {
        name: guarded_output(shape, getattr(torch, dtype), "cuda")
        for name, (shape, dtype) in family.output_specs(problem).items()
    }
    outputs = {name: view for name, (_, view) in guarded.items()}
    kept = {name: inputs[name].clone() for name in inputs if name not in family.mutated}
    fresh = {name: inputs[name].clone() for name in family.mutated}
    own = {**inputs, **{name: tensor.clone() for name, tensor in fresh.items()}}
    twin = family.expected(problem, compiled.config, own)
    runner = Runner(compiled)
    cases: list[Comparison] = []
    faults: list[str] = []
    labelled: list[dict[str, Any]] = []

    def poison() -> None:
        for whole, _ in guarded.values():
            whole.fill_(poison_value(whole.dtype))
        for name, tensor in fresh.items():
            inputs[name].copy_(tensor)

    def inputs_unchanged(how: str) -> None:
        for name, before in kept.items():
            if not torch.equal(before.view(torch.uint8), inputs[name].view(torch.uint8)):
                faults.append(f"{how}: input {name} was changed")

    def judge(rows: int, how: str) -> None:
        for name in outputs:
            result = compare(name, outputs[name][:rows], twin[name][:rows], family.tolerance(problem, name))
            cases.append(result)
            labelled.append({"rows": rows, "run": how, **result.to_json()})
            if not result.ok:
                faults.append(f"rows {rows}, {how}: {result.message}")

    for rows in row_cases(problem.rows):
        call = runner.bind({**inputs, **outputs}, rows=rows)
        poison()
        call()
        torch.cuda.synchronize()
        inputs_unchanged(f"rows {rows}, launch")
        judge(rows, "launch")
        for name in outputs:
            if bool(written(outputs[name][rows:]).any()):
                faults.append(f"rows {rows}: {name} was written beyond its {rows} rows")
        if not faults and (dead := dead_rows(family, problem, inputs, rows)):
            poison()
            runner.bind({**inputs, **dead, **outputs}, rows=rows)()
            torch.cuda.synchronize()
            judge(rows, "launch, other rows NaN")
        if faults:
            break
    full = runner.bind({**inputs, **outputs})
    if not faults:
        _repeatable(full, outputs, poison, faults)
        judge(problem.rows, "graph replay")
    if not faults and any(launch.pdl for launch in compiled.launches):
        from .check_chain import chain_faults

        specs = family.output_specs(problem)

        def another(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            return guarded_output(specs[name][0], getattr(torch, specs[name][1]), "cuda")

        poison()  # what is updated in place holds what it held at first
        faults += chain_faults(family, runner, inputs, fresh, another)
    for name, (whole, view) in guarded.items():
        if (place := written_beyond(whole, view)) is not None:
            faults.append(f"{name} was written beyond its end, first at element {place} of {view.numel()}")
    inputs_unchanged("repeated runs")
    for buffer in compiled.buffers:
        if buffer.zeroed and bool(runner.buffers[buffer.name].any()):
            faults.append(f"scratch buffer {buffer.name} was not left zeroed for the next launch")
    try:
        check_health(runner.buffers)
    except CollectiveError as error:  # the cause of whatever else was wrong
        faults.insert(0, f"a wait of the kernel gave up: {error}")
    errors = {case.output: case.relative for case in cases[: len(outputs)]}
    return CheckResult(not faults, "gpu", faults[0] if faults else None, errors, labelled)


def dead_rows(family: Family, problem: Problem, inputs: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """Activations whose rows beyond the live ones are NaN: no kernel may let them into a live row's result.

    A launch of its own: NaN in a dead row's result would look as if it had not been written.

    Args:
        family: says which inputs are weights or updated in place; those stay as they are.
        problem: how many rows the activations have, and along which axis each.
        inputs: by name.
        rows: those that live.
    """
    from .chain import handed_over

    if rows == problem.rows:
        return {}
    axes = family.row_axes(problem)
    found = {name: inputs[name].clone() for name in handed_over(family, inputs) if name in axes}
    for name, tensor in found.items():
        tensor.narrow(axes[name], rows, problem.rows - rows).fill_(float("nan"))
    return found


def _repeatable(call: Any, outputs: dict[str, torch.Tensor], poison: Any, faults: list[str]) -> None:
    """The same inputs give the same bits: launched again, and replayed from a graph."""
    import torch

    def bits() -> list[torch.Tensor]:
        torch.cuda.synchronize()
        return [tensor.view(torch.uint8).clone() for tensor in outputs.values()]

    poison()
    call()
    first = bits()
    poison()
    call()
    if not all(torch.equal(a, b) for a, b in zip(first, bits(), strict=True)):
        faults.append("two runs on the same inputs gave different bits")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        poison()
        graph.replay()
    if not all(torch.equal(a, b) for a, b in zip(first, bits(), strict=True)):
        faults.append("a graph replay gave other bits than a launch")


def interpreted_comparisons(
    family: Family, engine: Engine, problem: Problem, config: Config, seed: int, rows: Sequence[int]
) -> CheckResult:
    """Run on the interpreter in this process, which must have been started with TRITON_INTERPRET=1."""
    import dataclasses

    faults: list[str] = []
    labelled: list[dict[str, Any]] = []
    errors: dict[str, float] = {}
    for index, count in enumerate(rows):
        case = dataclasses.replace(problem, rows=count)
        inputs = family.inputs(case, seed + index, "cpu")
        got = engine.interpret(case, config, inputs)
        if got is None:
            return CheckResult(False, "compiled", f"{engine.name} has no interpreter")
        twin = family.expected(case, config, inputs)
        for name in family.output_specs(case):
            result = compare(name, got[name], twin[name], family.tolerance(case, name))
            labelled.append({"rows": count, "run": "interpreter", **result.to_json()})
            errors.setdefault(name, result.relative)
            if not result.ok:
                faults.append(f"rows {count}: {result.message}")
    return CheckResult(not faults, "interpreter", faults[0] if faults else None, errors, labelled)
