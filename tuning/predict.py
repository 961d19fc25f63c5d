"""Predictions: the cost model of :mod:`k3lab.tuning.cost_model` on one config, with its error and what was never calibrated.

``predicted`` means: compiled for the GPU, resources read from the cubin, time by this model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..kernels import Compiled, Config, Engine, Family, Problem
from ..kernels.gpu_cards import GpuCard
from .cost_features import features, resident_blocks
from .cost_model import MODEL_VERSION, TERM_MEANINGS, Constants, constants_of, link_gpus, terms, total
from .cubin import KernelResources, resources
from .model_error import stated_error

__all__ = ["MODEL_VERSION", "TERM_MEANINGS", "Prediction", "predict", "resident_blocks"]


@dataclass(frozen=True)
class Prediction:
    """Time by the model; never called measured."""

    microseconds: float
    terms: dict[str, float]
    """Microseconds by term; they do not add up, as some overlap."""
    error: str
    """How far this model was off where it could be compared, in words."""
    uncalibrated: list[str] = field(default_factory=list)
    """Terms never calibrated on the target."""
    model_version: int = MODEL_VERSION

    def to_json(self) -> dict[str, Any]:
        """Field name to value."""
        data = asdict(self)
        data["microseconds"] = round(self.microseconds, 3)
        data["terms"] = {name: round(value, 3) for name, value in self.terms.items()}
        return data


def predict(
    family: Family, engine: Engine, problem: Problem, config: Config, gpu: GpuCard, compiled: Compiled | None,
    *, found: Sequence[KernelResources] | None = None, constants: Constants | None = None, alone: bool = False,
) -> Prediction:  # fmt: skip
    """Time of one isolated call with cold weights on a GPU.

    Args:
        family: the engine's.
        engine: whose constants are used; those of all engines together where it was never calibrated.
        problem: which instance.
        config: one point of its space.
        gpu: the target's card.
        compiled: the config compiled for it, or None with ``found``.
        found: resources of its launches.
        constants: others than the calibrated ones.
        alone: one GPU plays all ranks, as where kernels are measured over loopback: nothing crosses a link.

    Raises:
        ValueError: not one block fits on an SM.
    """
    if found is None:
        assert compiled is not None, "either the compiled object or its resources"
        found = resources(compiled)
    seen = features(found, engine.work(problem, config), family.traffic(problem), gpu, alone=alone)
    used = constants or constants_of(family.name, engine.name)[0]
    parts = terms(seen, used)
    error, uncalibrated = stated_error(family.name, engine.name, gpu)
    uncalibrated = [name for name in uncalibrated if parts[name]]
    for name in ("spills", *(() if gpu.name in link_gpus() else ("link",))):
        if parts[name] and name not in uncalibrated:
            uncalibrated.append(name)
    # a fit to small shapes may know no bandwidth: on another GPU no call is quicker than its bytes, whatever the constants say
    return Prediction(max(total(parts, used), seen.memory_us), parts, error, uncalibrated)
