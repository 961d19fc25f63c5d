"""The link's constants from made records: found again, written into every set, and refused where they tell nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from k3lab.kernels import K3, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import calibrate_link, cost_model
from k3lab.tuning.calibrate_link import fit, main, points
from k3lab.tuning.ranks.cases import cases
from k3lab.tuning.ranks.report import KIND

SHARE, HOP = 0.6, 1.7
CARD = gpu_card("H200")


def record(rows: tuple[int, ...] = (1, 8, 32), *, noise: float = 0.0, **change: Any) -> dict[str, Any]:
    found = []
    for place, case in enumerate(cases(("output_projection",), rows, 4, CARD)[0]):
        work = family(case.family).engine(case.engine).work(case.problem, case.config)
        added = work.link_bytes / CARD.nvlink_bandwidth * 1e6 / SHARE + work.link_hops * HOP
        series = {"us": 20.0 + added + noise * (-1) ** place, "stable": True}
        found.append({**case.to_json(), "real": series, "loopback": {"us": 20.0, "stable": True}})
    return {
        "kind": KIND, "ranks": 4, "time_sliced": False, "environment": {"gpu": {"card": "H200"}}, "cases": found, **change,
    }  # fmt: skip


def slower_with_fewer() -> dict[str, Any]:
    data = record()
    for case in data["cases"]:
        case["real"]["us"] = 40.0 - case["rows"] / 4
    return data


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy that may be written."""
    copy = tmp_path / "cost_model.json"
    copy.write_text(cost_model.DATA.read_text())
    monkeypatch.setattr(calibrate_link, "DATA", copy)
    return copy


def kept(path: Path, data: Any) -> str:
    path.write_text(json.dumps(data))
    return str(path)


def test_constants_are_found_again() -> None:
    made = fit(points(record()))
    assert (made.link_share, made.link_hop_us) == pytest.approx((SHARE, HOP), rel=1e-6)
    assert made.error_us < 1e-6 and made.cases == len(record()["cases"])
    noisy = fit(points(record(noise=0.1)))
    assert (noisy.link_share, noisy.link_hop_us) == pytest.approx((SHARE, HOP), rel=0.15)
    assert 0.05 < noisy.error_us <= 0.1


def test_unstable_cases_are_left_out() -> None:
    data = record()
    data["cases"][0]["real"] = {"us": 900.0, "stable": False}
    assert fit(points(data)).link_hop_us == pytest.approx(HOP)


def test_they_are_written_into_every_set_and_nothing_else_is(model: Path, tmp_path: Path, capsys: Any) -> None:
    before = json.loads(model.read_text())
    given = kept(tmp_path / "ranks.json", record())
    assert main([given]) == 0
    assert json.loads(model.read_text()) == before
    assert main([given, "--write"]) == 0
    assert "link_share 0.6, link_hop_us 1.7" in capsys.readouterr().out
    after = json.loads(model.read_text())
    assert after["link"]["gpus"] == ["H200"] and after["link"]["records"] == [f"{tmp_path.name}/ranks.json"]
    for name, one in after["constants"].items():
        assert one == {**before["constants"][name], "link_share": SHARE, "link_hop_us": HOP}
    assert {name: value for name, value in after.items() if name not in ("link", "constants")} == {
        name: value for name, value in before.items() if name != "constants"
    }
    assert cost_model.link_gpus(model) == ("H200",)
    assert cost_model.with_link(before, after) == after and cost_model.with_link(after, before) == after


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (record(time_sliced=True), "holds no times"), ({"kind": "other"}, "no record of `k3lab ranks`"), ([], "no record"),
        (record(environment={"gpu": {"card": "H300"}}), "no GPU with a card"), (record(cases=[]), "0 stable cases"),
        (slower_with_fewer(), "no bandwidth at all"), ({name: one for name, one in record().items() if name != "cases"}, "lacks 'cases'"),
    ],
)  # fmt: skip
def test_what_tells_nothing_is_refused_in_one_line(
    data: Any, said: str, model: Path, tmp_path: Path, capsys: Any
) -> None:
    before = model.read_text()
    assert main([kept(tmp_path / "ranks.json", data), "--write"]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1 and model.read_text() == before


def test_files_that_are_none_and_several_gpus_are_refused(model: Path, tmp_path: Path, capsys: Any) -> None:
    assert main([str(tmp_path / "none.json")]) == 2
    other = record(environment={"gpu": {"card": "GB300"}})
    assert main([kept(tmp_path / "a.json", record()), kept(tmp_path / "b.json", other)]) == 2
    assert "GB300, H200" in capsys.readouterr().err


def test_the_predictors_link_term_is_what_was_measured() -> None:
    from k3lab.tuning.cost_features import Features
    from k3lab.tuning.cost_model import Constants, terms

    owner = family("output_projection")
    engine, problem = owner.engine("cute_split"), owner.problem(K3, tp=4, rows=8)
    config = {**engine.space(problem, CARD).default, "exchange": "two_shot"}
    work = engine.work(problem, config)
    zeros = dict.fromkeys(Features.__dataclass_fields__, 1.0)
    seen = Features(
        **{**zeros, "link_us": work.link_bytes / CARD.nvlink_bandwidth * 1e6, "link_hops": float(work.link_hops)}
    )
    made = fit(points(record()))
    case = next(one for one in record()["cases"] if one["exchange"] == "two_shot" and one["rows"] == 8)
    term = terms(seen, Constants(link_share=made.link_share, link_hop_us=made.link_hop_us))["link"]
    assert term == pytest.approx(case["real"]["us"] - case["loopback"]["us"])
