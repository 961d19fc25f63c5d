"""The format of a bundle: ``bundle.json``, and one cubin file for each kernel binary.

``bundle.json`` is ``{"body": ..., "sha256": ...}`` in one canonical spelling; the body lists every other
file with its SHA-256. So every byte of the directory is covered.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from ..contract import Buffer
from ..evidence import Evidence

SCHEMA_VERSION = 1
MANIFEST = "bundle.json"
CUBINS = "cubins"

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
CubinPath = Annotated[str, StringConstraints(pattern=r"^cubins/[0-9a-f]{64}\.cubin$")]
"""Named by content, so a path can point nowhere else."""
Positive = Annotated[int, Field(ge=1, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Three = tuple[Positive, Positive, Positive]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ArgModel(_Model):
    """One kernel parameter; see :class:`k3lab.kernels.contract.Arg`."""

    kind: Literal["tensor", "tensor_map", "int32", "null"]
    name: str
    box: tuple[Count, Count] = (0, 0)
    swizzle: Literal[0, 32, 64, 128] = 0
    extent: str = ""

    @model_validator(mode="after")
    def _only_tensor_maps_have_a_box(self) -> Self:
        """A box that the driver would take, on a tensor map and on nothing else."""
        if self.kind != "tensor_map":
            if (self.box, self.swizzle, self.extent) != ((0, 0), 0, ""):
                raise ValueError(f"a {self.kind} argument has neither box nor swizzle nor extent")
        elif not all(1 <= side <= 256 for side in self.box):
            raise ValueError(f"the box of a tensor map is 1 to 256 rows by 1 to 256 columns, not {self.box}")
        return self

    @model_serializer(mode="wrap")
    def _plain_arguments_as_ever(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What only tensor maps have is written for them alone: other bundles keep their bytes and their readers."""
        data: dict[str, Any] = dump(self)
        return data if self.kind == "tensor_map" else {"kind": self.kind, "name": self.name}


class BufferModel(_Model):
    """Scratch memory; see :class:`k3lab.kernels.contract.Buffer`."""

    name: str
    shape: tuple[Count, ...]
    dtype: str
    zeroed: bool
    persistent: bool = False
    targets_of: str = ""

    @model_validator(mode="after")
    def _as_the_contract_has_it(self) -> Self:
        Buffer(**self.__dict__)
        return self

    @model_serializer(mode="wrap")
    def _other_buffers_as_ever(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written where they are set, as for launches."""
        data: dict[str, Any] = dump(self)
        return {key: value for key, value in data.items() if value or key not in ("persistent", "targets_of")}


class LaunchModel(_Model):
    """One kernel launch; see :class:`k3lab.kernels.contract.Launch`."""

    kernel: str
    cubin: CubinPath
    """File of the cubin, relative to the bundle."""
    grid: Three
    block: Three
    cluster: Three
    shared_bytes: Count
    """Dynamic shared memory."""
    pdl: bool
    needs_residency: bool = False
    args: tuple[ArgModel, ...]

    @model_serializer(mode="wrap")
    def _other_launches_as_ever(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written where it is set: a reader from before refuses such a bundle, and goes on reading all others."""
        data: dict[str, Any] = dump(self)
        return data if self.needs_residency else {key: data[key] for key in data if key != "needs_residency"}


class BuildModel(_Model):
    """The entry's config compiled for one architecture."""

    arch: str
    evidence: Evidence
    """The entry's for the GPU it was tuned for; ``compiled`` for any other architecture."""
    launches: tuple[LaunchModel, ...] = Field(min_length=1)
    buffers: tuple[BufferModel, ...]
    resources: tuple[dict[str, JsonValue], ...]
    """Per launch: registers, shared memory, spills, instruction mix, as read from the cubin."""


class ChoiceModel(_Model):
    """Why this config, among those tried."""

    reason: str
    value_us: float
    """Objective in microseconds: the cold time, or the prediction."""
    default_us: float | None
    margin_over_default: float | None
    tie_band: float
    runner_up: dict[str, JsonValue] | None
    trials: dict[str, int]
    """Trials of the study by status."""


class EntryModel(_Model):
    """The winner for one problem on one GPU."""

    family: str
    engine: str
    key: dict[str, JsonValue]
    """All fields of the problem but rows: what must match."""
    rows: int = Field(ge=1)
    """Serves this row count, and every smaller one down to the previous entry of the same key."""
    gpu: str
    """Name of the GPU card it was tuned for."""
    arch: str
    config: dict[str, int | str | bool]
    config_digest: str
    evidence: Evidence
    source_digest: str
    """Of the kernel files it was tuned from."""
    compilers: dict[str, str]
    summation_order: str
    choice: ChoiceModel
    timing: dict[str, JsonValue] | None
    """The measurement; None for an entry that is only predicted."""
    prediction: dict[str, JsonValue] | None
    environment: dict[str, JsonValue] | None
    """Where the study ran."""
    builds: tuple[BuildModel, ...] = Field(min_length=1)
    rechecks: tuple[dict[str, JsonValue], ...] = ()
    """What `bundle verify --stale` found later, the oldest first."""

    @model_serializer(mode="wrap")
    def _other_entries_as_ever(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written where there are any, as for launches."""
        data: dict[str, Any] = dump(self)
        return data if self.rechecks else {key: data[key] for key in data if key != "rechecks"}

    @model_validator(mode="after")
    def _evidence_of_builds(self) -> Self:
        """Only the build for the GPU it was tuned for rests on more than a compilation."""
        archs = [build.arch for build in self.builds]
        if len(set(archs)) != len(archs) or self.arch not in archs:
            raise ValueError(f"builds are for {', '.join(archs)}: one each, and one for {self.arch}, are needed")
        for build in self.builds:
            due = self.evidence if build.arch == self.arch else Evidence.COMPILED
            if build.evidence is not due:
                raise ValueError(f"the build for {build.arch} says {build.evidence}, this entry makes it {due}")
        return self

    @property
    def place(self) -> tuple[str, str, str, int]:
        """What it is the only entry of: family, GPU, key, rows."""
        return self.family, self.gpu, canonical(self.key), self.rows

    def label(self) -> str:
        """Short text for lists: family, key, rows, GPU, evidence."""
        key = " ".join(f"{name}={value}" for name, value in self.key.items())
        return f"{self.family} {key} rows<={self.rows} on {self.gpu} ({self.evidence}, engine {self.engine})"


class BodyModel(_Model):
    """All of a bundle but the checksum of this very text."""

    schema_version: Literal[1]
    k3lab: str
    """Version that wrote it."""
    entries: tuple[EntryModel, ...]
    files: dict[CubinPath, Sha256]
    """Every other file of the directory and its SHA-256."""

    @model_validator(mode="after")
    def _one_entry_a_place(self) -> Self:
        seen: set[tuple[str, str, str, int]] = set()
        for entry in self.entries:
            if entry.place in seen:
                raise ValueError(f"two entries for {entry.label()}")
            seen.add(entry.place)
        return self


def canonical(data: Any) -> str:
    """The one spelling of a JSON value that checksums are taken of."""
    return json.dumps(data, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False)


def manifest_text(body: BodyModel) -> str:
    """The whole text of ``bundle.json``."""
    data = body.model_dump(mode="json")
    return canonical({"body": data, "sha256": hashlib.sha256(canonical(data).encode()).hexdigest()}) + "\n"
