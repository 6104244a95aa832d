"""The program of ranks 1, 2 ...: hold a part of the learner, and make every call of it that rank 0 makes."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from turnwise.engines.sharded import rank_pool
from turnwise.engines.sharded.rank_pool import ABOUT, BEAT, BEAT_SECONDS, END, INTERFACE, OVER, START, START_SECONDS
from turnwise.engines.sharded.sharded_learner import ShardedLearner
from turnwise.engines.sharded.torchrun import TorchrunRank
from turnwise.errors import TurnwiseError

WAIT_FOR_RUN = datetime.timedelta(days=7)  # rank 0 may download and prepare a model first; torchrun ends us if it fails
LOST_PEER = 3  # exit status of a rank that ends because another one is gone


def main(descriptor: int, port: int, place: dict[str, Any], start: dict[str, Any]) -> int:
    """A rank that rank 0 has started, with a socket between them that nothing is sent through: it closes when either ends."""

    def end_with_rank_0() -> None:
        with contextlib.suppress(EOFError, OSError):
            Connection(descriptor).recv_bytes()
        os._exit(LOST_PEER)  # also from inside a collective operation

    threading.Thread(target=end_with_rank_0, daemon=True).start()
    return serve(dist.TCPStore("127.0.0.1", port, is_master=False), TorchrunRank(**place), start)


def main_of_torchrun(here: TorchrunRank) -> int:
    """What a process that torchrun started does as rank 1, 2 ... of a run, until that ends."""
    store = rank_pool.open_store(here)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python could not handle it while torch waits
    store.wait([START], WAIT_FOR_RUN)
    if (start := store.get(START).decode()) == OVER:
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the run, whose rank 0 then writes a checkpoint and closes
    return serve(store, here, json.loads(start))


def serve(store: dist.Store, here: TorchrunRank, start: dict[str, Any]) -> int:
    """Join rank 0, and make its calls. Returns the exit status; why it fails is told in the store, and in one line."""
    try:
        torch.set_num_threads(start["threads"])
        learner = ShardedLearner.__new__(ShardedLearner)  # its first call builds it
        learner.device = torch.device(start["device"])
        if learner.device.type == "cuda":
            learner.device = torch.device("cuda", here.local_rank)
            torch.cuda.set_device(learner.device)
        address, interface = rank_pool.interface_toward(here.address)
        place = {"host": socket.gethostname(), "process": os.getpid(), "node": here.node, "address": address}
        store.set(ABOUT.format(here.rank), json.dumps(place))
        store.wait([INTERFACE], datetime.timedelta(seconds=START_SECONDS))
        if not here.node:
            interface = store.get(INTERFACE).decode()
        learner.files = rank_pool.join_group(store, learner.device, here.rank, here.size, interface)
        threading.Thread(target=_live, args=(store.clone(), here.rank), daemon=True).start()  # type: ignore[attr-defined]
        for number in itertools.count():
            if (call := rank_pool.next_call(store, number)) is None:
                break
            getattr(learner, call[0])(*call[1])
            del call  # its batch
    except Exception as fault:
        lost = rank_pool.lost_connection(fault)
        line = f"{type(fault).__name__}: {str(fault).splitlines()[0] if str(fault) else ''}"
        reason: TurnwiseError | str = "" if lost else fault if isinstance(fault, TurnwiseError) else line
        rank_pool.say_end(store, here.rank, reason)
        print(line, file=sys.stderr, flush=True)
        return LOST_PEER if lost else 1
    dist.destroy_process_group()
    return 0


def _live(store: dist.Store, rank: int) -> None:
    """Give signs of life until rank 0 says that all end, or the store is gone: then end, also inside a collective operation."""
    with contextlib.suppress(dist.DistError):
        while not store.check([END]):
            store.add(BEAT.format(rank), 1)
            time.sleep(BEAT_SECONDS)
        rank_pool.say_end(store, rank, "")
    os._exit(LOST_PEER)
