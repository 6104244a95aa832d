"""The main program of ranks 1, 2 ...: build a part of the learner, then do what rank 0 says until it closes the connection."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from turnwise.engines.sharded import messages
from turnwise.engines.sharded.joined_ranks import connected, lost_connection
from turnwise.engines.sharded.rank_learner import RankHost
from turnwise.engines.sharded.rank_pool import LOST_PEER, join_group
from turnwise.engines.sharded.torchrun import TorchrunRank
from turnwise.errors import TurnwiseError


def main(descriptor: int) -> int:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def join(start: dict[str, Any]) -> torch.device:
        rank = start["rank"]
        device = _own_device(start, rank)
        join_group(dist.TCPStore("127.0.0.1", start["port"], is_master=False), device, rank, start["size"])
        return device

    return _told(lambda: serve(Connection(descriptor), join))


def main_of_torchrun(started: TorchrunRank) -> int:
    """What a process that torchrun started does as rank 1, 2 ... of a run, until that ends."""

    def work() -> int:
        with connected(started, LOST_PEER) as (connection, store, interface):

            def join(start: dict[str, Any]) -> torch.device:
                device = _own_device(start, started.local_rank)
                join_group(store, device, started.rank, started.size, start["interface"] or interface)
                return device

            return serve(connection, join)

    return _told(work)


def serve(connection: Connection, join: Callable[[dict[str, Any]], torch.device]) -> int:
    """Become a rank, and do what rank 0 says until it closes the connection."""
    try:
        start = messages.receive(connection)
        messages.send(connection, (None, None))  # imported: rank 0 waits with the process group until all are
        torch.set_num_threads(start["threads"])
        host = RankHost(join(start))
        while True:
            verb, arguments = messages.receive(connection)
            messages.send(connection, _outcome(host, verb, arguments))
    except (EOFError, ConnectionError):
        return 0  # rank 0 has closed the connection


def _told(work: Callable[[], int]) -> int:
    """The exit status. A fault is told in one line, which rank 0 quotes."""
    try:
        return work()
    except Exception as fault:
        print(
            f"{type(fault).__name__}: {str(fault).splitlines()[0] if str(fault) else ''}", file=sys.stderr, flush=True
        )
        return LOST_PEER if lost_connection(fault) else 1


def _own_device(start: dict[str, Any], number: int) -> torch.device:
    """``number``: of this rank on its machine."""
    device = torch.device(start["device"], number) if start["device"] == "cuda" else torch.device(start["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _outcome(host: RankHost, verb: str, arguments: tuple[Any, ...]) -> tuple[TurnwiseError | None, Any]:
    """(the fault, the answer). A fault that a user can cause is told to rank 0; any other ends this rank."""
    try:
        return None, host.do(verb, *arguments)
    except TurnwiseError as fault:
        return fault, None


def _end_with(parent: int) -> None:
    """End when rank 0 has ended, also from inside a collective operation."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(LOST_PEER)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
