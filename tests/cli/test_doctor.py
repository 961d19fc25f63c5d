"""Doctor: what works here, what does not, and the cure; a GPU's clocks, cap and MIG as its driver tells them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from k3lab.cli import doctor, main
from k3lab.cli.doctor_gpu import gpu_items

ROOT = Path(__file__).resolve().parents[2]


class Refused(Exception):
    """What a driver raises for something a part does not have."""


def driver(*, throttle: int = 0, cap: int = 700_000, mig: int | None = 0, sm: int = 1980) -> Any:
    """A driver with one H200 as pynvml shows it."""

    def mode(handle: object) -> tuple[int, int]:
        if mig is None:
            raise Refused("Not Supported")
        return mig, mig

    return SimpleNamespace(
        NVMLError=Refused, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetClockInfo=lambda handle, kind: sm if kind == 1 else 3201,
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: 1980,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: throttle,
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: cap,
        nvmlDeviceGetPowerManagementDefaultLimit=lambda handle: 700_000,
        nvmlDeviceGetPowerUsage=lambda handle: 120_400,
        nvmlDeviceGetMigMode=mode,
    )  # fmt: skip


def test_a_gpu_that_is_well() -> None:
    items = gpu_items(2, driver())
    assert [item["name"] for item in items[:3]] == ["GPU 0 clocks", "GPU 0 power cap", "GPU 0 MIG"]
    assert len(items) == 6 and all(item["ok"] and not item["cure"] for item in items)
    assert items[0]["found"] == "SM 1980 of 1980 MHz, memory 3201 MHz"
    assert items[1]["found"] == "700 W, by default 700 W; draws 120 W"


@pytest.mark.parametrize(
    ("state", "name", "found", "cure"),
    [
        ({"throttle": 0x4 | 0x1, "sm": 1100}, "GPU 0 clocks", "SM 1100 of 1980 MHz, memory 3201 MHz; held down: sw_power_cap", "raise its cap"),
        ({"cap": 500_000}, "GPU 0 power cap", "500 W, by default 700 W; draws 120 W", "nvidia-smi -pl 700"),
        ({"mig": 1}, "GPU 0 MIG", "on", "nvidia-smi -mig 0"),
    ],
)  # fmt: skip
def test_what_spoils_a_time_has_a_cure(state: dict[str, int], name: str, found: str, cure: str) -> None:
    (bad,) = (item for item in gpu_items(1, driver(**state)) if not item["ok"])
    assert (bad["name"], bad["found"]) == (name, found)
    assert cure in bad["cure"]


def test_what_the_driver_does_not_tell_is_no_fault() -> None:
    items = gpu_items(1, driver(mig=None))
    assert items[2] == {"name": "GPU 0 MIG", "ok": True, "found": "not told by the driver (Not Supported)", "cure": ""}


def test_it_says_what_works_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["healthy"] and not data["can_measure"]
    can = {line["what"]: line["ok"] for line in data["works"]}
    assert can["check Triton kernels on the interpreter"] and can["read traces, judge them, the report"]
    assert not can["check on the GPU, time, measured tuning"]
    items = {item["name"]: item for item in data["items"]}
    assert items["architectures"]["found"] == "compiles for sm_90a, sm_100a, sm_103a"
    assert items["disk"]["ok"] and "GB free" in items["disk"]["found"]
    assert {"nsys", "ncu", "ptxas", "cache folder"} <= set(items)
    assert main.run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "no   check on the GPU, time, measured tuning (see GPU)" in shown
    assert "No GPU here: everything but measuring works." in shown


@pytest.mark.parametrize(
    ("driver", "cuda", "cure"),
    [
        ("unknown", None, "needs an NVIDIA driver; without one: "),
        ("580.1", None, "is built without CUDA: install a CUDA build of it"),
        ("580.1", "13.0", "it must be new enough for CUDA 13.0, and CUDA_VISIBLE_DEVICES name a GPU"),
    ],
)
def test_a_gpu_that_torch_cannot_use_has_the_cure_that_fits(driver: str, cuda: str | None, cure: str, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    import torch
    from k3lab.kernels import device

    monkeypatch.delenv("K3LAB_NO_GPU", raising=False)
    monkeypatch.setattr(device, "driver_version", lambda: driver)
    monkeypatch.setattr(device, "discover", lambda index=0: None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    data = doctor.diagnose()
    items = {item["name"]: item for item in data["items"]}
    assert (items["driver"]["ok"], items["driver"]["found"]) == (
        (True, driver) if driver != "unknown" else (False, "none")
    )
    assert cure in items["GPU"]["cure"] and data["healthy"]


def test_a_missing_part_is_named_with_what_it_stops() -> None:
    items = [{"name": "ptxas", "ok": False}, {"name": "torch", "ok": True}]
    stopped = {line["what"]: line["missing"] for line in doctor.works(items) if not line["ok"]}
    assert stopped == {"compile for every architecture, predicted tuning": ["ptxas"]}


def test_an_assembler_that_is_too_old_says_for_what(tmp_path: Path) -> None:
    old = tmp_path / "ptxas"
    old.write_text("#!/bin/sh\necho sm_90a sm_100a\n")
    old.chmod(0o755)
    found = doctor._archs(str(old))
    assert not found["ok"]
    assert found["found"] == "compiles for sm_90a, sm_100a, not for sm_103a"
    (tmp_path / "ptxas-blackwell").write_text("#!/bin/sh\necho sm_103a\n")
    (tmp_path / "ptxas-blackwell").chmod(0o755)
    assert doctor._archs(str(old))["ok"]


def test_the_pinned_versions_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, version in doctor.PINNED.items():
        assert any(line.startswith(f"{name}=={version}") for line in wanted)
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "4.7.0")
    (other,) = (item for item in doctor._packages() if item["name"] == "nvidia-cutlass-dsl")
    assert (other["ok"], other["cure"]) == (False, "pip install nvidia-cutlass-dsl==4.8.1")
