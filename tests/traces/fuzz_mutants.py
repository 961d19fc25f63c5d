"""Ways to damage a trace: its bytes, its rows, and its structure (a kernel, a layer or a step that is not there)."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_samples import LAYERS, STEPS, Rows

_ODD = (None, True, -1, 0, 1.5, 2**31, 2**53 + 1, 2**62, -(2**62), "", "x", "NaN", "1e400", "-1.-500", "\u0000")
_ODD_JSON = (10**30, -(10**30), 1e308, [], {}, [None], {"a": 1})
_ODD_SQL = (b"\xff\x00", b"")
_TEXTS = (
    b"\x00",
    b"\xff",
    b'"',
    b"{",
    b"]",
    b",",
    b"\n",
    b"NaN",
    b"inf",
    b"1e999999",
    b"-1.-500",
    b"9" * 5000,
    b"[" * 3000,
)


def _cells(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    nested = row.get("args")
    return nested if isinstance(nested, dict) and nested and rng.random() < 0.5 else row


def _drop(rows: list[dict[str, Any]], gone: set[int]) -> list[dict[str, Any]]:
    return [row for index, row in enumerate(rows) if index not in gone]


def rows_dropped(it: Rows, rng: random.Random) -> list[dict[str, Any]]:
    """Some rows of any sort are missing."""
    return _drop(it.rows, set(rng.sample(range(len(it.rows)), rng.choice((1, 2, 10, len(it.rows) // 2)))))


def rows_doubled(it: Rows, rng: random.Random) -> list[dict[str, Any]]:
    """Some rows are there twice."""
    return it.rows + [dict(rng.choice(it.rows)) for _ in range(rng.choice((1, 5, 60)))]


def rows_shuffled(it: Rows, rng: random.Random) -> list[dict[str, Any]]:
    """Rows in another order: nothing may change."""
    rng.shuffle(it.rows)
    return it.rows


def odd_cells(it: Rows, rng: random.Random) -> list[dict[str, Any]]:
    """Values of wrong types and sizes."""
    odd = (*_ODD, *(_ODD_SQL if it.suffix == ".sqlite" else _ODD_JSON))
    for _ in range(rng.choice((1, 3, 30))):
        cells = _cells(rng.choice(it.rows), rng)
        cells[rng.choice(list(cells))] = rng.choice(odd)
    return it.rows


def huge_times(it: Rows, rng: random.Random) -> list[dict[str, Any]]:
    """Starts or ends far away, as corrupt stamps are."""
    for _ in range(rng.choice((1, 4))):
        row = rng.choice(it.rows)
        for key in ("start", "end", "ts", "dur"):
            if isinstance(row.get(key), (int, float)) and rng.random() < 0.5:
                row[key] = rng.choice((0, -5, 2**53, 2**62 - 1, row[key] * 1000, -row[key]))
    return it.rows


def columns_swapped(it: Rows, rng: random.Random) -> list[dict[str, Any]]:
    """Two columns change places, in one row or in all."""
    first = rng.choice(it.rows)
    keys = [key for key in first if key not in ("args", "table")]
    if len(keys) > 1:
        one, other = rng.sample(keys, 2)
        everywhere = rng.random() < 0.5
        for row in it.rows if everywhere else [first]:
            if one in row and other in row:
                row[one], row[other] = row[other], row[one]
    return it.rows


def keys_removed(it: Rows, rng: random.Random) -> list[dict[str, Any]]:
    """A cell, or a column of all rows, is missing."""
    key = rng.choice(list(_cells(rng.choice(it.rows), rng)))
    everywhere = rng.random() < 0.3
    for row in it.rows if everywhere else [rng.choice(it.rows)]:
        for cells in (row, row.get("args")):
            if isinstance(cells, dict) and key != "table":
                cells.pop(key, None)
    return it.rows


def kernel_removed(it: Rows, rng: random.Random) -> list[dict[str, Any]]:
    """One kernel of one step."""
    return _drop(it.rows, {rng.choice(list(it.places))})


def kernel_of_a_layer_removed(it: Rows, rng: random.Random) -> list[dict[str, Any]]:
    """One kernel of one layer, in every step."""
    layer, at = rng.randrange(LAYERS), rng.randrange(13)
    gone = set()
    for step in range(STEPS):
        gone.add([index for index, place in it.places.items() if place == (step, layer)][at])
    return _drop(it.rows, gone)


def layer_removed(it: Rows, rng: random.Random) -> list[dict[str, Any]]:
    """One layer of one step or of all."""
    layer, steps = rng.randrange(LAYERS), rng.choice([*([step] for step in range(STEPS)), list(range(STEPS))])
    return _drop(it.rows, {index for index, place in it.places.items() if place[1] == layer and place[0] in steps})


def step_removed(it: Rows, rng: random.Random) -> list[dict[str, Any]]:
    """The kernels of one step, or of two; with their launches where a mark still tells that there was a step."""
    steps = rng.sample(range(STEPS), rng.choice((1, 1, 2)))
    gone = {index for index, place in it.places.items() if place[0] in steps}
    if it.kind in ("marked_graphs", "eager") or it.suffix == ".sqlite":
        gone |= {row for row, step in it.launches.items() if step in steps and rng.random() < 0.5}
    return _drop(it.rows, gone)


Mutation = Callable[[Rows, random.Random], list[dict[str, Any]]]
ROWS: tuple[Mutation, ...] = (
    rows_dropped, rows_doubled, rows_shuffled, odd_cells, odd_cells, huge_times, columns_swapped, keys_removed,
)  # fmt: skip
REMOVED: tuple[Mutation, ...] = (kernel_removed, kernel_of_a_layer_removed, layer_removed, step_removed)


def damage_bytes(path: Path, rng: random.Random) -> str:
    """Damage a file in place; returns how."""
    data = bytearray(path.read_bytes())
    inside = path.suffix == ".gz" and rng.random() < 0.5
    if inside:
        data = bytearray(gzip.decompress(bytes(data)))
    kind = rng.choice(("flip", "flip", "truncate", "delete", "double", "zero", "insert"))
    size = len(data)
    at = rng.randrange(size)
    length = rng.choice((1, 2, 16, 300, 4096))
    if kind == "flip":
        for _ in range(rng.choice((1, 1, 2, 20, 200))):
            data[rng.randrange(size)] = rng.randrange(256)
    elif kind == "truncate":
        del data[rng.choice((0, 1, 15, 100, at, size - 1, size - 2)) :]
    elif kind == "delete":
        del data[at : at + length]
    elif kind == "double":
        data[at:at] = data[at : at + length]
    elif kind == "zero":
        data[at : at + length] = bytes(min(length, size - at))
    else:
        data[at:at] = rng.choice(_TEXTS)
    path.write_bytes(gzip.compress(bytes(data), mtime=0) if inside else bytes(data))
    return f"bytes_{kind}"
