"""Where a kernel lets the next one start: read from machine code, and who says that it does so behind its wait."""

from __future__ import annotations

import pytest
from k3lab.decode.choices import STEP_FAMILIES
from k3lab.kernels import Engine, family
from k3lab.tuning.sass_order import Instruction, behind_fault


def code(*words: str) -> list[Instruction]:
    """``@X`` is predicated, ``BRA n`` goes to instruction n where its predicate holds."""
    made = []
    for place, word in enumerate(words):
        name, _, to = word.removeprefix("@").partition(" ")
        made.append(Instruction(16 * place, name, "", word.startswith("@") or bool(to), 16 * int(to) if to else None))
    return made


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("LDG", "ACQBULK", "PREEXIT", "EXIT"), None),
        (("PREEXIT", "ACQBULK", "EXIT"), "PREEXIT at 0x0"),
        (("BRA 3", "ACQBULK", "PREEXIT", "ACQBULK", "EXIT"), None),  # two roles, each behind its own
        (("BRA 2", "ACQBULK", "PREEXIT", "EXIT"), "PREEXIT at 0x20"),  # one of them passes by
        (("@ACQBULK", "PREEXIT", "EXIT"), "PREEXIT at 0x10"),  # not by every thread
        (("@EXIT", "ACQBULK", "PREEXIT", "EXIT"), "EXIT at 0x0"),  # a block that has no work is over
    ],
)
def test_a_release_is_behind_the_wait_on_every_path(words: tuple[str, ...], fault: str | None) -> None:
    found = behind_fault(code(*words))
    assert found is None if fault is None else found is not None and found.startswith(fault)


def test_whoever_says_that_it_releases_behind_its_wait_has_a_test_of_its_machine_code() -> None:
    """What follows reads early on their word: a new name here needs :func:`behind_fault` in its test."""
    saying = {
        (name, engine.name)
        for name in STEP_FAMILIES
        for engine in family(name).engines
        if type(engine).releases_behind is not Engine.releases_behind
    }
    assert saying == {
        ("kda", "cute"), ("kda", "triton"), ("mla", "cute_mma"), ("mla", "triton"), ("router", "cute_fused"),
    }  # fmt: skip
