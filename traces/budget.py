"""A budget: how many kernels and how much time a layer may take, on which GPU, and who says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import TraceError

SCHEMA = "k3lab.budget/1"
ANY = "any"
_FOLDER = Path(__file__).parent / "budgets"


@dataclass(frozen=True)
class Limit:
    """The limits of one layer; None where the budget sets none. ``period_ns`` is a completion period."""

    kernels: int | None
    period_ns: int | None


@dataclass(frozen=True)
class Budget:
    """A budget and its conditions.

    ``layers`` maps a layer kind (``kda``, ``mla``, or ``any``) to its limit; ``inferred`` names what the source
    does not state.
    """

    name: str
    gpu: str
    tp: int
    layers: Mapping[str, Limit]
    rows: int | None = None
    inferred: tuple[str, ...] = ()
    source: str = ""
    conditions: tuple[str, ...] = field(default=())

    def limit(self, kind: str | None) -> Limit | None:
        """The limit of a layer of a kind.

        A layer whose kernels do not tell its kind falls under the only limit there is: it is judged rather than let
        through. A known kind without a limit of its own or for any is not judged (None).
        """
        if kind is None:
            found = self.layers.get(ANY)
            return found or (next(iter(self.layers.values())) if len(self.layers) == 1 else None)
        return self.layers.get(kind) or self.layers.get(ANY)

    def fits_gpu(self, name: str) -> bool:
        """Whether a device name is the budget's GPU: ``NVIDIA GB300`` is GB300, ``NVIDIA B300`` is not."""
        words = name.upper().replace("-", " ").replace("_", " ").split()
        return self.gpu.upper() in words

    def to_json(self) -> dict[str, Any]:
        """The budget as JSON-able data, as in its file."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "gpu": self.gpu,
            "tp": self.tp,
            "rows": self.rows,
            "inferred": list(self.inferred),
            "layers": {
                kind: {"kernels": limit.kernels, "period_ns": limit.period_ns} for kind, limit in self.layers.items()
            },
            "source": self.source,
            "conditions": list(self.conditions),
        }


def budget_names() -> tuple[str, ...]:
    """The budgets that come with the package."""
    return tuple(sorted(path.stem.replace("_", "-") for path in _FOLDER.glob("*.json")))


def load_budget(name: str | Path) -> Budget:
    """A budget of the package by name (``gb300-tp16``), or one of yours by the path of its JSON file.

    Raises:
        TraceError: no such budget, or a file of another form.
    """
    path = _FOLDER / f"{str(name).replace('-', '_')}.json"
    if not path.is_file():
        path = Path(name)
        if path.suffix != ".json" or not path.is_file():
            raise TraceError(f"no budget {str(name)!r}; known: {', '.join(budget_names())}, or give a .json file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise TraceError(f"{path.name}: not a readable JSON file; a budget looks like {_FOLDER.name}/gb300_tp16.json"
                         ) from None  # fmt: skip
    return parse_budget(data, path.name)


def parse_budget(data: Any, where: str = "budget") -> Budget:
    """Check the data of a budget file.

    Raises:
        TraceError: a field is missing or of the wrong type.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise TraceError(f"{where}: not a budget of schema {SCHEMA}")
    for key in ("name", "gpu"):
        if not isinstance(data.get(key), str) or not data[key].strip():
            raise TraceError(f"{where}: {key!r} must be a text")
    limits = data.get("layers")
    if not isinstance(limits, dict) or not limits:
        raise TraceError(f"{where}: 'layers' must map a layer kind (kda, mla, any) to kernels and period_ns")
    layers = {}
    for kind, limit in limits.items():
        if not isinstance(limit, dict):
            raise TraceError(f"{where}: layer kind {kind!r} must hold kernels and period_ns")
        kernels = _positive(limit, "kernels", where)
        period = _positive(limit, "period_ns", where)
        if kernels is None and period is None:
            raise TraceError(f"{where}: layer kind {kind!r} sets neither kernels nor period_ns")
        layers[kind] = Limit(kernels, period)
    tp = _positive(data, "tp", where)
    if tp is None:
        raise TraceError(f"{where}: 'tp' must be a whole number above 0")
    return Budget(
        name=data["name"],
        gpu=data["gpu"].strip(),
        tp=tp,
        layers=layers,
        rows=_positive(data, "rows", where),
        inferred=_texts(data, "inferred", where),
        source=data["source"] if isinstance(data.get("source"), str) else "",
        conditions=_texts(data, "conditions", where),
    )


def _positive(data: Mapping[str, Any], key: str, where: str) -> int | None:
    value = data.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise TraceError(f"{where}: {key!r} must be a whole number above 0")
    return value


def _texts(data: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = data.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TraceError(f"{where}: {key!r} must be a list of texts")
    return tuple(value)
