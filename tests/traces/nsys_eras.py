"""What an Nsight Systems SQLite export looked like from release to release: tables, columns, where its facts lie."""

from __future__ import annotations

from dataclasses import dataclass

_KERNEL_HEAD = ("start", "end", "deviceId", "contextId")
_KERNEL_REST = (
    "streamId", "correlationId", "globalPid", "demangledName", "shortName", "mangledName", "launchType", "cacheConfig",
    "registersPerThread", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "staticSharedMemory",
    "dynamicSharedMemory", "localMemoryPerThread", "localMemoryTotal", "gridId", "sharedMemoryExecuted", "graphNodeId",
    "sharedMemoryLimitConfig",
)  # fmt: skip
_HARDWARE = (
    "qmdBulkReleaseDone", "qmdPreexitDone", "qmdLastCtaDone", "graphId", "clusterX", "clusterY", "clusterZ",
    "clusterSchedulingPolicy", "maxPotentialClusterSize", "maxActiveClusters",
)  # fmt: skip
_NVTX = (
    "start", "end", "eventType", "rangeId", "category", "color", "text", "globalTid", "endGlobalTid", "textId",
    "domainId", "uint64Value", "int64Value", "doubleValue", "uint32Value", "int32Value", "floatValue", "jsonTextId",
    "jsonText",
)  # fmt: skip
_RUNTIME = ("start", "end", "eventClass", "globalTid", "correlationId", "nameId", "returnValue", "callchainId")
_WORK = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid")


@dataclass(frozen=True)
class Era:
    """One release: its version and schema, the tables of its facts, and the columns of the kernel table."""

    nsys: str
    schema: str | None
    export_table: str | None
    capture_table: str | None
    mode_prefix: str
    kernel: tuple[str, ...]

    @property
    def tables(self) -> dict[str, str]:
        """Columns of every table the tests write, as one string each."""
        columns: dict[str, tuple[str, ...]] = {
            "CUPTI_ACTIVITY_KIND_KERNEL": self.kernel,
            "CUPTI_ACTIVITY_KIND_RUNTIME": _RUNTIME,
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (*_WORK, "graphId", "graphExecId"),
            "CUPTI_ACTIVITY_KIND_MEMCPY": (*_WORK, "bytes", "copyKind", "graphNodeId"),
            "CUPTI_ACTIVITY_KIND_MEMSET": (*_WORK, "value", "bytes", "graphNodeId"),
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (*_WORK, "syncType", "eventId"),
            "CUPTI_ACTIVITY_KIND_OVERHEAD": ("start", "end", "eventClass", "globalTid", "nameId", "overheadType"),
            "PROFILER_OVERHEAD": ("start", "end", "globalTid", "nameId", "overheadType"),
            "NVTX_EVENTS": _NVTX,
            "CUDA_GRAPH_NODE_EVENTS": ("start", "end", "eventClass", "globalTid", "nameId", "graphNodeId",
                                       "originalGraphNodeId"),
            "CUDA_GRAPH_EVENTS": ("start", "end", "eventClass", "globalTid", "nameId", "graphId", "originalGraphId",
                                  "graphExecId"),
            "TARGET_INFO_GPU": ("vmId", "id", "name", "busLocation", "smCount", "computeMajor", "computeMinor",
                                "chipName"),
            "DIAGNOSTIC_EVENT": ("timestamp", "timestampType", "source", "severity", "text", "globalPid"),
            "PROCESSES": ("globalPid", "pid", "name"),
        }  # fmt: skip
        for table in (self.export_table, self.capture_table):
            if table is not None:
                columns[table] = ("name", "value")
        return {table: ", ".join(names) for table, names in columns.items()}


def _era(nsys: str, schema: str | None, *more: str, green: bool = True, table: str | None = "META_DATA_EXPORT",
         capture: str | None = "META_DATA_CAPTURE", prefix: str = "") -> Era:  # fmt: skip
    kernel = (*_KERNEL_HEAD, *(("greenContextId",) if green else ()), *_KERNEL_REST, *more)
    return Era(nsys, schema, table, capture, prefix, kernel)


_PERCENT = (*_HARDWARE, "sharedMemoryRequestedPercentage")

ERAS: tuple[Era, ...] = (
    _era("2021.5.1.118", None, green=False, table=None, capture=None),
    _era("2022.4.2.1", "3.0.0", green=False, table="EXPORT_META_DATA", capture=None),
    _era("2023.2.3.1001", "3.1.7", green=False, table="EXPORT_META_DATA", capture=None),
    _era("2023.3.1.92", "3.4.0", green=False),
    _era("2023.4.4.54", "3.7.2", green=False, prefix="PROCESS_0:"),
    _era("2024.5.1.113", "3.13.2"),
    _era("2025.1.3.140", "3.17.2"),
    _era("2025.3.1.90", "3.20.2"),
    _era("2025.5.1.121", "3.23.3", prefix="PROCESS_0:"),
    _era("2025.5.2.266", "3.24.0", *_HARDWARE),
    _era("2026.1.1.204", "3.24.14", *_PERCENT),
    _era("2026.2.1.210", "3.25.0", *_PERCENT, "tensorSizeMinusOneElements"),
    _era("2026.4.1.100", "3.28.0", *_PERCENT, "tensorSizeMinusOneElements", "somethingNew"),
)
LATEST = ERAS[-2]
