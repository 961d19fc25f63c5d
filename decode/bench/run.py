"""A bench of batches, start to end: what is asked is checked, both backends run, and each gets its report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels import InputError, ModelCard
from ...kernels.device import Device, discover
from ...kernels.whole_file import write_whole
from ..choices import Finder
from ..fitting import fitting_here
from ..group import Group, join
from ..memory import check_memory, peak_memory, watch_memory
from ..plan import AUTO_NOTE
from ..run_options import RunOptions
from ..run_places import known_gpu
from ..traffic.both import Turns
from .measures import absent, measures
from .presets import Preset
from .reports import Folder, asked, between, bundled, conditions, drafting, evidence, named

if TYPE_CHECKING:
    from .places import Say

BOTH = ("auto", "latency_specialized")
MAX_ROUNDS, MIN_SAMPLES, MAX_SAMPLES = 10_000, 4, 10_000


def names_of(backend: str) -> tuple[str, ...]:
    """Backends of ``auto``, ``latency_specialized`` or ``both``.

    Raises:
        InputError: another word.
    """
    if backend not in (*BOTH, "both"):
        raise InputError(f"unknown backend {backend!r}; backends: {', '.join(BOTH)}, both")
    return BOTH if backend == "both" else (backend,)


def check_bundle(bundle: Finder | None, names: Sequence[str]) -> None:
    """Raise InputError for a bundle that no backend of ``names`` would use."""
    if bundle is not None and "latency_specialized" not in names:
        raise InputError("backend auto uses no bundle; --backend latency_specialized or both does")


def run_bench(
    card: ModelCard, options: RunOptions, *, names: Sequence[str] = BOTH, rounds: int = 1, samples: int = 30,
    bundle: Finder | None = None, preset: Preset | None = None, out: Path | None = None,
    environment: Mapping[str, Any] | None = None, say: Say | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run batches on each of the named backends.

    Args:
        card: the model.
        options: of the batch; its backend is not looked at.
        names: backends, in their order.
        rounds: batches, one after the other.
        samples: of each graph of layers, on a GPU.
        bundle: of the tuned path.
        preset: whose published figures stand beside ours.
        out: folder for requests as they end and a report a backend.
        environment: GPU, driver, versions, commit.
        say: is told how far it is.

    Returns:
        Reports by backend, what may be said between them, the preset, and this process' rank.

    Raises:
        InputError: what cannot be run here; nothing was run.
    """
    options = replace(options, backend="latency_specialized" if "latency_specialized" in names else "auto")
    options.check(card)
    if not 1 <= rounds <= MAX_ROUNDS or not MIN_SAMPLES <= samples <= MAX_SAMPLES:
        raise InputError(
            f"rounds {rounds}, samples {samples}: 1 to {MAX_ROUNDS} rounds, {MIN_SAMPLES} to {MAX_SAMPLES} samples"
        )
    if options.tokens < 2:
        raise InputError(f"tokens is {options.tokens}; a bench decodes 2 or more: the first comes out of the prompt")
    device = discover()
    group = join(options.tp, device, rank=options.rank, transport=options.transport)
    try:
        return _bench(card, options, names, rounds, samples, bundle, preset, out, environment, say, device, group)
    finally:
        if group:
            group.close()


def _bench(
    card: ModelCard, options: RunOptions, names: Sequence[str], rounds: int, samples: int, bundle: Finder | None,
    preset: Preset | None, out: Path | None, environment: Mapping[str, Any] | None, say: Say | None, device: Device | None,
    group: Group | None,
) -> dict[str, Any]:  # fmt: skip
    from ..run import head_lines, planned_launches, usable_choices, wanted_choices
    from .places import Wanted, run_here

    device = group.device if group else device
    if group and group.alone:
        options.check_alone(group.rank)
    if options.drafts:
        from ..speculate_run import check_drafter

        check_drafter(card, options, group.rank if group and group.alone else None)
    check_bundle(bundle, names)
    wanted = wanted_choices(card, options, bundle, device, command="bench")
    if group and "latency_specialized" in names:
        bundle = fitting_here(bundle, wanted, group)
        wanted = wanted_choices(card, options, bundle, device, command="bench")
    choices = usable_choices(wanted, options, device)
    check_memory(
        card, options.tp, device, whole=options.checkpoint is None, requests=options.rows, context=options.held_context,
        verify=options.drafts + 1, one_rank=group is not None and group.alone,
    )  # fmt: skip
    first = group is None or group.rank == 0 or group.alone
    folder = Folder(out if first else None, names, "requests")
    files = {name: Turns(folder.kept(name) if folder.path else None) for name in names}
    watch_memory(device)
    planned = planned_launches(card, options, choices, known_gpu(options, device), bundle)
    ran = run_here(
        Wanted(
            card, options, tuple(names), rounds, samples, lambda name, one: files[name].add(one),
            say or (lambda _what, _done, _of: None),
        ),
        group, bundle, choices, planned,
    )  # fmt: skip
    notes = list(
        dict.fromkeys([*([AUTO_NOTE] if "auto" in names else []), *head_lines(options, wanted, device, group)])
    )
    alike = conditions(
        card, options, gpu=device.name if device else "cpu", gpus=group.size if group and group.host else 1,
        transport=transport_of(options, group), workload=asked(options, rounds),
    ).to_json()  # fmt: skip
    point = named(preset, card, options)
    reports = {
        name: {
            "conditions": alike, "backend": name, "evidence": evidence(alike), "operators": one["operators"], "ranks": group.words if group else f"{options.tp} ranks as threads",
            "notes": notes, "measures": measures(one["seen"], one["layers"]),
            "absent": absent(one["seen"], one["layers"], drafts=options.drafts), "dspark": drafting(card, options),
            "bundle": bundled(bundle, choices) if name != "auto" else None, "environment": environment, "preset": point,
            "seen": {**one["seen"], "each": one["each"]}, "steps": one["steps"], "launches": one["launches"], "layers": one["layers"],
            "weight_bytes": one["weight_bytes"], "peak_memory_bytes": peak_memory(device),
        }
        for name, one in ran.items()
    }  # fmt: skip
    unwritten = write_reports(folder.path, reports)
    return {
        "reports": reports, "between": between(reports), "notes": notes, "rank": group.rank if group else 0,
        "preset": point, "unwritten": unwritten,
    }  # fmt: skip


def transport_of(options: RunOptions, group: Group | None) -> str:
    """What carried the ranks' messages, for the conditions."""
    if options.tp == 1:
        return "none"
    if group is None:
        return "threads"
    if group.alone:
        return "loopback"
    return options.transport or ("symmetric" if group.device else "gloo")


def write_reports(folder: Path | None, reports: Mapping[str, Mapping[str, Any]]) -> str | None:
    """A file a backend; why one could not be written, for who has shown them: what was measured is not lost with a disk."""
    if folder is None:
        return None
    for name, report in reports.items():
        path = folder / f"{name}.json"
        try:
            write_whole(path, json.dumps(report, indent=1) + "\n")
        except OSError as error:
            return f"cannot write {path} ({error.strerror}); what was measured is above"
    return None
