"""``k3lab check``, ``time``, ``compile``, ``predict``: what they print, and how they refuse."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from k3lab.cli.main import run

ROOT = Path(__file__).resolve().parents[2]
FAMILY = "attention_projection"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("K3LAB_NO_GPU", "1")


def call(capsys, *argv):
    code = run(argv)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("engine", ["triton", "cute_skinny"])
def test_compile_tells_what_a_real_cubin_holds(capsys, engine):
    code, out, _ = call(
        capsys, "compile", FAMILY, "--tp", "16", "--rows", "8", "--arch", "sm_103a", "--engine", engine, "--json"
    )
    data = json.loads(out)
    assert code == 0
    assert data["evidence"] == "compiled"
    (kernel,) = data["kernels"]
    assert kernel["kernel"].startswith(f"k3_{FAMILY}_{engine}")
    assert 16 <= kernel["registers"] <= 255
    assert kernel["spill_instructions"] == 0
    assert sum(kernel["instructions"].values()) > 100
    assert kernel["dynamic_shared_bytes"] > 0
    assert data["summation_order"]


def test_compile_shows_the_tensor_core_instructions(capsys):
    for arch, mma in (("sm_90a", "HGMMA"), ("sm_103a", "UTCHMMA")):
        code, out, _ = call(capsys, "compile", FAMILY, "--arch", arch)
        assert code == 0
        assert mma in out


def test_a_config_from_the_command_line_is_used(capsys):
    argv = ("compile", FAMILY, "--config", "block_n=32,num_warps=2", "--json")
    code, out, _ = call(capsys, *argv)
    data = json.loads(out)
    assert code == 0
    assert (data["config"]["block_n"], data["kernels"][0]["threads"]) == (32, 64)


def test_predict_says_predicted_and_how_far_the_model_is_off(capsys):
    code, out, _ = call(capsys, "predict", FAMILY, "--gpu", "gb300", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["evidence"] == "predicted"
    assert data["prediction"]["microseconds"] > data["floor_us"]
    assert data["prediction"]["error"]
    assert data["floor_bandwidth"] == "nominal"


def test_check_without_a_gpu_runs_what_an_interpreter_can_run(capsys):
    code, out, _ = call(capsys, "check", FAMILY, "--model", "small", "--tp", "4", "--rows", "3", "--json")
    verdicts = {result["engine"]: (result["verdict"], result.get("how")) for result in json.loads(out)["results"]}
    assert code == 0
    assert verdicts["triton"] == ("pass", "interpreter")
    assert verdicts["cute_skinny"] == ("not run", "compiled")


def test_a_check_that_ran_nothing_is_no_success(capsys):
    code, out, _ = call(capsys, "check", FAMILY, "--engine", "cute_skinny", "--rows", "2")
    assert code == 1
    assert "not run" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("check", "projection"), "unknown family 'projection'"),
        (("check", FAMILY, "--tp", "7"), "TP sizes that do: 1, 2, 4, 8, 16"),
        (("compile", FAMILY, "--rows", "65"), "1 to 64 rows"),
        (("compile", FAMILY, "--rows", "0"), "1 to 64 rows"),
        (("compile", FAMILY, "--kind", "gqa"), "kinds: kda, mla"),
        (("compile", FAMILY, "--engine", "cutlass"), "it has: triton, cute_skinny"),
        (("compile", FAMILY, "--arch", "sm_91a"), "unknown architecture 'sm_91a'"),
        (("compile", FAMILY, "--engine", "cute_skinny", "--rows", "9"), "at most 8"),
        (("compile", FAMILY, "--config", "block_n=3"), "legal values are"),
        (("compile", FAMILY, "--config", "tile=3"), "unknown parameter 'tile'"),
        (("compile", FAMILY, "--config", "block_n"), "name=value"),
        (("compile", FAMILY, "--config", "block_n=2"), "at least 16 weight rows"),
        (("predict", FAMILY, "--gpu", "gb400"), "unknown GPU 'gb400'"),
        (("predict", FAMILY, "--model", "nowhere/config.json"), "cannot read"),
        (("time", FAMILY), "needs an NVIDIA GPU"),
    ],
)
def test_a_wrong_call_gets_one_line_and_exit_2(capsys, argv, says):
    code, out, err = call(capsys, *argv)
    assert code == 2
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_a_family_without_engines_is_told(capsys, monkeypatch):
    from k3lab.kernels import family

    monkeypatch.setattr(type(family("lm_head")), "engines", ())
    code, out, err = call(capsys, "check", "lm_head")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "family lm_head has no engine yet, only its twin" in err


@pytest.mark.parametrize(
    ("engine", "file", "find", "replace", "reason"),
    [
        ("triton", "triton_splitk.py", "live = m[None, :] < rows", "live = m[None, :] < lines", "lines"),
        (
            "cute_skinny",
            "cute_skinny.py",
            "arch.griddepcontrol_wait()",
            "arch.griddepcontrol_wai()",
            "griddepcontrol_wai",
        ),
    ],
)
def test_a_kernel_that_does_not_compile_is_one_line_with_its_place(tmp_path, engine, file, find, replace, reason):
    for package in ("kernels", "tuning", "cli"):
        shutil.copytree(ROOT / package, tmp_path / "k3lab" / package, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "k3lab" / "kernels" / FAMILY / file
    text = path.read_text()
    assert text.count(find) == 1
    path.write_text(text.replace(find, replace))
    line = 1 + text[: text.index(find)].count("\n")
    command = [sys.executable, "-m", "k3lab.cli.main", "compile", FAMILY, "--rows", "2", "--engine", engine]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 1
    (told,) = [part for part in done.stderr.splitlines() if part.startswith("k3lab:")]
    assert f"{file}:{line}" in told
    assert reason in told
    assert "Traceback" not in done.stderr
