"""Running a model of the Kimi K3 structure for some tokens, on either backend, here and now.

Without a GPU the twins run, eagerly, all ranks of the group as threads, or each in a process under torchrun. On a GPU
this process' rank runs: one of torchrun's, or alone, with stand-in collectives where the group is larger; eagerly and
from a CUDA graph, whose tokens must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from ..kernels import Evidence, InputError, ModelCard
from ..kernels.device import Device, discover
from .choices import Choice, Fallback, Finder, Tuned, choose, without_gpu
from .cures import model_word
from .fitting import fitting_here
from .group import NO_LINK, Group, join, of_rank
from .memory import check_memory, peak_memory, watch_memory
from .plan import AUTO_NOTE, TUNED_FAMILIES, plan
from .report import RunReport
from .run_options import RunOptions, label
from .run_places import Progress, known_gpu, run_cpu, run_gpu
from .unused import unused_entries

Recorder = Callable[[Path], AbstractContextManager[object]]
"""What records the block under it to a file, and says at the call if it cannot: ``k3lab.traces.capture.recording``."""


def wanted_choices(
    card: ModelCard, options: RunOptions, bundle: Finder | None, device: Device | None, command: str = "run"
) -> tuple[Choice, ...]:
    """What the bundle offers for this GPU, or for ``options.gpu`` where there is none; ``command`` asks again."""
    if options.backend == "auto":
        if bundle is not None:
            raise InputError("backend auto uses no bundle; --backend latency_specialized does")
        return ()
    known = known_gpu(options, device)
    model = [] if options.checkpoint else ["--model", options.model or model_word(card)]
    words = [command, *model, *options.again]
    words += ["--gpu", known] if device is None else []
    words += ["--trace", str(options.trace)] if options.trace else []
    return choose(
        card,
        tp=options.tp,
        rows=options.step_rows,
        gpu=known,
        bundle=bundle,
        only=TUNED_FAMILIES,
        objective="measured" if device and device.card else "predicted",
        model=options.model,
        command=tuple(words),
        form=options.form,
    )


def usable_choices(wanted: tuple[Choice, ...], options: RunOptions, device: Device | None) -> tuple[Choice, ...]:
    """What of it can be launched here."""
    if device is None:
        return without_gpu(wanted, "no GPU here: the twin runs", f"run it on a {options.gpu}")
    if device.card is None:
        return without_gpu(wanted, f"no GPU card for {device.name}", "add its card to kernels/gpu_cards.py")
    return wanted


def planned_launches(
    card: ModelCard, options: RunOptions, choices: tuple[Choice, ...], gpu: str, bundle: Finder | None
) -> dict[str, int]:
    """Launches a step of every tuned kernel that can be launched here, known before anything is."""
    if not any(isinstance(one, Tuned) for one in choices):
        return {}
    made = plan(
        card, tp=options.tp, rows=options.step_rows, backend=options.backend, bundle=bundle, gpu=gpu, form=options.form
    )
    return made.tuned_kernels()


def head_lines(
    options: RunOptions, wanted: tuple[Choice, ...], device: Device | None, group: Group | None
) -> tuple[str, ...]:
    """What must be known before a number of the run is read."""
    gpu = known_gpu(options, device)
    lines = [AUTO_NOTE] if options.backend == "auto" else []
    lines += [
        f"{one.evidence} only, never measured on a {gpu}: {one.label}, engine {one.engine}"
        for one in wanted
        if isinstance(one, Tuned) and one.evidence != Evidence.MEASURED
    ]
    if device is None:
        lines.append("no GPU: the twins run on the CPU; times say nothing about kernels")
    if group and group.alone:
        lines.append(
            f"rank {group.rank} of {group.size} alone: collectives are stand-ins, tokens and step times are not those of the"
            f" group; {NO_LINK}"
        )
    if options.dcp > 1:
        lines.append(f"each context lies over all {options.dcp} ranks (decode context parallelism)")
    if options.drafts:
        lines.append(label(options))
    if options.fill:
        lines.append(
            f"a context of {options.fill} tokens is made up (--fill-context): caches hold random numbers, the tokens mean nothing"
        )
    if options.checkpoint is None:
        lines.append(f"random weights (seed {options.seed}): the tokens mean nothing")
    return tuple(lines)


def run(
    card: ModelCard,
    options: RunOptions,
    *,
    bundle: Finder | None = None,
    progress: Progress | None = None,
    record: Recorder | None = None,
) -> RunReport:
    """Decode ``options.tokens`` tokens for ``options.rows`` requests with random weights.

    Args:
        card: the model.
        options: what to run.
        bundle: for ``latency_specialized``; entries that are only predicted count if it was loaded so.
        progress: called as the run gets on.
        record: what writes ``options.trace``.

    Raises:
        InputError: something in ``options`` cannot be run here; nothing was run.
    """
    options.check(card)
    if options.trace and record is None:
        raise InputError("a trace needs what records it: record=k3lab.traces.capture.recording")
    options = replace(options, trace=of_rank(options.trace))
    recorder = record(options.trace) if options.trace and record else None
    device = discover()
    group = join(options.tp, device, rank=options.rank, transport=options.transport)
    device = group.device if group else device
    try:
        return _run(card, options, device, group, bundle, progress, recorder)
    finally:
        if group:
            group.close()


def _run(
    card: ModelCard, options: RunOptions, device: Device | None, group: Group | None, bundle: Finder | None,
    progress: Progress | None, recorder: AbstractContextManager[object] | None,
) -> RunReport:  # fmt: skip
    if options.trace and device is None:
        raise InputError("--trace records device kernels and needs an NVIDIA GPU, and none is visible here")
    if group and group.alone:
        options.check_alone(group.rank)
    if options.drafts:
        from .speculate_run import check_drafter

        check_drafter(card, options, group.rank if group and group.alone else None)
    wanted = wanted_choices(card, options, bundle, device)
    if group and options.backend != "auto":
        bundle = fitting_here(bundle, wanted, group)
        wanted = wanted_choices(card, options, bundle, device)
    choices = usable_choices(wanted, options, device)
    check_memory(
        card,
        options.tp,
        device,
        whole=options.checkpoint is None,
        requests=options.rows,
        context=options.held_context,
        verify=options.drafts + 1,
        one_rank=group is not None and group.alone,
    )
    watch_memory(device)
    say = progress or (lambda _what, _done, _of: None)
    planned = planned_launches(card, options, choices, known_gpu(options, device), bundle)
    decoded = (
        run_gpu(card, options, choices, group, say, recorder, bundle, planned)
        if group and device
        else run_cpu(card, options, say, group)
    )
    return RunReport(
        head=head_lines(options, wanted, device, group),
        rank=group.rank if group else 0,
        backend_steps=decoded.backend_steps,
        launches=decoded.launches,
        planned=planned,
        model=card.name,
        tp=options.tp,
        dcp=options.dcp,
        ranks=decoded.ranks,
        rows=options.rows,
        tokens_per_request=options.tokens,
        prompt_tokens=options.prompt,
        filled_context=options.fill,
        backend=options.backend,
        device=device.name if device else "cpu",
        dtype="bfloat16",
        operators=decoded.operators,
        weight_bytes=decoded.weight_bytes,
        peak_memory_bytes=peak_memory(device),
        tokens=decoded.eager.tokens,
        step_ns=decoded.eager.step_ns,
        graph_step_ns=decoded.graph.step_ns if decoded.graph else None,
        speculation=decoded.speculation,
        graph_agrees=decoded.graph.tokens == decoded.eager.tokens if decoded.graph else None,
        tuned=tuple(one for one in choices if isinstance(one, Tuned)),
        fallbacks=tuple(one for one in choices if isinstance(one, Fallback)),
        trace=options.trace,
        unused=unused_entries(
            card, wanted, bundle.entries, tp=options.tp, rows=options.step_rows, gpu=known_gpu(options, device)
        )
        if bundle
        else (),
    )
