"""What torchrun tells a process that it started. Knows environment variables only; imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from turnwise.errors import SettingError

RUN = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class TorchrunRank:
    """One of the ``size`` processes that torchrun started, ``local_size`` of them on this machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int  # number of this machine
    address: str  # of the machine of rank 0
    attempt: int = 0  # how often torchrun has started all of them again


def torchrun_rank() -> TorchrunRank | None:
    """Which rank this process is; None: torchrun did not start it."""
    if RUN not in os.environ:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    try:
        rank, size, local_rank, local_size, node = (int(os.environ[name]) for name in names)
        address = os.environ["MASTER_ADDR"]
    except (KeyError, ValueError) as fault:
        raise SettingError(
            f"torchrun started this process, but did not say which rank it is ({fault}); unset {RUN} if it did not"
        ) from None
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return TorchrunRank(rank, size, local_rank, local_size, node, address, attempt)


def ranks_here(ranks: int) -> int:
    """How many of a learner's ranks are on this machine."""
    started = torchrun_rank()
    return ranks if started is None else started.local_size


def check_torchrun(ranks: int, on_cluster: bool = False) -> None:
    """Refuse a number of ranks that torchrun did not start."""
    started = torchrun_rank()
    if started is None:
        return
    if on_cluster:
        raise SettingError("torchrun and --cluster both place the ranks of the learner; leave one of them out")
    if started.size != ranks:
        raise SettingError(
            f"torchrun started {started.size} processes, and ranks is {ranks}; write --ranks {started.size}, or start turnwise "
            "without torchrun"
        )
