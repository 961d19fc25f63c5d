"""A build with stamps, run on the CPU by :mod:`ptx_machine`: each warp's stages are there, in the order of the launch."""

from __future__ import annotations

import numpy as np
import pytest
from k3lab.kernels.stamps import BLOCKS, BYTES, STAGES, TABLE_BYTES, WARPS
from k3lab.tuning.stages import roles_of, stamps_of

from .test_output_projection_machine import AT_ONCE, Case

TABLE = 11 << 20
"""Where in the machine's memory the stamps go: beyond all that a case has there."""


def test_the_producers_warps_stamp_their_stages_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, stamps=TABLE)
    assert max(at for at, _, _ in case.memory.places.values()) < TABLE - (1 << 20)
    case.memory.data[TABLE : TABLE + TABLE_BYTES] = 0
    case.run(0, AT_ONCE, tick=7)
    stamps = (
        case.memory.data[TABLE : TABLE + TABLE_BYTES].view(np.int64).reshape(len(STAGES), BLOCKS, WARPS, BYTES // 8)
    )
    assert not stamps[:, 128:].any()
    (role,) = roles_of(stamps_of(stamps)[0][None])
    assert [one.stage for one in role.stages] == ["begin", "woken", "asked", "product", "told"]
    assert (role.warps, role.blocks) == (128 * 8, 128)


def test_what_runs_stamps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number that says which build it is stands in no kernel that asks for none."""
    stamped, plain = Case(monkeypatch, stamps=TABLE), Case(monkeypatch)
    assert "%clock64" in stamped.texts[0]
    assert not any("%clock64" in text for text in plain.texts)
