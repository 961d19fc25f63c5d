"""The order of machine instructions around the dependency wait: what a launch with PDL promises, read from the cubin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .cubin import sass

WAIT, RELEASE = "ACQBULK", "PREEXIT"
"""``griddepcontrol.wait`` and ``griddepcontrol.launch_dependents``."""
_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)\s*([^;]*);")
_LABEL = re.compile(r"(\.L_x_\d+):\s*$")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_MEMORY = re.compile(r"(LDG|LD|LDGMC|LDGSTS|STG|ST|ATOM|ATOMG|RED|REDG|UTMALDG|UTMASTG|UTMAREDG|UBLKCP|UBLKRED)(\.|$)")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction."""

    address: int
    """Bytes from the start of the kernel: the order of the text, which is that of execution but for branches."""
    mnemonic: str
    """In full, e.g. ``LDG.E.NA.128``."""
    operands: str
    predicated: bool
    target: int | None = None
    """Of a branch inside the kernel: the address that it goes to."""

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may come after this one; a branch may ask a predicate among its operands."""
        ends = self.mnemonic in ("EXIT", "RET") or self.mnemonic.startswith(("BRA", "RET."))
        return self.predicated or not ends or (self.mnemonic.startswith("BRA") and "," in self.operands)


def order(cubin: bytes) -> list[Instruction]:
    """The instructions of a cubin that holds one kernel, in the order of its text, without padding."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    found = []
    for line in sass(cubin).splitlines():
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif match := _LINE.match(line):
            address, predicate, mnemonic, operands = match.groups()
            labels |= dict.fromkeys(waiting, int(address, 16))
            waiting.clear()
            found.append((int(address, 16), mnemonic, operands.strip(), bool(predicate)))
    made = []
    for address, mnemonic, operands, predicated in found:
        to = _TARGET.search(operands) if mnemonic.startswith("BRA") else None
        made.append(Instruction(address, mnemonic, operands, predicated, labels[to[1]] if to else None))
    return [instruction for instruction in made if instruction.mnemonic != "NOP"]


def places(code: Sequence[Instruction], pattern: str) -> list[int]:
    """Positions in ``code`` of the instructions whose whole mnemonic matches the regular expression."""
    return [place for place, instruction in enumerate(code) if re.fullmatch(pattern, instruction.mnemonic)]


def unwaited(code: Sequence[Instruction]) -> list[int]:
    """Positions that some path from the entry reaches without a dependency wait; branches are followed both ways.

    Raises:
        ValueError: a branch whose target the text does not tell.
    """
    at = {instruction.address: place for place, instruction in enumerate(code)}
    ordered = sorted(at)
    reached: set[int] = set()
    todo = [0]
    while todo:
        place = todo.pop()
        if place in reached or place >= len(code):
            continue
        instruction = code[place]
        if instruction.mnemonic == WAIT and not instruction.predicated:
            continue
        reached.add(place)
        if re.match(r"(BRX|BRXU|JMP|JMX|JMXU)(\.|$)", instruction.mnemonic):
            raise ValueError(f"{instruction.mnemonic} at {instruction.address:#x} goes where the text does not say")
        if instruction.target is not None:  # padding in between is no part of the code
            todo.append(at[next(address for address in ordered if address >= instruction.target)])
        if instruction.falls_through:
            todo.append(place + 1)
    return sorted(reached)


def wait_fault(code: Sequence[Instruction], weights: str, *, ahead: int = 1) -> str | None:
    """What is wrong with the order around the dependency wait, or None.

    Right is: exactly one wait, by every thread, on every path to an exit; at least ``ahead`` loads of weights before
    it; before it no other load from global memory and no store to it.

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
    before = [code[place] for place in unwaited(code)]
    if len(found := places(before, weights)) < ahead:
        return f"{len(found)} loads of weights before the wait, not {ahead}"
    for instruction in before:
        if _MEMORY.match(instruction.mnemonic) and not re.fullmatch(weights, instruction.mnemonic):
            return f"{instruction.mnemonic} at {instruction.address:#x} comes before the dependency wait"
        if instruction.mnemonic == "EXIT":
            return f"a path ends at {instruction.address:#x} without the dependency wait"
    return None


def behind_fault(code: Sequence[Instruction]) -> str | None:
    """Why what comes next may begin before all that was before this kernel has ended, or None.

    Right is: no path from the entry releases the next kernel, or ends, ahead of a dependency wait. An engine whose last launch
    is so may say that it :meth:`~k3lab.kernels.Engine.releases_behind`.
    """
    for place in unwaited(code):
        if code[place].mnemonic in (RELEASE, "EXIT"):
            return f"{code[place].mnemonic} at {code[place].address:#x} may come before the dependency wait"
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
