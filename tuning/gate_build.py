"""Compiles cases with the k3lab on the path and tells their resources: ``python -P gate_build.py < cases.json``.

It is run as a script with another version's package on the path, the base of a gate: so it takes as little as it can
from that package, by name, and a case that this version cannot build has a reason.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

FIELDS = (
    "kernel",
    "registers",
    "static_shared_bytes",
    "dynamic_shared_bytes",
    "stack_bytes",
    "spill_instructions",
    "instructions",
)


def config_of(engine: Any, problem: Any, case: dict[str, Any]) -> dict[str, Any]:
    """The case's config; the default of this version's space where that does not know it."""
    cards = importlib.import_module("k3lab.kernels.gpu_cards").GPU_CARDS
    space = engine.space(problem, next(card for card in cards.values() if card.arch == case["arch"]))
    names = {param.name for param in space.params}
    if set(case["config"]) == names and space.illegal(case["config"]) is None:
        return dict(case["config"])
    return dict(space.default)


def built(case: dict[str, Any]) -> dict[str, Any]:
    """The config and the resources of each launch of one case, or ``failed``: why there are none."""
    try:
        kernels = importlib.import_module("k3lab.kernels")
        compiling = importlib.import_module("k3lab.tuning.compiling")
        family = kernels.family(case["family"])
        engine = family.engine(case["engine"])
        problem = family.problem_from_json(case["problem"])
        config = config_of(engine, problem, case)
        compiled = compiling.compile_config(engine, problem, config, case["arch"])
        found = [one.to_json() for one in compiling.resources_of(compiled)]
        return {"config": config, "launches": [{name: one[name] for name in FIELDS} for one in found]}
    except Exception as error:  # another version may lack anything
        text = " ".join(str(error).split())
        return {"failed": f"{type(error).__name__}: {text}"[:300]}


def main() -> None:
    """Answer one line a case, in their order; what libraries print goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for case in json.load(sys.stdin):
        answers.write(json.dumps(built(case)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
