"""Reading a bundle: every byte is covered, what contradicts itself is refused, what is missing is told with its cure."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from k3lab.kernels import Buffer, Evidence, InputError
from k3lab.kernels.bundle.reader import Bundle, BundleEntry, Miss, is_gpu_code
from k3lab.kernels.bundle.schema import (
    BufferModel,
    canonical,
)
from k3lab.kernels.bundle.writer import cubin_path, write_bundle
from pydantic import ValidationError

from .bundle_case import CUBIN, AProblem, Written, entry, refusal, rewrite


def test_what_was_written_is_read(written: Written) -> None:
    made = entry()
    bundle = Bundle.load(written(made), accept_predicted=True)
    assert [one.model for one in bundle.entries] == [made[0]]
    assert bundle.predicted_entries == bundle.entries
    found = bundle.find("a", AProblem(16, 8), "GB300")
    assert isinstance(found, BundleEntry)
    compiled = found.compiled("sm_103a", AProblem(16, 5))
    (launch,) = compiled.launches
    assert launch.cubin == CUBIN + b"103\x08"
    assert (launch.grid, launch.block, launch.cluster, launch.shared_bytes, launch.pdl) == (
        (4, 2, 1),
        (128, 1, 1),
        (2, 1, 1),
        2048,
        True,
    )
    assert [(arg.kind, arg.name) for arg in launch.args] == [("tensor", "x"), ("int32", "rows"), ("null", "")]
    assert [(b.name, b.shape, b.dtype, b.zeroed) for b in compiled.buffers] == [("partial", (2, 64), "float32", True)]
    assert (compiled.family, compiled.engine, compiled.problem) == ("a", "b", AProblem(16, 5))
    assert compiled.config == {"tile": 8, "deep": True, "mode": "x"}
    assert compiled.config["deep"] is True


def test_blocks_that_wait_for_each_other_are_told_and_other_bundles_keep_their_bytes(written: Written) -> None:
    made, cubins = entry()
    plain = written((made, cubins))
    assert "needs_residency" not in (plain / "bundle.json").read_text()
    waiting = [
        build.model_copy(update={"launches": tuple(one.model_copy(update={"needs_residency": True}) for one in build.launches)})
        for build in made.builds
    ]  # fmt: skip
    path = written((made.model_copy(update={"builds": tuple(waiting)}), cubins), name="other")
    (found,) = Bundle.load(path, accept_predicted=True).entries
    assert [launch.needs_residency for launch in found.compiled("sm_103a", AProblem(16, 8)).launches] == [True]
    assert (path / "bundle.json").read_text().count("needs_residency") == 2


def test_buffers_that_launches_keep_are_told_and_other_bundles_keep_their_bytes(written: Written) -> None:
    made, cubins = entry()
    plain = (written((made, cubins)) / "bundle.json").read_text()
    assert "persistent" not in plain and "targets_of" not in plain
    kept = (
        BufferModel(name="mail", shape=(16, 2, 8), dtype="int32", zeroed=False, persistent=True),
        BufferModel(name="mail_targets", shape=(16, 2), dtype="int64", zeroed=False, targets_of="mail"),
    )
    builds = tuple(build.model_copy(update={"buffers": kept}) for build in made.builds)
    path = written((made.model_copy(update={"builds": builds}), cubins), name="other")
    (found,) = Bundle.load(path, accept_predicted=True).entries
    assert found.compiled("sm_103a", AProblem(16, 8)).buffers == (
        Buffer("mail", (16, 2, 8), "int32", persistent=True),
        Buffer("mail_targets", (16, 2), "int64", targets_of="mail"),
    )
    with pytest.raises(ValidationError, match="either every launch leaves zeros"):
        BufferModel(name="mail", shape=(1,), dtype="int32", zeroed=True, persistent=True)


def test_a_row_count_between_entries_uses_the_next_larger_one(written: Written) -> None:
    bundle = Bundle.load(written(entry(16), entry(4), entry(8)), accept_predicted=True)
    served = {}
    for rows in range(1, 18):
        found = bundle.find("a", AProblem(16, rows), "gb300")
        served[rows] = found.rows if isinstance(found, BundleEntry) else None
    assert served == {r: 4 if r <= 4 else 8 if r <= 8 else 16 if r <= 16 else None for r in range(1, 18)}


def test_a_miss_says_why_and_what_would_fix_it(written: Written) -> None:
    path = written(entry())
    bundle = Bundle.load(path, accept_predicted=True)
    cases = [
        ("z", AProblem(16, 8), "GB300", "no entry for z (it has a)"),
        ("a", AProblem(8, 8), "GB300", "other problems than"),
        ("a", AProblem(16, 8, "mla"), "GB300", "other problems than"),
        ("a", AProblem(16, 9), "GB300", "at most 8 rows, this step has 9"),
        ("a", AProblem(16, 8), "B300", "tuned for GB300"),
        ("a", AProblem(16, 8), "NVIDIA H200", "only compiled for sm_90a, tuned for GB300"),
        ("a", AProblem(16, 8), "NVIDIA L4", "are for GB300, not for L4"),
    ]
    for family, problem, gpu, words in cases:
        miss = bundle.find(family, problem, gpu)
        assert isinstance(miss, Miss)
        assert words in miss.reason
        assert f"k3lab tune {family} --tp {problem.tp} --rows {problem.rows} --kind {problem.kind} --gpu" in miss.cure
    strict = Bundle.load(path).find("a", AProblem(16, 8), "GB300")
    assert isinstance(strict, Miss)
    assert "only predicted" in strict.reason
    assert "--accept predicted" in strict.cure


def test_another_gpus_entry_is_used_only_where_that_was_accepted(written: Written) -> None:
    bundle = Bundle.load(written(entry()), accept_predicted=True, accept_compiled=True)
    found = bundle.find("a", AProblem(16, 8), "H200")
    assert isinstance(found, BundleEntry)
    assert found.build("sm_90a").evidence is Evidence.COMPILED
    with pytest.raises(InputError, match="no cubin for sm_100a, only for sm_103a, sm_90a"):
        found.build("sm_100a")
    with pytest.raises(InputError, match="does not serve"):
        found.compiled("sm_90a", AProblem(16, 9))
    with pytest.raises(InputError, match="does not serve"):
        found.compiled("sm_90a", AProblem(8, 8))


def test_measured_entries_need_no_acceptance(written: Written) -> None:
    bundle = Bundle.load(written(entry(evidence=Evidence.MEASURED), entry(4, gpu="H200", evidence=Evidence.MEASURED)))
    assert bundle.predicted_entries == ()
    found = bundle.find("a", AProblem(16, 2), "NVIDIA H200")
    assert isinstance(found, BundleEntry)
    assert (found.model.gpu, found.rows) == ("H200", 4)


def test_any_flipped_byte_is_found(written: Written) -> None:
    path = written(entry())
    rng = random.Random(1)
    flips = 0
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        whole = file.read_bytes()
        for index in range(len(whole)):
            changed = bytearray(whole)
            changed[index] ^= 1 << rng.randrange(8)
            file.write_bytes(changed)
            assert str(path) in refusal(path), (file, index)
            flips += 1
        for cut in (whole[:-1], whole + b"\n", b""):
            file.write_bytes(cut)
            refusal(path)
        file.write_bytes(whole)
    assert flips > 1000
    Bundle.load(path)


def test_missing_extra_and_foreign_files_are_found(written: Written, tmp_path: Path) -> None:
    path = written(entry())
    cubin = next((path / "cubins").iterdir())
    content = cubin.read_bytes()
    cubin.unlink()
    assert "lacks cubins/" in refusal(path)
    outside = tmp_path / "outside"
    outside.write_bytes(content)
    cubin.symlink_to(outside)
    assert "is a link" in refusal(path)
    cubin.unlink()
    cubin.write_bytes(content)
    (path / "cubins" / "more.so").write_bytes(b"x")
    assert "cubins/more.so, which bundle.json does not list" in refusal(path)
    (path / "cubins" / "more.so").unlink()
    Bundle.load(path)
    (path / "cubins").rename(tmp_path / "cubins")
    (path / "cubins").symlink_to(tmp_path / "cubins")
    assert "link" in refusal(path)


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    assert "not a directory" in refusal(tmp_path / "none")
    assert "has no bundle.json" in refusal(tmp_path)
    for text in (
        "",
        "hello",
        "[1]",
        "{}",
        '{"body": 1, "sha256": ""}',
        "\ud800",
        '{"body": {}, "sha256": NaN}',
        "[" * 100_000,
    ):
        (tmp_path / "bundle.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        refusal(tmp_path)


def test_another_schema_and_unknown_fields_are_refused(written: Written) -> None:
    path = written(entry())
    whole = (path / "bundle.json").read_text()

    def set_version(body: dict[str, Any]) -> None:
        body["schema_version"] = 2

    rewrite(path, set_version)
    assert "schema version 2, this k3lab reads version 1" in refusal(path)
    changes: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda body: body.update(extra=1), "extra"),
        (lambda body: body["entries"][0].update(extra=1), "entries.0.extra"),
        (lambda body: body["entries"][0].pop("evidence"), "entries.0.evidence"),
        (lambda body: body["entries"][0].update(evidence="guessed"), "entries.0.evidence"),
        (lambda body: body["entries"][0].update(rows=0), "entries.0.rows"),
        (lambda body: body["entries"][0].update(rows="8"), "entries.0.rows"),
        (lambda body: body["entries"][0]["builds"][0]["launches"][0].update(grid=[1, 1]), "grid"),
        (lambda body: body["entries"][0]["builds"][0].update(launches=[]), "launches"),
    ]
    for change, where in changes:
        (path / "bundle.json").write_text(whole)
        rewrite(path, change)
        text = refusal(path)
        assert "not of this schema" in text
        assert where in text


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside.cubin", "cubins/../../outside.cubin", "cubins/a.cubin"])
def test_paths_that_leave_the_bundle_are_refused(written: Written, name: str) -> None:
    path = written(entry())

    def point_there(body: dict[str, Any]) -> None:
        body["entries"][0]["builds"][0]["launches"][0]["cubin"] = name

    rewrite(path, point_there)
    assert "not of this schema" in refusal(path)

    def list_it(body: dict[str, Any]) -> None:
        body["files"][name] = "0" * 64

    path = written(entry(), force=True)
    rewrite(path, list_it)
    assert "not of this schema" in refusal(path)


def test_a_launch_of_an_unlisted_file_and_an_unused_file_are_refused(written: Written) -> None:
    path = written(entry())

    def point_elsewhere(body: dict[str, Any]) -> None:
        body["entries"][0]["builds"][0]["launches"][0]["cubin"] = f"cubins/{'0' * 64}.cubin"

    rewrite(path, point_elsewhere)
    assert "launches cubins/000" in refusal(path)
    path = written(entry(), force=True)
    rewrite(path, lambda body: body["entries"][0].update(builds=body["entries"][0]["builds"][:1]))
    assert "which nothing launches" in refusal(path)


def test_machine_code_of_the_host_is_refused(written: Written) -> None:
    host = Path(sys.executable).resolve().read_bytes()[:4096]
    assert not is_gpu_code(host)
    assert is_gpu_code(CUBIN)
    with pytest.raises(InputError, match="GPU code only"):
        cubin_path(host)
    path = written(entry())
    cubin = next((path / "cubins").iterdir())
    digest = hashlib.sha256(host).hexdigest()
    cubin.rename(path / f"cubins/{digest}.cubin").write_bytes(host)

    def swap(body: dict[str, Any]) -> None:
        text = canonical(body).replace(f"cubins/{cubin.name}", f"cubins/{digest}.cubin").replace(cubin.stem, digest)
        body.update(json.loads(text))
        body["files"] = json.loads(text)["files"]

    rewrite(path, swap)
    assert "is not a cubin" in refusal(path)


def test_reading_needs_neither_torch_nor_optuna(written: Written) -> None:
    code = (
        "import sys; from k3lab.kernels.bundle.reader import Bundle; Bundle.load(sys.argv[1]).entries;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'optuna', 'sqlalchemy', 'triton', 'cutlass')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(written(entry()))], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body["entries"].append(body["entries"][0]), "two entries for a kind=kda tp=16"),
        (lambda body: body["entries"][0]["builds"][1].update(evidence="measured"), "the build for sm_90a says measured"),
        (lambda body: body["entries"][0].update(evidence="measured"), "says predicted, this entry makes it measured"),
        (lambda body: body["entries"][0]["builds"].pop(0), "one for sm_103a"),
        (lambda body: body["entries"][0]["builds"][0]["launches"][0].update(grid=[0, 1, 1]), "greater than or equal to 1"),
        (lambda body: body["entries"][0]["builds"][0]["launches"][0].update(grid=[10**30, 1, 1]), "less than"),
        (lambda body: body["entries"][0]["builds"][0]["buffers"][0].update(shape=[-1]), "greater than or equal to 0"),
    ],
    ids=["twice", "build evidence", "entry evidence", "no own build", "no block", "huge grid", "negative buffer"],
)  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    one, cubins = entry()
    write_bundle(tmp_path / "b", [one], cubins)
    rewrite(tmp_path / "b", lambda body: None)
    Bundle.load(tmp_path / "b")
    rewrite(tmp_path / "b", change)
    with pytest.raises(InputError, match=words):
        Bundle.load(tmp_path / "b")


def test_pipes_in_a_bundle_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    one, cubins = entry()
    write_bundle(tmp_path / "b", [one], cubins)
    file = tmp_path / "b" / next(iter(cubins))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InputError, match="is no regular file"):
        Bundle.load(tmp_path / "b")
    (tmp_path / "b" / "bundle.json").unlink()
    os.mkfifo(tmp_path / "b" / "bundle.json")
    with pytest.raises(InputError, match=r"bundle\.json is no regular file"):
        Bundle.load(tmp_path / "b")


def test_a_predicted_entry_does_not_hide_a_measured_one_for_more_rows(tmp_path: Path) -> None:
    predicted, cubins = entry(8)
    measured, more = entry(16, evidence=Evidence.MEASURED)
    write_bundle(tmp_path / "b", [predicted, measured], {**cubins, **more})
    for accepted, rows in ((False, 16), (True, 8)):
        found = Bundle.load(tmp_path / "b", accept_predicted=accepted).find("a", AProblem(16, 4), "GB300")
        assert isinstance(found, BundleEntry)
        assert found.rows == rows
