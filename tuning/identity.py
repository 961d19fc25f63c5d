"""What a study is a study of. Trials of two identities are never mixed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ..kernels.contract import Engine, Family, Problem
from ..kernels.errors import InputError
from ..kernels.gpu_cards import GpuCard
from ..kernels.space import Config, Space

SCHEMA = 1
"""Version of what a study's attributes hold; raised when they change meaning."""

Objective = Literal["measured", "predicted"]


STUDIES = Path("studies")
"""Where studies are kept, under the working folder."""
KERNEL_FIELDS = ("source_digest", "glue_digest", "space")
"""Fields that change when an author edits a kernel or its space."""


def space_digest(space: Space) -> str:
    """Digest of the parameters and their values (not of the constraints, which are asked anew): 16 hex digits."""
    text = json.dumps([[param.name, list(param.values)] for param in space.params])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class StudyIdentity:
    """Everything two trials must share to be compared."""

    schema: int
    family: str
    engine: str
    problem: Mapping[str, Any]
    gpu: str
    """Name of the GPU card."""
    objective: Objective
    method: str
    """Version of the timing policy, or of the cost model and its constants: times of two of them are not compared."""
    source_digest: str
    """Of the kernel files."""
    glue_digest: str
    """Of the module that turns a config into launches."""
    compilers: Mapping[str, str]
    """Compiler package to version."""
    space: str
    """Digest of the parameters and their values: of the whole space."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Parameters held at one value; studies from before this field hold none."""

    @staticmethod
    def of(
        family: Family,
        engine: Engine,
        problem: Problem,
        gpu: GpuCard,
        objective: Objective,
        fixed: Config | None = None,
    ) -> StudyIdentity:
        """The identity a new study would have now."""
        from .compiling import compiler_versions, glue_digest
        from .cost_model import version_of
        from .policy import POLICY_VERSION

        return StudyIdentity(
            schema=SCHEMA,
            family=family.name,
            engine=engine.name,
            problem=problem.to_json(),
            gpu=gpu.name,
            objective=objective,
            method=f"timing policy {POLICY_VERSION}"
            if objective == "measured"
            else version_of(family.name, engine.name),
            source_digest=engine.source_digest(),
            glue_digest=glue_digest(engine),
            compilers=compiler_versions(engine),
            space=space_digest(engine.space(problem, gpu)),
            fixed=dict(fixed or {}),
        )

    @property
    def name(self) -> str:
        """Name of the study inside its file."""
        return f"{self.family}/{self.engine}/{self.gpu}/{self.objective}"

    def to_json(self) -> dict[str, Any]:
        """Field name to value."""
        return asdict(self)

    def require(self, stored: Mapping[str, Any], path: Path) -> None:
        """Refuse a stored identity that differs from this one.

        Raises:
            InputError: names the first field that differs, with both values.
        """
        check_schema(stored, path)
        if differs := first_difference(stored, self.to_json()):
            field, there, here = differs
            what = "the kernel changed since" if field in KERNEL_FIELDS else "it was made for another one"
            raise InputError(
                f"study {path} has another {field} ({there!r}, now {here!r}; {what}): "
                "--fresh keeps the old study beside a new one, --study PATH tunes into another file"
            )


def first_difference(stored: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first field that differs, as it is stored and as it is now; None where none does. Fields in fields are named with a dot."""
    for field, here in now.items():
        there = stored.get(field, {} if field == "fixed" else None)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            changed = sorted(key for key in {*here, *there} if here.get(key) != there.get(key))
            if changed:
                return f"{field}.{changed[0]}", there.get(changed[0]), here.get(changed[0])
        elif here != there:
            return field, there, here
    return None


def check_schema(stored: Mapping[str, Any], path: Path) -> None:
    """Refuse a study whose attributes this version does not know.

    Raises:
        InputError: it has another schema version.
    """
    if stored.get("schema") != SCHEMA:
        raise InputError(
            f"study {path} has schema {stored.get('schema')!r}, this k3lab reads schema {SCHEMA}: "
            "give another --study path, or open it with the version that wrote it"
        )
    for field in fields(StudyIdentity):
        kind = int if field.name == "schema" else Mapping if field.name in ("problem", "compilers", "fixed") else str
        if field.name == "fixed" and "fixed" not in stored:
            continue
        if not isinstance(stored.get(field.name), kind):
            raise InputError(
                f"study {path} is damaged (its identity has no {field.name}): restore a copy, or name another file"
            )
    if stored["objective"] not in get_args(Objective):
        raise InputError(
            f"study {path} has the objective {stored['objective']!r}, which is none of {', '.join(get_args(Objective))}"
        )


def default_path(
    family: Family, engine: Engine, problem: Problem, gpu: GpuCard, objective: Objective, fixed: Config | None = None,
    folder: Path = STUDIES,
) -> Path:  # fmt: skip
    """``studies/<family>-<engine>-<problem>-<gpu>-<objective>[-<name>_is_<value>...].sqlite3`` under the working folder."""
    held = "".join(f"-{name}_is_{value}" for name, value in sorted((fixed or {}).items()))
    name = f"{family.name}-{engine.name}-{problem.label}-{gpu.name.lower()}-{objective}{held}"
    return folder / f"{name}.sqlite3"
