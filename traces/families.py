"""Which kernel family a kernel of a trace belongs to, and which kind of layer a sequence of kernels is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import TraceError

FAMILIES = (
    "attention_projection", "output_projection", "router", "experts", "kda", "mla", "moe_tail", "attn_res", "lm_head",
)  # fmt: skip
"""Families whose names hold underscores must be known to cut ``k3_<family>_<engine>_<role>``."""

_OURS = re.compile(r"(?<![A-Za-z0-9])k3_([a-z0-9]+(?:_[a-z0-9]+)*)|_k3_([a-z0-9]+(?:_[a-z0-9]+)*)")
_MLA = re.compile(r"(?<![a-z])(?:flash)?mla(?![a-z])", re.IGNORECASE)
_KDA = re.compile(r"(?<![a-z])kda(?![a-z])", re.IGNORECASE)

Plan = Mapping[str, str]
"""Kernel name (or a part of it) to family."""


def family_of(kernel: str, plan: Plan | None = None) -> str | None:
    """The family of a kernel: from the plan (whole name, else the longest part), else from its name, else None."""
    if plan:
        if kernel in plan:
            return plan[kernel]
        parts = [name for name in plan if name and name in kernel]
        if parts:
            return plan[max(parts, key=lambda name: (len(name), name))]
    found = _OURS.search(kernel)
    if found is None:
        return None
    words = found[1] or found[2]
    known = [name for name in FAMILIES if words == name or words.startswith(name + "_")]
    return max(known, key=len) if known else words.split("_")[0]


def layer_kind(names: Iterable[str]) -> str | None:
    """``mla`` or ``kda`` where kernel names say so (an MLA kernel decides), else None."""
    names = list(names)
    if any(_MLA.search(name) for name in names):
        return "mla"
    if any(_KDA.search(name) for name in names):
        return "kda"
    return None


def read_plan(plan: str | Path | Mapping[str, Any] | list[Any]) -> dict[str, str]:
    """A plan as {kernel name: family}: such a mapping, a list of {kernel, family}, an object with such a list, a file.

    Raises:
        TraceError: unreadable, or of another form.
    """
    wrong = "a plan is a JSON object {kernel name: family} or a list of objects with 'kernel' and 'family'"
    if isinstance(plan, (str, Path)):
        try:
            plan = json.loads(Path(plan).read_text(encoding="utf-8"))
        except OSError as error:
            raise TraceError(f"{plan}: cannot be read ({error.strerror or error}); {wrong}") from None
        except (ValueError, RecursionError):
            raise TraceError(f"{plan}: not JSON; {wrong}") from None
    if isinstance(plan, Mapping):
        lists = [value for value in plan.values() if isinstance(value, list)]
        if not lists and all(isinstance(value, str) for value in plan.values()):
            return dict(plan)
        plan = [item for value in lists for item in value]
    if not isinstance(plan, list):
        raise TraceError(wrong)
    found: dict[str, str] = {}
    for item in plan:
        if isinstance(item, Mapping):
            name, family = item.get("kernel") or item.get("name"), item.get("family")
            if isinstance(name, str) and name and isinstance(family, str):
                found[name] = family
    if not found:
        raise TraceError(wrong)
    return found
