"""The cost model's constants from recorded measurements: one set an engine, fitted to shapes that its validation leaves out.

``python -m k3lab.tuning.calibrate RECORDING...`` fits, :mod:`k3lab.tuning.validate` judges; ``--write`` replaces
``data/cost_model.json``. What is left out is decided by :func:`left_out` from the shapes alone, before any fit.
An engine with few configs (:func:`scarce`) begins with the constants of all engines that have many and moves from them as
far as its configs bear it out; its validation leaves out one shape after the other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..kernels import InputError, family
from ..kernels.gpu_cards import gpu_card
from ..kernels.whole_file import write_whole
from .cost_features import Features, features
from .cost_model import DATA, FITTED, MODEL_VERSION, POOLED, Constants, rounded, terms, total, with_link
from .measurements import Measured, measured

HELD_ROWS = 16
"""The rows bucket that no fit sees."""
STEPS, RATE = 1200, 0.03
SOFT = 0.05
"""Relative error from which an outlier counts linearly."""
PULL = 0.002
"""Weight of what draws constants that the data do not tell to where the fit begins."""
LEAST = 40
"""Configs beside those left out from which an engine's constants are fitted to them alone; fewer are :func:`scarce`."""
FEWEST = 4
"""Configs that a scarce engine must have, of at least two shapes, for constants of its own: with one nobody could say how good they are."""


def shapes_key(one: Measured) -> str:
    """The shape without its rows: what stands for N."""
    return json.dumps({name: value for name, value in one.problem.items() if name != "rows"}, sort_keys=True)


def left_out(configs: Sequence[Measured]) -> list[bool]:
    """Which configs no fit may see: of each family one N (of all in order of their bytes the middle one), one rows bucket, and
    every recorded space, unless a family has nothing else.
    """
    middle: dict[str, str] = {}
    searched = {one.family for one in configs if not one.fair}
    for name in {one.family for one in configs}:
        owner = family(name)
        moved: dict[str, int] = {}
        for one in configs:
            if one.family == name:
                size = owner.traffic(owner.problem_from_json({**one.problem, "rows": 1})).bytes
                moved[shapes_key(one)] = size
        order = sorted(moved, key=lambda key: (moved[key], key))
        if len(order) > 2:
            middle[name] = order[(len(order) - 1) // 2]
    return [
        one.problem["rows"] == HELD_ROWS
        or middle.get(one.family) == shapes_key(one)
        or (one.fair and one.family in searched)
        for one in configs
    ]


def scarce(configs: Sequence[Measured]) -> set[tuple[str, str]]:
    """(family, engine) of those with fewer than :data:`LEAST` configs that are not left out: no other engine's fit sees them."""
    count = Counter({(one.family, one.engine): 0 for one in configs})
    for one, out in zip(configs, left_out(configs), strict=True):
        count[one.family, one.engine] += not out
    return {name for name, kept in count.items() if kept < LEAST}


def features_of(one: Measured) -> Features:
    """The features of a measured config; one GPU played all ranks where it was measured."""
    owner = family(one.family)
    problem = owner.problem_from_json(one.problem)
    work = owner.engine(one.engine).work(problem, one.config)
    return features(one.resources, work, owner.traffic(problem), gpu_card(one.gpu), alone=True)


def fit(
    configs: Sequence[Measured], steps: int = STEPS, begin: Constants | None = None, pull: float = PULL
) -> Constants:
    """Constants that make the least of the logarithms' errors, every shape counted alike, outliers softly.

    Gradient descent on the logarithms of the constants: the same configs give the same.

    Args:
        configs: what to fit to.
        steps: of the descent.
        begin: where it begins and what it is drawn to; by default the values of :class:`Constants`.
        pull: how much.
    """
    import torch

    found = [features_of(one) for one in configs]
    columns: dict[str, Any] = {
        field.name: torch.tensor([getattr(one, field.name) for one in found], dtype=torch.float64)
        for field in fields(Features)
    }
    f = Features(**columns)
    truth = torch.tensor([one.us for one in configs], dtype=torch.float64).log()
    count = Counter(one.shape for one in configs)
    weight = torch.tensor([1 / count[one.shape] / len(count) for one in configs], dtype=torch.float64)
    start = asdict(begin or Constants())
    moves = torch.zeros(len(FITTED), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([moves], lr=RATE)

    def at(steps: Any) -> dict[str, Any]:
        found = {name: start[name] * step.exp() for name, step in zip(FITTED, steps, strict=True)}
        return start | found | {"sharpness": found["sharpness"].clamp(min=1.0)}  # below 1 terms would more than add up

    for _ in range(steps):
        constants = Constants(**at(moves))
        off = total(terms(f, constants, torch.maximum), constants).log() - truth
        loss = (weight * SOFT * ((1 + (off / SOFT) ** 2).sqrt() - 1)).sum() + pull * (moves**2).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return Constants(**{name: float(value) for name, value in at(moves.detach()).items()})


def fit_scarce(own: Sequence[Measured], pooled: Constants, steps: int = STEPS) -> Constants:
    """Constants of an engine with few configs, drawn to those of all engines the more the fewer they are."""
    return fit(own, steps, pooled, PULL * max(LEAST / len(own), 1.0))


def kept_for_fit(configs: Sequence[Measured]) -> list[Measured]:
    """What the constants of all engines together are fitted to: neither left out nor of an engine with few configs."""
    few = scarce(configs)
    return [
        one
        for one, out in zip(configs, left_out(configs), strict=True)
        if not out and (one.family, one.engine) not in few
    ]


def calibrate(configs: Sequence[Measured], steps: int = STEPS) -> dict[str, Constants]:
    """``family/engine`` to its constants, and :data:`POOLED` to those of all that have many configs.

    Raises:
        InputError: nothing to fit to.
    """
    kept = kept_for_fit(configs)
    if not kept:
        raise InputError(
            f"nothing is left to fit to: no engine has {LEAST} configs beside those that validation leaves out"
        )
    found = {POOLED: fit(kept, steps)}
    for name in sorted({(one.family, one.engine) for one in kept}):
        found["/".join(name)] = fit([one for one in kept if (one.family, one.engine) == name], steps)
    for name in sorted(scarce(configs)):
        own = [one for one in configs if (one.family, one.engine) == name]
        if len(own) >= FEWEST and len({one.shape for one in own}) > 1:
            found["/".join(name)] = fit_scarce(own, found[POOLED], steps)
    return found


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m k3lab.tuning.calibrate", description=__doc__)
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help=f"replace {DATA.name}")
    given = parser.parse_args(argv)
    try:
        configs = list(measured(sorted(given.recordings)))
        found = calibrate(configs)
    except InputError as error:
        print(f"k3lab: {error}", file=sys.stderr)
        return 2
    few = scarce(configs)
    rare, kept = sum((one.family, one.engine) in few for one in configs), len(kept_for_fit(configs))
    data = {
        "model": MODEL_VERSION,
        "fitted_to": kept,
        "left_out": len(configs) - kept - rare,
        "of_few": rare,
        "recordings": sorted(path.name for path in given.recordings),
        "constants": {name: rounded(one) for name, one in sorted(found.items())},
    }
    if DATA.is_file():
        data = with_link(data, json.loads(DATA.read_text()))
    text = json.dumps(data, indent=1) + "\n"
    print(text, end="")
    if given.write:
        write_whole(DATA, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
