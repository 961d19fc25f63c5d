"""Compilation: the cache's key sees every field, its entries survive nothing but themselves."""

import dataclasses
import hashlib
import tempfile

import pytest
from k3lab.kernels import K3, InputError, family
from k3lab.kernels.errors import KernelError
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.kernels.paths import cache_root, compiled_cache
from k3lab.tuning import compiling, cubin, evaluate
from k3lab.tuning.compiling import cache_key, compile_config
from k3lab.tuning.jobs import Job, resolve
from k3lab.tuning.outcome import SetupError

FAMILY = family("attention_projection")
ENGINE = FAMILY.engine("cute_skinny")
PROBLEM = FAMILY.problem(K3, tp=16, rows=1)
CONFIG = dict(ENGINE.space(PROBLEM, gpu_card("GB300")).default)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("K3LAB_CACHE_DIR", str(tmp_path / "cache"))


def test_any_change_changes_the_key(monkeypatch):
    keys = {cache_key(ENGINE, PROBLEM, CONFIG, "sm_103a")}
    keys.add(cache_key(ENGINE, PROBLEM, CONFIG, "sm_90a"))
    keys.add(cache_key(ENGINE, PROBLEM, {**CONFIG, "threads": 64}, "sm_103a"))
    for change in ({"rows": 2}, {"kind": "mla"}, {"hidden": 3584}, {"outputs": 16}, {"tp": 8}, {"dtype": "float16"}):
        keys.add(cache_key(ENGINE, dataclasses.replace(PROBLEM, **change), CONFIG, "sm_103a"))
    keys.add(cache_key(FAMILY.engine("triton"), PROBLEM, CONFIG, "sm_103a"))
    monkeypatch.setattr(compiling, "compiler_versions", lambda engine: {"nvidia-cutlass-dsl": "0"})
    keys.add(cache_key(ENGINE, PROBLEM, CONFIG, "sm_103a"))
    monkeypatch.setattr(type(ENGINE), "source_digest", lambda self: "changed")
    keys.add(cache_key(ENGINE, PROBLEM, CONFIG, "sm_103a"))
    monkeypatch.setattr(compiling, "glue_digest", lambda engine: "changed")
    keys.add(cache_key(ENGINE, PROBLEM, CONFIG, "sm_103a"))
    assert len(keys) == 13


def test_second_compilation_comes_from_the_cache(monkeypatch):
    first = compile_config(ENGINE, PROBLEM, CONFIG, "sm_103a")

    def explode(*args):
        raise AssertionError("compiled again")

    monkeypatch.setattr(type(ENGINE), "compile", explode)
    assert compile_config(ENGINE, PROBLEM, CONFIG, "sm_103a") == first
    with pytest.raises(KernelError, match="compiled again"):
        compile_config(ENGINE, PROBLEM, CONFIG, "sm_103a", cache=False)


def test_a_damaged_entry_is_compiled_again():
    first = compile_config(ENGINE, PROBLEM, CONFIG, "sm_103a")
    (entry,) = compiled_cache().glob("*.pickle")
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    assert compile_config(ENGINE, PROBLEM, CONFIG, "sm_103a").launches[0].kernel == first.launches[0].kernel


def test_the_same_source_gives_the_same_bytes():
    one, two = (compile_config(ENGINE, PROBLEM, CONFIG, "sm_103a", cache=False) for _ in range(2))
    assert one.launches == two.launches


def test_a_refused_problem_is_not_compiled():
    with pytest.raises(InputError, match="at most 8"):
        compile_config(ENGINE, dataclasses.replace(PROBLEM, rows=16), CONFIG, "sm_103a")


def test_a_disassembler_that_is_too_old_is_passed_over(tmp_path, monkeypatch):
    from k3lab.tuning.cubin import kernel_resources

    (launch,) = compile_config(ENGINE, PROBLEM, CONFIG, "sm_103a").launches
    for name in ("cuobjdump", "nvdisasm"):
        old = tmp_path / name
        old.write_text("#!/bin/sh\necho \"fatal: Cannot decode architecture 'SM103a'\" >&2\nexit 1\n")
        old.chmod(0o755)
    monkeypatch.setenv("K3LAB_CUDA_BIN", str(tmp_path))
    assert kernel_resources(launch).registers > 0
    monkeypatch.setattr("k3lab.tuning.cubin.tools", lambda name: [str(tmp_path / name)])
    with pytest.raises(InputError, match="Cannot decode architecture 'SM103a'"):
        kernel_resources(launch)


def test_files_that_change_under_a_process_are_not_compiled(monkeypatch):
    """What the process holds is the old code, and its file says another digest."""
    compile_config(ENGINE, PROBLEM, CONFIG, "sm_103a")
    monkeypatch.setattr(type(ENGINE), "source_digest", lambda self: "changed")
    with pytest.raises(
        SetupError, match="attention_projection/cute_skinny were changed after this process loaded them"
    ):
        compile_config(ENGINE, PROBLEM, CONFIG, "sm_103a")
    assert len(list(compiled_cache().glob("*.pickle"))) == 1


def test_the_key_sees_the_launcher_and_what_the_user_sets(monkeypatch):
    keys = {cache_key(ENGINE, PROBLEM, CONFIG, "sm_103a")}
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", "/opt/ptxas")
    keys.add(cache_key(ENGINE, PROBLEM, CONFIG, "sm_103a"))
    monkeypatch.setattr(compiling, "launcher_digest", lambda compiler: "changed")
    keys.add(cache_key(ENGINE, PROBLEM, CONFIG, "sm_103a"))
    assert len(keys) == 3
    assert compiling.glue_digest(ENGINE) != compiling.glue_digest(
        FAMILY.engine("triton")
    )  # each has a module of its own


def test_the_glue_of_a_base_class_is_part_of_the_digest():
    class Derived(type(ENGINE)):
        pass

    assert compiling.glue_digest(Derived()) not in ("none", compiling.glue_digest(ENGINE))


def test_the_glue_holds_what_the_modules_of_an_engine_import_from_their_folder():
    names = {path.name for path in compiling.glue_files(FAMILY.engine("cute_mma"))}
    assert {"cute_mma_engine.py", "common.py"} <= names
    assert not names & {"cute_mma.py", "triton_engine.py", "cute_skinny_engine.py", "engines.py", "family.py"}


def test_an_entry_of_a_class_that_is_gone_is_compiled_again():
    compile_config(ENGINE, PROBLEM, CONFIG, "sm_103a")
    (entry,) = compiled_cache().glob("*.pickle")
    body = b"\x80\x04cnosuchmodule\nGone\n."
    entry.write_bytes(hashlib.sha256(body).digest() + body)
    assert compile_config(ENGINE, PROBLEM, CONFIG, "sm_103a").engine == "cute_skinny"


def test_no_cache_at_all_costs_nothing_but_time(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / "compiled").write_text("not a folder")
    assert compile_config(ENGINE, PROBLEM, CONFIG, "sm_103a").engine == "cute_skinny"


def test_a_cache_that_another_user_may_have_filled_is_not_taken(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("K3LAB_CACHE_DIR", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usual = cache_root()
    assert (usual.parent, usual.stat().st_mode & 0o777) == (tmp_path, 0o700)
    assert cache_root() == usual
    usual.chmod(0o777)
    other = cache_root()
    assert other != usual
    assert other.stat().st_mode & 0o022 == 0


def test_a_missing_tool_is_no_fault_of_the_config(tmp_path, monkeypatch):
    from k3lab.tuning import cubin

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(cubin.shutil, "which", lambda name: None)
    with pytest.raises(SetupError, match="nosuchtool is neither in Triton's wheel nor on PATH"):
        cubin.tools("nosuchtool")


def test_instructions_are_grouped_by_what_an_author_looks_for():
    from k3lab.tuning.cubin import instruction_groups

    groups = instruction_groups(
        {"IMAD": 9, "HGMMA": 8, "HMMA": 1, "UTCHMMA": 2, "UTCQMMA": 1, "LDGSTS": 4, "UBLKCP": 1, "LDG": 3, "LDL": 2, "LDS": 5, "BAR": 1, "FFMA2": 7, "FHFMA": 3}
    )  # fmt: skip
    assert groups["tensor cores"] == {"HGMMA": 8, "HMMA": 1, "UTCHMMA": 2, "UTCQMMA": 1}
    assert groups["asynchronous copies"] == {"LDGSTS": 4, "UBLKCP": 1}
    assert groups["local memory"] == {"LDL": 2}
    assert groups["floating point"] == {"FFMA2": 7, "FHFMA": 3}
    assert groups["integer and control"] == {"IMAD": 9}


def test_resources_are_read_once_and_from_what_they_are_read_from(monkeypatch):
    compiled = compile_config(ENGINE, PROBLEM, CONFIG, "sm_103a")
    first = compiling.resources_of(compiled)
    assert first == cubin.resources(compiled)
    asked = []

    def ask(launch):
        asked.append(launch)
        return dataclasses.replace(first[0], registers=7)

    monkeypatch.setattr(cubin, "kernel_resources", ask)
    assert compiling.resources_of(compiled) == first
    assert not asked
    (launch,) = compiled.launches
    for change in ({"cubin": launch.cubin + b"x"}, {"grid": (1, 2, 3)}, {"shared_bytes": 5}, {"kernel": "other"}):
        other = dataclasses.replace(compiled, launches=(dataclasses.replace(launch, **change),))
        assert compiling.resources_of(other)[0].registers == 7
    assert len(asked) == 4
    monkeypatch.setattr(cubin, "tools", lambda name: ["another"])
    assert compiling.resources_of(compiled)[0].registers == 7
    (entry, *_) = compiled_cache().glob("*.resources")
    entry.write_bytes(b"?" * 40)
    compiling.resources_of(compiled)


def test_a_compilation_ahead_serves_the_measurement(monkeypatch):
    """What the compile job leaves is all that a measurement needs of compilers and their tools."""
    job = Job("compile", FAMILY.name, None, ENGINE.name, PROBLEM.to_json(), CONFIG, "sm_103a", "GB300")
    stages = []
    done = evaluate.compile(resolve(job), stages.append)
    assert (done.status, done.value, stages) == ("ok", 1.0, ["compile"])
    assert done.resources[0]["registers"] > 0

    def explode(*args):
        raise AssertionError("again")

    monkeypatch.setattr(type(ENGINE), "compile", explode)
    monkeypatch.setattr(cubin, "kernel_resources", explode)
    compiled, begun = evaluate._compile(resolve(dataclasses.replace(job, kind="measure")), stages.append)
    assert begun.status == "ok"
    assert begun.resources == done.resources
    assert compiled.launches
