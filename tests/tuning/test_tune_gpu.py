"""On a GPU: a real measured study of a real engine, killed in the middle, exported, and loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest
from k3lab.kernels import K3, Evidence, family
from k3lab.kernels.bundle.reader import Bundle, BundleEntry
from k3lab.tuning.export import export
from k3lab.tuning.study import TuningStudy
from k3lab.tuning.tune import TuneRequest, tune

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]


@pytest.mark.timeout(600)
def test_a_measured_study_becomes_a_measured_entry(tmp_path: Path) -> None:
    from k3lab.kernels.device import require

    card = require("this test").need_card()
    owner = family("attention_projection")
    problem = owner.problem(K3, tp=16, rows=8, kind="kda")
    path = tmp_path / "s.sqlite3"
    result = tune(TuneRequest(owner, owner.engine("triton"), problem, card, "measured", 4, path))
    assert (result.ended, sum(result.statuses.values())) == ("trials", 4)
    assert result.choice is not None
    assert result.choice.evidence == "measured"
    assert result.choice.default_us is not None
    with TuningStudy.for_reading(path) as study:
        for trial in study.trials():
            assert trial.outcome is not None
            if trial.ok:
                assert trial.outcome.timing is not None
                assert trial.outcome.check is not None
                assert trial.outcome.timing["floor_us"] * 0.97 <= trial.value
        assert set(study.note("finals")) == {one.digest for one in result.choice.finalists}
        assert study.note("environment")["gpu"]["driver"] != "unknown"
    export([path], tmp_path / "bundle")
    found = Bundle.load(tmp_path / "bundle").find(owner, owner.problem(K3, tp=16, rows=5, kind="kda"), card.name)
    assert isinstance(found, BundleEntry)
    assert found.evidence is Evidence.MEASURED
    recheck_of(tmp_path / "bundle")


def recheck_of(path: Path) -> None:
    """An entry of another driver is timed again and is as quick as it was; one that claims half the time is a regression."""
    from k3lab.kernels.bundle.writer import write_bundle
    from k3lab.tuning.bundle_check import recheck

    assert recheck(path)["rechecked"] == []
    there = Bundle.load(path)
    entry = there.entries[0].model
    environment = dict(entry.environment or {})
    environment["gpu"] = {**environment["gpu"], "driver": "1.0"}
    for part, verdicts in ((1.0, ("same", "faster", "regression")), (0.5, ("regression",))):
        choice = entry.choice.model_copy(update={"value_us": entry.choice.value_us * part})
        changed = entry.model_copy(update={"environment": environment, "choice": choice})
        write_bundle(path, [changed], there.cubins, force=True)
        (found,) = recheck(path)["rechecked"]
        assert found["because"][0].startswith("driver was 1.0") and found["verdict"] in verdicts
        assert found["new_us"] == pytest.approx(entry.choice.value_us, rel=0.05)
    assert len(Bundle.load(path).entries[0].model.rechecks) == 1


@pytest.mark.timeout(600)
def test_an_illegal_access_costs_one_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that poisons the CUDA context ends as crashed, and the next config is measured as if nothing was."""
    from k3lab.kernels.device import require
    from k3lab.tuning.outcome import Status
    from k3lab.tuning.supervisor import Supervisor

    card = require("this test").need_card()
    (tmp_path / "poisoning_evaluator.py").write_text(
        "import torch\nfrom k3lab.tuning.evaluate import measure as honest\n"
        "def measure(task, stage):\n"
        "    if task.job.seed == 1:\n"
        "        stage('check')\n"
        "        torch.zeros(4, device='cuda')[torch.tensor([1 << 30], device='cuda')].sum().item()\n"
        "    return honest(task, stage)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    owner = family("attention_projection")
    problem = owner.problem(K3, tp=16, rows=8, kind="kda")
    request = TuneRequest(owner, owner.engine("triton"), problem, card, "measured", 1)
    default = request.engine.space(problem, card).default
    with Supervisor(gpu=True, evaluator="poisoning_evaluator") as worker:
        before = worker.run(request.job("measure", default, seed=0))
        poisoned = worker.run(request.job("measure", default, seed=1))
        after = worker.run(request.job("measure", default, seed=0))
    assert poisoned.status is Status.CRASHED
    assert (before.status, after.status) == (Status.OK, Status.OK)
    assert before.value is not None
    assert after.value == pytest.approx(before.value, rel=0.2)


@pytest.mark.timeout(600)
def test_a_table_lets_engines_compete_in_one_process(tmp_path: Path) -> None:
    """Two row counts, all engines that serve them: times above the floor, cuBLAS beside them, a bundle that serves rows between."""
    from k3lab.kernels.device import require
    from k3lab.tuning.table import TableRequest, tune_table
    from k3lab.tuning.table_rows import as_result
    from k3lab.tuning.workers import default_jobs

    card = require("this test").need_card()
    owner = family("attention_projection")
    problems = tuple(owner.problem(K3, tp=16, rows=rows, kind="kda") for rows in (4, 16))
    ask = TableRequest(
        owner, problems, owner.engines, card, "measured", 4, folder=tmp_path / "s", jobs=default_jobs(), budget_s=500
    )
    table = tune_table(ask)
    assert (table.ended, table.missing) == ("done", ())
    for row in table.rows:
        assert row.floor_us * 0.97 <= row.us
        assert row.floor_us < row.alternatives["PyTorch"]
        assert row.us == min(row.engines.values()) or "tie" in row.reason
        assert row.band < 0.05
        assert row.chain is not None, row.notes
        assert row.chain["plain_us"] == pytest.approx(row.us, rel=0.25)
        assert row.chain["hidden_us"] > -0.5
        assert row.to_json()["us"] == round(row.us, 3)
    assert as_result(table)["environment"]["gpu"]["driver"] != "unknown"
    assert tune_table(ask).new_trials == 0
    export([tmp_path / "s"], tmp_path / "bundle")
    bundle = Bundle.load(tmp_path / "bundle")
    for rows, serving in ((3, 4), (5, 16)):
        found = bundle.find(owner, owner.problem(K3, tp=16, rows=rows, kind="kda"), card.name)
        assert isinstance(found, BundleEntry)
        assert found.rows == serving
