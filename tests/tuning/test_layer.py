"""A whole layer's queue: what promises most comes first, the end comes in time, and the same command goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_family
import postgres
import pytest
from k3lab.cli.layer import duration
from k3lab.kernels import K3, InputError, family
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import layer as module
from k3lab.tuning import table as table_module
from k3lab.tuning.layer import LayerRequest, queue, share_of, tune_layer
from k3lab.tuning.outcome import Outcome, Status, failure
from k3lab.tuning.shared_storage import Rhythm
from k3lab.tuning.shared_study import Shared
from k3lab.tuning.study import glance
from k3lab.tuning.supervisor import Limits
from k3lab.tuning.watch import snapshot


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_family.FakeFamily, "engines", (fake_family.SMALL, fake_family.LARGE))


def request(folder: Path, **changes: Any) -> LayerRequest:
    fields: dict[str, Any] = {
        "card": K3, "tp": 1, "rows": (1, 8), "gpu": gpu_card("gb300"), "objective": "predicted", "trials": 3,
        "families": (fake_family.FAMILY,), "folder": folder, "limits": Limits(compile_s=20, measure_s=20), "evaluator": "fake_evaluator",
    }  # fmt: skip
    return LayerRequest(**{**fields, **changes})


class Predicting:
    """Workers that predict what they are told for a row count."""

    def __init__(self, told: dict[int, float | None]) -> None:
        self.told = told
        self.asked: list[int] = []

    def submit(self, job: Any) -> None:
        assert job.kind == "predict"
        self.asked.append(job.problem["rows"])

    def result(self, job: Any) -> Outcome:
        us = self.told[job.problem["rows"]]
        return failure(Status.ILLEGAL, "no") if us is None else Outcome(Status.OK, value=us)


def floor_us(rows: int) -> float:
    problem = fake_family.FakeProblem(tp=1, rows=rows)
    return fake_family.FAMILY.traffic(problem).bytes / gpu_card("gb300").read_bandwidth * 1e6


def test_what_promises_the_layer_most_comes_first(tmp_path: Path) -> None:
    workers = Predicting({1: 12.0, 16: 20.0})
    items = queue(request(tmp_path, rows=(1, 4, 8, 16)), workers, lambda text: None)  # type: ignore[arg-type]
    assert [item.problem.rows for item in items] == [16, 8, 4, 1]
    assert items[0].gain_us == pytest.approx(20.0 - floor_us(16))
    assert workers.asked == [1, 16]  # the ends of the shape; between them what lies above the floor goes by the rows
    excess = [(12.0 - floor_us(1)), (20.0 - floor_us(16))]
    assert items[1].gain_us == pytest.approx(excess[0] + (excess[1] - excess[0]) * 7 / 15)
    assert [item.between for item in items] == [False, True, True, False]


def test_where_an_end_cannot_be_predicted_each_is_asked_for(tmp_path: Path) -> None:
    workers = Predicting({1: 12.0, 4: 30.0, 8: None, 16: None})
    items = queue(request(tmp_path, rows=(1, 4, 8, 16)), workers, lambda text: None)  # type: ignore[arg-type]
    assert [item.problem.rows for item in items] == [4, 1, 16, 8]
    assert workers.asked == [1, 16, 4, 8]
    assert items[-1].gain_us == 0.0 and not any(item.between for item in items)


def test_a_kind_counts_as_often_as_the_model_has_it() -> None:
    kda = len([kind for kind in K3.layer_kinds if kind == "kda"]) / K3.num_hidden_layers
    projection, router, head = family("attention_projection"), family("router"), family("lm_head")
    assert share_of(K3, projection, "kda") == share_of(K3, family("kda"), None) == kda
    assert share_of(K3, projection, "mla") == pytest.approx(1 - kda)
    assert share_of(K3, router, None) == 1.0
    assert share_of(K3, head, None) == pytest.approx(1 / K3.num_hidden_layers)
    assert 0 < share_of(K3, family("output_projection"), "restart") < 0.2


def test_engines_compete_for_each_problem_and_nothing_is_done_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    done = tune_layer(request(tmp_path), said.append)
    assert (done["ended"], [one["state"] for one in done["queue"]]) == ("done", ["done", "done"])
    assert {one["problem"]["rows"] for one in done["queue"]} == {1, 8}
    assert len(list(tmp_path.glob("*.sqlite3"))) == 4
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    again = tune_layer(request(tmp_path))
    assert again["queue"] == done["queue"]
    assert log.read_text().count("predict") == 2  # the queue's own


def test_one_set_of_workers_serves_all_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To start a worker that measures takes longer than a small table."""
    begun: list[bool] = []
    real = module.Workers

    def counted(*arguments: Any, **options: Any) -> Any:
        begun.append(options["measured"])
        return real(*arguments, **options)

    monkeypatch.setattr(module, "Workers", counted)
    monkeypatch.setattr(table_module, "Workers", None)  # a table of its own would start others
    data = tune_layer(request(tmp_path))
    assert data["ended"] == "done" and len(data["queue"]) == 2
    assert len(begun) == 2  # those that predict the queue, and those that serve it


def test_the_time_ends_it_and_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.2")
    part = tune_layer(request(tmp_path, rows=(1, 2, 4, 8), for_s=2.5))
    assert part["ended"] == "budget"
    states = [one["state"] for one in part["queue"]]
    assert "waiting" in states and len(states) == 4
    monkeypatch.delenv("FAKE_SECONDS")
    whole = tune_layer(request(tmp_path, rows=(1, 2, 4, 8)))
    assert [one["state"] for one in whole["queue"]] == ["done"] * 4
    assert all(glance(path).trials == 3 for path in tmp_path.glob("*.sqlite3"))


def test_wrong_requests_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3LAB_NO_GPU", "1")
    for changes, words in (
        ({"rows": ()}, "at least one family and one row count"),
        ({"objective": "measured"}, "needs an NVIDIA GPU"),
        ({"rows": (65,)}, "no engine of these families serves"),
    ):
        with pytest.raises(InputError, match=words):
            tune_layer(request(tmp_path, **changes))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def server() -> Iterator[postgres.Server]:
    if reason := postgres.missing():
        pytest.skip(reason)
    with postgres.running() as one:
        yield one


def test_in_a_database_every_engine_has_its_study(server: postgres.Server, tmp_path: Path) -> None:
    address = server.create("layer")
    where = Shared(address, None, Rhythm(beat_s=1, grace_s=3), spool=tmp_path / "spool")
    done = tune_layer(request(tmp_path, shared=where))
    assert [one["state"] for one in done["queue"]] == ["done", "done"]
    seen = snapshot(address)
    assert [(one["trials"], one["wanted"]) for one in seen["studies"]] == [(3, 3)] * 4
    assert (seen["left_s"], seen["workers"]) == (0.0, 0)
    assert {one["study"].split("-")[1] for one in seen["studies"]} == {"small", "large"}
    assert not list(tmp_path.glob("*.sqlite3"))
    assert module.tune_layer(request(tmp_path, shared=where))["queue"] == done["queue"]
    assert [one["trials"] for one in snapshot(address)["studies"]] == [3] * 4


def test_times_are_read_as_people_write_them() -> None:
    assert [duration(text) for text in ("48h", "90m", "1h30m", "45s", "0.5d")] == [172800, 5400, 5400, 45, 43200]
    for text in ("48", "h", "-1h", "1 h", "0s", "1h or so"):
        with pytest.raises(InputError, match="such as 48h"):
            duration(text)
