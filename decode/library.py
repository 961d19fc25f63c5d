"""Every engine as an operator of torch.library, ``k3lab::<family>_<engine>``, with a fake implementation.

An operator launches kernels that are loaded already and are named by a handle; its results are tensors that it
writes. So a step can be traced, with fake tensors too, and compiled around: what is launched stays what was tuned.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..kernels import InputError

_HANDLES = itertools.count()
_LOADED: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register(loaded: Any) -> str:
    """A handle of loaded kernels (:class:`~k3lab.decode.family_kernels.FamilyKernels`), valid as long as they live."""
    handle = f"{loaded.family.name}/{next(_HANDLES)}"
    _LOADED[handle] = loaded
    return handle


def _of(handle: str) -> Any:
    if handle not in _LOADED:
        raise InputError(f"the kernels {handle} are not loaded any more")
    return _LOADED[handle]


def _named(names: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    """``a,b=c`` and two tensors: b is c too."""
    words = names.split(",") if names else []
    return {name: tensor for word, tensor in zip(words, tensors, strict=True) for name in word.split("=")}


@cache
def operator(family: str, engine: str) -> Callable[..., None]:
    """The operator of an engine; registered when it is first asked for.

    Its arguments: handle; names of the inputs, joined by commas; inputs; names of the results, ``a=b`` where a kernel
    knows one tensor by two names; results, which are written; rows; fields that this call has less of than was
    compiled for, ``name=value``, joined by commas; whether what is older than the launch before may be read early.
    """

    @torch.library.custom_op(f"k3lab::{family}_{engine}", mutates_args=("results",))
    def launch(
        handle: str,
        names: str,
        inputs: list[Tensor],
        written: str,
        results: list[Tensor],
        rows: int,
        fewer: str,
        early: bool,
    ) -> None:
        less = {name: int(value) for name, _, value in (word.partition("=") for word in fewer.split(",") if word)}
        _of(handle).launch({**_named(names, inputs), **_named(written, results)}, rows, less, early)

    @launch.register_fake
    def fake(
        handle: str,
        names: str,
        inputs: list[Tensor],
        written: str,
        results: list[Tensor],
        rows: int,
        fewer: str,
        early: bool,
    ) -> None:
        _of(handle).check({**_named(names, inputs), **_named(written, results)}, rows)

    return launch


def call(
    loaded: Any, inputs: Mapping[str, Tensor], results: Mapping[str, Tensor], rows: int, fewer: Mapping[str, int],
    early: bool,
) -> None:  # fmt: skip
    """Launch loaded kernels through their operator."""
    operator(loaded.family.name, loaded.engine)(
        loaded.handle, ",".join(inputs), list(inputs.values()), ",".join(results), list(results.values()), rows,
        ",".join(f"{name}={value}" for name, value in fewer.items()), early,
    )  # fmt: skip
