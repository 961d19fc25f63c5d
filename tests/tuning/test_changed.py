"""Two tables beside each other: whose winner changed."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from k3lab.tuning import changed

TABLE = Path(__file__).parents[2] / "results/h200/attention_projection_table.json"


def test_changed_winners_are_listed_with_both_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = json.loads(TABLE.read_text())
    new = copy.deepcopy(old)
    first, second, gone = new["rows"][0], new["rows"][1], new["rows"].pop()
    engine = next(name for name in first["engines"] if name != first["engine"])
    first |= {"engine": engine, "us": 1.5}
    second["config"] = {**second["config"], "other": 1}
    for name, data in (("old", old), ("new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    out = tmp_path / "changed.json"
    assert changed.main([str(tmp_path / "old.json"), str(tmp_path / "new.json"), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    (one,) = found["other_engine"]
    assert (one["was"], one["now"], one["now_us"]) == (old["rows"][0]["engine"], engine, 1.5)
    assert one["was_us_now"] == old["rows"][0]["engines"][one["was"]]
    assert len(found["other_config"]) == 1 and found["compared"] == len(old["rows"]) - 1
    assert found["gone_problems"] and gone["engine"] and not found["new_problems"]
    assert "1 with another engine, 1 with another config" in capsys.readouterr().out


def test_tables_of_two_gpus_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**json.loads(TABLE.read_text()), "gpu": "B200"}))
    assert changed.main([str(TABLE), str(other)]) == 2
    assert "two values of gpu: H200 and B200" in capsys.readouterr().err
    assert changed.main([str(TABLE), str(tmp_path / "none.json")]) == 2


@pytest.mark.parametrize(
    ("text", "words"), [("{}", "is no table"), ("[]", "is no table"), ("{", "is not JSON"), (None, "cannot read")]
)
def test_what_is_no_table_is_one_line(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)
    assert changed.main([str(path), str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
