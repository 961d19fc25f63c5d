"""The experts' chain with a prefetch, as far as no GPU is needed: the order of launches, cold copies, the search, the verdict."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from k3lab.cli.prefetch import chain_configs
from k3lab.kernels import K3, InputError
from k3lab.kernels.experts.prefetch import OFF, space
from k3lab.kernels.gpu_cards import gpu_card
from k3lab.tuning import prefetch_chain, prefetch_tune
from k3lab.tuning.policy import QUICK
from k3lab.tuning.prefetch_chain import copies_of, links, one_pass, weights_behind
from k3lab.tuning.prefetch_tune import climbed, judged, tune_prefetch
from k3lab.tuning.timing import BrokenMeasurement

STEPS = ("front", "experts", "tail", "projection")


class Streams:
    """Writes down what is launched on which stream, and which stream waits for which."""

    def __init__(self):
        self.seen, self.stack = [], [Stream(self, "main")]
        self.side = Stream(self, "side")

    @contextmanager
    def on(self, stream):
        self.stack.append(stream)
        yield
        self.stack.pop()

    def launch(self, name):
        return lambda: self.seen.append(f"{self.stack[-1].name} {name}")

    def passed(self, fork, prefetch=True):
        steps = [self.launch(name) for name in STEPS]
        call = self.launch("prefetch") if prefetch else None
        one_pass(steps, call, fork, self.side, lambda: self.stack[-1], self.on)()
        return self.seen


class Stream:
    def __init__(self, streams, name):
        self.streams, self.name = streams, name

    def wait_stream(self, other):
        self.streams.seen.append(f"{self.name} waits for {other.name}")


MAIN = [f"main {name}" for name in STEPS]
AWAY, JOIN = ["side waits for main", "side prefetch"], ["main waits for side"]


@pytest.mark.parametrize(
    ("fork", "wanted"),
    [
        ("ahead", [*AWAY, *MAIN, *JOIN]),
        ("beside", [MAIN[0], *AWAY, *MAIN[1:], *JOIN]),
        ("before", [MAIN[0], "main prefetch", *MAIN[1:]]),
        ("behind", [*MAIN[:2], "main prefetch", *MAIN[2:]]),
    ],
)
def test_the_prefetch_leaves_where_the_config_says_and_comes_back_at_the_end(fork, wanted):
    assert Streams().passed(fork) == wanted
    assert Streams().passed(fork, prefetch=False) == MAIN


def test_the_forks_are_those_of_the_space():
    forks = next(param.values for param in space().params if param.name == "fork")
    assert set(forks) == {"ahead", "beside", "before", "behind"}
    assert set(prefetch_tune.ORDER) == {param.name for param in space().params}


def test_the_chain_is_experts_projection_output_projection():
    found = links(
        K3, 16, 4, "mla", gpu_card("H200"), {"experts": {"tasks": 7}, "attention_projection": {"engine": "cute_mma"}}
    )
    assert [(one.family.name, one.problem.label, one.engine.name) for one in found] == [
        ("experts", "bf16-tp16-rows4", "cute"),
        ("attention_projection", "mla-tp16-rows4", "cute_mma"),
        ("output_projection", "mla-tp16-rows4", "cute_fused"),
    ]
    assert found[0].config["tasks"] == 7
    many = links(K3, 16, 64, "kda", gpu_card("H200"), {})
    assert many[2].engine.name == "cute_split"  # the default engine does not serve so many rows
    assert many[1].engine.name == "triton"
    with pytest.raises(InputError, match="no engine of experts named best serves bf16-tp16-rows4"):
        links(K3, 16, 4, "kda", gpu_card("H200"), {"experts": {"engine": "best"}})
    with pytest.raises(InputError, match="illegal config"):
        links(K3, 16, 4, "kda", gpu_card("H200"), {"experts": {"tasks": 3}})


def test_every_pass_reads_weights_of_its_own(monkeypatch):
    experts = SimpleNamespace(rotated=("w13",), mutated=())
    other = SimpleNamespace(rotated=("w", "norm"), mutated=())
    chain = [SimpleNamespace(family=one, problem=None) for one in (experts, other, other)]
    x = torch.zeros(4)
    have = {id(experts): 5, id(other): 2}

    def inputs(family, problem, policy, seed):
        return [
            {"x": x, **{name: torch.full((4,), float(i)) for name in family.rotated}} for i in range(have[id(family)])
        ]

    monkeypatch.setattr(prefetch_chain, "input_copies", inputs)
    made = copies_of(chain, QUICK, 0)
    assert [len(each) for each in made] == [5, 5, 5]
    for each in made[1:]:
        assert len({one["w"].data_ptr() for one in each}) == len({one["norm"].data_ptr() for one in each}) == 5
        assert {one["x"].data_ptr() for one in each} == {x.data_ptr()}
    have[id(other)] = 9
    assert [len(each) for each in copies_of(chain, QUICK, 0)] == [5, 5, 5]
    behind = weights_behind(chain, [each[3] for each in made])
    assert [[one.data_ptr() for one in weights] for weights in behind] == [
        [each[3]["w"].data_ptr(), each[3]["norm"].data_ptr()] for each in made[1:]
    ]


def cost(config):
    """Microseconds of a made-up chain: one best value of each parameter."""
    best = {
        "cap_mb": 24,
        "fork": "ahead",
        "blocks": 32,
        "chunk_kb": 4,
        "kept": False,
        "reach": 1,
        "order": "use",
        "priority": "high",
    }
    return 50.0 + sum(config[name] != value for name, value in best.items())


def test_the_search_takes_parameters_in_turn_and_times_no_illegal_config():
    seen, said = [], []

    def measure(tried, rounds=2):
        seen.extend(tried)
        return [[(cost(one), 0.01)] * rounds for one in tried]

    best, count = climbed(space(), measure, said.append)
    assert cost(best) == 50.0 and count == len(seen)
    assert all(space().illegal(one) is None and one["cap_mb"] for one in seen)
    assert len(said) == len(prefetch_tune.ORDER) - 1  # one kernel has no order


def test_a_gain_inside_the_noise_is_off():
    quiet = [(50.0, 0.001), (50.1, 0.001), (50.0, 0.001)]
    assert judged(quiet, [(47.0, 0.001)] * 3).worth_it
    assert judged(quiet, [(47.0, 0.001)] * 3).gain_us == 3.0
    assert not judged(quiet, [(52.0, 0.001)] * 3).worth_it
    assert judged(quiet, [(49.8, 0.0)] * 3).band_us == pytest.approx(0.25)  # the least of all bands
    assert not judged(quiet, [(49.8, 0.0)] * 3).worth_it
    assert not judged(quiet, [(49.0, 0.03)] * 3).worth_it  # as its spread is
    assert not judged(quiet, [(47.0, 0.0), (50.5, 0.0), (49.0, 0.0)]).worth_it  # as its rounds differ


class FakeChain:
    """Passes are configs; times are made up; one config changes a bit."""

    loses, wrong = False, None

    def __init__(self, chain, compiled, policy, seed):
        self.kept, self.copies = [], [[{"ids": torch.arange(16).view(1, 16)}] * 3]

    def passes(self, config, arch):
        return [config]

    def require_edges(self, passes, config):
        return 1

    def outputs(self, passes):
        return [torch.full((4,), 2.0 if passes[0]["fork"] == self.wrong else 1.0, dtype=torch.bfloat16)]

    def check_health(self):
        pass


@pytest.fixture
def tuned(monkeypatch):
    def capture(passes, policy):
        config = passes[0]
        us = 55.0 if not config["cap_mb"] else 56.0 + cost(config) - 50 if FakeChain.loses else cost(config)
        return SimpleNamespace(replayed=lambda policy: SimpleNamespace(median_us=us, spread=0.001))

    monkeypatch.setattr(prefetch_chain, "Chain", FakeChain)
    monkeypatch.setattr("k3lab.tuning.timing.capture_calls", capture)
    monkeypatch.setattr("k3lab.tuning.compiling.compile_config", lambda *given: None)
    monkeypatch.setattr(FakeChain, "loses", False)
    monkeypatch.setattr(FakeChain, "wrong", None)
    card = gpu_card("H200")
    device = SimpleNamespace(arch=card.arch, need_card=lambda: card)
    return lambda given=None: tune_prefetch(device, K3, 16, 1, "kda", {}, given, lambda text: None)


def test_the_table_says_off_where_it_loses(tuned, monkeypatch):
    row = tuned()
    assert (row["off_us"], row["on_us"], row["gain_us"], row["worth_it"]) == (55.0, 50.0, 5.0, True)
    assert row["config"] == row["best"] and row["config"]["cap_mb"] == 24
    assert row["distinct_experts"] == 16 and row["passes"] == 3
    assert json.loads(json.dumps(row)) == row
    monkeypatch.setattr(FakeChain, "loses", True)
    row = tuned()
    assert row["gain_us"] < 0 and not row["worth_it"]
    assert row["config"] == OFF and row["best"]["cap_mb"] == 24
    assert tuned({**OFF, "cap_mb": 8})["timed"] == 1


def test_a_prefetch_that_changes_a_bit_is_a_broken_measurement(tuned, monkeypatch):
    monkeypatch.setattr(FakeChain, "wrong", "behind")
    with pytest.raises(BrokenMeasurement, match="a prefetch changed the results"):
        tuned()
    tuned({**OFF, "cap_mb": 8})


def test_configs_of_the_chain_are_read():
    assert chain_configs(None) == {}
    assert chain_configs('{"experts": {"tasks": 2}}') == {"experts": {"tasks": 2}}
    with pytest.raises(InputError, match="JSON object of families"):
        chain_configs("experts")
    with pytest.raises(InputError, match="JSON object of families"):
        chain_configs('{"experts": 2}')
    with pytest.raises(InputError, match="--chain names 'router'"):
        chain_configs('{"router": {}}')
