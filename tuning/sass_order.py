"""The order of machine instructions around the dependency wait: what a launch with PDL promises, read from the cubin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .cubin import sass

WAIT, RELEASE = "ACQBULK", "PREEXIT"
"""``griddepcontrol.wait`` and ``griddepcontrol.launch_dependents``."""
_LINE = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)\s*([^;]*);", re.MULTILINE
)


@dataclass(frozen=True)
class Instruction:
    """One machine instruction."""

    address: int
    """Bytes from the start of the kernel: the order of the text, which is that of execution but for branches."""
    mnemonic: str
    """In full, e.g. ``LDG.E.NA.128``."""
    operands: str
    predicated: bool


def order(cubin: bytes) -> list[Instruction]:
    """The instructions of a cubin that holds one kernel, in the order of its text, without padding."""
    found = [
        Instruction(int(address, 16), mnemonic, operands.strip(), bool(predicate))
        for address, predicate, mnemonic, operands in _LINE.findall(sass(cubin))
    ]
    return [instruction for instruction in found if instruction.mnemonic != "NOP"]


def places(code: Sequence[Instruction], pattern: str) -> list[int]:
    """Positions in ``code`` of the instructions whose whole mnemonic matches the regular expression."""
    return [place for place, instruction in enumerate(code) if re.fullmatch(pattern, instruction.mnemonic)]


def wait_fault(code: Sequence[Instruction], weights: str, *, ahead: int = 1) -> str | None:
    """What is wrong with the order around the dependency wait, or None.

    Right is: exactly one wait, by every thread; at least ``ahead`` loads of weights before it; before it no other
    load from global memory and no store to it.

    Args:
        code: see :func:`order`.
        weights: regular expression of the mnemonics that load weights and nothing else.
        ahead: loads of weights before the wait.
    """
    waits = places(code, WAIT)
    if len(waits) != 1:
        return f"{len(waits)} dependency waits"
    (wait,) = waits
    if code[wait].predicated:
        return "the dependency wait is predicated: not every thread waits"
    before = code[:wait]
    if len(found := places(before, weights)) < ahead:
        return f"{len(found)} loads of weights before the wait, not {ahead}"
    for instruction in before:
        memory = re.match(r"(LDG|LD|LDGSTS|STG|ST|ATOMG?|REDG?|UTMALDG|UTMASTG|UBLKCP)\b", instruction.mnemonic)
        if memory and not re.fullmatch(weights, instruction.mnemonic):
            return f"{instruction.mnemonic} at {instruction.address:#x} comes before the dependency wait"
    return None


def release_fault(code: Sequence[Instruction], weights: str, release: str) -> str | None:
    """What is wrong with where the next kernel may start, or None.

    Args:
        code: see :func:`order`.
        weights: as in :func:`wait_fault`.
        release: ``entry`` (before any load), ``loads`` (after the last load of weights, before the result is
            stored) or ``end`` (nowhere: at exit).
    """
    at = places(code, RELEASE)
    if release == "end":
        return f"{len(at)} releases in a kernel that releases at exit" if at else None
    if len(at) != 1:
        return f"{len(at)} releases, not one"
    loads = places(code, weights)
    if not loads:
        return "no loads of weights"
    if release == "entry" and at[0] > loads[0]:
        return "the release comes after a load of weights"
    stores = places(code, r"STG\..*|UTMASTG.*|REDG.*")
    if release == "loads" and not (loads[-1] < at[0] and (not stores or at[0] < stores[0])):
        return "the release does not lie between the last load of weights and the first store"
    return None
