"""The readers of the ceiling, without a GPU: they read all, load wide, keep much in flight, spill nothing."""

from __future__ import annotations

import pytest
from k3lab.tuning import ceiling
from k3lab.tuning.ceiling import READ_BYTES, READERS, compile_reader
from k3lab.tuning.cubin import full_mnemonics, kernel_resources, sass

ONE_OF_EACH = [next(one for one in READERS if one.kind == kind) for kind in ("tiles", "bulk")]


def test_readers_have_names_of_their_own():
    assert len({reader.label for reader in READERS}) == len(READERS)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize("reader", ONE_OF_EACH, ids=lambda reader: reader.kind)
def test_a_reader_loads_wide_and_reads_nearly_all(reader, arch):
    compiled, read = compile_reader(reader, READ_BYTES // 4, arch, 132)
    assert 0.998 * READ_BYTES < read <= READ_BYTES
    (launch,) = compiled.launches
    found = kernel_resources(launch)
    assert found.spill_instructions == 0
    code = full_mnemonics(sass(launch.cubin))
    if reader.kind == "bulk":
        assert code["UBLKCP.S.G"] >= reader.depth
        assert not any(name.startswith("LDG") for name in code)
        assert launch.shared_bytes >= reader.depth * reader.words * 4
        assert launch.grid == (132 * reader.a_sm, 1, 1)
    else:
        wide = sum(count for name, count in code.items() if name.startswith("LDG.E") and ".128" in name)
        assert wide * 4 * 32 * reader.warps == reader.words * reader.depth
        assert not any(name.startswith("LDG") and ".128" not in name for name in code)


@pytest.mark.parametrize("reader", [one for one in READERS if one.kind == "bulk"], ids=lambda reader: reader.label)
def test_rings_fit_as_often_as_they_claim(reader):
    assert reader.a_sm * (reader.depth * (reader.words * 4 + 8) + 1024) <= 228 * 1024


def test_the_ceiling_is_the_best_reader(monkeypatch):
    import torch

    monkeypatch.setattr(ceiling, "time_readers", lambda **_: {"one": 4.4e12, "two": 4.6e12, "three": 4.5e12})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert ceiling.read_ceiling.__wrapped__(4096) == 4.6e12
