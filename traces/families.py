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
    """The family of a kernel: by its whole name in the plan, by its own name, by the longest part in the plan, or None."""
    if plan and kernel in plan:
        return plan[kernel]
    found = _OURS.search(kernel)
    if found is not None:
        words = found[1] or found[2]
        known = [name for name in FAMILIES if words == name or words.startswith(name + "_")]
        return max(known, key=len) if known else words.split("_")[0]
    parts = [name for name in plan or () if name and name in kernel]
    return plan[max(parts, key=lambda name: (len(name), name))] if plan and parts else None


def layer_kind(names: Iterable[str]) -> str | None:
    """``mla`` or ``kda`` where kernel names say so (an MLA kernel decides), else None."""
    names = list(names)
    if any(_MLA.search(name) for name in names):
        return "mla"
    if any(_KDA.search(name) for name in names):
        return "kda"
    return None


def read_plan(plan: str | Path | Mapping[str, Any] | list[Any]) -> dict[str, str]:
    """A plan as {kernel name: family}.

    Args:
        plan: such a mapping; or any JSON data (or the path of a file) that somewhere holds objects with ``kernel``
            (or ``name``) and ``family``, like what ``k3lab decode plan --json`` prints.

    Raises:
        TraceError: unreadable, or nothing of that kind in it.
    """
    wrong = "a plan is a JSON object {kernel name: family}, or what k3lab decode plan --json prints"
    if isinstance(plan, (str, Path)):
        try:
            plan = json.loads(Path(plan).read_text(encoding="utf-8"))
        except OSError as error:
            raise TraceError(f"{plan}: cannot be read ({error.strerror or error}); {wrong}") from None
        except (ValueError, RecursionError):
            raise TraceError(f"{plan}: not JSON; {wrong}") from None
    if isinstance(plan, Mapping) and plan and all(isinstance(value, str) for value in plan.values()):
        return dict(plan)
    found: dict[str, str] = {}
    pending: list[Any] = [plan]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, Mapping):
            pending.extend(item.values())
            name, family = item.get("kernel") or item.get("name"), item.get("family")
            if isinstance(name, str) and name and isinstance(family, str):
                found[name] = family
    if not found:
        raise TraceError(wrong)
    return found
