"""The gate: new spills and figures of other kernels fail, what says that it is stale passes, and no change costs no compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from k3lab.kernels import InputError, family
from k3lab.tuning import gate as module
from k3lab.tuning.gate import ARCHS, base_commit, build_all, cases_of, compare, files_of, touched
from k3lab.tuning.stale import mark, outdated, stale_reason, word_of

ROOT = Path(__file__).resolve().parents[2]
OWNER = family("attention_projection")
SKINNY = OWNER.engine("cute_skinny")


def build(**changes: Any) -> dict[str, Any]:
    launch = {
        "kernel": "k3_x", "registers": 64, "static_shared_bytes": 1024, "dynamic_shared_bytes": 2048, "stack_bytes": 0,
        "spill_instructions": 0, "instructions": {"LDG": 8, "FFMA": 16},
    }  # fmt: skip
    return {"launches": [launch | changes]}


@pytest.mark.parametrize(
    ("changes", "told", "fails"),
    [
        ({}, [], []),
        ({"registers": 72}, ["k3_x: registers 64 -> 72"], []),
        ({"dynamic_shared_bytes": 4096}, ["k3_x: shared bytes 3072 -> 5120"], []),
        ({"instructions": {"LDG": 8, "FFMA": 20}}, ["k3_x: floating point 16 -> 20"], []),
        ({"instructions": {"LDG": 8, "FFMA": 16, "BAR": 1}}, ["k3_x: barriers and waits 0 -> 1"], []),
        ({"kernel": "k3_y"}, ["launches k3_x -> k3_y"], []),
        (
            {"spill_instructions": 3, "stack_bytes": 16},
            ["k3_x: stack bytes 0 -> 16", "k3_x: spill instructions 0 -> 3"],
            ["spill instructions 0 -> 3"],
        ),
    ],
)
def test_what_changed_is_told_and_only_new_spills_fail(
    changes: dict[str, Any], told: list[str], fails: list[str]
) -> None:
    assert compare(build(), build(**changes)) == (told, fails)


def test_fewer_spills_pass_and_spills_of_a_second_launch_count() -> None:
    spilling = build(spill_instructions=5)
    assert compare(spilling, build(spill_instructions=2))[1] == []
    two = {"launches": [*build()["launches"], *spilling["launches"]]}
    assert compare(build(), two)[1] == ["spill instructions 0 -> 5"]


def test_what_does_not_compile_any_more_fails_and_what_is_new_does_not() -> None:
    broken = {"failed": "ValueError: no"}
    assert compare(build(), broken) == (["does not compile: ValueError: no"],) * 2
    assert compare(broken, broken)[1] == []
    assert compare(broken, build(spill_instructions=2)) == (["new here: 2 spill instructions"], [])


def test_an_engine_is_touched_by_each_of_its_files_and_by_no_other() -> None:
    names = {path.name for path in files_of(SKINNY, ROOT)}
    assert {"cute_skinny.py", "cute_compile.py", "contract.py"} <= names
    others = [engine.name for engine in OWNER.engines if engine.compiler == "triton"]
    for path, expected in (
        (SKINNY.sources[0], True),
        (ROOT / "kernels" / "cute_compile.py", True),
        (ROOT / "kernels" / "triton_compile.py", False),
        (ROOT / "kernels" / "attention_projection" / "twin.py", False),
    ):
        found = [engine.name for _, engine in touched([OWNER], ROOT, {path.resolve()})]
        assert (SKINNY.name in found) is expected, path
    assert others == [
        engine.name for _, engine in touched([OWNER], ROOT, {(ROOT / "kernels" / "triton_compile.py").resolve()})
    ]


def test_of_dozens_of_kinds_an_even_choice_is_compiled() -> None:
    """All of the first kind, every architecture and row count, and kinds from all of the list."""
    owner = family("mla")
    cases = cases_of(owner, owner.engine("cute_mma"))
    assert len(owner.kinds) > 24 and len(cases) == len({json.dumps(case, sort_keys=True) for case in cases}) == 24
    kinds = {case["problem"]["kind"] for case in cases}
    first = [case for case in cases if case["problem"]["kind"] == owner.kinds[0]]
    assert {(case["arch"], case["problem"]["rows"]) for case in first} == {
        (arch, rows) for arch in ARCHS for rows in (1, 8, 64)
    }
    assert any("fp8" in kind for kind in kinds) and any("dcp" in kind for kind in kinds) and len(kinds) > 8
    for arch in ARCHS:
        assert sum(case["arch"] == arch for case in cases) == 12
    assert len(cases_of(OWNER, SKINNY)) == 8  # few kinds: all of them


def test_a_case_is_built_by_another_process_with_the_package_of_a_tree() -> None:
    cases = [case for case in cases_of(OWNER, SKINNY) if "kda" in case["label"] and "rows1" in case["label"]]
    assert [case["arch"] for case in cases] == ["sm_90a", "sm_103a"]
    found = build_all([*cases, {**cases[0], "engine": "nobody"}], ROOT)
    for one in found[:2]:
        (launch,) = one["launches"]
        assert launch["registers"] > 0 and launch["spill_instructions"] == 0 and launch["instructions"]
    assert "nobody" in found[2]["failed"]


def test_a_config_that_the_base_does_not_know_is_compared_with_its_default() -> None:
    """So that spills which come with a new parameter are seen."""
    case = next(case for case in cases_of(OWNER, SKINNY) if case["arch"] == "sm_90a")
    fewer = {name: value for name, value in case["config"].items() if name != "release"}
    same, changed = build_all([case, {**case, "config": {**fewer, "new_here": 1}}], ROOT)
    assert same == changed and same["config"] == case["config"]
    spilling = {"config": {**fewer, "new_here": 1}, "launches": [{**same["launches"][0], "spill_instructions": 3}]}
    changes, faults = compare(same, spilling)
    assert changes[0].startswith("the default config, which the base does not know: ") and "new_here=1" in changes[0]
    assert faults == ["spill instructions 0 -> 3"]


def test_a_tree_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (one,) = build_all([{"family": "x", "engine": "y", "problem": {}, "config": {}, "arch": "sm_90a"}], tmp_path)
    assert "failed" in one


def results(folder: Path, **fields: Any) -> Path:
    path = folder / "h200" / "one.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"family": OWNER.name, "evidence": "measured", **fields}, indent=1))
    return path


def test_results_of_another_source_are_found_and_marked(tmp_path: Path) -> None:
    digest = SKINNY.source_digest()
    path = results(tmp_path, sources={"cute_skinny": {"source": digest}, "triton": {"source": "0" * 16}})
    (one,) = outdated(tmp_path, [OWNER])
    assert (one.engine, one.was, one.marked) == ("triton", "0" * 16, None)
    assert one.now == OWNER.engine("triton").source_digest() and "had the source 0000" in str(one)
    text = path.read_text()
    mark(path, ["triton"], "its weights go first now")
    (one,) = outdated(tmp_path, [OWNER])
    assert one.marked == "its weights go first now"
    data = json.loads(path.read_text())
    assert path.read_text().replace(' "stale": {"triton": "its weights go first now"},\n', "", 1) == text
    assert (word_of(data), word_of(data, "triton"), word_of(data, "cute_skinny")) == (
        "stale measured",
        "stale measured",
        "measured",
    )
    mark(path, ["cute_skinny"], "too")
    assert json.loads(path.read_text())["stale"] == {"triton": "its weights go first now", "cute_skinny": "too"}
    results(tmp_path, sources={"cute_skinny": {"source": digest}})
    assert outdated(tmp_path, [OWNER]) == []


def test_identities_gone_engines_and_whole_marks(tmp_path: Path) -> None:
    path = results(
        tmp_path, identity={"family": OWNER.name, "engine": "gone", "source_digest": "1" * 16}, stale="replaced"
    )
    (one,) = outdated(tmp_path, [OWNER])
    assert (one.now, one.marked) == ("none", "replaced")
    with pytest.raises(InputError, match="as a whole already"):
        mark(path, ["gone"], "why")
    assert stale_reason({}) is None and stale_reason({"stale": {}}) is None
    other = tmp_path / "h200" / "space.json.gz"
    with pytest.raises(InputError, match="is compressed"):
        mark(other, ["x"], "why")


def test_wrong_bases_are_one_line(tmp_path: Path) -> None:
    for root, ref, words in (
        (ROOT, "no-such-ref", "is no commit"),
        (tmp_path, "HEAD", "is no commit"),
        (ROOT, "--all", "is no commit"),
    ):
        with pytest.raises(InputError, match=words) as refused:
            base_commit(root, ref)
        assert "\n" not in str(refused.value)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of its own with the packages as they are here, found through ``.lint``."""
    root = tmp_path / "checkout"
    (root / ".lint" / "k3lab").mkdir(parents=True)
    for name in module.PACKAGES:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        (root / ".lint" / "k3lab" / name).symlink_to(root / name)
    who = ("-c", "user.name=k3lab", "-c", "user.email=k3lab@localhost", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", *module.PACKAGES), ("commit", "-q", "-m", "as it is")):
        subprocess.run(["git", "-C", str(root), *who, *words], check=True, timeout=120)
    return root


def run(root: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(root / ".lint"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "k3lab.cli.main", "gate", "--base", "HEAD", "--json", "--jobs", "1", *arguments], cwd=root,
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_an_edit_is_compiled_on_both_sides_and_its_results_must_say_stale(checkout: Path) -> None:
    path = results(checkout / "results", sources={"cute_skinny": {"source": SKINNY.source_digest()}})
    code, data = run(checkout)
    assert (code, data["engines"], data["compiled"], data["faults"]) == (0, [], 0, [])
    kernel = checkout / SKINNY.sources[0].relative_to(ROOT)
    kernel.write_text(kernel.read_text() + "\n# an edit that changes no machine code\n")
    code, data = run(checkout)
    assert (code, data["engines"], data["cases"]) == (1, ["attention_projection/cute_skinny"], [])
    assert data["compiled"] == len(cases_of(OWNER, SKINNY)) > 0
    (fault,) = data["faults"]
    assert f"results/h200/one.json: attention_projection/cute_skinny had the source {SKINNY.source_digest()}" in fault
    code, data = run(checkout, "--mark-stale", "only a comment")
    assert (code, data["faults"]) == (0, [])
    assert "only a comment" in data["stale"][0] and json.loads(path.read_text())["stale"] == {
        "cute_skinny": "only a comment"
    }
