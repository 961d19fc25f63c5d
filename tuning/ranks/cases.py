"""What is run on the ranks: engines and exchanges of a family, each rank's inputs, and the twin over the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...kernels import K3, Config, InputError, Problem, family
from ...kernels.gpu_cards import GpuCard
from ...kernels.twin_family import TwinFamily, in_fp32

if TYPE_CHECKING:
    import torch

    from ...kernels.collectives import Collectives

ENGINES = {
    "output_projection": ("cute_fused", "cute_apart", "cute_split"),
    "router": ("cute_fused",),
    "moe_tail": ("cute_fused",),
}
"""Engines that publish."""
OWN = {
    "output_projection": ("x", "w_o"),
    "router": ("w_router", "w_down"),
    "moe_tail": ("latent_partial", "shared_partial", "w_up"),
}
"""Inputs that are each rank's own; the others are the same on all."""
NARROWER = {"moe_tail": (2, 4)}
"""Where no config serves K3's hidden size on so few ranks, a share of its columns stands in, and the case says so."""
GATHER = "gather"
"""The exchange of an engine that sums nothing over ranks."""


@dataclass(frozen=True)
class Case:
    """One engine on one problem, TP the number of ranks."""

    family: str
    engine: str
    exchange: str
    """``one_shot``, ``two_shot`` or :data:`GATHER`."""
    problem: Problem
    config: Config
    narrow: int | None = None
    """Hidden size, where it is less than K3's."""

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.family}/{self.engine} {self.exchange} at {self.problem.rows} rows"

    def to_json(self) -> dict[str, Any]:
        """What tells it from the others, and how to make it again."""
        return {
            "family": self.family, "engine": self.engine, "exchange": self.exchange, "rows": self.problem.rows,
            "problem": self.problem.to_json(), "config": dict(self.config), "narrow": self.narrow,
        }  # fmt: skip


def cases(
    families: Sequence[str], rows: Sequence[int], size: int, card: GpuCard
) -> tuple[list[Case], list[dict[str, Any]]]:
    """(cases, what no engine serves and why): the default configs, with every exchange that the engine has."""
    found: list[Case] = []
    missing: list[dict[str, Any]] = []
    for name in families:
        for count in rows:
            whole = family(name).problem(K3, tp=size, rows=count)
            for engine in ENGINES[name]:
                for share in (1, *NARROWER.get(name, ())):
                    problem = whole if share == 1 else replace(whole, hidden=K3.hidden_size // share)  # type: ignore[call-arg]
                    made, why = _exchanges(name, engine, problem, card)
                    narrow = None if share == 1 else K3.hidden_size // share
                    found += [replace(case, narrow=narrow) for case in made]
                    if why:
                        width = "" if narrow is None else f"hidden {narrow}: "
                        missing.append({"family": name, "engine": engine, "rows": count, "why": width + why})
                    if made:
                        break
    return found, missing


def _exchanges(name: str, engine_name: str, problem: Problem, card: GpuCard) -> tuple[list[Case], str | None]:
    """(a case an exchange, why there are fewer than the engine has)."""
    engine = family(name).engine(engine_name)
    if refusal := engine.refuses(problem, card.arch):
        return [], refusal
    try:
        space = engine.space(problem, card)
    except InputError as error:
        return [], str(error)
    sums = "one_shot" if name == "output_projection" else GATHER
    values = next((param.values for param in space.params if param.name == "exchange"), None)
    configs = {str(one): {**space.default, "exchange": one} for one in values} if values else {sums: space.default}
    illegal = {exchange: reason for exchange, config in configs.items() if (reason := space.illegal(config))}
    made = [Case(name, engine_name, one, problem, config) for one, config in configs.items() if one not in illegal]
    return made, "; ".join(f"{exchange}: {reason}" for exchange, reason in illegal.items()) or None


def rank_inputs(case: Case, rank: int, seed: int, device: str) -> dict[str, torch.Tensor]:
    """A rank's inputs; of the router whole numbers, so that logits are exact and no choice depends on the order of a sum."""
    owner = family(case.family)
    assert isinstance(owner, TwinFamily)
    mine = TwinFamily.inputs(owner, case.problem, 1000 * seed + rank + 1, device)
    common = TwinFamily.inputs(owner, case.problem, 1000 * seed, device)
    found = {name: (mine if name in OWN[case.family] else common)[name] for name in mine}
    return _whole(case.problem, found) if case.family == "router" else found


def _whole(problem: Any, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch

    for name, least in (("x", 1.0), ("w_router", 64.0), ("w_down", 64.0)):
        found[name] = (found[name] / found[name].float().std()).float().round().clamp(-1, 1).div(least).bfloat16()
    shape = (problem.tp, problem.rows, problem.experts + problem.latent // 2)
    peers = torch.zeros(shape, dtype=torch.int32, device=found["x"].device)
    return {**found, "bias": torch.zeros_like(found["bias"]), "peers": peers}


def twin(case: Case, inputs: dict[str, torch.Tensor], comm: Collectives) -> dict[str, torch.Tensor]:
    """Outputs of the family's twin over the group, in FP32; every rank calls it."""
    import torch

    problem: Any = case.problem
    t = in_fp32(inputs)
    if case.family == "output_projection":
        from ...kernels.output_projection.twin import output_projection

        prefix, mlp_input = output_projection(
            t["x"], t["w_o"], t["prefix"], list(t["blocks"]), t["res_norm"], t["res_proj"], t["norm_w"],
            eps=problem.eps, comm=comm,
        )  # fmt: skip
        return {"prefix_out": prefix, "mlp_input": mlp_input}
    if case.family == "moe_tail":
        from ...kernels.moe_tail.twin import moe_tail

        prefix, following = moe_tail(
            t["latent_partial"], t["shared_partial"], t["latent_norm"], t["w_up"], t["prefix"], list(t["blocks"]),
            t["res_norm"], t["res_proj"], t["norm_w"], eps=problem.eps, comm=comm,
        )  # fmt: skip
        return {"prefix_out": prefix, "next_input": following}
    from ...kernels.router.twin import front, route

    logits, latent = front(t["x"], t["w_router"], t["w_down"], comm)
    ids, weights = route(logits, t["bias"], problem.top_k, problem.scaling)
    return {"logits": logits, "latent": latent, "ids": ids.to(torch.int32), "weights": weights}
