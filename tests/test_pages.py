"""What the repository tells its readers: pages, commands, results; none of it points elsewhere or says what is not so."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def registry() -> list[Any]:
    """The families of this repository; what other packages bring is no matter of its pages."""
    from k3lab.kernels import family
    from k3lab.kernels.registry import FAMILIES

    return [family(name) for name in FAMILIES]


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def test_nothing_points_outside_the_project() -> None:
    """No path of one machine, and no address of a package registry: the files speak to strangers."""
    banned = [
        "/" + "work/", ".." + "/shared", "/" + "root/", "files.python" + "hosted", "py" + "pi.org", "download.py" + "torch.org",
        "registry.np" + "mjs", "deb.deb" + "ian.org", "test.py" + "pi",
    ]  # fmt: skip
    wrong = []
    for path in tracked():
        if path.suffix in (".png", ".gz", ".xz", ".sqlite", ".zip", ".cubin"):
            continue
        text = path.read_text(errors="replace")
        wrong += [f"{relative(path)}: {word}" for word in banned if word in text]
    assert not wrong


def commands() -> dict[tuple[str, ...], Any]:
    import typer
    from k3lab.cli.main import build_app

    found: dict[tuple[str, ...], Any] = {}

    def walk(command: Any, path: tuple[str, ...]) -> None:
        children = getattr(command, "commands", None)
        if children is None:
            found[path] = command
            return
        for name, child in children.items():
            walk(child, (*path, name))

    walk(typer.main.get_command(build_app()), ())
    return found


def options(command: Any) -> set[str]:
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }


def test_every_command_takes_json_and_has_help() -> None:
    found = commands()
    assert not [" ".join(path) for path, command in found.items() if "--json" not in options(command)]
    assert not [" ".join(path) for path, command in found.items() if not command.help]


def test_every_command_of_the_architecture_is_there() -> None:
    from k3lab.cli.main import COMMANDS

    assert {path[0] for path in commands()} == set(COMMANDS)


def shell_lines(text: str) -> Iterator[list[str]]:
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        if language not in ("", "sh", "bash", "console", "shell"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = line.split("#")[0].replace("$ ", "", 1).split()
            while words and re.fullmatch(r"[A-Z0-9_]+=\S*", words[0]):
                words = words[1:]
            if "--" in words:  # what follows is another program's
                words = words[: words.index("--")]
            if words:
                yield words


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "docs/traces.md", "docs/decode.md", "docs/howto.md", "docs/tutorial.md"]
)
def test_the_commands_a_page_shows_exist(page: str) -> None:
    found = commands()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    shown = 0
    for words in shell_lines((ROOT / page).read_text()):
        if words[0] == "make":
            shown += 1
            assert words[1] in targets, f"{page}: make {words[1]}"
        elif words[0] == "k3lab":
            shown += 1
            path = next((tuple(words[1 : 1 + depth]) for depth in (2, 1) if tuple(words[1 : 1 + depth]) in found), None)
            assert path is not None, f"{page}: {' '.join(words)}"
            unknown = {word.split("=")[0] for word in words if word.startswith("--")} - options(found[path])
            assert not unknown, f"{page}: {' '.join(words)}: no option {', '.join(unknown)}"
    assert shown >= 3


def test_the_readme_tells_families_engines_and_evidence_as_they_are() -> None:
    from k3lab.cli.recorded import evidence_of

    rows = {
        line.split("`")[1]: line
        for line in (ROOT / "README.md").read_text().splitlines()
        if re.match(r"\| `[a-z_]+` \|", line)
    }
    for owner in registry():
        engines = ", ".join(f"`{engine.name}`" for engine in owner.engines) or "twin only"
        known = evidence_of(owner.name, ROOT / "results")
        words = [("measured", "on"), ("predicted", "for"), ("compiled", "for")]
        told = [f"{word} {link} {gpu}" for word, link in words
                for gpu in sorted({entry["gpu"] for entry in known if entry["evidence"] == word})]  # fmt: skip
        row = f"| `{owner.name}` | {owner.title} | {engines} | {', '.join(told) or 'none'} |"
        assert rows.pop(owner.name, None) == row, f"the README's table of families needs this row:\n{row}"
    assert not rows, f"the README's table lists {', '.join(rows)}, which kernels/registry.py does not have"


def test_the_readme_repeats_the_record_of_the_h200() -> None:
    """Each figure of a row is the table's, as the file has it now."""
    result = "results/h200/attention_projection_table.json"
    readme = (ROOT / "README.md").read_text()
    told = re.findall(rf"^\| \[(\w+), TP(\d+), (\d+) rows?\]\({result}\) \| (.*) \|$", readme, re.M)
    assert len(told) >= 5
    recorded = json.loads((ROOT / result).read_text())["rows"]
    rows = {tuple(one["problem"][name] for name in ("kind", "tp", "rows")): one for one in recorded}
    assert f"of {len(recorded)} problems" in readme
    for kind, tp, count, figures in told:
        row = rows[kind.lower(), int(tp), int(count)]
        times = [row["us"], row["chain_us"], row["floor_us"], row["alternatives"]["PyTorch"]]
        wanted = [f"`{row['engine']}`", *(f"{value:.2f} us" for value in times)]
        assert figures == " | ".join(wanted), f"{kind} TP{tp} rows {count} has {wanted}"


def test_the_readme_shows_the_slow_trace_as_it_comes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from k3lab.cli.main import run

    text = (ROOT / "README.md").read_text()
    make, check = (re.search(rf"^k3lab trace {word} (\S*slow\S*.*)$", text, re.M) for word in ("synthesize", "check"))
    assert make
    assert check
    shown = text[check.end() :].split("```text\n", 1)[1].split("```", 1)[0].splitlines()
    monkeypatch.chdir(tmp_path)
    assert run(["trace", "synthesize", *make[1].split()]) == 0
    capsys.readouterr()
    assert run(["trace", "check", *check[1].split()]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert len(shown) >= 2
    assert [line for line in printed if line in shown] == shown


def test_a_number_in_a_readme_table_names_its_result() -> None:
    """A time, bandwidth or share in a table row stands beside a link to the result file it comes from."""
    unit = re.compile(r"\d ?(us|µs|ms|TB/s|GB/s|tok/s|%)(\W|$)")
    for line in (ROOT / "README.md").read_text().splitlines():
        if line.startswith("|") and unit.search(line):
            files = [ROOT / name for name in re.findall(r"\((results/[^)\s]+)\)", line)]
            assert files, f"no result file behind: {line}"
            assert all(path.is_file() for path in files), line


def test_the_page_of_a_kernel_says_what_its_table_says() -> None:
    """Every committed table of a family with bars has a page in the navigation, and each section and the figure are the table's.

    Families with a field that tells shapes apart, and those without.
    """
    from k3lab.cli.kernel_page import differences, read_page, table_path
    from k3lab.cli.page_data import load_bars

    owners = [owner.name for owner in registry() if (ROOT / "kernels" / owner.name / "bars.json").is_file()]
    assert owners
    tables = [name for name in owners if (ROOT / table_path(name, load_bars(name))).is_file()]
    if not tables:
        pytest.skip(f"no table of {', '.join(owners)} is recorded yet")
    assert {"shape" in load_bars(name) for name in tables} == {True, False}
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    for name in tables:
        assert f"- {name}.md\n" in navigation
        found = differences(read_page(name, ROOT))
        assert not found, f"`python -m k3lab.cli.kernel_page {name}` renews it: {found}"


def test_every_recorded_result_says_what_it_rests_on() -> None:
    """A result file has an evidence word; a measured one also GPU, driver, versions and commit."""
    from k3lab.cli.recorded import load_result, result_files

    for path in result_files(ROOT / "results"):
        data = load_result(path)
        assert data is not None, f"{relative(path)} is not a JSON object"
        assert data.get("evidence") in ("measured", "predicted", "compiled"), relative(path)
        if data["evidence"] == "measured":
            environment = data.get("environment") or {}
            assert {"gpu", "packages", "commit"} <= set(environment), relative(path)
            assert {"name", "driver"} <= set(environment["gpu"]), relative(path)
