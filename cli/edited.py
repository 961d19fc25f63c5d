"""A family whose files are being edited: what changed since they were imported, and their import anew."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import linecache
import sys
from functools import cache
from pathlib import Path

from ..kernels import Family, InputError, registry


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "gone"


class EditedFamily:
    """A family by its name or its ``module:ATTRIBUTE``, imported again when a file of its own changes.

    Its own are the modules of its package, or the one module. What lies outside (shared parts of k3lab, other families) is
    not imported again: after such an edit start the process anew.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.family = self._load()
        self._seen = self._own()

    def _load(self) -> Family:
        from ..tuning.jobs import find_family

        if ":" in self.name:
            module = self.name.partition(":")[0]
            return find_family(module, self.name)
        return registry.family(self.name)

    @property
    def _package(self) -> str:
        """The module that holds the family, or the package that this module is in."""
        location = self.name if ":" in self.name else registry.location(self.name)
        module = location.partition(":")[0]
        if hasattr(sys.modules.get(module), "__path__") or "." not in module:
            return module
        return module.rpartition(".")[0]

    def _own(self) -> dict[Path, str]:
        """Its files and their digests: those of its package, and kernel files and glue of its engines, wherever they lie."""
        from ..tuning.compiling import glue_files

        loaded = sys.modules[self._package]
        found = {path for folder in getattr(loaded, "__path__", ()) for path in Path(folder).rglob("*.py")}
        found |= {Path(loaded.__file__)} if loaded.__file__ else set()
        for engine in self.family.engines:
            found |= {*engine.sources, *glue_files(engine)}
        return {path: _digest(path) for path in sorted(found)}

    def _modules(self) -> list[str]:
        """What is imported of its files."""
        files = {str(path) for path in self._seen}
        package = self._package
        return [
            name
            for name, module in list(sys.modules.items())
            if name == package or name.startswith(f"{package}.") or getattr(module, "__file__", None) in files
        ]

    def refresh(self) -> list[Path]:
        """Import the family again if a file of its own changed; the files that did.

        Raises:
            InputError: the changed files do not import; the next call tries again.
        """
        changed = [path for path, digest in self._seen.items() if _digest(path) != digest]
        if not changed:
            return []
        from ..tuning import compiling, jobs

        for path in changed:  # a compiled file goes by seconds and size: an edit may change neither
            Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        kept = {name: sys.modules.pop(name) for name in self._modules()}
        linecache.checkcache()
        importlib.invalidate_caches()
        registry.family.cache_clear()
        jobs.find_family.cache_clear()
        compiling.forget(self.family.name)
        before = self.family
        try:
            self.family = self._load()
            self._seen = self._own()  # asks for the engines, which families import late
        except Exception as error:  # whatever an edited file raises
            self.family = before
            for name in self._modules():
                sys.modules.pop(name, None)
            sys.modules.update(kept)
            names = ", ".join(path.name for path in changed)
            raise InputError(f"{names} changed and does not import: {type(error).__name__}: {error}") from error
        return changed


@cache
def edited_family(name: str) -> EditedFamily:
    """The one of that name: labs of one family must not each import it, since their classes would be others."""
    return EditedFamily(name)
