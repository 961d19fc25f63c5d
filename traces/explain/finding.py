"""What an explanation is, and the words that name a kernel in it."""

from __future__ import annotations

from dataclasses import dataclass

from ..families import Names
from ..names import short_name

NOTABLE_NS = 1000
"""Differences and gaps up to a microsecond are not told."""


@dataclass(frozen=True)
class Finding:
    """One observation.

    ``kind``: kernel, share, gap, idle, between, graphs, extra, missing, fallback, overlap, side, ahead, pdl, parts,
    profiler, abstained. ``layer``: its number, or None. ``cost_ns``: what it costs a step; None where nothing
    measures that, which is not the same as 0. ``cause``: the plain word for why (host-bound, copy, ...), empty
    where the kind says it.
    """

    kind: str
    layer: int | None
    text: str
    cost_ns: int | None = None
    cause: str = ""


def by_cost(finding: Finding) -> tuple[bool, int]:
    """Sorts the costliest first, and what has no measured cost last."""
    return (finding.cost_ns is None, -(finding.cost_ns or 0))


def one_line(text: str) -> str:
    """The text without what is not printable: names of kernels and ranges may hold anything."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else " " for sign in text)


def kernel_label(name: str, names: Names) -> str:
    """Short name, with the family where it is known."""
    family = names.family(name)
    return f"{short_name(name)} [{family}]" if family else short_name(name)
