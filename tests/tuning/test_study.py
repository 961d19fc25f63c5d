"""The study file: where it may lie, what it must be, who may write it, and what survives a dead process."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import sqlite3
import time
from pathlib import Path

import fake_family
import pytest
import sqlalchemy.event
from k3lab.kernels import InputError
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import storage
from k3lab.tuning.identity import StudyIdentity, default_path
from k3lab.tuning.outcome import Outcome, Status, failure
from k3lab.tuning.study import TuningStudy

PROBLEM = fake_family.FakeProblem(tp=1, rows=8)
SPACE = fake_family.SMALL.space(PROBLEM, None)


def identity(**changes: object) -> StudyIdentity:
    made = StudyIdentity.of(fake_family.FAMILY, fake_family.SMALL, PROBLEM, gpu_card("gb300"), "predicted")
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def one_line(caught: pytest.ExceptionInfo[InputError]) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_trials_survive_closing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "study.sqlite3"
    with TuningStudy.for_tuning(path, identity()) as study:
        first = study.start(SPACE.default, SPACE)
        second = study.start({"tile": 2, "deep": True, "mode": "b"}, SPACE)
        study.finish(first, Outcome(Status.OK, value=3.5, resources=({"registers": 32},), seconds={"compile": 0.5}))
        study.finish(second, failure(Status.COMPILE_ERROR, "no\nsuch instruction"))
    with TuningStudy.for_reading(path) as study:
        one, two = study.trials()
        assert study.identity == identity().to_json()
    assert (one.number, one.config, one.value, one.finished) == (0, SPACE.default, 3.5, True)
    assert one.outcome is not None
    assert one.outcome.resources == ({"registers": 32},)
    assert one.outcome.seconds == {"compile": 0.5}
    assert two.config == {"tile": 2, "deep": True, "mode": "b"}
    assert two.outcome is not None
    assert (two.outcome.status, two.outcome.reason, two.ok) == (Status.COMPILE_ERROR, "no such instruction", False)


def test_a_started_trial_is_whole_before_anything_else_happens(tmp_path: Path) -> None:
    path = tmp_path / "study.sqlite3"
    with TuningStudy.for_tuning(path, identity()) as study:
        study.start({"tile": 4, "deep": False, "mode": "b"}, SPACE)
    with TuningStudy.for_tuning(path, identity()) as study:
        (left,) = study.unfinished()
    assert left.config == {"tile": 4, "deep": False, "mode": "b"}
    assert left.outcome is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("family", "other"),
        ("engine", "large"),
        ("gpu", "H200"),
        ("objective", "measured"),
        ("method", "cost model 0"),
        ("source_digest", "0" * 16),
        ("glue_digest", "0" * 16),
        ("space", "0" * 16),
        ("compilers", {"triton": "0.0"}),
        ("problem", {"tp": 1, "rows": 16, "width": 64}),
    ],
)
def test_a_study_of_something_else_is_refused_by_the_field(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "study.sqlite3"
    TuningStudy.for_tuning(path, identity()).close()
    with pytest.raises(InputError) as caught:
        TuningStudy.for_tuning(path, identity(**{field: value}))
    named = {"compilers": "compilers.triton", "problem": "problem.rows"}.get(field, field)
    assert f"another {named} " in one_line(caught)
    TuningStudy.for_tuning(path, identity()).close()  # the refusal freed the lock


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.sqlite3"
    with TuningStudy.for_tuning(path, identity()) as study:
        study._study.set_user_attr("k3lab:identity", identity(schema=99).to_json())
    for opened in (lambda: TuningStudy.for_reading(path), lambda: TuningStudy.for_tuning(path, identity())):
        with pytest.raises(InputError, match="schema 99, this k3lab reads schema 1"):
            opened()


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_what_is_no_study_is_refused_and_left_alone(tmp_path: Path) -> None:
    text = _file(tmp_path / "notes.txt", b"not a database at all")
    strange = tmp_path / "strange.sqlite3"
    with sqlite3.connect(strange) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
    connection.close()
    cut = tmp_path / "cut.sqlite3"
    TuningStudy.for_tuning(cut, identity()).close()
    cut.write_bytes(cut.read_bytes()[:3000])
    (tmp_path / "cut.sqlite3.lock").unlink()
    for path in (text, strange, cut):
        before = path.read_bytes()
        for opened in (lambda p=path: TuningStudy.for_tuning(p, identity()), lambda p=path: TuningStudy.for_reading(p)):
            with pytest.raises(InputError) as caught:
                opened()
            assert str(path) in one_line(caught)
        assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cut.sqlite3", "notes.txt", "strange.sqlite3"]


def test_a_damaged_study_is_one_line_or_readable(tmp_path: Path) -> None:
    path = tmp_path / "study.sqlite3"
    with TuningStudy.for_tuning(path, identity()) as study:
        for config in SPACE.legal[:4]:
            study.finish(study.start(config, SPACE), Outcome(Status.OK, value=1.0))
    whole = path.read_bytes()
    rng = random.Random(3)
    said = []
    for _ in range(50):
        changed = bytearray(whole)
        for _ in range(rng.choice([1, 20])):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            with TuningStudy.for_reading(path) as study:
                study.trials()
        except InputError as error:
            said.append(str(error))
    assert len(said) > 8
    assert all(str(path) in line and "\n" not in line for line in said)
    path.write_bytes(whole)
    with TuningStudy.for_reading(path) as study:
        assert len(study.trials()) == 4


def test_a_full_disk_is_told_and_what_was_stored_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "study.sqlite3"
    with TuningStudy.for_tuning(path, identity()) as study:
        study.finish(study.start(SPACE.default, SPACE), Outcome(Status.OK, value=1.0))
    with TuningStudy.for_tuning(path, identity()) as study:
        pages = -(-path.stat().st_size // 4096)

        @sqlalchemy.event.listens_for(study._storage.engine, "connect")
        def limit(connection: sqlite3.Connection, _: object) -> None:
            connection.execute(f"PRAGMA max_page_count = {pages}")

        study._storage.engine.dispose()
        with pytest.raises(InputError, match=r"cannot be written any more \(.*full"):
            study.set_note("large", "x" * 100_000)
    with TuningStudy.for_reading(path) as study:
        assert [trial.value for trial in study.trials()] == [1.0]


def test_an_optuna_study_of_someone_else_is_refused(tmp_path: Path) -> None:
    import optuna

    path = tmp_path / "theirs.sqlite3"
    optuna.create_study(storage=f"sqlite:///{path}", study_name="theirs")
    with pytest.raises(InputError, match="has no identity"):
        TuningStudy.for_tuning(path, identity())


def test_an_empty_file_becomes_a_study(tmp_path: Path) -> None:
    path = _file(tmp_path / "study.sqlite3", b"")
    TuningStudy.for_tuning(path, identity()).close()
    TuningStudy.for_reading(path).close()


def test_leftovers_of_a_killed_creation_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "study.sqlite3"
    left = _file(tmp_path / ".study.sqlite3.abc.new", b"half")
    other = _file(tmp_path / ".other.sqlite3.abc.new", b"half")
    TuningStudy.for_tuning(path, identity()).close()
    assert not left.exists()
    assert other.exists()


def test_unusable_paths_are_refused(tmp_path: Path) -> None:
    blocked = _file(tmp_path / "file", b"")
    for path in (tmp_path, blocked / "study.sqlite3", Path("/proc/none/study.sqlite3"), Path("postgresql://host/db")):
        with pytest.raises(InputError) as caught:
            TuningStudy.for_tuning(path, identity())
        assert str(path) in one_line(caught)
    with pytest.raises(InputError, match="there is no study"):
        TuningStudy.for_reading(tmp_path / "none.sqlite3")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="cannot be written"):
            TuningStudy.for_tuning(tmp_path / "study.sqlite3", identity())
    finally:
        tmp_path.chmod(0o700)


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    share = tmp_path / "my share"
    escaped = str(share).replace(" ", r"\040")  # as the kernel writes it
    mounts.write_text(f"rootfs / ext4 rw 0 0\nserver:/x {escaped} nfs4 rw 0 0\nx {escaped}/local xfs rw 0 0\n")
    monkeypatch.setattr(storage, "MOUNTS", mounts)
    with pytest.raises(InputError, match=r"network file system \(nfs4\)"):
        TuningStudy.for_tuning(share / "deep" / "study.sqlite3", identity())
    assert storage.filesystem_type(tmp_path / "my shares") == "ext4"
    TuningStudy.for_tuning(share / "local" / "study.sqlite3", identity()).close()


def test_a_second_tuner_is_kept_off_and_readers_are_not(tmp_path: Path) -> None:
    path = tmp_path / "study.sqlite3"
    with TuningStudy.for_tuning(path, identity()) as study:
        with pytest.raises(InputError, match=rf"another tuner \(process {os.getpid()}\) is writing study {path}:"):
            TuningStudy.for_tuning(path, identity())
        study.start(SPACE.default, SPACE)
        with TuningStudy.for_reading(path) as reader:
            assert len(reader.trials()) == 1
    TuningStudy.for_tuning(path, identity()).close()


def _hold(path: Path, held: object) -> None:
    with TuningStudy.for_tuning(path, identity()):
        held.set()  # type: ignore[attr-defined]
        time.sleep(600)


def test_the_lock_of_a_killed_tuner_is_free(tmp_path: Path) -> None:
    path = tmp_path / "study.sqlite3"
    context = multiprocessing.get_context("fork")
    held = context.Event()
    holder = context.Process(target=_hold, args=(path, held))
    holder.start()
    try:
        assert held.wait(30)
        with pytest.raises(InputError, match=f"process {holder.pid}"):
            TuningStudy.for_tuning(path, identity())
    finally:
        holder.kill()
        holder.join(30)
    TuningStudy.for_tuning(path, identity()).close()


def test_the_default_path_names_everything() -> None:
    path = default_path(fake_family.FAMILY, fake_family.SMALL, PROBLEM, gpu_card("gb300"), "predicted")
    assert str(path) == "studies/fake-small-tp1-rows8-gb300-predicted.sqlite3"


@pytest.mark.parametrize("name", ["a?b.sqlite3", "a{b}.sqlite3", "a%41#c.sqlite3", "a b&mode=memory.sqlite3"])
def test_a_file_name_is_no_part_of_an_address(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with TuningStudy.for_tuning(path, identity()) as study:
        study.finish(study.start(SPACE.default, SPACE), Outcome(Status.OK, value=1.0))
    with TuningStudy.for_reading(path) as study:
        assert len(study.trials()) == 1
    assert {file.name for file in tmp_path.iterdir()} == {name, f"{name}.lock"}


def test_a_link_to_a_study_is_that_study_with_its_lock(tmp_path: Path) -> None:
    path, link, early = tmp_path / "study.sqlite3", tmp_path / "link.sqlite3", tmp_path / "early.sqlite3"
    early.symlink_to(path)
    TuningStudy.for_tuning(early, identity()).close()
    assert early.is_symlink()
    assert path.is_file()
    link.symlink_to(path)
    for one, other in ((path, link), (link, path)):
        with (
            TuningStudy.for_tuning(one, identity()),
            pytest.raises(InputError, match=rf"another tuner \(process {os.getpid()}\)"),
        ):
            TuningStudy.for_tuning(other, identity())


def test_a_pipe_is_refused_and_left_alone(tmp_path: Path) -> None:
    """As a device is; a test that failed to would break the machine it runs on as root."""
    pipe, link = tmp_path / "pipe.sqlite3", tmp_path / "link.sqlite3"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        for opened in (lambda p=path: TuningStudy.for_tuning(p, identity()), lambda p=path: TuningStudy.for_reading(p)):
            with pytest.raises(InputError, match="is no regular file"):
                opened()
    assert pipe.is_fifo()


def test_a_lock_file_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "study.sqlite3.lock").mkdir()
    with pytest.raises(InputError, match=r"cannot be locked: .*study\.sqlite3\.lock"):
        TuningStudy.for_tuning(tmp_path / "study.sqlite3", identity())


def test_a_disk_that_is_full_from_the_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage.tempfile, "mkstemp", full)
        with pytest.raises(InputError, match="No space left on device"):
            TuningStudy.for_tuning(tmp_path / "study.sqlite3", identity())
    monkeypatch.setattr(storage.sqlite3, "connect", lambda *_, **__: full())
    with pytest.raises(InputError, match=r"study .*/study\.sqlite3 "):
        TuningStudy.for_tuning(tmp_path / "study.sqlite3", identity())
    assert [file.name for file in tmp_path.iterdir()] == ["study.sqlite3.lock"]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE study_user_attributes SET value_json = '{\"schema\": 1}' WHERE key = 'k3lab:identity'",
        "UPDATE study_user_attributes SET value_json = replace(value_json, 'predicted', 'guessed') WHERE key = 'k3lab:identity'",
        "UPDATE study_user_attributes SET value_json = '5' WHERE key = 'k3lab:choice'",
        "UPDATE study_user_attributes SET value_json = '{}' WHERE key = 'k3lab:environment'",
        "UPDATE trial_user_attributes SET value_json = replace(value_json, ': 1.0', ': \"fast\"')",
        "UPDATE trial_user_attributes SET value_json = replace(value_json, ': 1.0', ': -1.0')",
    ],
)
def test_a_study_that_lacks_what_it_must_hold_is_one_line(tmp_path: Path, change: str) -> None:
    from k3lab.tuning.choose import choose
    from k3lab.tuning.show import show

    path = tmp_path / "study.sqlite3"
    with TuningStudy.for_tuning(path, identity()) as study:
        study.finish(study.start(SPACE.default, SPACE), Outcome(Status.OK, value=1.0))
        study.set_note("environment", {"gpu": None})
        choice = choose(study, SPACE)
        assert choice
        study.set_note("choice", choice.to_json())
    assert show(path)["choice"]["value_us"] == 1.0
    with sqlite3.connect(path) as connection:
        assert connection.execute(change).rowcount == 1
    connection.close()
    with pytest.raises(InputError) as caught:
        show(path)
    assert str(path) in one_line(caught)


def test_a_fresh_study_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "study.sqlite3"
    for source in ("one", "two", "three"):
        TuningStudy.for_tuning(path, identity(source_digest=source), fresh=True).close()
    with pytest.raises(InputError, match=r"the kernel changed since.*--fresh"):
        TuningStudy.for_tuning(path, identity(source_digest="four"))
    kept = {file.name: TuningStudy.for_reading(file).identity["source_digest"] for file in tmp_path.glob("*.sqlite3")}
    assert kept == {"study.sqlite3": "three", "study-old1.sqlite3": "one", "study-old2.sqlite3": "two"}


def test_what_was_held_fixed_is_part_of_the_identity(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite3"
    TuningStudy.for_tuning(path, identity(fixed={"mode": "b"})).close()
    TuningStudy.for_tuning(path, identity(fixed={"mode": "b"})).close()
    with pytest.raises(InputError, match=r"another fixed.mode \('b', now None; it was made for another one\)"):
        TuningStudy.for_tuning(path, identity())
    with pytest.raises(InputError, match=r"another fixed.mode \('b', now 'a'"):
        TuningStudy.for_tuning(path, identity(fixed={"mode": "a"}))


def test_a_study_from_before_fixed_parameters_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite3"
    TuningStudy.for_tuning(path, identity()).close()
    with sqlite3.connect(path) as database:
        (text,) = database.execute("SELECT value_json FROM study_user_attributes WHERE key='k3lab:identity'").fetchone()
        old = json.loads(text)
        assert old.pop("fixed") == {}
        database.execute("UPDATE study_user_attributes SET value_json=? WHERE key='k3lab:identity'", (json.dumps(old),))
    TuningStudy.for_tuning(path, identity()).close()
    with pytest.raises(InputError, match=r"another fixed\.mode"):
        TuningStudy.for_tuning(path, identity(fixed={"mode": "a"}))
