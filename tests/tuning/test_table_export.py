"""From the studies of a table to a bundle: what goes in, what is passed over, and what is begun anew."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from pathlib import Path

import fake_family
import pytest
from k3lab.kernels import InputError
from k3lab.kernels.bundle.reader import Bundle, BundleEntry, Miss
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import table as table_module
from k3lab.tuning import tune as tune_module
from k3lab.tuning.export import export
from k3lab.tuning.table import tune_table
from table_case import ENGINES, problems, request

pytestmark = pytest.mark.usefixtures("a_gpu")


def test_a_table_becomes_a_bundle_that_serves_the_rows_between(tmp_path: Path) -> None:
    folder, out = tmp_path / "s", tmp_path / "bundle"
    table = tune_table(request(folder, 2, 8, 32))
    (folder / "notes.txt").write_text("mine")
    result = export([folder], out, family=fake_family.FAMILY, evaluator="fake_evaluator")
    assert [(entry.rows, entry.engine) for entry in result.entries] == [(2, "large"), (8, "large"), (32, "large")]
    for entry, row in zip(result.entries, table.rows, strict=True):
        assert entry.config == row.config
        assert entry.choice.value_us == pytest.approx(row.us, abs=1e-4)
        assert entry.choice.reason.endswith(f"; between engines: {row.reason}")
    assert sum("loses to large" in line for line in result.passed_over) == 3
    bundle = Bundle.load(out)
    for rows, serving in ((1, 2), (2, 2), (3, 8), (8, 8), (9, 32), (32, 32)):
        found = bundle.find(fake_family.FAMILY, fake_family.FakeProblem(1, rows), "H200")
        assert isinstance(found, BundleEntry)
        assert found.rows == serving
        compiled = found.compiled("sm_90a", fake_family.FakeProblem(1, rows))
        here = fake_family.LARGE.compile(fake_family.FakeProblem(1, serving), found.model.config, "sm_90a")
        assert [one.cubin for one in compiled.launches] == [one.cubin for one in here.launches]
    assert isinstance(bundle.find(fake_family.FAMILY, fake_family.FakeProblem(1, 33), "H200"), Miss)


def test_what_was_measured_apart_is_not_compared(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    ask = request(folder, 1)
    for engine in ENGINES:
        tune_module.tune(ask.request(problems(1)[0], engine, 30))
    with pytest.raises(InputError, match=r"were measured apart: `k3lab tune-table` compares engines in one process"):
        export([folder], tmp_path / "b", family=fake_family.FAMILY, evaluator="fake_evaluator")
    (small,) = folder.glob("fake-small-*.sqlite3")
    assert (
        export([small], tmp_path / "one", family=fake_family.FAMILY, evaluator="fake_evaluator").entries[0].engine
        == "small"
    )
    assert tune_table(ask).new_trials == 0  # the studies are taken as they are
    (entry,) = export([folder], tmp_path / "b", family=fake_family.FAMILY, evaluator="fake_evaluator").entries
    assert entry.engine == "large"
    tune_module.tune(ask.request(problems(1)[0], fake_family.LARGE, 33))  # trials that the contest has not seen
    with pytest.raises(InputError, match="measured apart"):
        export([folder], tmp_path / "c", family=fake_family.FAMILY, evaluator="fake_evaluator")


def test_studies_in_part_are_passed_over_and_other_files_are_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "s"
    tune_table(request(folder, 1))
    with monkeypatch.context() as patch:
        patch.setattr(table_module, "hold", lambda *_: (_ for _ in ()).throw(InputError("the power went out")))
        assert tune_table(request(folder, 8)).missing == ("tp1-rows8: the power went out",)
    tune_module.tune(dataclasses.replace(
        request(folder, 1).request(problems(1)[0], fake_family.SMALL, 3), study=folder / "held.sqlite3", fixed={"tile": 8}
    ))  # fmt: skip
    result = export([folder], tmp_path / "b", family=fake_family.FAMILY, evaluator="fake_evaluator")
    assert [entry.rows for entry in result.entries] == [1]
    assert sum("stopped before its finals" in line for line in result.passed_over) == 2
    assert any("held.sqlite3: holds tile" in line for line in result.passed_over)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no study"):
        export([tmp_path / "empty"], tmp_path / "c", family=fake_family.FAMILY)


def test_changed_kernels_begin_anew_only_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s"
    ask = request(folder, 1, engines=(fake_family.SMALL,), objective="predicted", gpu=gpu_card("gb300"))
    tune_table(ask)
    (path,) = folder.glob("*.sqlite3")
    with sqlite3.connect(path) as connection:
        text = connection.execute("SELECT value_json FROM study_user_attributes WHERE key='k3lab:identity'").fetchone()[
            0
        ]
        other = json.dumps({**json.loads(text), "source_digest": "f" * 16})
        connection.execute("UPDATE study_user_attributes SET value_json=? WHERE key='k3lab:identity'", (other,))
    with pytest.raises(InputError, match="another source_digest"):
        tune_table(ask)
    assert tune_table(dataclasses.replace(ask, fresh=True)).new_trials == 14
    assert len(list(folder.glob("*-old1.sqlite3"))) == 1
    assert tune_table(dataclasses.replace(ask, fresh=True)).new_trials == 0
