"""Compile a config, with a disk cache keyed by everything that changes the bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..kernels import Compiled, Config, Engine, InputError, Problem, config_digest
from ..kernels.paths import compiled_cache

CACHE_FORMAT = 1


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


def glue_digest(engine: Engine) -> str:
    """Digest of the module that turns a config into launches: tile arithmetic lives there, not in the kernel file."""
    import sys

    path = getattr(sys.modules[type(engine).__module__], "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else "none"


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
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def compile_config(engine: Engine, problem: Problem, config: Config, arch: str, *, cache: bool = True) -> Compiled:
    """Compile, or take the same compilation from the cache.

    Raises:
        InputError: the engine refuses the problem or the architecture.
        Exception: whatever the compiler raises for a config that does not build.
    """
    if reason := engine.refuses(problem, arch):
        raise InputError(f"{engine.family}/{engine.name} refuses {problem.label} on {arch}: {reason}")
    path = compiled_cache() / f"{cache_key(engine, problem, config, arch)}.pickle"
    if cache and (found := _read(path)) is not None:
        return found
    compiled = engine.compile(problem, config, arch)
    if cache:
        _write(path, compiled)
    return compiled


def _read(path: Path) -> Compiled | None:
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
    found = pickle.loads(body)  # written by _write into the user's own cache
    return found if isinstance(found, Compiled) else None


def _write(path: Path, compiled: Compiled) -> None:
    """Atomically; a full or read-only disk costs the cache entry, not the result."""
    body = pickle.dumps(dataclasses.replace(compiled, config=dict(compiled.config)))
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(body).digest() + body)
        os.replace(temporary, path)
