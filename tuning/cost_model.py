"""The cost model's arithmetic: features and an engine's constants to microseconds, term by term.

Plain ``+ - * / **`` only: the same lines predict one config from floats and calibrate on thousands from arrays.
Constants are fitted (:mod:`k3lab.tuning.calibrate`), never a table of measured points: a prediction of a config that was
measured is as blind as one of any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from .cost_features import Features

MODEL_VERSION = 2
DATA = Path(__file__).parent / "data" / "cost_model.json"
POOLED = "*"
"""Whose constants serve an engine that was never calibrated: those of all engines together."""


@dataclass(frozen=True)
class Constants:
    """One engine's constants; the values here are where a fit begins."""

    launch_us: float = 2.5
    """Ramp-up and drain of one isolated launch in a graph."""
    step_us: float = 1.5
    """One hand-over between blocks through the L2, paid once a round of blocks."""
    cluster_us: float = 0.5
    """Starting and leaving a cluster, once a round."""
    latency_ns: float = 600.0
    """Device memory latency under load: what must be in flight is bandwidth times this (Little's law)."""
    efficiency: float = 1.0
    """Bandwidth reached with enough in flight, in units of the card's read bandwidth."""
    sm_share: float = 1.6
    """Most bandwidth one SM can draw, in units of an even share."""
    l2_ratio: float = 2.3
    """L2 bandwidth in units of device memory bandwidth."""
    scalar_rate: float = 0.34
    """Share of the FP32 rate that FMA loops with conversions reach."""
    tile_us: float = 0.15
    """One turn of a block's tile loop when nothing else holds it up."""
    tensor_ns: float = 0.1
    """One tensor-core instruction of the code, for each warp of an SM and each round."""
    other_ns: float = 0.02
    """One other instruction of the code, likewise."""
    sharpness: float = 3.0
    """How far terms that overlap add: 1 adds them, a large number takes the largest."""
    round_us: float = 1.0
    """Filling and draining the pipeline of a block: once a round of resident blocks after the first."""
    shared_us_per_kb: float = 0.005
    """Filling or summing a block's shared memory, for each block of the busiest SM."""
    warps_us: float = 0.3
    """Starting and draining 64 warps of an SM."""
    code_us: float = 0.5
    """A thousand instructions of code, fetched cold."""
    spill_us: float = 0.02
    """One instruction on local memory. Never fitted: no recorded config spills."""
    link_share: float = 0.7
    """Share of the links' bandwidth that packets of a whole group's stores reach; see :data:`LINK`."""
    link_hop_us: float = 5.2
    """From a store on one rank until its peers, who poll, go on; see :data:`LINK`."""


LINK = ("link_share", "link_hop_us")
"""Fitted to times of real ranks by :mod:`k3lab.tuning.calibrate_link`, the same for every engine; guesses before that."""
NEVER_FITTED = ("spill_us", *LINK)
"""No recorded measurement of one GPU tells them. With the guesses of the link's two the exchange changes from one to two shots at about the rows where
published times of another engine on GB300 cross: between 32 and 64 at TP 8, between 16 and 32 at TP 16."""
FITTED = tuple(field.name for field in fields(Constants) if field.name not in NEVER_FITTED)

TERM_MEANINGS = {
    "launch": "ramp-up and drain of each launch",
    "hand_over": "blocks that wait for another block",
    "cluster": "starting and leaving clusters",
    "memory": "bytes over bandwidth, as far as the config keeps them in flight, on as many SMs as have blocks",
    "l2": "bytes read again through the L2",
    "scalar": "FMA outside the tensor cores",
    "tile_loop": "turns of the tile loop of one block",
    "issue": "instructions of the cubin, by the warps that share an SM",
    "rounds": "rounds of blocks after the first",
    "shared": "filling or summing shared memory",
    "warps": "starting and draining warps",
    "code": "fetching the code",
    "spills": "local-memory instructions",
    "link": "bytes from the other ranks, and waits for them",
}
OVERLAP = ("memory", "l2", "scalar", "tile_loop", "issue")
"""Terms that run at once: of them ``(sum of t ** sharpness) ** (1 / sharpness)`` counts. The others add."""

E = 2.718281828459045


def terms(f: Features, c: Constants, maximum: Any = max) -> dict[str, Any]:
    """Microseconds by term.

    Args:
        f: features, floats or arrays.
        c: constants, floats or what a fit differentiates by.
        maximum: of two numbers, or elementwise.
    """
    saturation = 1 - E ** (-f.in_flight / c.latency_ns)
    return {
        "launch": f.launches * c.launch_us,
        "hand_over": f.dependent_steps * f.rounds * c.step_us,
        "cluster": f.clustered * f.rounds * c.cluster_us,
        # SMs that have no block of the last round leave their share to the others, up to what one SM can draw
        "memory": f.memory_us / c.efficiency / saturation * maximum(f.tail / c.sm_share, 1.0 + 0 * f.tail),
        "l2": f.l2_us / c.l2_ratio,
        "scalar": f.scalar_us / c.scalar_rate,
        "tile_loop": f.rounds * f.tile_turns * c.tile_us,
        "issue": f.tensor_issue * c.tensor_ns + f.other_issue * c.other_ns,
        "rounds": (f.rounds - 1) * c.round_us,
        "shared": f.blocks_a_sm * f.shared_kb * c.shared_us_per_kb,
        "warps": f.warps_a_sm / 64 * c.warps_us,
        "code": f.instructions * c.code_us,
        "spills": f.spills * c.spill_us,
        "link": f.link_us / c.link_share + f.link_hops * c.link_hop_us,
    }


def total(parts: dict[str, Any], c: Constants) -> Any:
    """Microseconds of one call from its terms."""
    body = sum(parts[name] ** c.sharpness for name in OVERLAP) ** (1 / c.sharpness)
    return body + sum(value for name, value in parts.items() if name not in OVERLAP)


@cache
def fitted(path: Path = DATA) -> dict[str, Constants]:
    """``family/engine`` to its constants, and :data:`POOLED` to those of all; empty before the first calibration."""
    if not path.is_file():
        return {}
    return {name: Constants(**one) for name, one in json.loads(path.read_text())["constants"].items()}


def with_link(model: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A model's file with the link's constants of another, where that has some of real ranks."""
    if "link" not in other:
        return dict(model)
    link = {name: other["link"][name] for name in LINK}
    constants = {name: {**one, **link} for name, one in model["constants"].items()}
    return {**model, "link": other["link"], "constants": constants}


@cache
def link_gpus(path: Path = DATA) -> tuple[str, ...]:
    """Cards whose ranks the link's constants were fitted to; none where they are guesses."""
    if not path.is_file():
        return ()
    return tuple(json.loads(path.read_text()).get("link", {}).get("gpus", ()))


STANDS_FOR = {"cute_tcgen05": "cute_wgmma"}
"""Blackwell engines that no GPU here runs, and the Hopper sibling of the same pipeline whose constants they take."""


def stand_in(family: str, engine: str) -> str:
    """The engine whose constants serve this one: itself where it has some, else its sibling where that has."""
    table, other = fitted(), STANDS_FOR.get(engine, engine)
    return other if f"{family}/{engine}" not in table and f"{family}/{other}" in table else engine


def constants_of(family: str, engine: str) -> tuple[Constants, bool]:
    """The constants that serve an engine, and whether they are its own or its sibling's, not those of all engines."""
    table = fitted()
    own = table.get(f"{family}/{stand_in(family, engine)}")
    return (own, True) if own else (table.get(POOLED, Constants()), False)


def version_of(family: str, engine: str) -> str:
    """Version of the model for an engine: of its arithmetic, and of the constants that serve the engine.

    Times of two versions are not compared: what was predicted before a calibration is no trial of a study after it.
    """
    text = json.dumps(rounded(constants_of(family, engine)[0]), sort_keys=True)
    return f"cost model {MODEL_VERSION}, constants {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def rounded(c: Constants) -> dict[str, float]:
    """For a file: four digits of each."""
    return {name: float(f"{value:.4g}") for name, value in asdict(c).items()}
