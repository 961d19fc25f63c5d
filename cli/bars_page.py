"""``python -m k3lab.cli.bars_page [--check]``: the decode path's bars in ``docs/decode.md``, from their recorded result.

The section between ``<!-- begin bars -->`` and ``<!-- end bars -->`` is made from ``results/h200/decode_bars.json``, which
``k3lab decode bars --out`` writes; the text around it is kept. ``--check`` writes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..kernels.errors import InputError
from .kernel_page import filled
from .output import write_file
from .words import counted

RESULT, PAGE = Path("results/h200/decode_bars.json"), Path("docs/decode.md")
NONE = "Nothing is recorded yet: the bars have not been measured as a whole."


def load(path: Path) -> Mapping[str, Any] | None:
    """A result of ``decode bars``; None where there is none.

    Raises:
        InputError: the file is no such result.
    """
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text())
        data["verdicts"], data["rows"], data["environment"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path} is no result of `k3lab decode bars --out`") from None
    return data  # type: ignore[no-any-return]


def section(data: Mapping[str, Any] | None, link: str) -> str:
    """Verdicts, then for each load and layer kind what the tuned time is made of, the largest distance first."""
    if data is None:
        return NONE
    shared = ", each context over all ranks (DCP)" if any(row.get("dcp", 1) > 1 for row in data["rows"]) else ""
    commit = data.get("environment", {}).get("commit")
    at = f", commit {commit}" if commit else ""
    lines = [
        f"Measured on an {data['gpu']}, rank {data['rank']} of {data['tp']} alone{shared}{at} ([record]({link})).",
        "",
    ]
    lines += ["| bar | measured | to close | aim | |", "| --- | ---: | ---: | ---: | --- |"]
    lines += [
        f"| {one['what']} | {one['got']:.1f} {one['unit']} | {one['close']:g} | {one['aim']:g} | {one['verdict']} |"
        for one in data["verdicts"]
    ]
    for row in data["rows"]:
        own, auto = row["backends"]["latency_specialized"], row["backends"]["auto"]
        for kind, layer in own["layers"].items():
            beside = auto["layers"][kind]
            lines += [
                "",
                f"{kind.upper()} + MoE layer, {counted(row['rows'], 'row')}: {layer['us']:.1f} us (floor {layer['floor_us']:.1f});"
                f" `auto` {beside['us']:.1f} us in {beside['launches']:.1f} launches, {beside['share_of_floor']:.0%} of its floor."
                f" Kernel by kernel, profiled ({layer.get('traced_us', 0):.1f} us in all):",
                "", "| family | launches | us | its bytes' floor | above it |", "| --- | ---: | ---: | ---: | ---: |",
                *(
                    f"| `{one['family']}` | {one['launches']:.1f} | {one['us']:.1f} | {one['floor_us']:.1f} | {one['above_floor_us']:.1f} |"
                    for one in layer["made_of"]
                ),
            ]  # fmt: skip
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Entry point; 0 where all is well, 1 where ``--check`` found a difference, 2 where the call was wrong."""
    parser = argparse.ArgumentParser(prog="python -m k3lab.cli.bars_page", description="The bars' section of docs/decode.md from their result.")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is not as the result says")  # fmt: skip
    parser.add_argument("--root", type=Path, default=Path(), help="the repository (default: the current folder)")
    asked = parser.parse_args(argv)
    page = asked.root / PAGE
    try:
        text, data = page.read_text(), load(asked.root / RESULT)
        try:
            told = section(data, f"../{RESULT.as_posix()}")
        except (AttributeError, KeyError, TypeError, ValueError):  # it lacks something below its first level
            raise InputError(f"{asked.root / RESULT} is no result of `k3lab decode bars --out`") from None
        made = filled(text, {"bars": told}, page)
        if asked.check:
            if made != text:
                print(f"{page}: section bars is not what the result says")
            return int(made != text)
        write_file(page, made)
    except OSError as error:
        print(f"k3lab: cannot read {page}: {error.strerror}", file=sys.stderr)
        return 2
    except InputError as error:
        print(f"k3lab: {error}", file=sys.stderr)
        return 2
    print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
