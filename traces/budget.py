"""A budget: how many kernels and how much time a layer may take, on which GPU, and who says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import TraceError
from .families import known_families
from .side_files import named_or_given

SCHEMA = "k3lab.budget/1"
ANY = "any"
_KINDS = ("kda", "mla", ANY)  # what kernel names tell; others are never met
_FOLDER = Path(__file__).parent / "budgets"


@dataclass(frozen=True)
class Limit:
    """The limits of one layer; None where the budget sets none. ``period_ns`` is a completion period.

    ``families`` shares the layer out: the periods of all families add up to the layer's. Kernel counts need not, where
    several lists of launches come to the same total.
    """

    kernels: int | None
    period_ns: int | None
    families: Mapping[str, Limit] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As in a budget's file."""
        data: dict[str, Any] = {"kernels": self.kernels, "period_ns": self.period_ns}
        if self.families:
            data["families"] = {name: limit.to_json() for name, limit in self.families.items()}
        return data


@dataclass(frozen=True)
class Split:
    """Who shared a layer out to families, and how: by which ``rule``, from how many ``bytes`` a layer kind and family.

    ``evidence`` is ``inferred`` for a split of a figure whose source gives none, ``derived`` where the whole budget is.
    """

    evidence: str
    rule: str
    bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As in a budget's file."""
        return {"evidence": self.evidence, "rule": self.rule, "bytes": {k: dict(v) for k, v in self.bytes.items()}}


@dataclass(frozen=True)
class Budget:
    """A budget and its conditions.

    ``layers`` maps a layer kind (``kda``, ``mla``, or ``any``) to its limit; ``inferred`` names what the source
    does not state. ``evidence`` says how the figures came about (``published``, ``derived``), ``split`` the shares.
    """

    name: str
    gpu: str
    tp: int
    layers: Mapping[str, Limit]
    rows: int | None = None
    inferred: tuple[str, ...] = ()
    source: str = ""
    conditions: tuple[str, ...] = field(default=())
    evidence: str = ""
    split: Split | None = None

    def limit(self, kind: str | None) -> Limit | None:
        """The limit of a layer of a kind.

        A layer whose kernels do not tell its kind falls under the only limit there is: it is judged rather than let
        through. A known kind without a limit of its own or for any is not judged (None).
        """
        if kind is None:
            found = self.layers.get(ANY)
            return found or (next(iter(self.layers.values())) if len(self.layers) == 1 else None)
        return self.layers.get(kind) or self.layers.get(ANY)

    def bounds(self, family: str | None = None) -> tuple[Limit, Limit] | None:
        """The tightest and the loosest limit over all layer kinds, of layers or of one family's shares.

        What keeps the first keeps its own, whatever its kind; what breaks the second breaks it. None where a kind has
        no such share.
        """
        limits = list(self.layers.values())
        if family is not None:
            if any(family not in limit.families for limit in limits):
                return None
            limits = [limit.families[family] for limit in limits]
        kernels, periods = [limit.kernels for limit in limits], [limit.period_ns for limit in limits]
        counted = [value for value in kernels if value is not None]
        timed = [value for value in periods if value is not None]
        tightest = Limit(min(counted, default=None), min(timed, default=None))
        return tightest, Limit(None if None in kernels else max(counted), None if None in periods else max(timed))

    def fits_gpu(self, name: str) -> bool:
        """Whether a device name is the budget's GPU: ``NVIDIA GB300`` is GB300, ``NVIDIA B300`` is not."""
        words = name.upper().replace("-", " ").replace("_", " ").split()
        return self.gpu.upper() in words

    def to_json(self) -> dict[str, Any]:
        """The budget as JSON-able data, as in its file."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "evidence": self.evidence,
            "gpu": self.gpu,
            "tp": self.tp,
            "rows": self.rows,
            "inferred": list(self.inferred),
            "layers": {kind: limit.to_json() for kind, limit in self.layers.items()},
            "split": self.split.to_json() if self.split else None,
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
    return parse_budget(*named_or_given(name, _FOLDER, budget_names(), "budget", "gb300_tp16"))


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
        if not kind.strip() or (kind not in _KINDS and kind.strip().lower() in _KINDS):
            raise TraceError(f"{where}: the layer kind {kind!r} is none; kinds are {', '.join(_KINDS)}")
        layers[kind] = _limit(limit, f"layer kind {kind!r}", where)
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
        evidence=data["evidence"] if isinstance(data.get("evidence"), str) else "",
        split=_split(data.get("split"), where),
    )


def _limit(data: Any, what: str, where: str) -> Limit:
    if not isinstance(data, dict):
        raise TraceError(f"{where}: {what} must hold kernels and period_ns")
    if unknown := sorted(set(data) - {"kernels", "period_ns", "families"}):
        raise TraceError(f"{where}: {what} has {unknown[0]!r}, which is no limit; limits are kernels and period_ns")
    kernels = _positive(data, "kernels", where)
    period = _positive(data, "period_ns", where)
    if kernels is None and period is None:
        raise TraceError(f"{where}: {what} sets neither kernels nor period_ns")
    shares = data.get("families", {})
    if not isinstance(shares, dict) or set(shares) - set(known_families()):
        known = ", ".join(known_families())
        raise TraceError(f"{where}: 'families' of {what} must map families to their shares: {known}")
    families = {name: _limit(share, f"the share of {name}", where) for name, share in shares.items()}
    periods = [share.period_ns for share in families.values() if share.period_ns is not None]
    if families and period is not None and len(periods) == len(families) and sum(periods) != period:
        raise TraceError(f"{where}: the shares of {what} add up to {sum(periods)} ns, its period is {period}")
    return Limit(kernels, period, families)


def _split(data: Any, where: str) -> Split | None:
    if data is None:
        return None
    if not isinstance(data, dict) or not all(isinstance(data.get(key), str) for key in ("evidence", "rule")):
        raise TraceError(f"{where}: 'split' must say evidence and rule")
    moved = data.get("bytes", {})
    if not isinstance(moved, dict) or not all(isinstance(value, dict) for value in moved.values()):
        raise TraceError(f"{where}: 'bytes' of 'split' must map a layer kind to bytes of its families")
    return Split(data["evidence"], data["rule"], moved)


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
