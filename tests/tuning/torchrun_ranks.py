"""``python torchrun_ranks.py REQUEST``: two processes as torchrun would start them; rank 0 prints how many ranks it heard of."""

from __future__ import annotations

import os
import socket
import sys
import traceback

import torch.distributed  # noqa: F401  # once, before the fork
from k3lab.kernels.env import torchrun
from k3lab.tuning.ranks.request import RanksRequest
from k3lab.tuning.ranks.torchrun import run


def rank(request: RanksRequest, own: int, port: int) -> None:
    places = {
        "RANK": own, "WORLD_SIZE": 2, "LOCAL_RANK": own, "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in places.items()})
    place = torchrun()
    assert place is not None
    found = run(request, place)
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    print(f"rank {own} has {'nothing' if found is None else [one['rank'] for one in found]}", flush=True)


def main() -> None:
    """Fork both, and end with the sum of their exit codes."""
    request = RanksRequest.from_text(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for own in range(2):
        child = os.fork()
        if child == 0:
            try:
                rank(request, own, port)
            except BaseException as error:
                traceback.print_exc()
                print(f"rank {own} {type(error).__name__}: {error}", flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    sys.exit(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main()
