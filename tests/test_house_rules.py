"""The rules of the house that a test can hold: layers, imports, kernel files, names, docstrings."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "tuning", "traces", "decode", "cli")
MAY_IMPORT = {
    "kernels": set(),
    "tuning": {"kernels"},
    "traces": set(),
    "decode": {"kernels", "tuning"},
    "cli": {"kernels", "tuning", "traces", "decode"},
}
HEAVY = ("torch", "triton", "cutlass", "optuna", "plotly", "jinja2", "numpy", "pandas", "transformers")
LINES = 400
WAITS = {"wait", "join", "communicate", "acquire", "result"}


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders or FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("k3lab", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def top_level(path: Path) -> Iterator[ast.stmt]:
    """Statements that run at import, without those of TYPE_CHECKING blocks."""

    def walk(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                yield from walk(node.orelse)
                continue
            yield node
            for field in ("body", "orelse", "finalbody"):
                if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield from walk(getattr(node, field, []))

    yield from walk(tree(path).body)


def imported(path: Path, nodes: Any) -> Iterator[str]:
    """Absolute names of the modules (and of the names in them) that the import statements name."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            yield full
            yield from (f"{full}.{alias.name}" for alias in node.names)


def folder_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "k3lab" and len(parts) > 1 and parts[1] in FOLDERS else None


@pytest.mark.parametrize("folder", FOLDERS)
def test_layers_import_only_what_they_may(folder: str) -> None:
    wrong = []
    for path in sources(folder):
        for name in imported(path, ast.walk(tree(path))):
            other = folder_of(name)
            if other in (None, folder):
                continue
            # decode may take tuning's timing policy alone; `from ..tuning import policy` is judged by its names
            policy = folder == "decode" and ("policy" in name or name == "k3lab.tuning")
            if other not in MAY_IMPORT[folder] or (folder == "decode" and other == "tuning" and not policy):
                wrong.append(f"{relative(path)} imports {name}")
    assert not wrong


def test_ours_is_imported_relatively() -> None:
    wrong = [
        f"{relative(path)} imports {name}"
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)
        for name in imported(path, [node])
        if name.split(".")[0] in {"k3lab", *FOLDERS}
    ]
    assert not wrong


def test_importing_a_package_is_light_and_quick() -> None:
    """Every module that does not itself import a heavy package at its top, in one fresh interpreter each package."""
    for folder in FOLDERS:
        light = [
            module_name(path)
            for path in sources(folder)
            if not any(name.split(".")[0] in HEAVY for name in imported(path, top_level(path)))
            and path.name != "__main__.py"
        ]
        code = (
            "import importlib, json, sys, time\nstart = time.process_time()\n"
            f"importlib.import_module('k3lab.{folder}')\nfirst = time.process_time() - start\n"
            f"heavy = lambda: sorted(set(sys.modules) & set({HEAVY!r}))\n"
            f"blame = {{}}\nfor name in {light!r}:\n    importlib.import_module(name)\n"
            "    if heavy() and not blame: blame = {name: heavy()}\n"
            "print(json.dumps([first, blame]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT / "tests"
        )
        assert done.returncode == 0, done.stderr
        first, blame = json.loads(done.stdout.splitlines()[-1])
        assert not blame, f"importing {blame} (only heavy modules themselves may import these at their top)"
        assert first < 1.0, f"importing k3lab.{folder} took {first:.2f} s"


def registry() -> list[Any]:
    """The families of this repository; what other packages bring is not judged by its rules."""
    from k3lab.kernels import family
    from k3lab.kernels.registry import FAMILIES

    return [family(name) for name in FAMILIES]


def test_every_family_of_the_model_is_registered_with_a_twin() -> None:
    from k3lab.kernels.registry import FAMILIES

    words = {
        "attention_projection",
        "output_projection",
        "router",
        "experts",
        "kda",
        "mla",
        "moe_tail",
        "attn_res",
        "lm_head",
    }
    assert words <= set(FAMILIES), f"the registry lacks {sorted(words - set(FAMILIES))}, which the decode path needs"
    for found in registry():
        assert (ROOT / "kernels" / found.name / "twin.py").is_file(), f"kernels/{found.name} has no twin.py"
        assert found.title
        assert found.default_engine in {engine.name for engine in found.engines} or not found.engines


def kernel_files() -> list[tuple[str, str, Path]]:
    found = []
    for owner in registry():
        for engine in owner.engines:
            found += [(owner.name, engine.name, Path(path)) for path in engine.sources]
    return found


def test_an_engine_names_all_kernel_files_that_its_kernels_use() -> None:
    """A changed part is another kernel: studies and results go by the digest of these files."""
    wrong = []
    for owner in registry():
        for engine in owner.engines:
            named = {Path(path).resolve() for path in engine.sources}
            for path in named:
                for name in imported(path, ast.walk(tree(path))):
                    parts = name.split(".")
                    used = [ROOT.joinpath(*parts[1:end]).with_suffix(".py") for end in (len(parts), len(parts) - 1)]
                    wrong += [
                        f"{owner.name} {engine.name} lacks {relative(one)}"
                        for one in used
                        if one.is_file() and one.name.startswith(("cute_", "triton_")) and one not in named
                    ]
    assert not wrong, sorted({*wrong})


def test_a_kernel_file_holds_kernels_only() -> None:
    """Imports, jitted functions, constants, and a call that names a kernel: nothing that chooses, checks or times."""
    wrong = []
    for _, _, path in kernel_files():
        for node in tree(path).body:
            plain = isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign))
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            jitted = isinstance(node, ast.FunctionDef) and any(
                word in ast.dump(decorator) for decorator in node.decorator_list for word in ("jit", "kernel")
            )
            naming = isinstance(node, ast.Expr) and "set_name_prefix" in ast.dump(node.value)
            if not (plain or text or jitted or naming):
                wrong.append(f"{path.name}:{node.lineno} {type(node).__name__}")
    assert kernel_files()
    assert not wrong


def test_kernels_are_named_after_family_engine_and_role() -> None:
    """A file that engines share holds parts of kernels, and no kernel of its own; each engine has a file with its own."""
    files = kernel_files()
    own = set()
    for owner, engine, path in files:
        prefix = f"k3_{owner}_{engine}"
        names = [node.name for node in tree(path).body if isinstance(node, ast.FunctionDef)]
        if sum(other == path for _, _, other in files) > 1:
            assert not any(name.startswith("k3_") for name in names), (
                f"{path.name} is shared, so its kernel has no engine"
            )
            continue
        assert all(name.startswith(prefix) for name in names if name.startswith("k3_")), path.name
        if any(name.startswith(prefix) for name in names):
            own.add((owner, engine))
    missing = {(owner, engine) for owner, engine, _ in files} - own
    assert not missing, f"no kernel k3_<family>_<engine>_<role>: {sorted(missing)}"


def test_twins_are_plain_pytorch() -> None:
    for path in sorted((ROOT / "kernels").glob("*/twin.py")):
        outside = {name.split(".")[0] for name in imported(path, ast.walk(tree(path)))}
        assert outside <= {"torch", "k3lab", "__future__", "dataclasses", "collections", "typing", "math"}, relative(
            path
        )


def test_environment_variables_are_read_in_one_place() -> None:
    wrong = []
    for path in sources():
        if relative(path) == "kernels/env.py":
            continue
        for node in ast.walk(tree(path)):
            by_key = (
                isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and "environ" in ast.dump(node.value)
            )
            asked = isinstance(node, ast.Compare) and any(
                "attr='environ'" in ast.dump(side) for side in node.comparators
            )
            called = isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.getenv", "os.environ.get")
            if (by_key and ast.unparse(node.value) == "os.environ") or asked or called:
                wrong.append(f"{relative(path)}:{node.lineno}")
    assert not wrong


def test_cache_folders_and_devices_are_found_in_one_place() -> None:
    wrong = []
    for path in sources():
        text = path.read_text()
        if relative(path) != "kernels/paths.py" and re.search(r"platformdirs|user_cache_dir|\.cache/", text):
            wrong.append(f"{relative(path)} looks for a cache folder; kernels/paths.py does")
        if relative(path) != "kernels/device.py" and re.search(
            r"cuda\.is_available|cuda\.device_count|get_device_capability", text
        ):
            wrong.append(f"{relative(path)} looks for a GPU; kernels/device.py does")
    assert not wrong


def test_waits_are_bounded() -> None:
    """A call that waits for a process, a thread, a lock or a queue says how long at most."""
    wrong = []
    for path in sources():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            named = ast.unparse(node.func)
            bare = (
                isinstance(node.func, ast.Attribute) and node.func.attr in WAITS and not node.args and not node.keywords
            )
            child = named in ("subprocess.run", "subprocess.check_output", "subprocess.check_call")
            if bare or (child and not any(keyword.arg == "timeout" for keyword in node.keywords)):
                wrong.append(f"{relative(path)}:{node.lineno} {named}")
    assert not wrong


def test_files_are_short() -> None:
    long = {relative(path): count for path in sources() if (count := len(path.read_text().splitlines())) > LINES}
    assert not long


def public(path: Path) -> Iterator[tuple[str, ast.AST]]:
    for node in tree(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                        yield f"{node.name}.{item.name}", item


def test_public_names_are_documented() -> None:
    wrong = [
        relative(path) for path in sources() if path.name != "__init__.py" and ast.get_docstring(tree(path)) is None
    ]
    wrong += [
        f"{relative(path)}: {name}" for path in sources() for name, node in public(path) if not ast.get_docstring(node)
    ]
    assert not wrong


def test_nothing_is_left_for_later() -> None:
    marks = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "Not" + "ImplementedError"))
    wrong = [
        f"{relative(path)}:{number}"
        for path in [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"\b({marks})\b", line)
    ]
    assert not wrong


def test_every_package_is_mapped() -> None:
    from setuptools import find_packages

    for folder in FOLDERS:
        found = {folder, *(f"{folder}.{sub}" for sub in find_packages(str(ROOT / folder)))}
        holding = {relative(path.parent).replace("/", ".") for path in sources(folder)}
        assert holding <= found, f"folders without __init__.py: {sorted(holding - found)}"
        assert (ROOT / folder / "py.typed").is_file()
    text = (ROOT / "setup.py").read_text()
    assert all(f'"{folder}"' in text for folder in FOLDERS)


def test_user_data_is_never_kept_in_a_cache() -> None:
    """Caches may be deleted: studies, results and bundles lie elsewhere."""
    from k3lab.kernels import K3, family
    from k3lab.kernels.gpu_cards import gpu_card
    from k3lab.tuning.identity import default_path

    owner = family("attention_projection")
    path = default_path(owner, owner.engine("triton"), owner.problem(K3, tp=16, rows=8), gpu_card("GB300"), "predicted")
    assert path.parts[0] == "studies"
    users = {
        relative(path) for path in sources() if re.search(r"compiled_cache|cache_root|cache_dir", path.read_text())
    }
    assert users <= {"kernels/env.py", "kernels/paths.py", "tuning/compiling.py", "cli/doctor.py"}
