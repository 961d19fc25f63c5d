"""What a worker does with a config: predict it, measure it, time it again, or build it for a bundle."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ..kernels.contract import Compiled
from ..kernels.errors import InputError
from ..kernels.gpu_cards import GpuCard, gpu_card
from .jobs import Stage, Task, require_digests
from .outcome import Outcome, SetupError, Status, describe, failure

CHECK_AGAIN = 1_000_003
"""Added to the seed for the check after timing: fresh inputs."""


def too_large(resources: Sequence[Any], gpu: GpuCard) -> str | None:
    """Why the kernels cannot be launched on the GPU, or None. ``resources`` are ``KernelResources``."""
    for kernel in resources:
        shared = kernel.static_shared_bytes + kernel.dynamic_shared_bytes
        if kernel.dynamic_shared_bytes > gpu.shared_per_block or shared > gpu.shared_per_sm:
            return (
                f"{kernel.kernel} needs {shared} bytes of shared memory a block; {gpu.name} has {gpu.shared_per_block}"
            )
        registers = -(-kernel.registers // 8) * 8 * kernel.threads
        if registers > gpu.registers_per_sm:
            return (
                f"{kernel.kernel} needs {registers} registers a block; an SM of {gpu.name} has {gpu.registers_per_sm}"
            )
    return None


def not_together(compiled: Compiled, resources: Sequence[Any], gpu: GpuCard) -> str | None:
    """Why blocks that must be on the GPU together are not, by the model of its card; None where they are.

    ``resources`` are ``KernelResources``, one a launch. On the GPU itself the launcher asks the driver instead.
    """
    from ..kernels import residency
    from .predict import resident_blocks

    for launch, kernel in zip(compiled.launches, resources, strict=True):
        if residency.concerned(launch):
            room = residency.room_by_card(launch, resident_blocks(kernel, gpu), gpu)
            if reason := residency.refusal(launch, room):
                return reason
    return None


def _compile(task: Task, stage: Stage) -> tuple[Compiled, Outcome]:
    """The compiled config, and an outcome that holds its resources: ok, or why it goes no further."""
    from .compiling import compile_config, resources_of

    stage("compile")
    try:
        compiled = compile_config(task.engine, task.problem, task.job.config, task.job.arch)
    except SetupError:
        raise
    except InputError as error:
        return None, failure(Status.ILLEGAL, error)  # type: ignore[return-value]  # never used with an illegal outcome
    found = resources_of(compiled)
    begun = Outcome(Status.OK, resources=tuple(kernel.to_json() for kernel in found))
    card = gpu_card(task.job.gpu)
    reason = too_large(found, card)
    if task.job.kind == "predict":
        reason = reason or not_together(compiled, found, card)
    if reason:
        begun = replace(begun, status=Status.ILLEGAL, reason=reason)
    return compiled, begun


def compile(task: Task, stage: Stage) -> Outcome:
    """Compile into the cache, ahead of a :func:`measure` of the same config in another process; needs no GPU."""
    _, begun = _compile(task, stage)
    return replace(begun, value=1.0) if begun.status is Status.OK else begun  # a compilation has no objective


def predict(task: Task, stage: Stage) -> Outcome:
    """Compile for the GPU card's architecture and ask the cost model."""
    from .model_error import band_source, relative_error
    from .predict import predict as ask

    compiled, begun = _compile(task, stage)
    if begun.status is not Status.OK:
        return begun
    gpu = gpu_card(task.job.gpu)
    try:
        answer = ask(task.family, task.engine, task.problem, task.job.config, gpu, compiled)
    except ValueError as error:  # no block fits on an SM
        return replace(begun, status=Status.ILLEGAL, reason=describe(error))
    who = (task.family.name, task.engine.name, gpu)
    stated = {"relative_error": relative_error(*who), "band_source": band_source(*who)}
    return replace(begun, value=answer.microseconds, prediction=answer.to_json() | stated)


def measure(task: Task, stage: Stage) -> Outcome:
    """Check, time, check again on fresh inputs. Only the cold figure is the objective."""
    from ..kernels.launch import ResidencyError
    from .check import check_compiled
    from .policy import QUICK

    compiled, begun = _compile(task, stage)
    if begun.status is not Status.OK:
        return begun
    stage("check")
    try:
        checked = check_compiled(task.family, compiled, task.job.seed)
    except ResidencyError as error:  # nothing was launched
        return replace(begun, status=Status.ILLEGAL, reason=describe(error))
    if not checked.ok:
        return replace(
            begun, status=Status.WRONG, reason=checked.reason or "differs from the twin", check=checked.to_json()
        )
    timed = replace(_time(task, compiled, stage, QUICK), resources=begun.resources, check=checked.to_json())
    if timed.status is not Status.OK:
        return timed
    stage("check")
    again = check_compiled(task.family, compiled, task.job.seed + CHECK_AGAIN)
    if not again.ok:
        return replace(
            timed, status=Status.WRONG, reason=f"after timing: {again.reason}", value=None, check=again.to_json()
        )
    return timed


def retime(task: Task, stage: Stage) -> Outcome:
    """Time once more, with the full policy, and check what it left."""
    from .check import check_compiled
    from .policy import FULL

    compiled, begun = _compile(task, stage)
    if begun.status is not Status.OK:
        return begun
    timed = _time(task, compiled, stage, FULL)
    if timed.status is not Status.OK:
        return timed
    stage("check")
    again = check_compiled(task.family, compiled, task.job.seed + CHECK_AGAIN)
    return (
        timed if again.ok else replace(timed, status=Status.WRONG, reason=f"after timing: {again.reason}", value=None)
    )


def contest(task: Task, stage: Stage) -> Outcome:
    """Time the contestants, which were all measured before, in turn in this process, beside what a user would run."""
    from .contest import time_contest
    from .policy import CONTEST

    compiled = _contestants(task, stage)
    result = time_contest(task.family, task.problem, compiled, CONTEST, task.job.seed, lambda: stage("time"))
    return Outcome(Status.OK, value=1.0, payload=result)  # a contest has no objective


def chain(task: Task, stage: Stage) -> Outcome:
    """Time the contestants behind a predecessor, in turn in this process, and check each again."""
    from .chain_contest import time_chains
    from .check import check_compiled
    from .policy import CHAIN

    compiled = _contestants(task, stage)
    result = time_chains(task.family, task.problem, compiled, CHAIN, task.job.seed, lambda: stage("time"))
    for one, found in zip(compiled, result["results"], strict=True):  # those within reach of winning, once more
        if not isinstance(one, str) and not found["failed"]:
            stage("check")
            again = check_compiled(task.family, one, task.job.seed + CHECK_AGAIN)
            if not again.ok:
                found["failed"] = f"wrong after timing: {again.reason}"
    return Outcome(Status.OK, value=1.0, payload=result)


def _contestants(task: Task, stage: Stage) -> list[Compiled | str]:
    """Each compiled, or why not."""
    from .compiling import compile_config

    stage("compile")
    compiled: list[Compiled | str] = []
    for one in task.job.contestants:
        engine = task.family.engine(one["engine"])
        require_digests(engine, one.get("digests"))
        try:
            compiled.append(compile_config(engine, task.problem, one["config"], task.job.arch))
        except SetupError:
            raise
        except Exception as error:  # it compiled before; the others can still be compared
            compiled.append(describe(error))
    return compiled


def _time(task: Task, compiled: Compiled, stage: Stage, policy: Any) -> Outcome:
    from .timing import BrokenMeasurement, time_compiled

    stage("time")
    try:
        timing = time_compiled(task.family, compiled, policy, seed=task.job.seed)
    except BrokenMeasurement as error:
        return failure(Status.UNSTABLE, describe(error))
    if not timing.stable:
        return Outcome(
            Status.UNSTABLE, f"spread {timing.spread:.1%} after {policy.attempts} attempts", timing=timing.to_json()
        )
    return Outcome(Status.OK, value=timing.cold_us, timing=timing.to_json())


def build(task: Task, stage: Stage) -> Outcome:
    """Compile for ``job.arch``; the payload holds launches, buffers and cubins (base64)."""
    from .compiling import compile_config, resources_of

    stage("compile")
    compiled = compile_config(task.engine, task.problem, task.job.config, task.job.arch)
    return Outcome(
        Status.OK,
        value=1.0,  # a build has no objective
        payload=build_payload(compiled, [kernel.to_json() for kernel in resources_of(compiled)]),
    )


def build_payload(compiled: Compiled, resources: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A compiled engine as JSON: what :mod:`k3lab.tuning.export` turns into a bundle's build."""
    launches = []
    for launch in compiled.launches:
        fields = {name: value for name, value in asdict(launch).items() if name != "cubin"}
        launches.append(fields | {"cubin": base64.b64encode(launch.cubin).decode()})
    return {
        "arch": compiled.arch,
        "launches": launches,
        "buffers": [asdict(buffer) for buffer in compiled.buffers],
        "resources": list(resources),
    }
