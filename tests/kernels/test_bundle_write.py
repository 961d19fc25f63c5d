"""Writing a bundle: the same bytes for the same entries, as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from k3lab.kernels import InputError
from k3lab.kernels.bundle.reader import Bundle
from k3lab.kernels.bundle.writer import write_bundle

from .bundle_case import Written, entry


def test_the_same_entries_give_the_same_bytes_in_any_order(written: Written) -> None:
    one, two = written(entry(4), entry(8), name="one"), written(entry(8), entry(4), name="two")
    assert (one / "bundle.json").read_bytes() == (two / "bundle.json").read_bytes()


def test_a_bundle_is_replaced_only_by_force_and_as_a_whole(written: Written, tmp_path: Path) -> None:
    path = written(entry(4))
    before = (path / "bundle.json").read_bytes()
    with pytest.raises(InputError, match="replace it with --force"):
        written(entry(8))
    with pytest.raises(InputError, match="two entries for"):
        written(entry(8), entry(8), force=True)
    with pytest.raises(InputError, match="at least one entry"):
        written(force=True)
    assert (path / "bundle.json").read_bytes() == before
    written(entry(8), force=True)
    assert [one.rows for one in Bundle.load(path).entries] == [8]
    assert [file.name for file in tmp_path.iterdir()] == ["bundle"]


def test_what_is_no_bundle_is_never_replaced(written: Written, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file"):
        with pytest.raises(InputError):
            written(entry(), name=name, force=True)
    with pytest.raises(InputError, match="cannot be written"):
        write_bundle("/proc/none/bundle", [entry()[0]], entry()[1])
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    Bundle.load(written(entry(), name="empty"))


def test_a_failed_write_leaves_the_old_bundle(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(entry(4))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot be written \(No space"):
        written(entry(8), force=True)
    assert [one.rows for one in Bundle.load(path).entries] == [4]
    assert [file.name for file in tmp_path.iterdir()] == ["bundle"]
