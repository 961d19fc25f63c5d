"""Kernel names as a reader wants them: without template arguments, parameters and mangling."""

from __future__ import annotations

import re
from functools import lru_cache

_ANGLES = re.compile(r"<[^<>]*>")
_ROUND = re.compile(r"\([^()]*\)")
_DEEPEST = 60  # brackets in brackets; real templates nest some tens, and each level is a pass over the name
_LENGTH = re.compile(r"\d+")


def _demangled(name: str) -> str | None:
    """The qualified name at the head of an Itanium-mangled name; None where it is not one."""
    position = 3 if name.startswith("_ZN") else 2
    nested, parts = name.startswith("_ZN"), []
    while (found := _LENGTH.match(name, position)) and len(found[0]) < 5:
        start = found.end()
        position = start + int(found[0])
        parts.append(name[start:position])
        if not nested:
            break
    return "::".join(parts) if parts and all(parts) else None


@lru_cache(maxsize=20000)
def base_name(name: str) -> str:
    """The name without template arguments, parameters, return type and mangling; the name itself if nothing is left."""
    if name.startswith("_Z"):
        return _demangled(name) or name
    bare = name.replace("(anonymous namespace)::", "").replace("->", " ")
    for pattern in (_ANGLES, _ROUND):
        for _ in range(_DEEPEST):
            if (shorter := pattern.sub("", bare)) == bare:
                break
            bare = shorter
    words = bare.split()
    return words[-1] if words and words[-1].strip("<>():&*") else name


def short_name(name: str, width: int = 48) -> str:
    """The base name cut to a width, for tables and findings."""
    base = base_name(name)
    return base if len(base) <= width else base[: width - 3] + "..."
