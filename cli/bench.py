"""``k3lab check``, ``time``, ``stages`` and ``compile``: one engine on one problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, emit
from .select import (
    MAX_SEED,
    ConfigText,
    EngineName,
    Kind,
    Model,
    Rows,
    Selection,
    Tp,
    card_of_arch,
    select_engine,
    select_engines,
)  # fmt: skip
from .words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from ..kernels import Config

Name = Annotated[str, typer.Argument(help="Family; see 'k3lab kernels'.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=MAX_SEED, help="Seed of the random inputs.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("check")(check)
    app.command("time")(time)
    app.command("stages")(stages)
    app.command("compile")(compile_)


def check(
    name: Name, tp: Tp = 16, rows: Rows = 8, kind: Kind = None, engine: EngineName = None, config: ConfigText = None,
    model: Model = "k3", seed: Seed = 0, as_json: Json = False,
) -> None:  # fmt: skip
    """Check engines against the twin: on the GPU here, or Triton kernels on its interpreter."""
    from ..kernels.device import discover
    from ..kernels.gpu_cards import gpu_card
    from ..tuning.check import check as run_check

    owner, problem, engines = select_engines(name, model=model, tp=tp, rows=rows, kind=kind, engine=engine)
    device = discover()
    card = device.need_card() if device else gpu_card("GB300")
    results: list[dict[str, Any]] = []
    for candidate in engines:
        refusal = candidate.refuses(problem, card.arch)
        if refusal and engine is None:
            results.append({"engine": candidate.name, "verdict": "refused", "reason": refusal})
            continue
        chosen = Selection(owner, candidate, problem).config(config, card)
        outcome = run_check(owner, candidate, problem, chosen, seed)
        verdict = "pass" if outcome.ok else "not run" if outcome.how == "compiled" else "fail"
        results.append({"engine": candidate.name, "verdict": verdict, "config": dict(chosen), **outcome.to_json()})
    passed = [r for r in results if r["verdict"] == "pass"]
    failed = [r for r in results if r["verdict"] == "fail"]
    data = {
        "family": owner.name,
        "problem": problem.to_json(),
        "gpu": device.name if device else None,
        "results": results,
    }

    def render(console: Console, data: dict[str, Any]) -> None:
        where = data["gpu"] or "no GPU here"
        console.print(f"{owner.name} {problem.label}, {where}")
        for result in data["results"]:
            errors = ", ".join(f"{output} {value:.2e}" for output, value in result.get("errors", {}).items())
            console.print(
                f"  {result['engine']:<14} {result['verdict']:<8} {result.get('how', '')}"
                f"{'  relative error ' + errors if errors else ''}",
                markup=False,
            )
            if result.get("reason"):
                console.print(f"      {result['reason']}", markup=False)

    emit(data, as_json, render)
    if failed or not passed:
        raise typer.Exit(1)


def _head(console: Console, chosen: Selection, gpu: str, point: Config) -> None:
    console.print(f"{chosen.family.name}/{chosen.engine.name} {chosen.problem.label} on {gpu}, measured", markup=False)
    console.print(f"  config       {' '.join(f'{k}={v}' for k, v in point.items())}", markup=False)


def time(
    name: Name, tp: Tp = 16, rows: Rows = 8, kind: Kind = None, engine: EngineName = None, config: ConfigText = None,
    model: Model = "k3", quick: Annotated[bool, typer.Option("--quick", help="Fewer samples, and no torch.compile.")] = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Time an engine on the GPU here: cold and hot, against the byte floor and PyTorch; and in a chain, if it has PDL."""
    from ..kernels.device import require
    from ..tuning.alternatives import COMPILE_S
    from ..tuning.check import check_compiled
    from ..tuning.compiling import compile_config
    from ..tuning.environment import environment
    from ..tuning.gpus import measuring
    from ..tuning.policy import FULL, QUICK
    from ..tuning.timing import time_compiled

    chosen = select_engine(name, model=model, tp=tp, rows=rows, kind=kind, engine=engine)
    device = require("timing")
    point = chosen.config(config, device.need_card())
    with measuring(device.index):
        compiled = compile_config(chosen.engine, chosen.problem, point, device.arch)
        before = check_compiled(chosen.family, compiled, seed=1)
        timing = time_compiled(
            chosen.family, compiled, QUICK if quick else FULL,
            alternative=True, compile_s=0.0 if quick else COMPILE_S, chain=True,
        )  # fmt: skip
        after = check_compiled(chosen.family, compiled, seed=2)
    wrong = next((result.reason for result in (before, after) if not result.ok), None)
    data = {
        **chosen.to_json(), "config": dict(point), "evidence": "measured", "checked": wrong is None,
        "timing": timing.to_json(), "environment": environment(device), "source_digest": chosen.engine.source_digest(),
    }  # fmt: skip

    def render(console: Console, data: dict[str, Any]) -> None:
        _head(console, chosen, device.name, point)
        console.print(
            f"  cold         {timing.cold_us:8.2f} us   spread {timing.spread:.1%}, {timing.cold.copies} copies of the weights"
        )
        console.print(f"  hot          {timing.hot_us:8.2f} us   one copy, as far as the L2 holds it")
        console.print(f"  floor        {timing.floor_us:8.2f} us   at {timing.read_ceiling / 1e12:.2f} TB/s read here")
        console.print(f"  of ceiling   {timing.percent_of_ceiling:8.1f} %")
        for other, microseconds in timing.alternatives.items():
            console.print(f"  {other:<12} {microseconds:8.2f} us   the same work by PyTorch, cold", highlight=False)
        for other, reason in timing.not_timed.items():
            console.print(f"  {other:<12}        -      {reason}", markup=False)
        if timing.chain is not None:
            console.print(
                f"  in a chain   {timing.chain.chain_us:8.2f} us   behind a kernel of {timing.chain.spin_us:.0f} us, with PDL; "
                f"{timing.chain.plain_us:.2f} without: {timing.chain.hidden_us:.2f} hidden"
            )
        clocks = timing.cold.clocks_after
        console.print(
            f"  clocks       {clocks.get('sm_mhz', '?')} MHz, {clocks.get('temperature_c', '?')} C, throttle: {clocks.get('throttle') or 'none'}",
            markup=False,
        )
        for note in timing.notes:
            console.print(f"  note: {note}", markup=False)
        if wrong:
            console.print(f"  WRONG RESULT: {wrong}", markup=False)

    emit(data, as_json, render)
    if wrong or not timing.stable:
        raise typer.Exit(1)


def stages(
    name: Name, tp: Tp = 16, rows: Rows = 8, kind: Kind = None, engine: EngineName = None, config: ConfigText = None,
    model: Model = "k3", chain: Annotated[bool, typer.Option("--chain", help="Behind a predecessor, with a programmatic edge.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """When the warps of a launch pass the stages of their kernel, on the GPU here: where its time goes."""
    from ..kernels.device import require
    from ..tuning.environment import environment
    from ..tuning.gpus import measuring
    from ..tuning.policy import QUICK
    from ..tuning.stages import measure_stages

    chosen = select_engine(name, model=model, tp=tp, rows=rows, kind=kind, engine=engine)
    device = require("k3lab stages")
    point = chosen.config(config, device.need_card())
    with measuring(device.index):
        found = measure_stages(chosen.family, chosen.engine, chosen.problem, point, device.arch, QUICK, chain=chain)
    data = {
        **chosen.to_json(), "config": dict(point), "evidence": "measured", "stages": found.to_json(),
        "environment": environment(device), "source_digest": chosen.engine.source_digest(),
    }  # fmt: skip

    def render(console: Console, data: dict[str, Any]) -> None:
        _head(console, chosen, device.name, point)
        console.print(
            f"  span         {found.span_us:8.2f} us   first stamp to last; this build {'adds' if chain else 'takes'} {found.stamped_us:.2f} {'to its predecessor' if chain else 'a launch'}"
        )
        for role in found.roles:
            console.print(
                f"  {found.kernels[role.launch]}, {counted(role.warps, 'warp')} of {counted(role.blocks, 'block')}: us since the first stamp"
            )
            for one in role.stages:
                console.print(
                    f"    {one.stage:<12} first {one.first_us:7.2f}   median {one.median_us:7.2f}   last {one.last_us:7.2f}"
                )
        told = {role.launch for role in found.roles}
        for place, kernel in enumerate(found.kernels):
            if place not in told:
                console.print(f"  {kernel} stamps no stages: its time lies between those of the others")

    emit(data, as_json, render)


def compile_(
    name: Name, tp: Tp = 16, rows: Rows = 8, kind: Kind = None, engine: EngineName = None, config: ConfigText = None,
    model: Model = "k3", arch: Annotated[str, typer.Option("--arch", help="Architecture.")] = "sm_103a", as_json: Json = False,
) -> None:  # fmt: skip
    """Compile a config and say what the cubin holds; needs no GPU."""
    from ..tuning.compiling import compile_config, compiler_versions
    from ..tuning.cubin import instruction_groups, resources

    chosen = select_engine(name, model=model, tp=tp, rows=rows, kind=kind, engine=engine)
    card = card_of_arch(arch)
    point = chosen.config(config, card)
    found = resources(compile_config(chosen.engine, chosen.problem, point, arch))
    data = {
        **chosen.to_json(), "config": dict(point), "arch": arch, "evidence": "compiled",
        "summation_order": chosen.engine.summation_order(chosen.problem, point),
        "compilers": compiler_versions(chosen.engine), "source_digest": chosen.engine.source_digest(),
        "kernels": [kernel.to_json() for kernel in found],
    }  # fmt: skip

    def render(console: Console, data: dict[str, Any]) -> None:
        console.print(
            f"{chosen.family.name}/{chosen.engine.name} {chosen.problem.label} for {arch}, compiled", markup=False
        )
        for kernel in found:
            console.print(f"  {kernel.kernel}", markup=False)
            console.print(
                f"    registers      {kernel.registers} a thread, {kernel.threads} threads, {kernel.blocks} blocks"
            )
            console.print(
                f"    shared memory  {kernel.dynamic_shared_bytes} bytes at launch, {kernel.static_shared_bytes} in the cubin"
            )
            console.print(
                f"    spills         {kernel.spill_instructions} local-memory instructions, stack {kernel.stack_bytes} bytes"
            )
            for group, members in instruction_groups(kernel.instructions).items():
                if group == "integer and control":
                    mix = str(sum(members.values()))
                else:
                    mix = ", ".join(f"{name} {count}" for name, count in members.items())
                console.print(f"    {group:<26} {mix}", markup=False)
        console.print(f"  summation order: {data['summation_order']}", markup=False)

    emit(data, as_json, render)
