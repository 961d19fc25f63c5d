"""Every command that README, CONTRIBUTING and the pages of docs/ show is executed here, at a reduced size.

The lines run in order, page after page, in one folder; a line that an earlier page has shown is not run again. What another program does (make, pip, nsys, an editor) is listed
with the reason why it does not run here.
"""

from __future__ import annotations

import importlib.util
import json
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
from k3lab.cli.main import run
from k3lab.decode.checkpoint.write import write_checkpoint
from k3lab.decode.random_weights import random_tensors
from k3lab.kernels import SMALL_K3, registry
from k3lab.traces import synthesize
from k3lab.traces.families import _family, known_families

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")),
]
TINY = replace(SMALL_K3, name="tiny-k3", num_hidden_layers=3, mla_layers=(2,), attn_res_block_size=2, num_experts=16)
SMALLER = (
    (r"--trials \d+", "--trials 2"),
    (r"--later-trials \d+", "--later-trials 2"),
    (r"--sample \d+", "--sample 2"),
    (r"--tp 4,8,16 --kind kda,mla --rows \S+ --engines all", "--tp 16 --kind kda --rows 1 --engines triton"),
    (r"^(k3lab (?:check|compile|predict|time|tune|decode plan|study record) .*)--rows 8", r"\1--rows 1"),
    (r"rows8", "rows1"),
    (r"^(k3lab check attention_projection (?!.*--engine).*)$", r"\1 --engine triton"),
    (r"^(k3lab (?:check attention_projection|study record) .*)--tp 16", r"\1--model small --tp 4"),
    (r"^(k3lab decode run (?!.*--tokens).*)$", r"\1 --tokens 2"),
    (r"--prompt 200 --chunk 64", "--prompt 8 --chunk 4"),
    (r"^(k3lab decode bench .*--tokens) \d+", r"\1 2"),
    (r"--prompt 40", "--prompt 3"),
    (r"--fill-context 1000", "--fill-context 16"),
    (r"^(k3lab decode run .*)--model small", r"\1--model path/to/checkpoint/config.json"),
    (r"^(k3lab decode run --checkpoint \S+) --tp 16", r"\1 --tp 4"),
    (r"--package \.\./", "--package "),
)
"""What makes a line quick, and nothing else of it."""
ELSEWHERE = {
    "make": "tests/cli/test_demo.py runs the demo; the others are what runs these tests",
    "source": "this process has the environment",
    "pip": "the family's package is put on the path without an installation",
    "jupyter": "tests/cli/test_notebooks.py executes the notebooks",
    "nsys": "not on this machine; tests/traces holds its exports",
    "k3lab decode bars": "needs a GPU: tests/decode/test_bars.py measures with a clock of its own",
    "torchrun": "tests/decode/test_ranks.py starts its ranks",
    "k3lab trace capture": "tests/traces/test_capture.py runs it around programs of its own",
    "python -m k3lab.tuning.calibrate_link": "tests/tuning/test_calibrate_link.py fits made records; there is none of real ranks yet",
    "python -m k3lab.tuning.validate": "tests/tuning/test_predict.py holds the recorded error against the data",
    "python -m k3lab.cli.kernel_page": "tests/test_pages.py holds the page against the data",
    "python -m pytest token_mix/tests": "tests/cli/test_new.py runs the skeleton's tests",
    "python -m pytest test_kernels.py": "test_the_timing_tests_of_its_page_run, below",
}
REFUSED = {
    "k3lab time": (2, "timing needs an NVIDIA GPU"),
    "k3lab stages": (2, "k3lab stages needs an NVIDIA GPU"),
    "k3lab ranks": (2, "k3lab ranks needs NVIDIA GPUs"),
    "k3lab trace ranks rank*.sqlite --budget gb300-tp16 --world 16": (1, ""),  # two ranks of sixteen: inconclusive
}
"""What has to be refused here, and how."""
DONE: set[str] = set()
"""Lines that were run."""
FAILS = ("slow.json.gz", "planted.json.gz", "FILE")
"""Traces with a fault, or of another GPU than the budget's: a check of one exits with 1."""


def lines(page: str, language: str = "sh") -> list[str]:
    """Command lines of a page, without comments and variables set in front."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    text = "".join(blocks).replace("\\\n", " ")
    found = [re.sub(r"\s+#.*$", "", line).strip() for line in text.splitlines()]
    return [re.sub(r"^(?:[A-Z0-9_]+=\S+\s+)+", "", line) for line in found if line and not line.startswith("#")]


def smaller(line: str) -> str:
    for pattern, replacement in SMALLER:
        line = re.sub(pattern, replacement, line)
    return line


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
    caches = (registry._locations, registry._claims, registry.family, known_families, _family)
    yield shared
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()
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
    monkeypatch.syspath_prepend(site)
    for cached in (registry._locations, registry._claims, registry.family, known_families, _family):
        cached.cache_clear()


def expected(line: str) -> tuple[int, str]:
    for head, outcome in REFUSED.items():
        if line.startswith(head):
            return outcome
    return (1 if line.startswith("k3lab trace check") and any(name in line for name in FAILS) else 0), ""


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run those of its lines that no earlier page has shown."""
    for block in re.findall(r"^```json\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE):
        if name := re.search(r'"name": "(token_mix)"', block):
            (folder / f"{name[1]}.json").write_text(block)
    for shown in lines(page):
        line = smaller(shown)
        if line.startswith("pip install") and "token_mix" in line:
            put_on_path(folder / "token_mix", monkeypatch)
            continue
        if any(line.startswith(head) for head in ELSEWHERE):
            continue
        program, *words = line.split()
        assert program == "k3lab", f"{page}: {shown}: who runs this? Name it in ELSEWHERE"
        words = [str(path) for word in words for path in (sorted(Path().glob(word)) if "*" in word else [word])]
        if line in DONE:
            continue
        DONE.add(line)
        code, message = expected(line)
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
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/tutorial.md").read_text(), re.DOTALL | re.MULTILINE)
    values: dict[str, Any] = {}
    exec(compile(code.replace("rows=8", "rows=1"), "docs/tutorial.md", "exec"), values)
    assert values["lab"].problem.label == "tp16-rows1"


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
    (block,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/timing_tests.md").read_text(), re.DOTALL | re.MULTILINE
    )
    small = block.replace("tp=16, rows=[1, 8]", "tp=4, rows=[1], model=k3lab.kernels.SMALL_K3")
    (folder / "test_kernels.py").write_text(f"import k3lab.kernels\n{small}")
    (line,) = (line for line in lines("docs/timing_tests.md") if "--k3-store" not in line)
    command = [sys.executable, *line.split()[1:], "-q", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert "1 passed, 1 skipped" in done.stdout, done.stdout
    assert "no GPU here; no baseline is stored yet" in done.stdout


@pytest.mark.usefixtures("folder")
def test_the_python_of_the_readme_runs() -> None:
    code, _ = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
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
