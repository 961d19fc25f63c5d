"""Ratios only where everything agrees that decides a number; the field is named where it does not."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from k3lab.cli.main import run
from k3lab.decode.evaluation.compare import Conditions, compare, read_report
from k3lab.kernels import InputError

BASE = Conditions(
    model="kimi-k3", weights="aa", gpu="GB300", gpus=16, tp=16, dcp=1, transport="symmetric", drafts=7,
    acceptance="SYNTHETIC length 6", kv_dtype="float8_e4m3fn", ssm_dtype="float32", workload="w1",
)  # fmt: skip
MEASURES = {"decode": {"value": 488.0, "unit": "tok/s"}, "step": {"value": 9.0, "unit": "ms"}}


def write(path: Path, *, measures: Any = None, backend: str = "auto", **changes: Any) -> Path:
    data = {"conditions": {**BASE.to_json(), **changes}, "backend": backend, "measures": measures or MEASURES}
    path.write_text(json.dumps(data))
    return path


def test_ratios_say_how_many_times_better_whatever_the_unit(tmp_path: Path) -> None:
    faster = {
        "decode": {"value": 842.0, "unit": "tok/s"},
        "step": {"value": 6.0, "unit": "ms"},
        "more": {"value": 1, "unit": "s"},
    }
    a, b = write(tmp_path / "a"), write(tmp_path / "b", measures=faster, backend="latency_specialized")
    data = compare(read_report(a), read_report(b))
    assert data["comparable"] and data["left_out"] == ["more"]
    assert data["ratios"]["decode"]["times_better"] == 842 / 488 and data["ratios"]["step"]["times_better"] == 1.5


def test_a_percentile_of_few_samples_is_marked_and_so_is_its_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def latency(value: float, samples: int) -> dict[str, Any]:
        one = {"value": value, "unit": "s", "samples": samples}
        return {**MEASURES, "median": {**one, "tail_covered": True}, "P90": {**one, "tail_covered": samples > 9}}

    a, b = write(tmp_path / "a", measures=latency(3.0, 8)), write(tmp_path / "b", measures=latency(1.5, 17))
    data = compare(read_report(a), read_report(b))
    assert data["ratios"]["P90"]["samples"] == [8, 17] and data["ratios"]["P90"]["tail_covered"] == [False, True]
    assert data["ratios"]["step"]["samples"] == [None, None]
    assert run(["decode", "compare", str(a), str(b)]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split()[1]: line.replace("│", "").split()[1:] for line in lines if "│" in line}
    assert cells["P90"] == ["3*", "1.5", "s", "2.000*", "8,", "17"]
    assert cells["median"] == ["3", "1.5", "s", "2.000", "8,", "17"] and cells["step"] == ["9", "9", "ms", "1.000"]
    assert any("none lies beyond this percentile" in line for line in lines)


@pytest.mark.parametrize("name", [field.name for field in fields(Conditions)])
def test_any_other_condition_forbids_a_ratio(name: str, tmp_path: Path) -> None:
    there = getattr(BASE, name)
    a, b = write(tmp_path / "a"), write(tmp_path / "b", **{name: there + 1 if isinstance(there, int) else f"{there}x"})
    data = compare(read_report(a), read_report(b))
    assert not data["comparable"] and not data["ratios"]
    assert [one["field"] for one in data["different"]] == [name]


def test_a_report_of_before_contexts_could_lie_over_ranks_had_them_whole(tmp_path: Path) -> None:
    a, b, c = write(tmp_path / "a"), write(tmp_path / "b"), write(tmp_path / "c", dcp=16)
    old = json.loads(a.read_text())
    del old["conditions"]["dcp"]
    a.write_text(json.dumps(old))
    assert compare(read_report(a), read_report(b))["comparable"]
    (found,) = compare(read_report(a), read_report(c))["different"]
    assert found["field"] == "dcp"


def test_the_published_sixteen_against_eight_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """AgentX at concurrency 1: 403.2 against 223.7 tok/s a user, on 16 GPUs and on 8."""
    user = {"user rate, P90": {"value": 223.7, "unit": "tok/s/user"}}
    a = write(tmp_path / "auto", measures=user, gpus=8, tp=8, workload="agentx")
    b = write(
        tmp_path / "special", measures={"user rate, P90": {"value": 403.2, "unit": "tok/s/user"}}, workload="agentx"
    )
    assert run(["decode", "compare", str(a), str(b)]) == 1
    text = capsys.readouterr().out
    assert "gpus: 8 and 16 (another number of GPUs" in text and "tp: 8 and 16" in text and "1.8" not in text


def test_speculative_and_plain_share_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", drafts=0, acceptance="none"), write(tmp_path / "b")
    assert run(["decode", "compare", str(a), str(b), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert {one["field"] for one in data["different"]} == {"drafts", "acceptance"} and data["ratios"] == {}


def test_without_a_gpu_there_is_no_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", gpu="cpu"), write(tmp_path / "b", gpu="cpu")
    assert run(["decode", "compare", str(a), str(b)]) == 1
    assert "say nothing of either backend" in capsys.readouterr().out


def test_the_same_conditions_print_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", backend="latency_specialized")
    assert run(["decode", "compare", str(a), str(b)]) == 0
    assert "1.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is no report"),
        ('{"conditions": {}, "measures": {}}', "condition model is None, must be text"),
    ],
)
def test_what_is_no_report_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(InputError, match=words):
        read_report(tmp_path / "x")


@pytest.mark.parametrize(
    "one",
    [
        {"value": "fast", "unit": "ms"}, {"value": 1.0, "unit": "parsecs"}, {"value": True, "unit": "ms"}, 3,
        {"value": 1.0, "unit": "ms", "samples": 0}, {"value": 1.0, "unit": "ms", "tail_covered": "no"},
    ],
)  # fmt: skip
def test_a_measure_has_a_value_and_a_unit(tmp_path: Path, one: Any) -> None:
    with pytest.raises(InputError, match=r"measure x (is|has)"):
        read_report(write(tmp_path / "x", measures={"x": one}))
    with pytest.raises(InputError, match="condition tp is '16', must be a whole number"):
        read_report(write(tmp_path / "y", tp="16"))
    (tmp_path / "z").write_text(write(tmp_path / "y").read_text().replace("488.0", "NaN"))
    with pytest.raises(InputError, match="finite"):
        read_report(tmp_path / "z")
