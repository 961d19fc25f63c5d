"""Loading a bundle, and finding what it has for a problem. Every byte is verified before anything is used."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..contract import Arg, Buffer, Compiled, Family, Launch, Problem
from ..errors import InputError
from ..evidence import Evidence
from ..gpu_cards import GPU_CARDS
from .schema import CUBINS, MANIFEST, SCHEMA_VERSION, BodyModel, BuildModel, EntryModel, canonical

ELF_MAGIC = b"\x7fELF"
ELF_MACHINE = slice(18, 20)
CUDA_MACHINE = 190
"""ELF machine number of NVIDIA CUDA code."""


@dataclass(frozen=True)
class Miss:
    """A bundle has nothing for a problem."""

    reason: str
    cure: str
    """The command that would fix it."""
    accept: tuple[str, ...] = ()
    """Evidence words that, accepted, would fix it without tuning."""


@dataclass(frozen=True)
class BundleEntry:
    """One entry, with the cubins of its bundle."""

    model: EntryModel
    cubins: Mapping[str, bytes]

    @property
    def evidence(self) -> Evidence:
        """What the entry rests on, on the GPU it was tuned for."""
        return self.model.evidence

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self.model.engine

    @property
    def rows(self) -> int:
        """Most rows it serves."""
        return self.model.rows

    @property
    def label(self) -> str:
        """Short text for lists."""
        return self.model.label()

    def build(self, arch: str) -> BuildModel:
        """The build for an architecture.

        Raises:
            InputError: there is none; the message lists those there are.
        """
        for build in self.model.builds:
            if build.arch == arch:
                return build
        have = ", ".join(build.arch for build in self.model.builds)
        raise InputError(f"bundle entry {self.label} has no cubin for {arch}, only for {have}")

    def compiled(self, arch: str, problem: Problem) -> Compiled:
        """What a runner launches, for a problem with at most the entry's rows.

        Raises:
            InputError: no cubin for the architecture, or another problem than the entry's.
        """
        if canonical(problem.key) != canonical(self.model.key) or problem.rows > self.model.rows:
            raise InputError(f"bundle entry {self.label} does not serve {problem.label}")
        build = self.build(arch)
        launches = tuple(
            Launch(
                kernel=launch.kernel,
                cubin=self.cubins[launch.cubin],
                grid=launch.grid,
                block=launch.block,
                shared_bytes=launch.shared_bytes,
                args=tuple(Arg(arg.kind, arg.name, arg.box, arg.swizzle, arg.extent) for arg in launch.args),
                cluster=launch.cluster,
                pdl=launch.pdl,
                needs_residency=launch.needs_residency,
            )
            for launch in build.launches
        )
        buffers = tuple(
            Buffer(one.name, one.shape, one.dtype, one.zeroed, one.persistent, one.targets_of) for one in build.buffers
        )
        return Compiled(self.model.family, self.model.engine, problem, self.model.config, arch, launches, buffers)


def tune_command(family: str, problem: Problem, gpu: str) -> str:
    """What would put an entry for a problem of K3 into a bundle: measured where that GPU is here, else predicted."""
    fields = problem.to_json()
    kind = f" --kind {shlex.quote(str(fields['kind']))}" if fields.get("kind") else ""
    tune = f"k3lab tune {family} --tp {problem.tp} --rows {problem.rows}{kind} --gpu {shlex.quote(gpu.lower())}"
    return f"{tune}, then k3lab export with the study it names"


def _differs(problem: Problem, keys: Iterable[Mapping[str, Any]]) -> str:
    """Which problem was asked for: its label, and the other sizes where only those are not a bundle's."""
    shown = ("tp", "kind")
    key = problem.key
    near = [other for other in keys if all(other.get(name) == key.get(name) for name in shown)]
    if not near:
        return problem.label
    closest = min(near, key=lambda other: sum(other.get(name) != value for name, value in key.items()))
    names = [name for name in key if closest.get(name) != key[name]]
    here = ", ".join(f"{name} {key[name]}" for name in names)
    there = ", ".join(f"{name} {closest.get(name)}" for name in names)
    return f"{problem.label} with {here} (the nearest has {there})"


@dataclass(frozen=True)
class Bundle:
    """A verified bundle."""

    path: Path
    body: BodyModel
    cubins: Mapping[str, bytes]
    accept_predicted: bool = False
    accept_compiled: bool = False

    @staticmethod
    def load(path: str | Path, accept_predicted: bool = False, accept_compiled: bool = False) -> Bundle:
        """Read and verify a bundle.

        Args:
            path: its directory.
            accept_predicted: also use entries that never ran on the GPU they were tuned for.
            accept_compiled: also use entries of another GPU that were built for this one's architecture.

        Raises:
            InputError: not a bundle, another schema, a missing, changed or unlisted file, or a file that is
                no GPU code.
        """
        path = Path(path)
        body = _read_manifest(path)
        return Bundle(path, body, _read_cubins(path, body), accept_predicted, accept_compiled)

    @cached_property
    def entries(self) -> tuple[BundleEntry, ...]:
        """All entries, in the order of the file."""
        return tuple(BundleEntry(entry, self.cubins) for entry in self.body.entries)

    @property
    def predicted_entries(self) -> tuple[BundleEntry, ...]:
        """Entries that never ran on the GPU they were tuned for: to be named at the head of a run."""
        return tuple(entry for entry in self.entries if entry.evidence is not Evidence.MEASURED)

    def find(self, family: Family | str, problem: Problem, gpu_name: str) -> BundleEntry | Miss:
        """The entry that serves the problem on the GPU: of those accepted the smallest row count that is large enough.

        Args:
            family: the family or its name.
            problem: which instance.
            gpu_name: name of the GPU card, or of the GPU as its driver gives it.
        """
        name = family if isinstance(family, str) else family.name
        gpu = gpu_name.removeprefix("NVIDIA ")
        cure = tune_command(name, problem, gpu)
        same = [entry for entry in self.entries if entry.model.family == name]
        if not same:
            have = ", ".join(sorted({entry.model.family for entry in self.entries})) or "nothing"
            return Miss(f"the bundle has no entry for {name} (it has {have})", cure)
        key = canonical(problem.key)
        asked = _differs(problem, [entry.model.key for entry in same])
        same = [entry for entry in same if canonical(entry.model.key) == key]
        if not same:
            return Miss(f"the bundle's entries for {name} are for other problems than {asked}", cure)
        here = [entry for entry in same if entry.model.gpu.lower() == gpu.lower()]
        card = GPU_CARDS.get(gpu.upper())
        if not here and card is not None:
            built = [entry for entry in same if any(build.arch == card.arch for build in entry.model.builds)]
            if built and not self.accept_compiled:
                serving = [entry for entry in built if entry.rows >= problem.rows]
                measured = any(entry.evidence is Evidence.MEASURED for entry in serving)
                accept = ("compiled",) if measured or self.accept_predicted else ("compiled", "predicted")
                return Miss(
                    f"the bundle's entry for {name} was only compiled for {card.arch}, tuned for {built[0].model.gpu}",
                    cure,
                    accept if serving else (),
                )
            here = built
        if not here:
            gpus = ", ".join(sorted({entry.model.gpu for entry in same}))
            return Miss(f"the bundle's entries for {name} are for {gpus}, not for {gpu}", cure)
        enough = [entry for entry in here if entry.rows >= problem.rows]
        if not enough:
            most = max(entry.rows for entry in here)
            return Miss(
                f"the bundle's entries for {name} serve at most {most} rows, this step has {problem.rows}", cure
            )
        usable = [entry for entry in enough if self.accept_predicted or entry.evidence is Evidence.MEASURED]
        best = min(usable or enough, key=lambda entry: entry.rows)
        if not usable:
            return Miss(
                f"the bundle's entry for {name} is only {best.evidence}, and that was not accepted",
                f"--accept predicted, or {cure}",
                ("predicted",),
            )
        return best


def _read_manifest(path: Path) -> BodyModel:
    manifest = path / MANIFEST
    if not path.is_dir():
        raise InputError(f"bundle {path} is not a directory; name one that `k3lab export` wrote")
    if manifest.exists() and not manifest.is_file():
        raise InputError(f"bundle {path}: {MANIFEST} is no regular file; name a directory that `k3lab export` wrote")
    try:
        text = manifest.read_bytes().decode()
        data = json.loads(text)
    except FileNotFoundError:
        raise InputError(f"bundle {path} has no {MANIFEST}; name a directory that `k3lab export` wrote") from None
    except OSError as error:
        raise InputError(f"bundle {manifest} cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, RecursionError, ValueError):
        raise InputError(f"bundle {manifest} is damaged: it is not JSON text; export the bundle again") from None
    if not isinstance(data, dict) or set(data) != {"body", "sha256"} or not isinstance(data["body"], dict):
        raise InputError(f"{manifest} is not a bundle: it must hold a body and its sha256")
    version = data["body"].get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"bundle {path} has schema version {version!r}, this k3lab reads version {SCHEMA_VERSION}: "
            "export it again, or use the version that wrote it"
        )
    changed = InputError(
        f"bundle {manifest} was changed after it was written (its checksum differs); export the bundle again"
    )
    try:
        if (
            canonical(data) + "\n" != text
            or hashlib.sha256(canonical(data["body"]).encode()).hexdigest() != data["sha256"]
        ):
            raise changed
    except (ValueError, UnicodeError):  # NaN, lone surrogates: no bundle holds them
        raise changed from None
    try:
        return BodyModel.model_validate_json(json.dumps(data["body"]))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"bundle {manifest} is not of this schema: {where}: {first['msg']}") from None


def _read_cubins(path: Path, body: BodyModel) -> dict[str, bytes]:
    """Every listed file, checked; nothing else may lie in the directory."""
    for folder in (path / MANIFEST, path / CUBINS):
        if folder.is_symlink():
            raise InputError(f"bundle {path}: {folder.name} is a link; a bundle holds its own files")
    there = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_symlink() or not file.is_dir()}
    if extra := sorted(there - {MANIFEST, *body.files}):
        raise InputError(
            f"bundle {path} holds {extra[0]}, which {MANIFEST} does not list; remove it, or export the bundle again"
        )
    cubins: dict[str, bytes] = {}
    for name, digest in sorted(body.files.items()):
        file = path / name
        if name not in there:
            raise InputError(f"bundle {path} lacks {name}; copy the whole directory, or export the bundle again")
        if file.is_symlink():
            raise InputError(f"bundle {path}: {name} is a link; a bundle holds its own files")
        if not file.is_file():
            raise InputError(f"bundle {path}: {name} is no regular file; export the bundle again")
        try:
            data = file.read_bytes()
        except OSError as error:
            raise InputError(f"bundle file {file} cannot be read ({error.strerror})") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise InputError(
                f"bundle file {file} was changed after it was written (its checksum differs); export the bundle again"
            )
        if not is_gpu_code(data):
            raise InputError(f"bundle file {file} is not a cubin; a bundle holds GPU code only")
        cubins[name] = data
    used = {launch.cubin for entry in body.entries for build in entry.builds for launch in build.launches}
    if missing := sorted(used - set(cubins)):
        raise InputError(f"bundle {path} launches {missing[0]}, which {MANIFEST} does not list")
    if idle := sorted(set(cubins) - used):
        raise InputError(f"bundle {path} lists {idle[0]}, which nothing launches")
    return cubins


def is_gpu_code(data: bytes) -> bool:
    """Whether the bytes are an ELF file for NVIDIA CUDA: never machine code of the host."""
    return data[:4] == ELF_MAGIC and int.from_bytes(data[ELF_MACHINE], "little") == CUDA_MACHINE


def describe(bundle: Bundle) -> dict[str, Any]:
    """JSON-able summary for ``k3lab bundle show``."""
    return {
        "path": str(bundle.path),
        "schema_version": bundle.body.schema_version,
        "k3lab": bundle.body.k3lab,
        "files": len(bundle.body.files) + 1,
        "cubin_bytes": sum(map(len, bundle.cubins.values())),
        "predicted_entries": [entry.label for entry in bundle.predicted_entries],
        "entries": [entry.model.model_dump(mode="json") for entry in bundle.entries],
    }
