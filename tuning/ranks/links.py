"""How the GPUs of a host are linked, as far as the driver says. Reads only."""

from __future__ import annotations

from typing import Any

MOST_LINKS = 18
"""NVLinks of a GPU that are asked about."""


def links(count: int) -> dict[str, Any]:
    """``nvlinks`` (active ones of each GPU), ``nvlink_version``, ``unreachable`` (pairs of GPUs that cannot reach each other).

    Holds what the driver answered; ``{"unavailable": reason}`` where it answered nothing.
    """
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    except Exception as error:  # no library or no driver: each has its own exception type
        return {"unavailable": str(error)}
    found: dict[str, Any] = {"nvlinks": [], "nvlink_version": None, "unreachable": []}
    for handle in handles:
        active = 0
        for link in range(MOST_LINKS):
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link):
                    active += 1
                    found["nvlink_version"] = int(nvml.nvmlDeviceGetNvLinkVersion(handle, link))
            except nvml.NVMLError:  # fewer links than were asked about
                break
        found["nvlinks"].append(active)
    found["unreachable"] = _unreachable(count)
    return found


def _unreachable(count: int) -> list[list[int]]:
    import torch

    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    return [[one, other] for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]
