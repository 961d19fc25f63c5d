"""The gate: what a change does to the machine code of the engines it touches, told without a GPU."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..kernels.contract import Engine, Family
from ..kernels.errors import InputError
from ..kernels.gpu_cards import GPU_CARDS, GpuCard
from ..kernels.model_card import K3
from .compiling import glue_files
from .cubin import instruction_groups

ARCHS = ("sm_90a", "sm_103a")
ROWS = (1, 8, 64)
TP = 16
LAUNCHERS = ("contract.py", "env.py")
"""Modules of kernels/ between every engine and its compiler, beside ``<compiler>_compile.py``."""
PACKAGES = ("kernels", "tuning", "traces", "decode", "cli")
MOST = 24
"""Cases of an engine: of families with dozens of kinds (verify lengths, number formats, contexts) an even choice, the first kind whole."""
CASE_S = 60.0
"""Seconds that a case may take in the mean of a process's share."""
GIT_LIMIT_S = 60.0


def git(root: Path, *args: str) -> bytes:
    """What git prints.

    Raises:
        InputError: it fails.
    """
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, timeout=GIT_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"gate needs git: {error}") from error
    if done.returncode:
        raise InputError(f"git {args[0]}: {' '.join(done.stderr.decode(errors='replace').split())}")
    return done.stdout


def base_commit(root: Path, ref: str) -> str:
    """The commit of a reference.

    Raises:
        InputError: there is none, or this is no checkout.
    """
    try:
        return git(root, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}").decode().strip()
    except InputError as error:
        raise InputError(f"--base {ref} is no commit of the checkout {root} ({error})") from None


def changed_files(root: Path, base: str) -> set[Path]:
    """Files of kernels/ that differ from the base in the working tree, new ones too."""
    names = git(root, "diff", "--name-only", "-z", base, "--", "kernels")
    names += git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", "kernels")
    return {(root / name.decode()).resolve() for name in names.split(b"\0") if name}


def files_of(engine: Engine, root: Path) -> list[Path]:
    """Every file that the engine's machine code follows from."""
    shared = [root / "kernels" / name for name in (f"{engine.compiler}_compile.py", *LAUNCHERS)]
    return [path.resolve() for path in (*engine.sources, *glue_files(engine), *shared)]


def touched(families: Sequence[Family], root: Path, changed: set[Path]) -> list[tuple[Family, Engine]]:
    """The engines that a change can reach."""
    return [
        (family, engine)
        for family in families
        for engine in family.engines
        if any(path in changed for path in files_of(engine, root))
    ]


def cases_of(family: Family, engine: Engine, archs: Sequence[str] = ARCHS) -> list[dict[str, Any]]:
    """What is compiled of an engine: its default config for one, eight and 64 rows of each kind, at TP16, on each architecture.

    Where these are more than :data:`MOST`, all of the first kind, and of the others every so many.
    """
    found: dict[str, dict[str, Any]] = {}
    first: set[str] = set()
    for arch in archs:
        card: GpuCard = next(card for card in GPU_CARDS.values() if card.arch == arch)
        for kind in family.kinds or (None,):
            for rows in ROWS:
                try:
                    problem = family.problem(K3, tp=TP, rows=rows, kind=kind)
                except InputError:
                    continue
                if arch not in engine.archs or engine.refuses(problem, arch):
                    continue
                case = {
                    "family": family.name, "engine": engine.name, "problem": problem.to_json(), "label": problem.label,
                    "config": dict(engine.space(problem, card).default), "arch": arch,
                }  # fmt: skip
                key = json.dumps(case, sort_keys=True)
                found.setdefault(key, case)
                if kind == (family.kinds or (None,))[0]:
                    first.add(key)
    others = [key for key in found if key not in first]
    room = max(0, MOST - len(first))
    if len(others) > room:
        others = [others[number * len(others) // room] for number in range(room)]
    return [found[key] for key in found if key in first or key in set(others)]


def build_all(cases: Sequence[dict[str, Any]], tree: Path) -> list[dict[str, Any]]:
    """The answers of :mod:`k3lab.tuning.gate_build` with the packages of a source tree.

    Raises:
        InputError: the process dies.
    """
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "k3lab"
        package.mkdir()
        for name in PACKAGES:
            (package / name).symlink_to(tree / name)
        script = Path(__file__).with_name("gate_build.py")
        environment = {**os.environ, "PYTHONPATH": folder, "CUDA_VISIBLE_DEVICES": "", "K3LAB_NO_GPU": "1"}
        limit = CASE_S * max(len(cases), 5)
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(script)], input=json.dumps(list(cases)), capture_output=True, text=True, env=environment,
                timeout=limit, cwd=folder,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise InputError(f"compiling {len(cases)} cases of {tree} took longer than {limit:g} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or len(lines) != len(cases):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"the compilations of {tree} ended with {done.returncode}: {last}")
    return [json.loads(line) for line in lines]


def _shares(cases: Sequence[Any], jobs: int) -> list[list[int]]:
    return [share for share in (list(range(start, len(cases), jobs)) for start in range(jobs)) if share]


def build_both(
    cases: Sequence[dict[str, Any]], root: Path, base: str, jobs: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each case at the base and here, in several processes at a time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        tree = Path(folder)
        with tarfile.open(fileobj=io.BytesIO(git(root, "archive", base, "--", *PACKAGES))) as packed:
            packed.extractall(tree, filter="data")
        shares = _shares(cases, jobs)
        asked = [(place, pool.submit(build_all, [cases[n] for n in share], where), share)
                 for place, where in enumerate((tree, root)) for share in shares]  # fmt: skip
        found: list[list[dict[str, Any]]] = [[{}] * len(cases), [{}] * len(cases)]
        for place, answer, share in asked:
            for number, one in zip(share, answer.result(2 * CASE_S * max(len(cases), 5) * len(asked)), strict=True):
                found[place][number] = one
    return list(zip(*found, strict=True))


def compare(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What changed between two builds of a case, in words; and of that what the gate does not let pass."""
    if "failed" in after:
        text = f"does not compile: {after['failed']}"
        return [text], [] if "failed" in before else [text]
    if "failed" in before:
        spills = sum(one["spill_instructions"] for one in after["launches"])
        return [f"new here: {spills} spill instructions"], []
    changes, faults = [], []
    if (was := before.get("config")) != (now := after.get("config")):
        changes.append(f"the default config, which the base does not know: {_told(was)} -> {_told(now)}")
    old, new = before["launches"], after["launches"]
    if [one["kernel"] for one in old] != [one["kernel"] for one in new]:
        changes.append(
            f"launches {', '.join(one['kernel'] for one in old)} -> {', '.join(one['kernel'] for one in new)}"
        )
    spills = [sum(one["spill_instructions"] for one in found) for found in (old, new)]
    for one, two in zip(old, new, strict=False):
        changes += _launch(one, two)
    if spills[1] > spills[0]:
        faults.append(f"spill instructions {spills[0]} -> {spills[1]}")
    return changes, faults


def _told(config: dict[str, Any] | None) -> str:
    return " ".join(f"{name}={value}" for name, value in (config or {}).items())


def _launch(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    shared = [one["static_shared_bytes"] + one["dynamic_shared_bytes"] for one in (old, new)]
    figures = [
        ("registers", old["registers"], new["registers"]),
        ("shared bytes", *shared),
        ("stack bytes", old["stack_bytes"], new["stack_bytes"]),
        ("spill instructions", old["spill_instructions"], new["spill_instructions"]),
    ]
    groups = [
        {name: sum(found.values()) for name, found in instruction_groups(one["instructions"]).items()}
        for one in (old, new)
    ]
    figures += [
        (name, groups[0].get(name, 0), groups[1].get(name, 0)) for name in dict.fromkeys([*groups[0], *groups[1]])
    ]
    return [f"{new['kernel']}: {name} {one} -> {two}" for name, one, two in figures if one != two]


def gate(root: Path, ref: str, families: Sequence[Family], *, jobs: int = 1) -> dict[str, Any]:
    """Compile the engines that changed since a commit, at that commit and here, and compare.

    Args:
        root: the checkout.
        ref: the commit to compare with.
        families: whose engines.
        jobs: processes at a time.

    Returns:
        JSON-able: ``engines`` touched, ``cases`` with ``changes``, and ``faults``: new spills, and what no longer compiles.

    Raises:
        InputError: no such commit, no checkout, or the compilers cannot be run.
    """
    base = base_commit(root, ref)
    changed = changed_files(root, base)
    engines = touched(families, root, changed) if changed else []
    cases = [case for family, engine in engines for case in cases_of(family, engine)]
    pairs = build_both(cases, root, base, jobs) if cases else []
    told: dict[tuple[str, ...], list[str]] = {}  # kinds of a problem often compile to the same code
    faults = []
    for case, (before, after) in zip(cases, pairs, strict=True):
        changes, wrong = compare(before, after)
        name = f"{case['family']}/{case['engine']} {case['label']} {case['arch']}"
        if changes:
            told.setdefault(tuple(changes), []).append(name)
        faults += [f"{name}: {text}" for text in wrong]
    return {
        "base": base, "changed_files": len(changed), "engines": [f"{family.name}/{engine.name}" for family, engine in engines],
        "compiled": len(cases), "cases": [{"case": ", ".join(names), "changes": list(changes)} for changes, names in told.items()], "faults": faults,
    }  # fmt: skip
