"""What families without engines share: inputs drawn from a table of shapes, bytes read off that table."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .contract import Family, Problem, Tensors, Tolerance, Traffic
from .errors import InputError
from .model_card import ModelCard

if TYPE_CHECKING:
    import torch

MAX_ROWS = 64
"""Most token rows of a decode step."""
ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8, "uint8": 1, "float8_e4m3fn": 1, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class Draw:
    """One random input: N(mean, std), or uniform integers in low..high-1 for an integer dtype."""

    shape: tuple[int, ...]
    std: float = 1.0
    mean: float = 0.0
    dtype: str = "bfloat16"
    low: int = 0
    high: int = 256

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def tensor(self, generator: torch.Generator) -> torch.Tensor:
        """Draw it on the generator's device."""
        import torch

        dtype = getattr(torch, self.dtype)
        if not dtype.is_floating_point:
            return torch.randint(
                self.low, self.high, self.shape, generator=generator, device=generator.device, dtype=dtype
            )
        normal = torch.randn(self.shape, generator=generator, device=generator.device)
        return (normal * self.std + self.mean).to(dtype)


def norm_weight(width: int) -> Draw:
    """Weight of an RMSNorm: around one."""
    return Draw((width,), std=0.1, mean=1.0)


def attn_res_draws(rows: int, hidden: int, blocks: int) -> dict[str, Draw]:
    """The sources and weights of an AttnRes and of the norm after it."""
    return {
        "prefix": Draw((rows, hidden)),
        "blocks": Draw((blocks, rows, hidden)),
        "res_norm": norm_weight(hidden),
        "res_proj": Draw((1, hidden), std=hidden**-0.5),
        "norm_w": norm_weight(hidden),
    }


def in_fp32(inputs: Tensors) -> dict[str, torch.Tensor]:
    """BF16 inputs widened to FP32, so that a twin rounds nowhere on its way; the rest unchanged."""
    import torch

    return {name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in inputs.items()}


def rounding_tolerance(roundings: int, length: int, why: str) -> Tolerance:
    """Bound for ``roundings`` BF16 roundings in a row and FP32 sums of ``length`` terms.

    One rounding errs by 2^-8 of a value at most and by less than 2^-9 in the root mean square; elements
    are bounded at 5 sigma of the output, larger ones in proportion.
    """
    accumulate = 2**-24 * length**0.5
    return Tolerance(
        relative=roundings * 2**-9 + 4 * accumulate,
        element=roundings * 2**-8 * 5 + 32 * accumulate,
        why=f"{roundings} BF16 rounding{'s' if roundings > 1 else ''} ({why}); FP32 sums of {length} terms",
    )


class TwinFamily(Family):
    """A family described by a table of its inputs."""

    problem_type: type[Problem]

    @abstractmethod
    def draws(self, problem: Problem) -> dict[str, Draw]:
        """Every input with its shape, dtype and magnitude."""

    @abstractmethod
    def flops(self, problem: Problem) -> int:
        """Multiplies and adds of one call, counted separately."""

    def check(self, card: ModelCard, tp: int, rows: int, kind: str | None = None) -> None:
        """Raise InputError unless TP divides, rows are in range and the kind exists."""
        card.check_tp(tp)
        if not 1 <= rows <= MAX_ROWS:
            raise InputError(f"rows is {rows}; the decode path serves 1 to {MAX_ROWS} rows")
        if kind is not None and kind not in self.kinds:
            have = f"kinds: {', '.join(self.kinds)}" if self.kinds else "it has no kinds"
            raise InputError(f"{self.name} has no kind {kind!r}; {have}")

    def problem_from_json(self, data: Mapping[str, Any]) -> Problem:
        """Inverse of ``to_json``."""
        if self.kinds and data.get("kind") not in self.kinds:
            raise InputError(f"{self.name} has no kind {data.get('kind')!r}; kinds: {', '.join(self.kinds)}")
        try:
            return self.problem_type(**data)
        except TypeError as error:
            raise InputError(f"not a problem of {self.name}: {error}") from error

    def inputs(self, problem: Problem, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Every input of the table, in its order, from one generator."""
        import torch

        generator = torch.Generator(device).manual_seed(seed)
        return {name: draw.tensor(generator) for name, draw in self.draws(problem).items()}

    def input_shapes(self, problem: Problem) -> dict[str, tuple[int, ...]]:
        """As the table has them."""
        return {name: draw.shape for name, draw in self.draws(problem).items()}

    def traffic(self, problem: Problem) -> Traffic:
        """Every input of the table read once, every output written once."""
        draws = self.draws(problem)
        weights = sum(draws[name].bytes for name in self.rotated if name in draws)
        read = sum(draw.bytes for name, draw in draws.items() if name not in self.rotated)
        written = sum(math.prod(shape) * ITEM_BYTES[dtype] for shape, dtype in self.output_specs(problem).values())
        return Traffic(weights, read + written, self.flops(problem))
