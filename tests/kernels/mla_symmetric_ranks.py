"""Real processes, one a rank of contexts over ranks, on as many GPUs as there are: ``python mla_symmetric_ranks.py SIZE KIND FOLDER``.

Each writes ``FOLDER/RANK.pt``. Processes that share a GPU are time-sliced. Forked before anything touches a GPU.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from forked_ranks import fork, join, keep

ROWS, STEPS = 8, 50
CONTEXTS = (700, 130, 5, 1, 0, 0, 63, 64)
"""Of as many requests as the kind has; at four ranks shards of one token and of none."""
WALL_S, PATIENT_S = 240.0, 120.0


def steps(rank: int, size: int, kind: str) -> dict:
    """Many launches: the same bits each time; the last rank comes late once."""
    from k3lab.kernels.device import require
    from k3lab.kernels.gpu_cards import GPU_CARDS
    from k3lab.kernels.health import check_health
    from k3lab.kernels.launch import Runner
    from k3lab.kernels.transports import Symmetric
    from k3lab.tuning.compiling import compile_config
    from mla_dcp_case import ENGINE, problem, rank_inputs

    device, one = require("this test"), problem(ROWS, kind, size)
    chosen = ENGINE.space(one, device.card or GPU_CARDS["H200"]).default
    runner = Runner(compile_config(ENGINE, one, chosen, device.arch), transport=Symmetric())
    inputs = rank_inputs(one, list(CONTEXTS[: one.requests]), rank)
    out = torch.empty(one.rows, one.heads * one.v_dim, dtype=torch.bfloat16, device="cuda")
    call = runner.bind({**{name: tensor.cuda() for name, tensor in inputs.items()}, "out": out})
    found, changed = [], 0
    for turn in range(STEPS):
        if turn == STEPS // 2 and rank == size - 1:
            time.sleep(1.0)
        out.fill_(float("nan"))
        call()
        check_health(runner.buffers, rank)
        found.append(out.cpu())
        changed += not torch.equal(found[-1], found[0])
    cache = call.tensors["cache"].cpu()
    return {"out": found[0], "cache": cache.view(torch.uint8), "changed": changed}


def rank_main(rank: int, size: int, port: int, kind: str, folder: Path) -> None:
    """One rank; what went wrong is left as text."""
    join(rank, size, port, PATIENT_S)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        found = steps(rank, size, kind)
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}"}
    keep(found, folder, rank)


def main() -> None:
    """Fork the ranks and see to it that all of them end."""
    size, kind, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    ended = fork(
        size, lambda rank, port: rank_main(rank, size, port, kind, folder), patience_s=PATIENT_S, wall_s=WALL_S
    )
    sys.exit(not ended)


if __name__ == "__main__":
    main()
