"""How far the cost model is off: its predictions against recorded measurements that its fit left out.

``python -m k3lab.tuning.validate RECORDING...`` prints the table that :mod:`k3lab.tuning.model_error` reads from
``data/model_error.json``; ``--write`` replaces that file. A test holds the file against the recordings under results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..kernels import InputError
from ..kernels.whole_file import write_whole
from .calibrate import FEWEST, STEPS, features_of, fit, fit_scarce, kept_for_fit, left_out, scarce
from .cost_model import POOLED, Constants, constants_of, fitted, terms, total
from .measurements import Measured, measured, recorded
from .model_error import DATA

FOLDS = 6
"""Fits of an engine with few configs, each without its part of the shapes."""
LEAST = 5
"""Configs of a shape from which a rank correlation is asked for."""


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0, the mean rank for ties."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in range(start, end + 1):
            found[order[position]] = (start + end) / 2
        start = end + 1
    return found


def spearman(one: Sequence[float], two: Sequence[float]) -> float:
    """Rank correlation; 0 where one side is constant."""
    try:
        return statistics.correlation(ranks(one), ranks(two))
    except statistics.StatisticsError:
        return 0.0


def regret(both: Sequence[tuple[float, float]]) -> float:
    """What taking the predicted winner costs, relative to the truly best; of configs predicted alike, the worst."""
    lowest = min(guess for guess, _ in both)
    return max(truth for guess, truth in both if guess == lowest) / min(truth for _, truth in both) - 1


def guess_us(one: Measured, constants: Constants | None = None) -> float:
    """What the model says of a measured config, from its recorded resources; it never sees its time."""
    used = constants or constants_of(one.family, one.engine)[0]
    return float(total(terms(features_of(one), used), used))


def pairs(recording: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(predicted, measured) microseconds of every config of a recorded space that was measured.

    Raises:
        InputError: its values are predicted ones.
    """
    if recording["evidence"] != "measured":
        raise InputError(
            f"a recording of {recording['evidence']} values cannot judge the cost model; it takes measured ones"
        )
    return [(guess_us(one), one.us) for one in recorded(recording)]


def bytes_us(one: Measured) -> float:
    """What bytes over bandwidth alone say: the same for every config of a shape."""
    return features_of(one).memory_us


def figures(configs: Sequence[Measured], guess: Callable[[Measured], float]) -> dict[str, Any]:
    """How far predictions are off.

    Returns:
        ``median_error``, the median of ``|predicted - measured| / measured``; over shapes of at least :data:`LEAST` configs
        the mean rank correlation ``spearman`` and the median and largest loss from taking the predicted winner,
        ``regret`` and ``worst_regret``, None where no shape has so many; ``pooled_spearman`` over all; counts.
    """
    both = [(guess(one), one.us) for one in configs]
    shapes: dict[Any, list[tuple[float, float]]] = {}
    for one, pair in zip(configs, both, strict=True):
        shapes.setdefault(one.shape, []).append(pair)
    full = [pairs for pairs in shapes.values() if len(pairs) >= LEAST]
    lost = [regret(pairs) for pairs in full]
    return {
        "configs": len(configs),
        "shapes": len(shapes),
        "median_error": round(statistics.median(abs(us - truth) / truth for us, truth in both), 4),
        "spearman": round(statistics.mean(spearman(*zip(*pairs, strict=True)) for pairs in full), 4) if full else None,
        "pooled_spearman": round(spearman([us for us, _ in both], [truth for _, truth in both]), 4),
        "regret": round(statistics.median(lost), 4) if lost else None,
        "worst_regret": round(max(lost), 4) if lost else None,
    }


def in_turn(own: Sequence[Measured], pooled: Constants, steps: int = STEPS) -> dict[int, float]:
    """Predictions of an engine with few configs by ``id``: each shape's by constants blind to it, fitted to other shapes.

    Shapes are left out one by one, of more than :data:`FOLDS` every so many together.
    """
    shapes = list(dict.fromkeys(one.shape for one in own))
    found: dict[int, float] = {}
    for fold in range(min(FOLDS, len(shapes))):
        away = set(shapes[fold::FOLDS])
        others = [one for one in own if one.shape not in away]
        constants = fit_scarce(others, pooled, steps) if others and len(own) >= FEWEST else pooled
        found |= {id(one): guess_us(one, constants) for one in own if one.shape in away}
    return found


IN_TURN = "shapes in turn"
"""How an engine with few configs is judged: :func:`in_turn`."""


def validate(configs: Sequence[Measured]) -> dict[str, Any]:
    """Figures over the configs that :func:`k3lab.tuning.calibrate.left_out` keeps from the fit; of engines with few configs over all.

    Returns:
        ``family/engine/GPU`` to its :func:`figures`; ``family/*/GPU`` to those of all its engines together, with those of
        bytes over bandwidth alone (``bytes_alone``) and of the recorded spaces among them (``fair_samples``); and under
        ``*`` what an engine may expect that was never calibrated: each one's figures by constants of all others. ``way`` is
        :data:`IN_TURN` where engines with few configs are among them.
    """
    few, pooled = scarce(configs), fitted().get(POOLED, Constants())
    held = [one for one, out in zip(configs, left_out(configs), strict=True) if out or (one.family, one.engine) in few]
    turns: dict[int, float] = {}
    for name in sorted(few):
        turns |= in_turn([one for one in held if (one.family, one.engine) == name], pooled)

    def guess(one: Measured) -> float:
        return turns[id(one)] if id(one) in turns else guess_us(one)

    found: dict[str, Any] = {}
    for key in sorted({(one.family, name, one.gpu) for one in held for name in (one.engine, "*")}):
        own = [one for one in held if (one.family, one.gpu) == (key[0], key[2]) and key[1] in ("*", one.engine)]
        entry = {"gpu": key[2], **figures(own, guess)}
        if any(id(one) in turns for one in own):
            entry["way"] = IN_TURN
        if key[1] == "*":
            entry["bytes_alone"] = figures(own, bytes_us)
            if fair := [one for one in own if one.fair]:
                entry["fair_samples"] = figures(fair, guess)
        found["/".join(key)] = entry
    if blind := _blind(held, kept_for_fit(configs), few, pooled):
        guesses = {id(one): us for one, us in blind}
        gpus = sorted({one.gpu for one, _ in blind})
        found[POOLED] = {"gpu": ", ".join(gpus), **figures([one for one, _ in blind], lambda one: guesses[id(one)])}
    return found


def _blind(
    held: Sequence[Measured], kept: Sequence[Measured], few: set[tuple[str, str]], pooled: Constants
) -> list[tuple[Measured, float]]:
    """Each config with its time by constants to which its engine gave nothing."""
    found = []
    for name in sorted({(one.family, one.engine) for one in held}):
        others = [one for one in kept if (one.family, one.engine) != name]
        constants = pooled if name in few else fit(others) if others else None
        if constants is not None:
            found += [(one, guess_us(one, constants)) for one in held if (one.family, one.engine) == name]
    return found


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m k3lab.tuning.validate", description=__doc__)
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help=f"replace {DATA.name}")
    given = parser.parse_args(argv)
    try:
        text = json.dumps(validate(list(measured(sorted(given.recordings)))), indent=1, sort_keys=True) + "\n"
    except InputError as error:
        print(f"k3lab: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    if given.write:
        write_whole(DATA, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
