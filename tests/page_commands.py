"""The commands that pages show: where they stand, what makes them quick, and which of them cannot be run beside the others."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")),
]
NCU = """"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","k3_kda_cute_step","gpu__time_duration.sum","nsecond","2570"
"0","k3_kda_cute_step","launch__registers_per_thread","register/thread","64"
"""
"""What Nsight Compute prints with --csv, in short."""
SMALLER = (
    (r"--trials \d+", "--trials 2"),
    (r"--later-trials \d+", "--later-trials 2"),
    (r"--sample \d+", "--sample 2"),
    (r"^(k3lab study replay .*)$", r"\1 --seeds 1 --sampler random"),
    (r"--jobs 16", "--jobs 1"),
    (r"--tp 4,8,16 --kind kda,mla --rows \S+ --engines all", "--tp 16 --kind kda --rows 1 --engines triton"),
    (r"^(k3lab (?:check|compile|predict|time|tune|decode plan|study record) .*)--rows 8", r"\1--rows 1"),
    (r"-rows8", "-rows1"),
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
    "k3lab decode bench --preset headline --rank": "a preset at full size needs a GPU: tests/cli/test_decode_bench.py has a rank alone",
    "export": "a database's address: tests/cli/test_shared_commands.py starts one",
    "k3lab tune attention_projection --tp 16 --rows 8 --trials 200": "into a database: tests/cli/test_shared_commands.py",
    "k3lab tune --layer": "tests/cli/test_shared_commands.py",
    "k3lab study watch": "tests/cli/test_shared_commands.py",
    "k3lab study pull": "tests/cli/test_shared_commands.py",
    "k3lab gate": "tests/tuning/test_gate.py compares commits of its own",
    "k3lab demo": "tests/cli/test_demo.py",
    "python -m k3lab.tuning.calibrate_link": "tests/tuning/test_calibrate_link.py fits made records; there is none of real ranks yet",
    "python -m k3lab.tuning.validate": "tests/tuning/test_predict.py holds the recorded error against the data",
    "python -m k3lab.cli.kernel_page": "tests/test_pages.py holds the page against the data",
    "python -m pytest token_mix/tests": "the tutorial's, below; tests/cli/test_new.py runs the skeleton's",
    "python -m pytest test_kernels.py": "test_the_timing_tests_of_its_page_run, below",
}
REFUSED = {
    "k3lab time": (2, "timing needs an NVIDIA GPU"),
    "k3lab stages": (2, "k3lab stages needs an NVIDIA GPU"),
    "k3lab ranks": (2, "k3lab ranks needs NVIDIA GPUs"),
    "k3lab prefetch": (2, "a prefetch needs an NVIDIA GPU"),
    "k3lab study in-situ": (2, "timing inside the layer needs an NVIDIA GPU"),
    "k3lab bundle verify out/bundle --stale": (2, "needs an NVIDIA GPU"),
    "k3lab trace ranks rank*.sqlite --budget gb300-tp16 --world 16": (1, ""),  # two ranks of sixteen: inconclusive
}
"""What has to be refused here, and how."""
FAILS = ("slow.json.gz", "planted.json.gz", "FILE")
"""Traces with a fault, or of another GPU than the budget's: a check of one exits with 1."""


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of a page's blocks of code, in order; of a console what is typed behind its prompts, if it has some."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    typed = ("".join(re.findall(r"^\$ (.*\n)", text, re.MULTILINE)) for _, text in found)
    return [
        ("sh", said or text) if language == "console" else (language, text)
        for (language, text), said in zip(found, typed, strict=True)
    ]


def commands(text: str) -> list[tuple[str, bool]]:
    """(command, whether its comment says that it fails) of each line, without comments and variables set in front."""
    found = [
        (re.sub(r"\s+#.*$", "", line).strip(), "# fails" in line) for line in text.replace("\\\n", " ").splitlines()
    ]
    return [
        (re.sub(r"^(?:[A-Z0-9_]+=\S+\s+)+", "", line), fails)
        for line, fails in found
        if line and not line.startswith("#")
    ]


def lines(page: str) -> list[str]:
    """Command lines of a page."""
    return [line for language, text in blocks(page) if language == "sh" for line, _ in commands(text)]


def smaller(line: str) -> str:
    for pattern, replacement in SMALLER:
        line = re.sub(pattern, replacement, line)
    return line


def expected(line: str) -> tuple[int, str]:
    for head, outcome in REFUSED.items():
        if line.startswith(head):
            return outcome
    return (1 if line.startswith("k3lab trace check") and any(name in line for name in FAILS) else 0), ""


def edit(block: str) -> bool:
    """Do what a page's diff says, a line for a line; False where it is done already."""
    name, *changes = block.splitlines()
    path, before = Path(name.removeprefix("--- ")), [line[1:] for line in changes if line.startswith("-")]
    after = [line[1:] for line in changes if line.startswith("+")]
    assert len(before) == len(after) > 0 and len(changes) == 2 * len(before), block
    text = path.read_text().splitlines()
    if all(line in text for line in after):
        return False
    for old, new in zip(before, after, strict=True):
        text[text.index(old)] = new
    path.write_text("\n".join(text) + "\n")
    return True
