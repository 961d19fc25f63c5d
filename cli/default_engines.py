"""In place of a bundle: every family's default engine at its default config, compiled here. Nothing of it is tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..kernels import Compiled, Evidence, InputError, Problem, config_digest, family
from ..kernels.bundle.reader import BundleEntry, Miss, tune_command
from ..kernels.bundle.schema import EntryModel
from ..kernels.gpu_cards import gpu_card


class DefaultEntry(BundleEntry):
    """What a bundle would hold of one problem."""

    def compiled(self, arch: str, problem: Problem) -> Compiled:
        """From the cache of compilations, or compiled now."""
        from ..tuning.compiling import compile_config

        return compile_config(family(self.model.family).engine(self.engine), problem, self.model.config, arch)


class DefaultEngines:
    """See :class:`~k3lab.decode.choices.Finder`."""

    path = Path("out/bundle")
    """Where the cures of fallbacks export to."""
    accept_predicted = True
    accept_compiled = True
    entries: tuple[BundleEntry, ...] = ()

    def find(self, family_name: str, problem: Problem, gpu_name: str, /) -> BundleEntry | Miss:
        """The default engine, or the first that serves the problem on the GPU; else why none does."""
        found, card, whys = family(family_name), gpu_card(gpu_name), []
        for name in sorted((one.name for one in found.engines), key=lambda name: name != found.default_engine):
            engine = found.engine(name)
            why = engine.refuses(problem, card.arch)
            try:
                config = None if why else dict(engine.space(problem, card).default)
            except InputError as error:  # no config serves it on this GPU
                config, why = None, str(error)
            if config is None:
                whys.append(f"{name}: {why}")
                continue
            known: dict[str, Any] = {
                "family": family_name, "engine": name, "key": dict(problem.key), "rows": problem.rows, "gpu": card.name,
                "arch": card.arch, "config": config, "config_digest": config_digest(config), "evidence": Evidence.COMPILED,
                "source_digest": engine.source_digest(),
            }  # fmt: skip
            return DefaultEntry(EntryModel.model_construct(**known), {})
        reason = f"no engine serves {problem.label} on {card.name} ({'; '.join(whys)})"
        return Miss(reason, tune_command(family_name, problem, gpu_name))
