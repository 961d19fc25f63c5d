"""Two processes over gloo: how far each family's chain over real collectives is from the twin; rank 0 prints it as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import torch
import torch.distributed as dist
from forked_ranks import fork, join
from k3lab.kernels import SMALL_K3, family
from k3lab.kernels.distributed import TorchGroup
from k3lab.tuning.compare import compare
from k3lab.tuning.ranks.beside import chain_call
from k3lab.tuning.ranks.cases import Case, rank_inputs, twin
from k3lab.tuning.ranks.request import FAMILIES


def product(a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None) -> torch.Tensor:
    """What ``torch.mm`` does on a GPU, where a product of BF16 operands may stay in FP32."""
    return (a.float() @ b.float()).to(out_dtype or a.dtype)


def rank_main(rank: int, port: int) -> None:
    store = join(rank, 2, port, 60)
    comm, told = TorchGroup(dist.PrefixStore("chains", store)), {}
    torch.mm = product  # type: ignore[assignment]
    for name in FAMILIES:
        owner = family(name)
        case = Case(name, "chain", "nccl", owner.problem(SMALL_K3, tp=2, rows=3), {})
        inputs = rank_inputs(case, rank, 0, "cpu")
        outputs = {
            output: torch.full(shape, -9, dtype=getattr(torch, dtype))
            for output, (shape, dtype) in owner.output_specs(case.problem).items()
        }
        chain_call(name, case.problem, {**inputs, **outputs}, None)()
        for output, wanted in twin(case, inputs, comm).items():
            if output != "ids":  # equal scores, in another order
                result = compare(output, outputs[output], wanted, owner.tolerance(case.problem, output))
                told[f"{name} {output}"] = result.message or "ok"
    if rank == 0:
        print(json.dumps(told), flush=True)


def main() -> None:
    """Fork both."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(not fork(2, rank_main, patience_s=60, wall_s=100))


if __name__ == "__main__":
    main()
