"""Two tables of one family and GPU, problem by problem: whose winner changed, and by what figures.

``python -m k3lab.tuning.changed OLD NEW --out FILE``: what a new cost model or a new round of tuning made of a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..kernels import InputError, family
from ..kernels.whole_file import write_whole


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Problems whose winner differs, with both winners and what the new table gives the old engine.

    Raises:
        InputError: the tables are of two families or GPUs.
    """
    for field in ("family", "gpu"):
        if old[field] != new[field]:
            raise InputError(f"the tables are of two values of {field}: {old[field]} and {new[field]}")
    owner = family(new["family"])

    def rows(table: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        return {owner.problem_from_json({**table["problem"], **row["problem"]}).label: row for row in table["rows"]}

    before, after = rows(old), rows(new)
    engines, configs = [], []
    for label in (one for one in after if one in before):
        was, now = before[label], after[label]
        if was["engine"] != now["engine"]:
            engines.append({
                "problem": label, "was": was["engine"], "was_us": was["us"], "now": now["engine"], "now_us": now["us"],
                "was_us_now": now["engines"].get(was["engine"]),
            })  # fmt: skip
        elif was["config"] != now["config"]:
            configs.append(label)
    return {
        "family": new["family"], "gpu": new["gpu"], "evidence": new["evidence"], "environment": new["environment"],
        "compared": sum(label in before for label in after), "new_problems": [one for one in after if one not in before],
        "gone_problems": [one for one in before if one not in after], "other_engine": engines, "other_config": configs,
    }  # fmt: skip


def _table(path: Path) -> dict[str, Any]:
    """A table of `k3lab tune-table`.

    Raises:
        InputError: the file cannot be read or is none.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not JSON") from None
    fields = ("family", "gpu", "evidence", "environment", "problem", "rows")
    if not isinstance(data, dict) or not all(name in data for name in fields):
        raise InputError(f"{path} is no table of `k3lab tune-table`")
    return data


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m k3lab.tuning.changed", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--out", type=Path, help="file to write, .json")
    given = parser.parse_args(argv)
    try:
        found = changed(*(_table(path) for path in (given.old, given.new)))
    except (InputError, OSError, ValueError) as error:
        print(f"k3lab: {error}", file=sys.stderr)
        return 2
    if given.out:
        write_whole(given.out, json.dumps(found, indent=1) + "\n")
    print(f"{found['compared']} problems, {len(found['other_engine'])} with another engine, {len(found['other_config'])} with another config of theirs")  # fmt: skip
    for one in found["other_engine"]:
        print(f"  {one['problem']}: {one['was']} {one['was_us']:.2f} us -> {one['now']} {one['now_us']:.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
