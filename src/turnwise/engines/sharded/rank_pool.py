"""The processes of a sharded learner: start them, let all ranks do the same thing at the same time, notice when one dies.

Rank 0 is the calling process. It starts the others, or torchrun has started all of them (``joined_ranks``). It sends each other
rank a verb with arguments, does its own part, and collects the answers.
Between verbs the others wait at their pipes, so a fault of the caller leaves no rank inside a collective operation.

Knows processes and pipes; does not know what the verbs compute.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from turnwise.engines.sharded import messages
from turnwise.engines.sharded.joined_ranks import JoinedRank, accept_ranks, open_store, shared_interface
from turnwise.engines.sharded.torchrun import TorchrunRank, check_torchrun, torchrun_rank
from turnwise.errors import RankFault, SettingError, TurnwiseError
from turnwise.workers.process import WorkerProcess, WorkerStuck

WORKER = "turnwise.engines.sharded.worker"
START_SECONDS = 300.0  # until a rank has imported torch and built its part of the model
ANSWER_SECONDS = 300.0  # the longest verb: a rank that is stopped or stuck is named after that
NAMING_SECONDS = 5.0  # until a rank that broke a connection shows as ended
FILE_SECONDS = 3600.0  # until a rank that reads or writes its files counts as stuck: a slow disk is no fault
LOST_PEER = 3  # exit status of a rank that ends because another one is gone
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class VerbHost(Protocol):
    """What a rank does its verbs with."""

    def do(self, verb: str, *arguments: Any) -> Any: ...


LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def join_group(store: dist.Store, device: torch.device, rank: int, size: int, own_interface: str = LOOPBACK) -> None:
    """Become a rank of the process group. ``own_interface``: of the network, over which gloo connects where the user named none;
    empty: the one that the name of this machine resolves to."""
    interface = "GLOO_SOCKET_IFNAME"
    chosen = interface in os.environ or not own_interface
    if not chosen:
        os.environ[interface] = own_interface
    try:
        timeout = datetime.timedelta(seconds=ANSWER_SECONDS)
        dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=size, timeout=timeout)
    finally:
        if not chosen:
            del os.environ[interface]


class _Rank(WorkerProcess):
    """The process of another rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(WORKER, seconds=ANSWER_SECONDS)
        self.rank = rank

    @property
    def lost_peer(self) -> bool:
        """Whether it ended because another rank had."""
        return self.process.returncode == LOST_PEER

    def send(self, message: object) -> None:
        """``RankFault`` where it reads nothing: a message that does not fit the pipe's buffer waits for its reader."""
        try:
            self.send_bytes(messages.encode(message))
        except WorkerStuck as stuck:
            raise RankFault(f"rank {self.rank} does not answer: {stuck}") from None


class RankProcess(NamedTuple):
    """The process of a rank, as the system of its machine knows it."""

    number: int
    machine: str = ""  # where it is not this one
    ended: bool = False  # or cannot be reached; told of other machines only


@dataclass
class RankPool:
    """``size`` ranks, of which the calling process is the first. ``host``: what does the verbs here, as ``worker`` does there."""

    size: int
    device: torch.device
    threads: int = 1  # of rank 0 while it does its part
    workers: list[_Rank | JoinedRank] = field(default_factory=list)
    host: VerbHost | None = None
    joined: bool = False  # torchrun started the others
    interface: str = LOOPBACK  # of the network, by which they reach this process
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def start(self, host: VerbHost) -> RankPool:
        """Start the other ranks, or let those of torchrun connect, and form the process group."""
        if dist.is_initialized():
            raise SettingError(
                "this process already belongs to a torch process group, so it cannot have ranks of its own; close the other "
                "learner with ranks first"
            )
        self.host, started = host, torchrun_rank()
        check_torchrun(self.size)
        try:
            store = self._start_workers() if started is None else self._accept_workers(started)
            with self._faults():
                for worker in self.workers:
                    self._answer(worker, START_SECONDS)  # imported: now the group can meet
                self._form_group(store)
        except BaseException:
            self.close()
            raise
        return self

    def _start_workers(self) -> dist.Store:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(1, self.size):
            self.workers.append(_Rank(rank))
            start = {"rank": rank, "size": self.size, "port": store.port, "device": self.device.type}
            self.workers[-1].send({**start, "threads": self.threads})
        return store

    def _accept_workers(self, started: TorchrunRank) -> dist.Store:
        store = open_store(started)
        others = accept_ranks(store, started, START_SECONDS, ANSWER_SECONDS)
        self.workers, self.joined = [*others], True
        self.interface = shared_interface(others, LOOPBACK)
        for other in others:
            here = self.interface if other.node == 0 else ""  # of this machine
            other.send({"device": self.device.type, "threads": self.threads, "interface": here})
        return store

    def _form_group(self, store: dist.Store) -> None:
        if not self.joined:
            join_group(store, self.device, 0, self.size)
            return
        try:
            join_group(store, self.device, 0, self.size, self.interface)
        except RuntimeError as fault:
            time.sleep(min(1.0, NAMING_SECONDS))  # a rank that ended may show a little later
            lost_peer, rank, how = next(iter(self._ended()), (True, 0, ""))
            if not lost_peer:  # otherwise it ended for want of a connection
                raise RankFault(f"rank {rank} of {self.size} {how}") from fault
            raise RankFault(
                f"torch could not connect the ranks ({str(fault).splitlines()[0]}); GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
                "name the network interface that they use, on each machine"
            ) from fault

    @property
    def several_machines(self) -> bool:
        return any(isinstance(worker, JoinedRank) and worker.node for worker in self.workers)

    @property
    def processes(self) -> list[RankProcess]:
        """Those of ranks 1, 2 ..."""
        return [
            RankProcess(worker.process, worker.elsewhere, bool(worker.elsewhere and worker.how_it_ended()))
            if isinstance(worker, JoinedRank)
            else RankProcess(worker.process.pid)
            for worker in list(self.workers)
        ]

    def call(
        self, verb: str, *shared: Any, each: Sequence[Sequence[Any]] | None = None, seconds: float = 0.0
    ) -> list[Any]:
        """Let every rank do ``verb`` with the shared arguments and its own of ``each``; the answers by rank. ``seconds``: until a
        rank counts as stuck, where the verb may take longer than others."""
        own = [tuple(arguments) for arguments in each] if each is not None else [()] * self.size
        with self._lock, self._faults():
            assert self.host is not None
            for worker in self.workers:
                worker.send((verb, (*shared, *own[worker.rank])))
            with _threads(self.threads):
                first = self.host.do(verb, *shared, *own[0])
            return [first, *(self._answer(worker, seconds or ANSWER_SECONDS) for worker in self.workers)]

    def _answer(self, worker: _Rank | JoinedRank, seconds: float) -> Any:
        until = time.monotonic() + seconds
        while not worker.connection.poll(0.2):
            self._check_alive()
            if time.monotonic() > until:
                raise RankFault(
                    f"rank {worker.rank} of {self.size} has not answered for {seconds:.0f} s: it is stopped or stuck"
                )
        try:
            fault, value = messages.receive(worker.connection)
        except (EOFError, OSError):
            raise _Broken from None
        if fault is not None:
            raise fault if isinstance(fault, TurnwiseError) else RankFault(f"rank {worker.rank} failed: {fault}")
        return value

    def _check_alive(self) -> None:
        """Name the rank that has ended: one that did not end because of another, which may show a little later."""
        until = time.monotonic() + NAMING_SECONDS
        while ended := self._ended():
            lost_peer, rank, how = ended[0]
            if not lost_peer or time.monotonic() > until:
                raise RankFault(f"rank {rank} of {self.size} {how}")
            time.sleep(0.05)

    def _ended(self) -> list[tuple[bool, int, str]]:
        """(whether it ended because of another, the rank, how it ended), those that did not first."""
        return sorted((w.lost_peer, w.rank, how) for w in self.workers if (how := w.how_it_ended()))

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """After any fault the ranks are no longer in step, so all end. A rank that dies breaks the connections of the others,
        here or inside torch: find out which one it was."""
        if self.host is None:
            raise RankFault("the ranks of this learner have ended")
        try:
            yield
        except BaseException as fault:
            named = None if isinstance(fault, TurnwiseError) else self._dead_rank(fault)
            self.close()
            if named is not None:
                raise named from fault
            raise

    def _dead_rank(self, fault: BaseException) -> RankFault | None:
        """The rank that ended and thereby caused this fault of a connection; None: it has another cause."""
        if not isinstance(fault, _Broken | OSError | RuntimeError):
            return None
        until = time.monotonic() + NAMING_SECONDS
        while time.monotonic() < until:
            try:
                self._check_alive()
            except RankFault as named:
                return named
            time.sleep(0.05)
        if "gloo" not in str(fault) and not isinstance(fault, dist.DistError):
            return None
        silent = [worker.rank for worker in self.workers if not worker.connection.poll(0)]
        return RankFault(f"rank {silent[0]} of {self.size} is stopped or stuck") if silent else None

    def close(self) -> None:
        """End the other ranks and leave the process group."""
        workers, self.workers, self.host = self.workers, [], None
        for worker in workers:
            worker.close()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Broken(Exception):
    """The pipe to a rank is closed."""


@contextlib.contextmanager
def shared_file(pool: RankPool, value: object) -> Iterator[Path]:
    """A file that holds ``value`` for the ranks to load, while this context is open: too large for a pipe. Other machines get
    a copy of the same name."""
    with tempfile.TemporaryDirectory(prefix="turnwise-ranks-") as folder:
        path = Path(folder) / "start.pt"
        torch.save(value, path)
        if not pool.several_machines:
            yield path
            return
        pool.call("copy_file", path, path.stat().st_size, seconds=FILE_SECONDS)
        try:
            yield path
        finally:
            if pool.host is not None:
                pool.call("remove_copies")
