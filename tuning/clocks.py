"""Clocks, power, temperature and throttle state, as the driver reports them. Reads only, sets nothing."""

from __future__ import annotations

import contextlib
from typing import Any

BENIGN = {"gpu_idle", "applications_clocks_setting"}
_REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}


def read_clocks(index: int = 0) -> dict[str, Any]:
    """``sm_mhz``, ``memory_mhz``, ``temperature_c``, ``power_w``, ``throttle`` (names of active reasons).

    Holds only what the driver answered; ``{"unavailable": reason}`` where it answered nothing.
    """
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except Exception as error:  # no library or no driver: each has its own exception type
        return {"unavailable": str(error)}
    found: dict[str, Any] = {}
    asks = {
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "power_w": lambda: round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000, 1),
        "throttle": lambda: throttle_names(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    }
    for name, ask in asks.items():
        with contextlib.suppress(nvml.NVMLError):
            found[name] = ask()
    return found


def throttle_names(mask: int) -> list[str]:
    """Names of the set bits of the driver's clock event mask."""
    return [name for name, bit in _REASONS.items() if mask & bit]


def throttled(clocks: dict[str, Any]) -> list[str]:
    """Active reasons that slow the GPU down, power cap included."""
    return [name for name in clocks.get("throttle", []) if name not in BENIGN]
