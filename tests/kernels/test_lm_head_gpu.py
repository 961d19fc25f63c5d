"""The head's engines on a GPU: the twin's bits, ties, NaN, epochs, graphs, delays, several ranks, and one that never comes."""

import dataclasses
import random
import time

import pytest
import torch
from k3lab.kernels.health import check_health
from k3lab.kernels.lm_head.peers import own_slot
from k3lab.kernels.lm_head.twin import best_token
from k3lab.kernels.transports import Loopback

from .gpu_acts import delay_often, replay_often, same, silence
from .lm_head_case import CUTE, FAMILY, ROWS, TRITON, engine_of, problem, whole_numbers
from .virtual_ranks import Group, VirtualRank

pytestmark = pytest.mark.gpu


class Case:
    """A compiled engine, its runner over loopback, tensors on the GPU and what they should become."""

    def __init__(self, device, one, changes=None, seed=0, inputs=None, transport=None):
        from k3lab.kernels.launch import Runner

        self.one, engine = one, engine_of(one)
        chosen = {**engine.space(one, device.need_card()).default, **(changes or {})}
        self.inputs = inputs or whole_numbers(one, seed)
        self.runner = Runner(engine.compile(one, chosen, device.arch), transport=transport or Loopback(one.tp))
        self.outputs = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
            for name, (shape, dtype) in FAMILY.output_specs(one).items()
        }
        self.tensors = {**{name: tensor.cuda() for name, tensor in self.inputs.items()}, **self.outputs}
        self._wanted = None

    @property
    def wanted(self):
        if self._wanted is None:
            self._wanted = FAMILY.twin(self.one, self.inputs)
        return self._wanted

    def poison(self):
        for tensor in self.outputs.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -7)

    def run(self, rows=None, pdl=None, dead=False):
        self.poison()
        tensors = dict(self.tensors)
        if dead:
            name, value = ("tokens", -1) if self.one.kind == "embed" else ("h", float("nan"))
            tensors[name] = tensors[name].clone()
            tensors[name][rows:] = value
        self.runner.bind(tensors, rows=rows, pdl=pdl)()
        torch.cuda.synchronize()
        check_health(self.runner.buffers)

    def judge(self, rows=None):
        """Whole numbers: to the bit; and what is left for the next launch is in order."""
        rows = rows or self.one.rows
        for name, tensor in self.outputs.items():
            got, wanted = tensor.cpu(), self.wanted[name].to(tensor.dtype)
            bad = (got[:rows] != wanted[:rows]).nonzero()
            assert not len(bad), f"{name}: {len(bad)} wrong, first {bad[0].tolist()}"
            dead = got[rows:]
            assert (dead.isnan() if dead.is_floating_point() else dead == -7).all(), name
        for name in ("keys", "arrived"):
            if name in self.runner.buffers:
                assert not self.runner.buffers[name].any(), name

    def bits(self):
        return [tensor.contiguous().view(torch.uint8).clone() for tensor in self.outputs.values()]


def drawn(one, card, count, seed=0):
    """Legal configs drawn point by point."""
    space, rng, found = CUTE.space(one, card), random.Random(seed), []
    while len(found) < count:
        point = {param.name: rng.choice(param.values) for param in space.params}
        if space.illegal(point) is None:
            found.append(point)
    return found


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 17, 64])
@pytest.mark.parametrize("kind", ["shard", "argmax", "embed"])
def test_equals_the_twin_in_many_launches_and_at_fewer_rows(device, rows, kind):
    # the whole shard once: its weights take seconds to draw
    case = Case(device, problem(rows, kind, **({} if rows == 8 else {"vocab": 2560})))
    case.run()
    case.judge()
    first = case.bits()
    for _ in range(20):
        case.run()
        assert same(first, case.bits())
    for fewer in sorted({1, rows // 2 or 1, rows}):
        case.run(fewer, dead=True)
        case.judge(fewer)


@pytest.mark.parametrize("tp", [4, 8])
def test_other_sizes_of_the_shard(device, tp):
    for kind in ("shard", "argmax"):
        case = Case(device, problem(8, kind, tp, vocab=5120))
        case.run()
        case.judge()


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("kind", ["shard", "argmax"])
def test_configs_of_the_whole_space_pass_the_house_check(device, rows, kind):
    from k3lab.tuning.check import check

    one = problem(rows, kind)
    for seed, config in enumerate(drawn(one, device.need_card(), 3, seed=rows)):
        result = check(FAMILY, CUTE, one, config, seed)
        assert result.ok, f"{config}: {result.reason}"


@pytest.mark.parametrize("threads", [64, 256, 1024])
def test_embedding_rows_pass_the_house_check(device, threads):
    from k3lab.tuning.check import check

    for rows in (1, 8, 64):
        if threads > 64 or rows < 64:
            one = problem(rows, "embed", vocab=2560)
            config = {"threads": threads, "release": "entry" if rows > 1 else "end", "backoff": 0}
            result = check(FAMILY, ROWS, one, config)
            assert result.ok, f"{rows} rows: {result.reason}"


@pytest.mark.parametrize("rows", [3, 64])
def test_triton_passes_the_house_check(device, rows):
    from k3lab.tuning.check import check

    one = problem(rows, "shard")
    result = check(FAMILY, TRITON, one, TRITON.space(one, device.need_card()).default)
    assert result.ok, result.reason


def test_equal_logits_give_the_lowest_id(device):
    one = problem(8, vocab=2560)
    inputs = whole_numbers(one, 2)
    inputs["w"][:] = inputs["w"][3]
    inputs["peers"][..., 0] = torch.full((), -1000.0).view(torch.int32)
    case = Case(device, one, inputs=inputs)
    for _ in range(20):  # whichever block comes last
        case.run()
        assert case.outputs["ids"].tolist() == [0] * 8
    case.judge()


def test_a_row_with_nan_gives_the_last_id_and_says_so(device):
    one = problem(8, vocab=2560)
    inputs = whole_numbers(one, 4)
    inputs["h"][2] = float("nan")
    slot = 1 if own_slot(16) != 1 else 2
    inputs["peers"][slot, 5] = torch.tensor([torch.full((), float("nan")).view(torch.int32), 7])
    case = Case(device, one, inputs=inputs)
    case.run()
    assert case.outputs["best"].isnan().tolist() == [row in (2, 5) for row in range(8)]
    assert case.outputs["ids"][[2, 5]].tolist() == [16 * 2560 - 1] * 2
    rest = [0, 1, 3, 4, 6, 7]
    assert torch.equal(case.outputs["ids"].cpu()[rest], case.wanted["ids"][rest])


def test_row_counts_change_from_launch_to_launch(device):
    case = Case(device, problem(64, vocab=2560))
    for rows in (64, 1, 8, 64, 33, 1, 64):
        case.run(rows)
        case.judge(rows)


def test_epochs_wrap(device):
    case = Case(device, problem(8, vocab=2560))
    for start in (2**31 - 3, 2**32 - 3):
        case.runner.buffers["epochs"].fill_(start - (1 << 32) if start >> 31 else start)
        case.runner.buffers["mailbox"].zero_()
        for _ in range(6):
            case.run()
            case.judge()


@pytest.mark.parametrize("kind", ["shard", "argmax", "embed"])
def test_a_graph_of_pdl_launches_gives_the_same_bits_fifty_times(device, kind):
    case = Case(device, problem(8, kind, vocab=5120))
    replay_often(case, 50)


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("kind", ["argmax", "embed"])
def test_delays_change_no_bit(device, rows, kind):
    one = problem(rows, kind, vocab=1024)
    plain, delayed = (Case(device, one, {"jitter": jitter}) for jitter in (0, 1))
    delay_often(plain, delayed, 200)


@pytest.mark.parametrize("dead", [0, 8, 15])
@pytest.mark.parametrize("kind", ["argmax", "embed"])
def test_a_rank_that_never_publishes_is_named_within_the_limit(device, dead, kind):
    case = Case(device, problem(8, kind, vocab=1024))
    silence(case, dead, rf"rank {dead} did not publish")


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_side_by_side_agree_on_the_token_of_the_whole_vocabulary(device, size):
    """A runner and a stream a rank, real stores into one another's mailboxes; launched in turns, one rank late at times."""
    one = problem(8, tp=size, vocab=1024, hidden=1792)
    whole = [dict(whole_numbers(one, 20 + rank), h=whole_numbers(one, 20)["h"]) for rank in range(size)]
    group = Group(size)
    ranks = [Case(device, one, inputs=whole[rank], transport=VirtualRank(group, rank)) for rank in range(size)]
    logits = torch.cat(
        [FAMILY.twin(dataclasses.replace(one, kind="shard"), inputs)["logits"] for inputs in whole], dim=-1
    )
    best, ids = best_token(logits.to(torch.bfloat16).float(), 0, size * one.vocab)
    calls = [rank.runner.bind(rank.tensors, pdl=False) for rank in ranks]
    streams = [torch.cuda.Stream() for _ in ranks]
    for turn in range(200):
        for rank in ranks:
            rank.poison()
        torch.cuda.synchronize()
        for place in random.Random(turn).sample(range(size), size):
            with torch.cuda.stream(streams[place]):
                calls[place]()
            if turn % 50 == 0:
                time.sleep(0.01)
        torch.cuda.synchronize()
        for place, rank in enumerate(ranks):
            check_health(rank.runner.buffers, place)
            assert torch.equal(rank.outputs["ids"].cpu(), ids.to(torch.int32)), (turn, place)
            assert torch.equal(rank.outputs["best"].cpu(), best), (turn, place)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_side_by_side_have_the_whole_tables_rows(device, size):
    """Ranks that own no row of a step run as far ahead as the beacons let them; tokens differ from call to call."""
    one = problem(3, "embed", tp=size, vocab=64, hidden=1792)
    everyone = [FAMILY.inputs(one, rank) for rank in range(size)]
    whole = torch.cat([inputs["table"] for inputs in everyone])
    group, generator = Group(size), torch.Generator().manual_seed(size)
    ranks = [
        Case(
            device, one, inputs={**inputs, "peers": inputs["peers"] * float("nan")}, transport=VirtualRank(group, rank)
        )
        for rank, inputs in enumerate(everyone)
    ]
    streams = [torch.cuda.Stream() for _ in ranks]
    for turn in range(50):
        calls = []
        for step in range(10):
            # all of one rank's, or of any: an owner alone could run away from the others
            first, last = (0, 64) if (turn + step) % 2 else (0, 64 * size)
            tokens = torch.randint(first, last, (3,), generator=generator, dtype=torch.int32)
            wanted, given = whole[tokens.long()], tokens.cuda()
            outs = [torch.full((3, one.hidden), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in ranks]
            binds = [
                rank.runner.bind({**rank.tensors, "tokens": given, "x": out}, pdl=False)
                for rank, out in zip(ranks, outs, strict=True)
            ]
            calls.append((binds, outs, wanted))
        torch.cuda.synchronize()
        order = [(step, place) for step in range(10) for place in range(size)]
        if turn % 2:  # a rank at a time, all its steps
            order.sort(key=lambda one: one[1])
        for step, place in order:
            with torch.cuda.stream(streams[place]):
                calls[step][0][place]()
        torch.cuda.synchronize()
        for place, rank in enumerate(ranks):
            check_health(rank.runner.buffers, place)
            for step, (_, outs, wanted) in enumerate(calls):
                assert torch.equal(outs[place].cpu(), wanted), (turn, step, place)


def test_invariant_logits_have_the_same_bits_at_any_rows_and_tile(device):
    found = {}
    big = FAMILY.inputs(problem(64, "shard", vocab=1024), 5)
    for rows in (1, 3, 8, 16, 64):
        one = problem(rows, "shard", vocab=1024)
        space = CUTE.space(one, device.need_card()).restricted({"k_order": "invariant"})
        for tile in (8, 16):
            config = {**space.default, "tile": tile, "depth": 1, "warps_n": 1}
            if space.illegal(config) is not None:
                continue
            case = Case(device, one, config, inputs={**big, "h": big["h"][:rows].clone()})
            case.run()
            found[rows, tile] = case.outputs["logits"].clone().view(torch.int16)
    assert len(found) >= 5
    for (rows, tile), got in found.items():
        assert torch.equal(got, found[64, 8][:rows]), (rows, tile)
