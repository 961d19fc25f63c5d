"""Compile a config, with a disk cache keyed by everything that changes the bytes."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import json
import pickle
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..kernels import Compiled, Config, Engine, InputError, Problem, config_digest, env
from ..kernels.errors import KernelError
from ..kernels.paths import compiled_cache
from ..kernels.whole_file import write_whole
from .blame import blame
from .outcome import SetupError

if TYPE_CHECKING:
    from .cubin import KernelResources

T = TypeVar("T")
CACHE_FORMAT = 2


def compiler_versions(engine: Engine) -> dict[str, str]:
    """Versions of the packages that make this engine's machine code."""
    packages = {"triton": ("triton",), "cute": ("nvidia-cutlass-dsl",)}[engine.compiler]
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = _module_version(package)
    return found


def _module_version(package: str) -> str:
    """Version of a package that was unpacked rather than installed."""
    import importlib

    try:
        return str(importlib.import_module({"nvidia-cutlass-dsl": "cutlass"}.get(package, package)).__version__)
    except (ImportError, AttributeError):
        return "unknown"


@lru_cache(256)
def _named(source: bytes) -> tuple[str, ...]:
    """Modules of its own folder that a module's text imports; parsed once, since every job asks."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found += [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
    return tuple(found)


def _siblings(path: Path) -> list[Path]:
    """Files of the same folder that a module imports; not the family's, which knows every engine."""
    found = [path.with_name(f"{name}.py") for name in _named(path.read_bytes())]
    return [one for one in found if one.is_file() and one.name != "family.py"]


def glue_files(engine: Engine) -> list[Path]:
    """The modules between a config and a launch: the engine's own, its base classes', and what they and the kernel
    files import from their folder. Tile arithmetic lives there, not in the kernel file.
    """
    import sys

    owners = dict.fromkeys(
        kind.__module__ for kind in type(engine).__mro__ if issubclass(kind, Engine) and kind is not Engine
    )
    own = [Path(path) for owner in owners if (path := getattr(sys.modules[owner], "__file__", None))]
    found, open_ = dict.fromkeys(own), [*own, *engine.sources]
    while open_:
        new = [path for path in _siblings(open_.pop()) if path not in found and path not in engine.sources]
        found |= dict.fromkeys(new)
        open_ += new
    return sorted(found)


def glue_digest(engine: Engine) -> str:
    """Digest of :func:`glue_files`: 16 hex digits."""
    files = glue_files(engine)
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16] if files else "none"


@lru_cache
def launcher_digest(compiler: str) -> str:
    """Digest of k3lab's own modules between an engine and its compiler: options, launch facts, arguments."""
    from .. import kernels

    folder = Path(kernels.__file__).parent
    data = [(folder / name).read_bytes() for name in (f"{compiler}_compile.py", "contract.py")]
    return hashlib.sha256(b"\0".join(data)).hexdigest()[:16]


_LOADED: dict[tuple[str, str], tuple[str, str]] = {}
"""Digests of an engine's files when this process first compiled with it."""


def digests(engine: Engine) -> tuple[str, str]:
    """Source and glue digest of the engine this process holds.

    A process keeps the code it imported: once the files change, what it compiles belongs to no digest at
    all, and would be cached, stored and exported as the new file's.

    Raises:
        SetupError: the files are no longer what they were when this process first used the engine.
    """
    now = engine.source_digest(), glue_digest(engine)
    if _LOADED.setdefault((engine.family, engine.name), now) != now:
        raise SetupError(
            f"the files of {engine.family}/{engine.name} were changed after this process loaded them: start it again"
        )
    return now


def forget(family: str) -> None:
    """Drop the digests of a family's engines: for a process that imports its files anew."""
    for key in [key for key in _LOADED if key[0] == family]:
        del _LOADED[key]


def cache_key(engine: Engine, problem: Problem, config: Config, arch: str) -> str:
    """Digest of one compilation: kernel source, glue, problem, config, architecture, compiler versions."""
    fields = {
        "format": CACHE_FORMAT,
        "family": engine.family,
        "engine": engine.name,
        "source": engine.source_digest(),
        "glue": glue_digest(engine),
        "problem": problem.to_json(),
        "config": config_digest(config),
        "arch": arch,
        "compilers": compiler_versions(engine),
        "launcher": launcher_digest(engine.compiler),
        "tools": env.compiler_settings(),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def compile_config(engine: Engine, problem: Problem, config: Config, arch: str, *, cache: bool = True) -> Compiled:
    """Compile, or take the same compilation from the cache.

    Raises:
        InputError: the engine refuses the problem or the architecture.
        SetupError: see :func:`digests`.
        KernelError: the kernel does not compile with this config; says where and why.
    """
    if reason := engine.refuses(problem, arch):
        raise InputError(f"{engine.family}/{engine.name} refuses {problem.label} on {arch}: {reason}")
    digests(engine)
    path = _place(f"{cache_key(engine, problem, config, arch)}.pickle") if cache else None
    if path and (found := _read(path, Compiled)) is not None:
        return found
    try:
        compiled = engine.compile(problem, config, arch)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # each compiler has its own exception types
        where = f"{engine.family}/{engine.name} does not compile for {arch}"
        raise KernelError(f"{where}: {blame(engine, error)}") from error
    digests(engine)  # the file may have changed between its digest and its import
    if path:
        _write(path, dataclasses.replace(compiled, config=dict(compiled.config)))
    return compiled


def _place(name: str) -> Path | None:
    """Path in the cache, or None where there can be no cache."""
    try:
        return compiled_cache() / name
    except OSError:
        return None


def resources_of(compiled: Compiled) -> list[KernelResources]:
    """Resources of every launch, or the same reading from the cache: two tools take as long as a compiler."""
    from .cubin import KernelResources, kernel_resources, tools

    found = []
    reader = hashlib.sha256(Path(__file__).with_name("cubin.py").read_bytes()).hexdigest()
    for launch in compiled.launches:
        facts = dataclasses.asdict(launch) | {"cubin": hashlib.sha256(launch.cubin).hexdigest()}
        fields = {"format": CACHE_FORMAT, "reader": reader, "tools": tools("nvdisasm"), "launch": facts}
        key = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
        path = _place(f"{key}.resources")
        one = _read(path, KernelResources) if path else None
        if one is None:
            one = kernel_resources(launch)
            if path:
                _write(path, one)
        found.append(one)
    return found


def _read(path: Path, kind: type[T]) -> T | None:
    """A cached object, or None; a file that cannot be read is dropped, since a cache may always be rebuilt."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, body = data[:32], data[32:]
    if hashlib.sha256(body).digest() != digest:
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    try:
        found = pickle.loads(body)  # written by _write into the user's own cache
    except Exception:  # a class that moved or changed since: each has its own exception type
        return None
    return found if isinstance(found, kind) else None


def _write(path: Path, found: object) -> None:
    """Atomically; a full or read-only disk costs the cache entry, not the result."""
    body = pickle.dumps(found)
    with contextlib.suppress(OSError):
        write_whole(path, hashlib.sha256(body).digest() + body)
