"""Families under the roofs of GPUs: what bytes and what arithmetic allow, and where a time is known, what was reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..kernels import Family, InputError, Problem
from ..kernels.gpu_cards import GpuCard
from .shown import Shown

if TYPE_CHECKING:
    from ..kernels import Traffic


def roof(gpu: GpuCard) -> dict[str, Any]:
    """Both roofs of a GPU: read bandwidth, bytes/s, and nominal dense BF16 arithmetic, operations/s."""
    return {
        "gpu": gpu.name,
        "bandwidth": gpu.read_bandwidth,
        "source": gpu.read_bandwidth_source,
        "flops": gpu.tensor_flops,
    }


def limits_us(traffic: Traffic, gpu: GpuCard) -> tuple[float, float]:
    """Microseconds that reading the bytes and that the arithmetic take at least."""
    return traffic.bytes / gpu.read_bandwidth * 1e6, traffic.flops / gpu.tensor_flops * 1e6


def point(name: str, gpu: str, traffic: Traffic, time_us: float, evidence: str) -> dict[str, Any]:
    """A problem in the roofline: operations a byte and operations a second at a time of it."""
    return {
        "name": name, "gpu": gpu, "intensity": traffic.flops / traffic.bytes, "flops": traffic.flops / time_us * 1e6,
        "evidence": evidence,
    }  # fmt: skip


def points(known: Iterable[Mapping[str, Any]], owner: Family) -> list[dict[str, Any]]:
    """Points of times that a study or a table knows: mappings with ``problem``, ``gpu``, ``us`` and ``evidence``."""
    found = []
    for item in known:
        problem = owner.problem_from_json(item["problem"])
        found.append(
            point(f"{owner.name} {problem.label}", item["gpu"], owner.traffic(problem), item["us"], item["evidence"])
        )
    return found


def shown_roofline(
    owner: Family,
    problem: Problem,
    gpu: GpuCard,
    sizes: Sequence[int],
    row_counts: Sequence[int],
    made: Mapping[str, Any],
) -> Shown:
    """A family's problems under the roofs of one GPU, and the byte floor of one on all.

    Args:
        owner: the family.
        problem: the one that the floors are of.
        gpu: whose roofs.
        sizes: TP sizes.
        row_counts: rows of a step.
        made: ``card`` and ``kind`` of the problems.
    """
    from .figures import floor_figure
    from .lab_figures import roofline_figure
    from .study_data import floors

    placed, skipped = [], []
    for tp in sizes:
        for count in row_counts:
            try:
                one = owner.problem(made["card"], tp=tp, rows=count, kind=made["kind"])
            except InputError as error:
                skipped.append(str(error))
                continue
            traffic = owner.traffic(one)
            by_bytes, by_flops = limits_us(traffic, gpu)
            found = point(f"{owner.name} {one.label}", gpu.name, traffic, max(by_bytes, by_flops), "floor")
            placed.append({**found, "tp": tp, "rows": count, "bytes_us": by_bytes, "flops_us": by_flops})
    if not placed:
        raise InputError(f"no problem of {owner.name} fits: {skipped[-1]}")
    here_bytes, here_flops = limits_us(owner.traffic(problem), gpu)
    held = "bytes" if here_bytes >= here_flops else "arithmetic"
    ridge = gpu.tensor_flops / gpu.read_bandwidth
    rows_told = [
        (item["name"].split(" ", 1)[1], f"{item['intensity']:.1f} operations a byte; bytes {item['bytes_us']:.2f} us, arithmetic {item['flops_us']:.2f} us")
        for item in placed
    ]  # fmt: skip
    rows = [
        ("held by", f"{held}: bytes {here_bytes:.2f} us, arithmetic {here_flops:.2f} us on {gpu.name}"),
        ("ridge", f"{ridge:.0f} operations a byte ({gpu.read_bandwidth_source} bandwidth, nominal dense BF16)"),
        *rows_told,
    ]
    title = f"roofline of {owner.name} on {gpu.name}: floors"
    data: dict[str, Any] = {"roof": roof(gpu), "points": placed, "floors": floors(owner, problem, sizes, made["card"])}
    figures = {
        "roofline": lambda: roofline_figure(title, [data["roof"]], placed),
        "floors": lambda: floor_figure(owner.name, problem, data["floors"]),
    }
    return Shown(title, data, rows, figures)
