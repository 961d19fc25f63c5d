"""Entries whose blocks do not fit on a GPU of the group: their families fall back, by the same choice on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from k3lab.decode import run as running
from k3lab.decode.choices import Fallback, Finder, Tuned, choose
from k3lab.decode.fitting import Fitting, fitting
from k3lab.decode.greedy import Decoded
from k3lab.decode.plan import plan
from k3lab.decode.run import RunOptions, run
from k3lab.decode.run_places import Outcome
from k3lab.decode.scope import entry_rows
from k3lab.kernels import K3, Compiled, Launch, ModelCard, Problem, launch
from k3lab.kernels.bundle.reader import Bundle
from k3lab.kernels.collectives import CollectiveError, Collectives, run_virtual_ranks
from k3lab.kernels.device import Device
from k3lab.kernels.gpu_cards import gpu_card

WORDS = (
    "its 528 blocks wait for each other, and only 400 can be on the GPU at once (the driver counts 4 a SM on 100 SMs)"
)
HERE = Device(0, "NVIDIA H200", "sm_90a", 132, 1, 1, "1", gpu_card("H200"))


def only_mla(compiled: Compiled) -> str | None:
    return WORDS if "kda" in compiled.problem.label else None


def fits(_compiled: Compiled) -> str | None:
    return None


@pytest.fixture
def bundle(write_bundle: Callable[..., Path]) -> Bundle:
    return Bundle.load(write_bundle(K3, tp=4, rows=8, gpu="H200", arch="sm_90a"), accept_predicted=True)


def chosen(bundle: Finder | None) -> dict[tuple[str, str | None], Tuned | Fallback]:
    made = choose(K3, tp=4, rows=8, gpu="H200", bundle=bundle, objective="measured")
    return {(one.family, one.kind): one for one in made}


def test_one_rank_whose_gpu_is_too_small_decides_for_all_and_is_named(bundle: Bundle) -> None:
    def rank(comm: Collectives) -> Finder | None:
        return fitting(bundle, chosen(bundle).values(), comm, only_mla if comm.rank == 2 else fits)

    found = run_virtual_ranks(4, rank, timeout_s=30)
    assert all(isinstance(one, Fitting) and one == found[0] for one in found)
    made = chosen(found[0])
    assert isinstance(made["attention_projection", "mla"], Tuned)
    kda = made["attention_projection", "kda"]
    assert isinstance(kda, Fallback)
    assert kda.reason == f"the bundle's entry for attention_projection does not fit on the GPU of rank 2: {WORDS}"
    tune, export, _ = kda.commands
    assert tune.startswith("k3lab tune attention_projection --tp 4 --rows 8 --kind kda ") and "--gpu h200" in tune
    assert export.endswith(f"--out {bundle.path} --add")
    planned = plan(K3, tp=4, rows=8, backend="latency_specialized", bundle=found[0], gpu="H200")
    assert planned.tuned_kernels() == {"k3_attention_projection_triton_mla": 24}
    assert [one.reason for one in planned.fallbacks if one.family == "attention_projection"] == [kda.reason]
    assert any(one.reason.endswith("the fallback of its family says why") for one in planned.unused)
    assert entry_rows(K3, found[0], tp=4, gpu="H200") == 8  # the other kind's


def test_what_fits_everywhere_is_the_bundle_and_a_rank_without_one_is_waited_for(bundle: Bundle) -> None:
    def rank(comm: Collectives) -> Finder | None:
        own = None if comm.rank == 1 else bundle
        return fitting(own, chosen(own).values(), comm, fits)

    assert run_virtual_ranks(2, rank, timeout_s=30) == [bundle, None]

    def absent(comm: Collectives) -> Finder | None:
        return fitting(bundle, chosen(bundle).values(), comm, fits) if comm.rank else None

    with pytest.raises(CollectiveError, match="rank 0"):
        run_virtual_ranks(2, absent, timeout_s=1)
    alone = fitting(bundle, chosen(bundle).values(), None, lambda _compiled: WORDS)
    assert entry_rows(K3, alone, tp=4, gpu="H200") == 0
    assert "does not fit on this GPU: its 528 blocks" in chosen(alone)["attention_projection", "mla"].reason  # type: ignore[union-attr]


def test_a_run_goes_on_without_the_entry_and_counts_its_steps(
    tiny: ModelCard, write_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.load(write_bundle(tiny, tp=1, rows=2, gpu="H200", arch="sm_90a"), accept_predicted=True)
    order: list[str] = []

    def ask(compiled: Compiled, device: str) -> str | None:
        order.append(f"{compiled.problem.to_json()['kind']} on {device}")
        return only_mla(compiled)

    def on_gpu(_card: Any, _options: Any, choices: Any, _group: Any, _say: Any, _recorder: Any, used: Any, planned: Any) -> Outcome:  # fmt: skip
        order.append("weights")
        assert [one.kind for one in choices if isinstance(one, Tuned)] == ["mla"]
        assert planned == {"k3_attention_projection_triton_mla": 3}
        assert isinstance(used, Fitting)
        tally = {"steps": 7, "served": 5, "share": 5 / 7, "fallbacks": []}
        return Outcome(Decoded([[1]], [1]), None, "one rank", "tuned", 1, None, None, tally)

    monkeypatch.setattr(running, "discover", lambda: HERE)
    monkeypatch.setattr(launch, "unfit", ask)
    monkeypatch.setattr(running, "run_gpu", on_gpu)
    for name in ("check_memory", "watch_memory", "peak_memory"):
        monkeypatch.setattr(running, name, lambda *_args, **_more: 0)
    report = run(tiny, RunOptions(rows=2, tokens=1, backend="latency_specialized"), bundle=bundle)
    assert order == ["kda on cuda:0", "mla on cuda:0", "weights"]
    told = [one for one in report.to_json()["fallbacks"] if one["family"] == "attention_projection"]
    assert [(one["kind"], one["count"]) for one in told] == [("kda", 5)]
    assert WORDS in told[0]["reason"]
    assert "k3lab tune attention_projection" in told[0]["cure"]


def test_only_what_must_be_there_together_is_asked_for_and_nothing_stays_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []
    asked: list[str] = []

    class Loaded:
        def __init__(self, one: Launch) -> None:
            self.name = one.kernel
            asked.append(self.name)
            if one.kernel == "large":
                raise launch.ResidencyError("too large")
            loaded.append(self.name)

        def unload(self) -> None:
            loaded.remove(self.name)

    monkeypatch.setattr(launch, "_Loaded", Loaded)
    plain = Launch("plain", b"", (1, 1, 1), (32, 1, 1), 0, ())
    waits, large = (
        replace(plain, kernel="waits", needs_residency=True),
        replace(plain, kernel="large", cluster=(2, 1, 1)),
    )

    def compiled(*launches: Launch) -> Compiled:
        return Compiled("f", "e", Problem(1, 1), {}, "sm_90a", launches)

    assert launch.unfit(compiled(plain, waits), "cpu") is None
    assert (asked, loaded) == (["waits"], [])
    assert launch.unfit(compiled(waits, large), "cpu") == "too large"
