"""TMA descriptors of matrices, as the driver makes them and as a launch passes them: 128 bytes by value.

Imports torch and the driver bindings, so import it from inside functions.
"""

from __future__ import annotations

import ctypes
from typing import Any

import cuda.bindings.driver as driver
import torch

from .contract import Arg

_SWIZZLES = {
    0: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
    32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}
ALIGNMENT = 64
"""Bytes: where the driver wants a descriptor to lie."""


class TensorMap(ctypes.Structure):
    """The 128 bytes of a CUtensorMap."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def encode(arg: Arg, tensor: torch.Tensor, rows: int | None) -> tuple[Any, Any]:
    """(status, descriptor) of the driver for copies of ``arg.box`` from a BF16 matrix; outside of it they read zeros.

    Args:
        arg: a ``tensor_map`` argument: box and swizzle.
        tensor: [rows, columns], contiguous, BF16, on the GPU; its rows are a multiple of 16 bytes.
        rows: live rows of the tensor (default: all of them).

    Raises:
        ValueError: another shape or dtype, or more live rows than there are.
    """
    if tensor.dim() != 2 or tensor.dtype != torch.bfloat16:
        have = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ValueError(f"{arg.name!r} is {have}; a tensor map is made of a BF16 matrix")
    height, width = tensor.shape
    live = height if rows is None else rows
    if not 1 <= live <= height:
        raise ValueError(f"{arg.name!r} has {height} rows; a tensor map of {live} of them cannot be made")
    return driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        tensor.data_ptr(),
        [driver.cuuint64_t(width), driver.cuuint64_t(live)],
        [driver.cuuint64_t(width * tensor.element_size())],
        [driver.cuuint32_t(arg.box[1]), driver.cuuint32_t(arg.box[0])],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        _SWIZZLES[arg.swizzle],
        # a box row is 128 bytes: the L2 fetches the neighbouring 128 with it, which the next K tile reads
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def placed(encoded: Any) -> TensorMap:
    """A descriptor of the driver's copied to memory on a 64-byte boundary that lives as long as the result."""
    storage = (ctypes.c_char * (ctypes.sizeof(TensorMap) + ALIGNMENT))()
    result = TensorMap.from_buffer(storage, -ctypes.addressof(storage) % ALIGNMENT)
    for index, word in enumerate(encoded.opaque):
        result.words[index] = int(word)
    return result
