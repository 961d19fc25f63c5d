"""Launching compiled engines through the CUDA driver: the one way a k3lab kernel starts on a GPU.

Checking, timing, and the decode path all use :class:`Runner`, on the cubin that is also exported.
Launches go to torch's current stream and can be captured in a CUDA graph. Imports torch and the
driver bindings, so import it from inside functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import cuda.bindings.driver as driver
import torch

from . import residency
from .contract import Arg, Compiled, Launch
from .tensor_map import TensorMap, encode, placed
from .transports import Loopback, Transport, own_buffers


class LaunchError(RuntimeError):
    """The driver refused to load or launch a kernel."""


class ResidencyError(LaunchError):
    """The GPU cannot hold the blocks that must be there together; nothing was launched."""


def _checked(result: tuple[Any, ...]) -> Any:
    """Values of a driver call, or LaunchError with the driver's own words."""
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(code)
        raise LaunchError(f"{code.name}: {text.decode() if text else 'unknown error'}")
    return values[0] if len(values) == 1 else values


def _tensor_map(arg: Arg, tensor: torch.Tensor, rows: int | None) -> TensorMap:
    """See :func:`k3lab.kernels.tensor_map.encode`; the driver's refusal as LaunchError."""
    code, encoded = encode(arg, tensor, rows)
    return placed(_checked((code, encoded)))


class _Loaded:
    """One kernel, loaded into the current context, ready for launches."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        # the module keeps no reference to the image, but the image must outlive the call
        self._module = _checked(driver.cuModuleLoadData(launch.cubin))
        self.function = _checked(driver.cuModuleGetFunction(self._module, launch.kernel.encode()))
        if launch.cluster_blocks > 8:
            wide = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _checked(driver.cuFuncSetAttribute(self.function, wide, 1))
        self._most_bytes = 48 * 1024
        self._even_bytes = launch.shared_bytes
        if residency.concerned(launch):
            room = residency.room_on_gpu(launch, self.function, self.config(pdl=False))
            if reason := residency.refusal(launch, room):
                raise ResidencyError(reason)
        if launch.pdl:
            self._even_bytes = residency.even_bytes(launch, self.function, self._config)

    def unload(self) -> None:
        """Give the kernel's memory back; it cannot be launched any more."""
        _checked(driver.cuModuleUnload(self._module))

    @property
    def carveout(self) -> int:
        """See :func:`k3lab.kernels.residency.carveout`."""
        return residency.carveout(self.launch, self.function, self.config(pdl=self.launch.pdl))

    def prefer_carveout(self, percent: int) -> None:
        """Ask for so much of an SM's memory as shared memory; a kernel that needs more gets what it needs."""
        preferred = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _checked(driver.cuFuncSetAttribute(self.function, preferred, percent))

    def config(self, *, pdl: bool) -> driver.CUlaunchConfig:
        """Launch configuration without the stream.

        ``pdl``: with programmatic stream serialization, and with so much shared memory that blocks spread evenly
        while the predecessor is still there (:func:`k3lab.kernels.residency.even_bytes`).
        """
        return self._config(self._even_bytes if pdl else self.launch.shared_bytes, pdl=pdl)

    def _config(self, shared_bytes: int, *, pdl: bool = False) -> driver.CUlaunchConfig:
        if shared_bytes > self._most_bytes:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self.function, limit, shared_bytes))
            self._most_bytes = shared_bytes
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.launch.block
        config.sharedMemBytes = shared_bytes
        attributes = []
        if self.launch.cluster != (1, 1, 1):
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = self.launch.cluster
            attributes.append(cluster)
        if pdl:
            serial = driver.CUlaunchAttribute()
            serial.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            serial.value.programmaticStreamSerializationAllowed = 1
            attributes.append(serial)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config


def unfit(compiled: Compiled, device: str = "cuda") -> str | None:
    """Why a GPU cannot hold the blocks of a launch that must be there together, or None.

    Nothing is launched, no buffers are made and no other rank is waited for: what loads kernels for good may ask first.

    Args:
        compiled: what is to be launched.
        device: torch's name of the GPU.

    Raises:
        LaunchError: the driver refuses the kernels themselves.
    """
    torch.zeros(1, device=device)  # the driver API needs torch's context to be current
    for launch in filter(residency.concerned, compiled.launches):
        try:
            loaded = _Loaded(launch)
        except ResidencyError as error:
            return str(error)
        loaded.unload()
    return None


class Runner:
    """A compiled engine on the current CUDA device.

    Raises:
        ResidencyError: a cluster of a launch fits nowhere, or a launch's blocks wait for each other and do not all fit.
    """

    def __init__(
        self,
        compiled: Compiled,
        device: str = "cuda",
        transport: Transport | None = None,
        *,
        carveout: int | None = None,
    ) -> None:
        """A runner of its own copy of the kernels.

        Args:
            compiled: what to launch.
            device: torch's name of it.
            transport: of kernels that write to other ranks; without one each plays them all on this GPU.
            carveout: percent of an SM's memory that the kernels leave to shared memory, for the sake of what runs
                behind them (:attr:`carveout` of its runner); None leaves it to the driver.
        """
        torch.cuda.current_stream()  # the driver API needs torch's context to be current
        torch.zeros(1, device=device)
        self.compiled = compiled
        self._loaded = [_Loaded(launch) for launch in compiled.launches]
        if carveout is not None:
            for loaded in self._loaded:
                loaded.prefer_carveout(carveout)
        self.transport = transport or Loopback(compiled.problem.tp)
        self.buffers, self._mailboxes = own_buffers(compiled, self.transport, device)

    @property
    def carveout(self) -> int:
        """Percent of an SM's shared memory that the first launch takes: what it wants its predecessor to leave."""
        return self._loaded[0].carveout

    def bind(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        rows: int | None = None,
        pdl: bool | None = None,
        fewer: Mapping[str, int] | None = None,
        early: bool = False,
    ) -> Callable[[], None]:
        """A call without arguments that launches on torch's current stream; holds the tensors alive.

        Args:
            tensors: inputs and outputs by name, contiguous, on the GPU.
            rows: token rows, at most those compiled for (default: exactly those).
            pdl: None launches as compiled; False without the programmatic edge to what runs before, so that
                the kernel starts when its predecessor has ended. True is for kernels compiled so.
            fewer: fields of the problem that this call has less of than was compiled for, e.g. saved blocks; of those
                that the kernels take as an argument.
            early: inputs that are older than the launch before may be read ahead of the wait for it, by kernels that take such an
                argument. The caller answers for it: that launch writes none of what they read so early, it is no launch of
                this runner, and it began when all before it had ended (it was launched without PDL, or lets others start only
                behind its own wait: :meth:`~k3lab.kernels.Engine.releases_behind`).

        Raises:
            ValueError: a tensor is missing, on another device, not contiguous or not 16-byte aligned; PDL asked of a
                kernel that was not compiled for it; or a field that no kernel takes, or more of it.
        """
        most = self.compiled.problem.rows
        rows = most if rows is None else rows
        if not 1 <= rows <= most:
            raise ValueError(f"{rows} rows: compiled for 1 to {most}")
        if pdl and not all(launch.pdl for launch in self.compiled.launches):
            raise ValueError("a kernel that does not wait for its predecessor itself cannot be launched with PDL")
        held = {**self.buffers, **tensors}
        integers = {**self.compiled.problem.to_json(), "rank": self.transport.rank, "rows": rows, "early": int(early)}
        taken = {arg.name for launch in self.compiled.launches for arg in launch.args if arg.kind == "int32"}
        for name, value in (fewer or {}).items():
            if name not in taken - {"rows", "rank", "early"} or not 1 <= value <= integers[name]:
                raise ValueError(f"{name} {value}: the kernels take 1 to {integers.get(name)} of {sorted(taken)}")
            integers[name] = value
        # edges between launches of one call stay as compiled
        calls = [
            self._pack(loaded, held, integers, loaded.launch.pdl if pdl is None or place else pdl)
            for place, loaded in enumerate(self._loaded)
        ]

        def call() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for config, function, pointers, _keep in calls:
                config.hStream = stream
                _checked(driver.cuLaunchKernelEx(config, function, pointers, 0))

        call.tensors = held  # type: ignore[attr-defined]  # alive as long as the call
        return call

    @staticmethod
    def _pack(
        loaded: _Loaded, held: Mapping[str, torch.Tensor], integers: Mapping[str, Any], pdl: bool
    ) -> tuple[Any, ...]:
        values: list[Any] = []
        for arg in loaded.launch.args:
            if arg.kind == "null":
                values.append(ctypes.c_uint64(0))
            elif arg.kind == "int32":
                values.append(ctypes.c_int32(integers[arg.name]))
            else:
                if arg.name not in held:
                    raise ValueError(f"{loaded.launch.kernel}: tensor {arg.name!r} is missing")
                tensor = held[arg.name]
                if not tensor.is_cuda or not tensor.is_contiguous() or tensor.data_ptr() % 16:
                    raise ValueError(
                        f"{loaded.launch.kernel}: {arg.name!r} must be a contiguous, 16-byte aligned CUDA tensor"
                    )
                if arg.kind == "tensor_map":
                    values.append(_tensor_map(arg, tensor, integers.get(arg.extent)))
                else:
                    values.append(ctypes.c_uint64(tensor.data_ptr()))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        return loaded.config(pdl=pdl), loaded.function, ctypes.addressof(pointers), (values, pointers)
