"""Compare an engine's output with the twin's, and say where they part."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..kernels import Tolerance

if TYPE_CHECKING:
    import torch


SIGMAS = 5.0


@dataclass(frozen=True)
class Comparison:
    """One output against the twin."""

    output: str
    ok: bool
    relative: float
    """norm(out - twin) / norm(twin); NaN where the output has NaN the twin has not."""
    element: float
    """max |out - twin| / max(rms(twin), |twin| / 5)."""
    tolerance: Tolerance
    message: str
    """Empty if ok; else one line: how far, where, and what that pattern usually means."""

    def to_json(self) -> dict[str, Any]:
        """Field name to value."""
        return asdict(self)


def compare(output: str, got: torch.Tensor, twin: torch.Tensor, tolerance: Tolerance) -> Comparison:
    """Judge ``got`` against ``twin``; a poisoned (NaN) element that was never written fails."""
    import torch

    if got.shape != twin.shape:
        message = f"{output}: shape {tuple(got.shape)}, the twin's is {tuple(twin.shape)}"
        return Comparison(output, False, float("nan"), float("nan"), tolerance, message)
    reference = twin.double()
    same = (got.double() == reference) | (got.isnan() & reference.isnan())  # equal infinities, NaN the twin has too
    error = torch.where(same, 0.0, got.double() - reference)
    unequal_nan = error.isnan() & ~reference.isnan()
    tiny = torch.finfo(torch.float64).tiny
    finite = torch.where(reference.isfinite(), reference, 0.0)
    relative = float(error.norm() / finite.norm().clamp_min(tiny))
    element = float((error.abs() / _scale(finite).clamp_min(tiny)).max())
    ok = not bool(unequal_nan.any()) and relative <= tolerance.relative and element <= tolerance.element
    message = "" if ok else _explain(output, got, reference, error, unequal_nan, relative, element, tolerance)
    return Comparison(output, ok, relative, element, tolerance, message)


def _explain(
    output: str,
    got: torch.Tensor,
    reference: torch.Tensor,
    error: torch.Tensor,
    unequal_nan: torch.Tensor,
    relative: float,
    element: float,
    tolerance: Tolerance,
) -> str:
    """One line for a reader who must find the fault."""
    if unequal_nan.any():
        where = [int(i) for i in unequal_nan.nonzero()[0]]
        count = int(unequal_nan.sum())
        return f"{output}: {count} of {error.numel()} elements are NaN (never written?), first at {where}{_span(unequal_nan)}"
    parts = error.abs() / _scale(reference)
    off = parts > tolerance.element
    if not off.any():
        return (
            f"{output}: relative error {relative:.2e} exceeds {tolerance.relative:.2e} ({tolerance.why}) although no element "
            f"stands out: a rounding too many, or a small term missing everywhere"
        )
    flat = int(parts.argmax())
    at = [int(i) for i in (parts == parts.max()).nonzero()[0]]
    return (
        f"{output}: relative error {relative:.2e} (limit {tolerance.relative:.2e}), largest element error {element:.2e} rms "
        f"(limit {tolerance.element:.2e}) at {at}: got {float(got.flatten()[flat]):.4g}, twin {float(reference.flatten()[flat]):.4g}; "
        f"{int(off.sum())} of {error.numel()} elements off{_span(off)}"
    )


def _scale(reference: torch.Tensor) -> torch.Tensor:
    """What an element's error is held against: the root mean square, or a fifth of what is beyond five times that.

    Roundings err in proportion to the value, so bounds that hold for five sigma are too small for the few far beyond.
    """
    import torch

    return torch.maximum(reference.abs() / SIGMAS, reference.square().mean().sqrt())


def _span(mask: torch.Tensor) -> str:
    """Which rows and columns a fault touches, for 2-D outputs."""
    if mask.dim() != 2:
        return ""
    rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()

    def text(name: str, index: torch.Tensor, size: int) -> str:
        if len(index) == size:
            return f"all {name}"
        return f"{name} {int(index[0])}..{int(index[-1])}" + (
            "" if len(index) == int(index[-1] - index[0]) + 1 else " (some)"
        )

    return f" ({text('rows', rows, mask.shape[0])}, {text('columns', columns, mask.shape[1])})"
