"""Real processes, one a rank: forked, joined over a store, and all of them ended.

torch is imported once and the ranks are forked from there, so that eight of them are quick to start. The parent
serves the store, so no rank's death takes it away.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from k3lab.kernels.collectives import CollectiveError

HOST = "127.0.0.1"


def fork(size: int, rank_main: Callable[[int, int], None], *, patience_s: float, wall_s: float) -> bool:
    """Fork the ranks and see to it that all of them end; whether none had to be killed.

    Args:
        size: how many.
        rank_main: called in each with its rank and the store's port.
        patience_s: of the store.
        wall_s: after which what still runs is killed.
    """
    told, tell = os.pipe()
    children = []
    for rank in range(size):  # before the store, whose thread a fork would lose with the locks it holds
        child = os.fork()
        if child == 0:
            try:
                rank_main(rank, int(os.read(told, 8)))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)  # whatever else a peer's death left open
        children.append(child)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=patience_s))
    os.write(tell, f"{store.port:8d}".encode() * size)
    deadline = time.monotonic() + wall_s
    while children and time.monotonic() < deadline:
        children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
        time.sleep(0.01)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not children


def join(rank: int, size: int, port: int, patience_s: float) -> dist.Store:
    """Join the process group; the store it was joined over."""
    limit = timedelta(seconds=patience_s)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return store


def keep(found: dict, folder: Path, rank: int) -> None:
    """Leave what a rank found in ``folder/rank.pt``, whole or not at all."""
    torch.save(found, folder / f"{rank}.part")
    os.replace(folder / f"{rank}.part", folder / f"{rank}.pt")


def gloo_main(
    scenarios: Mapping[str, Callable[[int, int, dist.Store], dict]], *, patience_s: float, wall_s: float
) -> NoReturn:
    """The command ``SIZE SCENARIO FOLDER``: ranks keep what theirs returns, or the error's text, and how long it took."""
    size, scenario, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

    def rank_main(rank: int, port: int) -> None:
        torch.set_num_threads(1)
        store = join(rank, size, port, patience_s)
        started = time.monotonic()
        try:
            found = scenarios[scenario](rank, size, dist.PrefixStore(scenario, store))
        except CollectiveError as error:
            found = {"error": str(error)}
        found["seconds"] = time.monotonic() - started
        keep(found, folder, rank)

    sys.exit(not fork(size, rank_main, patience_s=patience_s, wall_s=wall_s))
