"""The main program of ranks 1, 2 ...: build a part of the learner, then do what rank 0 says until it closes the pipe."""

from __future__ import annotations

import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from turnwise.engines.sharded import messages
from turnwise.engines.sharded.rank_learner import RankHost
from turnwise.engines.sharded.rank_pool import LOST_PEER, join_group
from turnwise.errors import TurnwiseError


def main(descriptor: int) -> int:
    connection = Connection(descriptor)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        start = messages.receive(connection)
        messages.send(connection, (None, None))  # imported: rank 0 waits with the process group until all are
        host = _join(start)
        while True:
            verb, arguments = messages.receive(connection)
            messages.send(connection, _outcome(host, verb, arguments))
    except (EOFError, ConnectionError):
        return 0  # rank 0 has closed the pipe
    except Exception as fault:
        print(
            f"{type(fault).__name__}: {str(fault).splitlines()[0] if str(fault) else ''}", file=sys.stderr, flush=True
        )
        return LOST_PEER if isinstance(fault, dist.DistError) or "gloo" in str(fault) else 1


def _join(start: dict[str, Any]) -> RankHost:
    rank, kind = start["rank"], start["device"]
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(start["threads"])
    store = dist.TCPStore("127.0.0.1", start["port"], is_master=False)
    join_group(store, device, rank, start["size"])
    return RankHost(device)


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
