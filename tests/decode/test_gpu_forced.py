"""On a GPU: given steps, 500 of them, through the tuned kernels, captured and filled up, beside ``auto``; the FP64 operators judge both.

Plain steps and verify steps of which a random part is accepted, in a batch that changes. All go by the judge's experts. The
tolerance is a top-2 gap in units of the logits' root mean square, some seven times what BF16 adds; of a rank alone fifteen in
sixteen logits are zero, so that there the unit is a quarter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from k3lab.decode.auto import AutoOperators
from k3lab.decode.judged_routes import Routes
from k3lab.decode.lone import LonePeers, lone_peers
from k3lab.decode.operators import Operators, ReferenceOperators
from k3lab.decode.random_weights import random_rank_weights
from k3lab.decode.teacher_forced import Follower, bits, drift, schedule, widened
from k3lab.decode.tuned import KernelPool, TunedOperators
from k3lab.decode.weights import RankWeights
from k3lab.kernels import SMALL_K3, ModelCard
from k3lab.kernels.collectives import Collectives, LoopbackGroup, SingleRank
from k3lab.kernels.device import Device

from .engines_case import engine_entries, five_layers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]
LAST, AGAIN = 25, 60
REQUESTS = 6
SIZES = (1, 3, REQUESTS)
"""Requests of the captured steps: those of 2, 4 and 5 are filled up."""


@dataclass(frozen=True)
class Place:
    """A model, and which of its ranks follows."""

    card: ModelCard
    tp: int
    comm: Collectives
    peers: LonePeers | None
    device: str = "cuda"

    def weights(self) -> RankWeights:
        """The same in every call, in memory of its own: tuned kernels turn the experts."""
        return random_rank_weights(self.card, seed=1, dtype=torch.bfloat16, device=self.device, tp=self.tp)

    def auto(self, dtype: torch.dtype) -> AutoOperators:
        return AutoOperators(self.card, dtype=dtype, device=self.device, peers=self.peers)

    def judge(self) -> Operators:
        """In FP64; of a rank alone ``auto``'s, which know what the others would have said, and are the twins otherwise."""
        return self.auto(torch.float64) if self.peers else ReferenceOperators(self.card)

    def tuned(self, weights: RankWeights, widths: range, arch: str) -> tuple[dict[int, TunedOperators], set[str]]:
        """Operators by tokens a request, and the families that have kernels in every step."""
        pool: KernelPool = {}
        made, families = {}, []
        for width in widths:
            choices, _ = engine_entries(
                self.card, tp=self.tp, rows=REQUESTS * width, q_len=width, arch=arch, exchange="one_shot"
            )
            made[width] = TunedOperators(
                self.card, choices, dtype=torch.bfloat16, device=self.device, peers=self.peers, pool=pool
            )
            families.append({one.family for one in choices})
        made[widths[0]].take(weights)
        return made, set.intersection(*families)


def small_k3() -> Place:
    """Families whose kernels want K3's widths are left to ``auto``."""
    return Place(SMALL_K3, 1, SingleRank(), None)


def one_rank() -> Place:
    """Whole layers of K3's widths, KDA and MLA; router and tail, which no engine serves on one rank, are left to ``auto``."""
    return Place(five_layers(64, 2048), 1, SingleRank(), None)


def full_widths() -> Place:
    """All families, on a rank whose group is not there: the others add zeros."""
    card, tp = five_layers(), 16
    return Place(card, tp, LoopbackGroup((1.0,) + (0.0,) * (tp - 1)), lone_peers(card, tp=tp, rows=64, device="cuda"))


def followed(place: Place, arch: str, *, steps: int, max_verify: int, again: int, tolerance: float) -> dict[str, Any]:
    """How far ``auto`` and the tuned path drift, led by the judge's experts; the tuned path's choices, and twice its first bits."""
    sizes: dict[str, Any] = {"requests": REQUESTS, "context": 200, "max_verify": max_verify}
    rounded, own = place.weights(), place.weights()
    given = schedule(vocabulary=rounded.embed.shape[0], steps=steps, seed=2, **sizes)
    assert len({len(one.requests) for one in given}) > 3
    kernels, families = place.tuned(own, range(1, max_verify + 1), arch)
    wide = widened(rounded)
    routes = Routes(wide)
    stock, led = routes.led(place.auto(torch.bfloat16)), {width: routes.led(one) for width, one in kernels.items()}

    def captured(used: dict[int, Any]) -> Follower:
        return Follower(own, used[1], place.comm, verify=used, sizes=SIZES, block_size=64, **sizes)

    judge = Follower(wide, routes.judging(place.judge()), place.comm, block_size=64, **sizes)
    followers = [Follower(rounded, stock, place.comm, block_size=64, **sizes), captured(led)]
    auto, tuned = drift(judge, followers, given, tolerance=tolerance)
    return {
        "auto": auto, "tuned": tuned, "families": families, "auto otherwise": stock.otherwise / stock.routed,
        "tuned otherwise": sum(one.otherwise for one in led.values()) / sum(one.routed for one in led.values()),
        # not led: the kernels follow each other as in any step
        "bits": [list(bits(captured(dict(kernels)), given[:again])) for _ in range(2)],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("where", "steps", "max_verify", "tolerance", "has"),
    [(small_k3, 500, 8, 0.3, 5), (full_widths, 500, 4, 1.2, 9), (one_rank, 100, 2, 0.3, 7)],
)
def test_the_tuned_path_follows_given_steps_as_closely_as_auto(
    device: Device, where: Any, steps: int, max_verify: int, tolerance: float, has: int
) -> None:
    found = followed(where(), device.arch, steps=steps, max_verify=max_verify, again=AGAIN, tolerance=tolerance)
    auto, tuned = found["auto"], found["tuned"]
    assert len(found["families"]) == has, found["families"]
    told = f"auto {auto.mean:.4f}, tuned {tuned.mean:.4f}; states {auto.states:.4f}, {tuned.states:.4f}; {tuned.agreed} of {tuned.clear}"
    assert tuned.mean <= 1.25 * auto.mean, told
    assert sum(tuned.logits[-LAST:]) <= 1.25 * sum(auto.logits[-LAST:]), told
    assert tuned.states <= 1.25 * auto.states, told
    assert tuned.clear > 50 and tuned.agreement >= 0.99, told
    assert found["tuned otherwise"] <= 1.25 * found["auto otherwise"] + 0.01, found
    assert found["bits"][0] == found["bits"][1]
