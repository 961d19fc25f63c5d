"""Every command that README, CONTRIBUTING and the pages of docs/ show is executed here, at a reduced size.

The lines run in order, page after page, in one folder; a line that an earlier page has shown is not run again. What another program does (make, pip, nsys, an editor) is listed
with the reason why it does not run here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from k3lab.cli.edited import edited_family
from k3lab.cli.main import run
from k3lab.decode.checkpoint.write import write_checkpoint
from k3lab.decode.random_weights import random_tensors
from k3lab.kernels import SMALL_K3, registry
from k3lab.traces import synthesize
from k3lab.traces.families import _family, known_families
from k3lab.tuning import compiling
from k3lab.tuning.jobs import find_family

from .page_commands import ELSEWHERE, NCU, PAGES, blocks, commands, edit, expected, lines, smaller

ROOT = Path(__file__).resolve().parents[1]
TINY = replace(SMALL_K3, name="tiny-k3", num_hidden_layers=3, mla_layers=(2,), attn_res_block_size=2, num_experts=16)
DONE: set[str] = set()
"""Lines that were run."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


def give(folder: Path) -> None:
    """What the pages take as given: traces, a checkpoint, a workload."""
    good = synthesize(folder / "given.json.gz", layers=8, steps=12)
    for name in ("out/demo/synthetic_trace.json.gz", "out/steps.json.gz", "out/before.json.gz", "FILE"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(good, folder / name)
    for name in ("rank0.sqlite", "rank1.sqlite"):
        shutil.copy(good, folder / name)
    synthesize(folder / "decode.sqlite", layers=93, steps=6)
    (folder / "steps.jsonl").write_text('{"count": 9, "requests": 1, "drafts": 7}\n')
    (folder / "problems.jsonl").write_text('{"id": "1", "prompt_ids": [1, 2], "answer_ids": [7]}\n')
    (folder / "ncu.csv").write_text(NCU)
    recording = "attention_projection_triton_mla_tp16_rows8.json.gz"
    (folder / "results" / "h200").mkdir(parents=True)
    shutil.copy(ROOT / "results" / "h200" / recording, folder / "results" / "h200" / recording)
    tensors = random_tensors(TINY, seed=0, dtype=torch.bfloat16)
    write_checkpoint(folder / "path" / "to" / "checkpoint", TINY, tensors)


@pytest.fixture
def folder(shared: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the pages' lines run: with the traces that they take as given."""
    monkeypatch.chdir(shared)
    monkeypatch.setenv("K3LAB_CACHE_DIR", str(cache))
    monkeypatch.setenv("K3LAB_NO_GPU", "1")
    if not (shared / "given.json.gz").exists():
        give(shared)
    yield shared
    monkeypatch.undo()
    forget()


def forget() -> None:
    """What this process knows of the family that the pages make; each command is a process of its own otherwise."""
    for cached in (
        registry._locations,
        registry._claims,
        registry.family,
        known_families,
        _family,
        find_family,
        edited_family,
    ):
        cached.cache_clear()
    compiling.forget("token_mix")
    for name in [name for name in sys.modules if name.startswith("k3lab_token_mix")]:
        del sys.modules[name]


def put_on_path(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family's package importable and its entry point known, as ``pip install`` would do."""
    site = package.parent / "site"
    if not site.exists():
        install = [
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--target",
            str(site),
            str(package),
        ]
        done = subprocess.run([sys.executable, "-m", "pip", *install], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(site / f"k3lab_{package.name}")
        (site / f"k3lab_{package.name}").symlink_to((package / f"k3lab_{package.name}").resolve())  # the -e of the page
    monkeypatch.syspath_prepend(site)
    forget()


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run those of its lines that no earlier page has shown."""
    for language, block in blocks(page):
        if language == "json" and (name := re.search(r'"name": "(token_mix)"', block)):
            (folder / f"{name[1]}.json").write_text(block)
        elif language == "diff" and edit(block):
            forget()
            DONE.difference_update([line for line in DONE if line.startswith("k3lab check token_mix")])
        elif language == "sh":
            run_block(page, block, folder, monkeypatch, capsys)


def run_block(
    page: str, block: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run a block of command lines."""
    for shown, fails in commands(block):
        line = smaller(shown)
        if line.startswith("pip install") and "token_mix" in line:
            put_on_path(folder / "token_mix", monkeypatch)
            continue
        if any(one.startswith(head) for head in ELSEWHERE for one in (shown, line)):
            continue
        program, *words = line.split()
        assert program == "k3lab", f"{page}: {shown}: who runs this? Name it in ELSEWHERE"
        words = [str(path) for word in words for path in (sorted(Path().glob(word)) if "*" in word else [word])]
        if line in DONE:
            continue
        DONE.add(line)
        code, message = (1, "") if fails else expected(line)
        assert run(words) == code, f"{page}: {line}\n{capsys.readouterr().err}"
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page(page, folder, monkeypatch, capsys)


def test_the_tenth_kernel_goes_all_the_way_by_the_tutorial(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check, tune, export, plan, trace share, report, and the lab: with what the tutorial's lines left."""
    run_page("docs/tutorial.md", folder, monkeypatch, capsys)
    put_on_path(folder / "token_mix", monkeypatch)
    capsys.readouterr()
    assert run(["bundle", "show", "out/token_mix_bundle", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["entries"]
    assert (entry["family"], entry["evidence"]) == ("token_mix", "predicted")
    assert entry["builds"][0]["launches"][0]["kernel"] == "k3_token_mix_triton_rows"
    assert run(["decode", "plan", "--bundle", "out/token_mix_bundle", "--accept", "predicted", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert "token_mix" in next(item["reason"] for item in plan["fallbacks"] if item["family"] == "attention_projection")
    share = ["trace", "check", "out/steps.json.gz", "--budget", "token_mix.json", "--family", "token_mix", "--json"]
    assert run(share) == 0
    rows = [
        row
        for device in json.loads(capsys.readouterr().out)["devices"]
        for group in device["classes"]
        for row in group["families"]
    ]
    own = [row for row in rows if row["family"] == "token_mix"]
    assert own and all((row["kernels"], row["verdict"]) == (1, "pass") for row in own)
    page = (folder / "out" / "report" / "index.html").read_text()
    body = page[page.rindex("<main>") :]
    assert re.search(r'<code>token_mix</code>.*?GB300 <span class="word predicted">predicted</span>', body, re.DOTALL)
    assert "k3_token_mix_triton_rows" in body
    check = ["check", "token_mix", "--tp", "16", "--rows", "1", "--json"]
    assert run(check) == 0 and json.loads(capsys.readouterr().out)["results"][0]["ok"]
    (kernel,) = Path("token_mix").glob("*/triton_rows.py")
    assert "tl.sigmoid" in kernel.read_text()  # the page's own kernel, not the skeleton's
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "token_mix/tests",
        "-k",
        "twin_equals or refused",
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder / "site")}
    done = subprocess.run(tests, env=environment, capture_output=True, text=True, timeout=120)
    assert "2 passed" in done.stdout, done.stdout
    (code,) = [text for language, text in blocks("docs/tutorial.md") if language == "python"]
    values: dict[str, Any] = {}
    exec(compile(code.replace("rows=8", "rows=1"), "docs/tutorial.md", "exec"), values)
    assert values["lab"].problem.label == "tp16-rows1"


def test_the_how_to_has_every_command() -> None:
    """Each is shown there, or told of with the page that has it."""
    import typer
    from k3lab.cli.main import build_app

    def leaves(command: Any, path: tuple[str, ...]) -> Iterator[str]:
        for name, child in getattr(command, "commands", {}).items():
            yield from leaves(child, (*path, name))
        if not hasattr(command, "commands"):
            yield " ".join(("k3lab", *path))

    page = (ROOT / "docs" / "howto.md").read_text()
    assert [name for name in leaves(typer.main.get_command(build_app()), ()) if not re.search(rf"{name}\b", page)] == []


def test_what_is_run_elsewhere_is_shown_somewhere() -> None:
    """No excuse outlives its command, and each names a test that is there."""
    shown = [line for page in [*PAGES, "results/README.md"] for line in lines(page)]
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    for head, why in ELSEWHERE.items():
        assert any(line.startswith(head) for line in shown) or head in text, head
        for path in re.findall(r"tests/\S+\.py", why):
            assert (ROOT / path).is_file(), path


def test_the_timing_tests_of_its_page_run(folder: Path) -> None:
    """The page's own file: checks pass on the interpreter, the timing test is skipped with its reason."""
    (block,) = [text for language, text in blocks("docs/timing_tests.md") if language == "python"]
    small = block.replace("tp=16, rows=[1, 8]", "tp=4, rows=[1], model=k3lab.kernels.SMALL_K3")
    (folder / "test_kernels.py").write_text(f"import k3lab.kernels\n{small}")
    (line,) = (line for line in lines("docs/timing_tests.md") if "--k3-store" not in line)
    command = [sys.executable, *line.split()[1:], "-q", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert "1 passed, 1 skipped" in done.stdout, done.stdout
    assert "no GPU here; no baseline is stored yet" in done.stdout


@pytest.mark.usefixtures("folder")
def test_the_python_of_the_readme_runs() -> None:
    code, _ = [text for language, text in blocks("README.md") if language == "python"]
    code = code.replace("tp=16, rows=8)", "tp=4, rows=1, model=SMALL_K3)").replace("tune(12)", "tune(2)")
    assert "model=SMALL_K3" in code
    values: dict[str, Any] = {"SMALL_K3": SMALL_K3}
    exec(compile(code, "README.md", "exec"), values)
    assert values["lab"].problem.tp == 4


def test_the_site_takes_nothing_for_granted() -> None:
    """Links to files of the repository must hold, and every generated section has something in it."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "hooks.py")
    assert spec and spec.loader
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    told = hooks.without_repository_links(
        "see [notes](../kernels/attention_projection/NOTES.md#limits) and [a](b.md)", "x.md"
    )
    assert told == "see notes (`kernels/attention_projection/NOTES.md`) and [a](b.md)"
    with pytest.raises(ValueError, match=r"x.md links to \.\./nothing.md, which is not there"):
        hooks.without_repository_links("[n](../nothing.md)", "x.md")
    text = "".join((ROOT / page).read_text() for page in PAGES)
    assert set(re.findall(r"^<!-- generated: (\w+) -->$", text, re.MULTILINE)) == set(hooks.SECTIONS)
    for name, section in hooks.SECTIONS.items():
        assert section().count("\n|") >= 3 or name == "error", name
    assert "## k3lab trace synthesize" in hooks.commands() and "`--kernel`" in hooks.commands()
    assert "kda-tp16" in hooks.results()
