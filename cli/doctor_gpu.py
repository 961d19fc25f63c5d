"""What ``k3lab doctor`` asks the driver of each GPU: clocks, power cap, MIG. Reads only, sets nothing."""

from __future__ import annotations

from typing import Any

from ..tuning.clocks import throttle_names, throttled


def _watts(milliwatts: int) -> str:
    return f"{milliwatts / 1000:.0f} W"


def _clocks(nvml: Any, handle: Any) -> tuple[bool, str, str]:
    now = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    most = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
    memory = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)
    reasons = throttled({"throttle": throttle_names(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))})
    found = f"SM {now} of {most} MHz, memory {memory} MHz"
    if reasons:
        return (
            False,
            f"{found}; held down: {', '.join(reasons)}",
            "times are of these clocks: cool it, or raise its cap",
        )
    return True, found, ""


def _power(nvml: Any, handle: Any) -> tuple[bool, str, str]:
    cap = nvml.nvmlDeviceGetEnforcedPowerLimit(handle)
    usual = nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
    found = f"{_watts(cap)}, by default {_watts(usual)}; draws {_watts(nvml.nvmlDeviceGetPowerUsage(handle))}"
    return cap >= usual, found, f"nvidia-smi -pl {usual // 1000}, as root; until then times are of the lower cap"


def _mig(nvml: Any, handle: Any) -> tuple[bool, str, str]:
    now, _ = nvml.nvmlDeviceGetMigMode(handle)
    cure = "times and floors are of a slice, not of the card; nvidia-smi -mig 0, as root, gives the whole GPU"
    return not now, "on" if now else "off", cure


ASKED = (("clocks", _clocks), ("power cap", _power), ("MIG", _mig))


def gpu_items(count: int, nvml: Any = None) -> list[dict[str, Any]]:
    """Items of so many GPUs; one the driver does not answer says so and is well: some parts have no such setting.

    Args:
        count: GPUs that are here.
        nvml: the driver's library, by default pynvml.
    """
    if nvml is None:
        try:
            import pynvml as nvml  # type: ignore[no-redef]
        except ImportError:
            return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return [{"name": "driver library", "ok": False, "found": str(error), "cure": "reinstall the NVIDIA driver"}]
    items = []
    for index in range(count):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        for name, ask in ASKED:
            try:
                ok, found, cure = ask(nvml, handle)
            except nvml.NVMLError as error:
                ok, found, cure = True, f"not told by the driver ({error})", ""
            items.append({"name": f"GPU {index} {name}", "ok": ok, "found": found, "cure": "" if ok else cure})
    return items
