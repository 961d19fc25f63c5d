"""What a launch refuses before it starts, with tensors and kernels that are only described."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from k3lab.kernels import K3, Arg, Compiled, Launch, family
from k3lab.kernels.launch import Runner

ARGS = (Arg("tensor", "prefix"), Arg("tensor", "out"), Arg("int32", "rows"), Arg("int32", "blocks"))
LAUNCH = Launch("k3_attn_res_test_main", b"", (8, 1, 1), (32, 1, 1), 0, ARGS, pdl=True)


@dataclasses.dataclass
class Described:
    """As much of a tensor as a launch looks at."""

    address: int = 1 << 20
    is_cuda: bool = True
    contiguous: bool = True

    def is_contiguous(self) -> bool:
        return self.contiguous

    def data_ptr(self) -> int:
        return self.address


def runner(launch: Launch = LAUNCH) -> tuple[Runner, list[tuple[bool, list[int]]]]:
    """A runner that was never loaded, and what is launched: with a programmatic edge or not, and the parameters' values."""
    problem = family("attn_res").problem(K3, tp=16, rows=8)
    made, packed = Runner.__new__(Runner), []
    made.compiled = Compiled("attn_res", "test", problem, {}, "sm_90a", (launch,))
    made.transport, made.buffers = SimpleNamespace(rank=0), {}  # type: ignore[assignment]
    made._loaded = [SimpleNamespace(launch=launch, function=None, config=lambda *, pdl: SimpleNamespace(pdl=pdl))]  # type: ignore[list-item]
    pack = made._pack

    def seen(*given: Any) -> Any:
        found = pack(*given)
        packed.append((found[0].pdl, [value.value for value in found[3][0]]))
        return found

    made._pack = seen  # type: ignore[method-assign]
    return made, packed


def tensors(**changes: Any) -> dict[str, Any]:
    return {"prefix": Described(), "out": Described(1 << 21), **changes}


def test_parameters_are_addresses_and_counts() -> None:
    made, packed = runner()
    made.bind(tensors())
    made.bind(tensors(), rows=3, pdl=False, fewer={"blocks": 5})
    assert packed == [(True, [1 << 20, 1 << 21, 8, 8]), (False, [1 << 20, 1 << 21, 3, 5])]


@pytest.mark.parametrize(
    "wrong",
    [Described(is_cuda=False), Described(contiguous=False), Described((1 << 20) + 8), torch.zeros(8)],
    ids=["not on the GPU", "strided", "between two 16 bytes", "a real one of the CPU"],
)
def test_tensors_that_no_kernel_can_read_are_refused(wrong: Any) -> None:
    made, _ = runner()
    with pytest.raises(ValueError, match="'prefix' must be a contiguous, 16-byte aligned CUDA tensor"):
        made.bind(tensors(prefix=wrong))


def test_a_missing_tensor_is_named() -> None:
    made, _ = runner()
    with pytest.raises(ValueError, match="k3_attn_res_test_main: tensor 'out' is missing"):
        made.bind({"prefix": Described()})


@pytest.mark.parametrize("rows", [0, 9, -1])
def test_rows_that_were_not_compiled_for_are_refused(rows: int) -> None:
    made, _ = runner()
    with pytest.raises(ValueError, match=f"{rows} rows: compiled for 1 to 8"):
        made.bind(tensors(), rows=rows)


@pytest.mark.parametrize(("name", "value"), [("blocks", 9), ("blocks", 0), ("rows", 4), ("rank", 1), ("hidden", 7)])
def test_fewer_is_of_what_kernels_take_alone(name: str, value: int) -> None:
    made, _ = runner()
    with pytest.raises(ValueError, match=f"{name} {value}: the kernels take 1 to"):
        made.bind(tensors(), fewer={name: value})


def test_a_kernel_that_does_not_wait_gets_no_programmatic_edge() -> None:
    made, packed = runner(dataclasses.replace(LAUNCH, pdl=False))
    made.bind(tensors())
    assert packed[0][0] is False
    with pytest.raises(ValueError, match="does not wait for its predecessor itself"):
        made.bind(tensors(), pdl=True)
