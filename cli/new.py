"""``k3lab new family``: the skeleton of a kernel family, a small one that works, here or in a package of its own."""

from __future__ import annotations

import importlib.util
import json
import keyword
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..kernels.errors import InputError
from .output import Json, emit

if TYPE_CHECKING:
    from rich.console import Console

TEMPLATES = Path(__file__).parent / "templates" / "family"
SOURCES = ("__init__.py", "twin.py", "family.py", "engines.py", "triton_rows.py")
REGISTRY_END = "}\n\n\n@cache\ndef _locations"

app = typer.Typer(no_args_is_help=True, help="Write the skeleton of something new.")


def check_name(name: str) -> None:
    """Raise InputError unless the name can be a family: lower snake case, and not taken."""
    from ..kernels import family_names

    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise InputError(f"{name!r} cannot be a family's name; use lower case words joined by _, such as token_mix")
    if name in family_names():
        raise InputError(f"family {name!r} exists already; families: {', '.join(family_names())}")


def title(name: str) -> str:
    """What the skeleton says it computes."""
    return f"{name.replace('_', ' ')}: row-wise scale and add (a skeleton)"


def render_files(name: str, *, inside: bool) -> dict[str, str]:
    """Path below the target (repository or package folder) to text."""
    import jinja2

    package = f"k3lab.kernels.{name}" if inside else f"k3lab_{name}"
    values = {
        "name": name,
        "camel": "".join(word.capitalize() for word in name.split("_")),
        "title": title(name),
        "base": ".." if inside else "k3lab.kernels.",
        "package": package,
        "inside": inside,
        "distribution": f"k3lab-{name.replace('_', '-')}",
    }
    loader = jinja2.FileSystemLoader(TEMPLATES)
    templates = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)

    def text(template: str) -> str:
        return templates.get_template(f"{template}.j2").render(values)

    folder = f"kernels/{name}" if inside else package
    files = {f"{folder}/{source}": text(source) for source in SOURCES}
    files[f"tests/kernels/test_{name}.py" if inside else f"tests/test_{name}.py"] = text("test_family.py")
    if not inside:
        files |= {"pyproject.toml": text("pyproject.toml"), "README.md": text("README.md")}
    return files


def write_package(name: str, folder: Path) -> list[Path]:
    """A package of its own in ``folder``, which must be new or empty; all files or none."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not empty; name a new folder for the package")
    files = render_files(name, inside=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from error
    try:
        for path, text in files.items():
            (staged / path).parent.mkdir(parents=True, exist_ok=True)
            (staged / path).write_text(text)
        staged.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        os.replace(staged, folder)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return [folder / path for path in files]


def register_line(registry: Path, name: str) -> str:
    """The registry's text with one more line."""
    text = registry.read_text()
    if REGISTRY_END not in text:
        raise InputError(f"{registry} has another form than expected; add {name!r} to FAMILIES by hand")
    line = f'    {json.dumps(name)}: "k3lab.kernels.{name}:FAMILY",\n'
    return text.replace(REGISTRY_END, line + REGISTRY_END, 1)


def write_inside(name: str, root: Path) -> list[Path]:
    """A family in the checkout at ``root``: its folder, its test, one line of registration."""
    if not (root / "tests" / "kernels").is_dir():
        raise InputError("k3lab is installed without its repository; write a package of your own: --package DIR")
    files = render_files(name, inside=True)
    taken = [path for path in files if (root / path).exists()]
    if taken:
        raise InputError(f"{taken[0]} exists already; choose another name or remove it")
    registry = root / "kernels" / "registry.py"
    registered = register_line(registry, name)
    written: list[Path] = []
    try:
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            written.append(root / path)
            (root / path).write_text(text)
        temporary = registry.with_suffix(".new")
        written.append(temporary)
        temporary.write_text(registered)
        os.replace(temporary, registry)
    except OSError as error:
        for file in written:
            file.unlink(missing_ok=True)
        shutil.rmtree(root / "kernels" / name, ignore_errors=True)
        raise InputError(f"cannot write the family into {root}: {error.strerror}") from error
    return [root / path for path in files]


def readme_row(name: str) -> str:
    """The family's row in the README's table, which tests hold against the registry."""
    return f"| `{name}` | {title(name)} | `triton` | none |"


def next_steps(name: str, package: Path | None) -> list[str]:
    """What to type next, in the environment that runs now; in a checkout also the one line to write by hand."""
    active = shlex.quote(f"{sys.prefix}/bin/activate")
    steps = [f"source {active}"] if sys.prefix != sys.base_prefix else []
    if package:
        steps.append(f"pip install --no-deps --no-build-isolation -e {shlex.quote(str(package))}")
    steps.append(f"k3lab check {name} --tp 16 --rows 8")
    if importlib.util.find_spec("pytest") is None:
        steps.append("pip install pytest")
    steps.append(f"python -m pytest {shlex.quote(f'{package}/tests') if package else f'tests/kernels/test_{name}.py'}")
    return steps if package else [*steps, f"add to the table of families in README.md:  {readme_row(name)}"]


def render(console: Console, data: dict[str, Any]) -> None:
    """Print what was written and what to do next."""
    for path in data["files"]:
        console.print(f"wrote {path}", soft_wrap=True)
    console.print("next:")
    for command in data["next"]:
        console.print(f"  {command}", soft_wrap=True, markup=False)


@app.command("family")
def family(
    name: str = typer.Argument(help="Lower case words joined by _."),
    package: Path | None = typer.Option(None, help="Write a package of its own into this new folder."),
    as_json: Json = False,
) -> None:
    """Write a kernel family that works: twin, Triton engine, space, test."""
    check_name(name)
    written = write_package(name, package) if package else write_inside(name, Path(__file__).resolve().parents[1])
    steps = next_steps(name, package)
    emit({"family": name, "files": [str(path) for path in written], "next": steps}, as_json, render)
