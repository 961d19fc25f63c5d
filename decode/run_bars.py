"""The bars of :mod:`k3lab.decode.bars` on the GPU here: one rank alone, both backends, random weights, uniform routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..kernels import InputError, ModelCard
from ..kernels.device import Device
from .bars import BARS_TP, KINDS, depths, ratio_faults, verdicts
from .choices import Choice, Fallback, Finder, Tuned, choose
from .fitting import fitting_here
from .group import NO_LINK, NO_NUMBERS, join
from .kernel_times import by_profiler, family_floors, made_of
from .memory import check_memory, peak_memory, watch_memory
from .plan import TUNED_FAMILIES, plan
from .run_options import check_context, check_seed
from .scope import digest
from .sharding import check_dcp, check_holds, check_rank

if TYPE_CHECKING:
    from .measure_bars import Load

Say = Callable[[str, int, int], None]
"""Called with (what, done, of)."""


def check_bars(card: ModelCard, loads: Sequence[Load], *, tp: int, rank: int, seed: int) -> None:
    """Raise InputError for what cannot be measured on any GPU."""
    check_rank(card, tp, rank)
    for load in loads:
        check_dcp(load.dcp, tp)
        check_holds(rank, load.dcp, load.context, "--context makes it longer")
    check_seed(seed)
    for load in loads:
        check_context(card, load.context + load.q_len)
    for kind in KINDS:
        depths(card, kind)


def run_bars(
    card: ModelCard, device: Device, bundle: Finder | None, loads: Sequence[Load], *, tp: int = 16, rank: int = 0, seed: int = 0,
    samples: int = 30, say: Say | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure; the table, verdicts and what must be known of them, as data.

    Raises:
        InputError: it does not fit here, no GPU card, or a group under torchrun.
    """
    import torch

    from .auto import AutoOperators
    from .context_parallel import context_group
    from .expert_memory import release
    from .lone import lone_peers
    from .measure_bars import measure
    from .operators import Operators
    from .random_weights import random_rank_weights
    from .tuned import KernelPool, TunedOperators
    from .weights import MoeMlp

    check_bars(card, loads, tp=tp, rank=rank, seed=seed)
    gpu, tell = device.need_card(), say or (lambda _what, _done, _of: None)
    group = join(tp, device, rank=rank, transport="loopback")
    if group is None or group.host is not None:
        raise InputError("the bars are one rank's alone")
    for load in loads:
        check_memory(card, tp, device, requests=load.requests, context=-(-load.context // load.dcp), verify=load.q_len)
    watch_memory(device)
    where: dict[str, Any] = {"dtype": torch.bfloat16, "device": f"cuda:{device.index}"}

    def chosen_from(bundle: Finder | None) -> dict[Load, tuple[Choice, ...]]:
        return {
            load: choose(
                card, tp=tp, rows=load.rows, gpu=gpu.name, bundle=bundle, only=TUNED_FAMILIES, objective="measured",
                form=load.form,
            )
            for load in loads
        }  # fmt: skip

    every = [one for own in chosen_from(bundle).values() for one in own]
    bundle = fitting_here(bundle, every, group)
    chosen = chosen_from(bundle)
    weights = random_rank_weights(
        card, seed=seed, tp=tp, rank=rank, progress=lambda done, of: tell("weights", done, of), **where
    )
    pool: KernelPool = {}

    def peers(load: Load) -> Any:
        return lone_peers(card, tp=tp, rows=load.rows, device=where["device"], seed=seed)

    def auto(load: Load) -> Operators:
        for layer in weights.layers:
            if isinstance(layer.mlp, MoeMlp):
                release(layer.mlp)
        return AutoOperators(card, peers=peers(load), context_group=context_group(group.comm, load.dcp), **where)

    def tuned(load: Load) -> Operators:
        shared = context_group(group.comm, load.dcp)
        made = TunedOperators(card, chosen[load], peers=peers(load), pool=pool, context_group=shared, **where)
        made.take(weights)
        return made

    found = measure(
        weights,
        group.comm,
        loads,
        {"auto": auto, "latency_specialized": tuned},
        gpu,
        samples=samples,
        say=tell,
        seed=seed,
        tracer=by_profiler,
    )
    for one, load in zip(found["rows"], loads, strict=True):
        for own in one["backends"].values():
            for kind, layer in own["layers"].items():
                floors = family_floors(chosen[load], kind, load.rows, gpu)
                layer["made_of"] = made_of(layer.get("kernel_times", ()), floors)
    made = verdicts(found, card)
    for one, load in zip(found["rows"], loads, strict=True):
        planned = plan(
            card, tp=tp, rows=load.rows, backend="latency_specialized", bundle=bundle, gpu=gpu.name, objective="measured",
            form=load.form,
        )  # fmt: skip
        one["planned_tuned_launches"] = sum(planned.tuned_kernels().values())
        one["tuned"] = [
            {
                "family": own.family,
                "kind": own.kind,
                "engine": own.engine,
                "evidence": own.evidence,
                "config": own.config,
            }
            for own in chosen[load]
            if isinstance(own, Tuned)
        ]
        one["fallbacks"] = [own.to_json() for own in chosen[load] if isinstance(own, Fallback)]
    return {
        **found,
        "notes": [
            f"rank {rank} of {tp} alone over loopback; {NO_LINK}",
            *[f"each context lies over all {tp} ranks (DCP): this one holds a part" for one in loads[:1] if one.dcp > 1],
            f"random weights (seed {seed}), uniform routing",
            "a layer's time is the slope between graphs of few and of many such layers, untraced",
            "a kernel's time is from the end of the one before it to its own, in profiled replays",
            NO_NUMBERS,
            *([] if made else [f"no bar speaks of this: they are K3's at TP{BARS_TP}, contexts whole, 1 and 8 rows"]),
            *[
                f"{one['rows']} rows, {name}: no kernel's time is known: {own['not_traced']}"
                for one in found["rows"] for name, own in one["backends"].items() if own.get("not_traced")
            ],
        ],
        "bundle": digest(bundle), "peak_memory_bytes": peak_memory(device), "weight_bytes": weights.bytes,
        "verdicts": [one.to_json() for one in made],
        "faults": [
            *[f"{one.bar.what}: {one.got:.1f} {one.bar.unit}, at most {one.bar.close:g}" for one in made if one.word == "missed"],
            *ratio_faults(found),
            *[
                f"{one['rows']} rows, {name}: {own['routing_fault']}"
                for one in found["rows"] for name, own in one["backends"].items() if own["routing_fault"]
            ],
        ],
    }  # fmt: skip
