"""What an entry of a bundle rests on, compared with what is here: hard fields refuse, soft ones warn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..contract import Engine
from ..device import Device
from ..errors import InputError
from .schema import EntryModel

UNKNOWN = (None, "unknown")
"""Of a field whose value is not known on one side nothing can be said."""


@dataclass(frozen=True)
class Key:
    """The fields. None is not known."""

    arch: str
    """Hard: machine code of one architecture does not run on another."""
    source_digest: str
    """Hard: another kernel."""
    compilers: Mapping[str, str]
    """Hard: other machine code."""
    gpu: str | None
    """Soft: the GPU's full name, form factor included; times differ, results do not."""
    driver: str | None
    """Soft."""


@dataclass(frozen=True)
class Difference:
    """One field that differs."""

    field: str
    there: Any
    here: Any
    hard: bool

    def __str__(self) -> str:
        return f"{self.field} was {self.there}, is {self.here}"


def key_of(entry: EntryModel) -> Key:
    """What the entry was made with."""
    gpu = (entry.environment or {}).get("gpu")
    facts: Mapping[str, Any] = gpu if isinstance(gpu, Mapping) else {}
    return Key(entry.arch, entry.source_digest, entry.compilers, facts.get("name"), facts.get("driver"))


def key_here(entry: EntryModel, engine: Engine, compilers: Mapping[str, str], device: Device | None) -> Key:
    """What the same entry would be made with here; without a GPU here nothing is said of the GPU.

    Args:
        entry: says for which architecture, where there is no GPU to ask.
        engine: the entry's engine as it is here.
        compilers: versions of its compilers as they are here.
        device: the GPU here.
    """
    name, driver = (device.name, device.driver) if device else (None, None)
    return Key(device.arch if device else entry.arch, engine.source_digest(), compilers, name, driver)


def differences(there: Key, here: Key) -> tuple[Difference, ...]:
    """The fields that differ, hard ones first."""
    found = [
        Difference("arch", there.arch, here.arch, True),
        Difference("source_digest", there.source_digest, here.source_digest, True),
    ]
    names = sorted({*there.compilers, *here.compilers})
    found += [
        Difference(f"compilers.{name}", there.compilers.get(name), here.compilers.get(name), True) for name in names
    ]
    found += [Difference("gpu", there.gpu, here.gpu, False), Difference("driver", there.driver, here.driver, False)]
    return tuple(one for one in found if one.there != one.here and one.there not in UNKNOWN and one.here not in UNKNOWN)


def refuse_hard(label: str, found: Sequence[Difference], cure: str) -> list[str]:
    """Refuse a hard difference; the lines of warning that the soft ones deserve.

    Raises:
        InputError: a hard field differs; names it with both values, and the cure.
    """
    hard = [one for one in found if one.hard]
    if hard:
        raise InputError(f"{label}: {'; '.join(map(str, hard))}: {cure}")
    return [f"{label}: {one}" for one in found]


def another_kernel(entry: EntryModel, engine: Engine) -> str | None:
    """Why the entry's machine code is of another kernel than the one here, or None.

    Its compilers are not asked for: who launches a bundle need not have any.
    """
    now = engine.source_digest()
    if entry.source_digest == now:
        return None
    return f"the bundle's entry for {entry.family} is of another source of {entry.engine} ({entry.source_digest}, here {now})"
