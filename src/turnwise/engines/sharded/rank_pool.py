"""The processes of a learner over several ranks, as rank 0 sees them: start them, let all make the same call of their learner at
the same time, notice which one dies.

Rank 0 is the calling process. It starts the others, or torchrun has started all of them; from then on there is no difference.
Rank 0 broadcasts each call of its learner (the name of a method, its arguments), the others make it too (``worker``), and what
they tell each other meanwhile goes through collective operations of torch. These are neither encrypted nor protected by a
password, and objects among them are pickled: use ranks on machines and in a network that you trust.

A rank that fails says why in the store by which the ranks met. After any fault all are told there to end, and say that they do;
one that died says nothing, and that is how it is found.
Knows processes and groups; does not know what the calls compute.
"""

from __future__ import annotations

import contextlib
import copyreg
import datetime
import fcntl
import io
import itertools
import json
import os
import pickle
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from turnwise.engines.sharded.torchrun import TorchrunRank, check_torchrun, torchrun_rank
from turnwise.errors import RankFault, SettingError, TurnwiseError
from turnwise.workers.process import WorkerProcess

WORKER = "turnwise.engines.sharded.worker"
START_SECONDS = 300.0  # until a rank has imported torch
ANSWER_SECONDS = 300.0  # of one collective operation: a rank that is stopped or stuck is named after that
NAMING_SECONDS = 10.0  # until every rank that still runs has said that it ends, after another one failed
FILE_SECONDS = 3600.0  # until a rank that reads or writes its files counts as stuck: a slow disk is no fault
IDLE = datetime.timedelta(days=365)  # rank 0 may sample as long as it likes before its next call
BEAT_SECONDS = 1.0  # between two signs of life of a rank ...
SILENT_SECONDS = 20.0  # ... which counts as ended after so long without one
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SIOCGIFADDR = 0x8915  # Linux: the address of an interface
START, OVER, INTERFACE, END = "start", "over", "interface", "end"  # in the store, beside what each rank has there:
ABOUT, FAULT, BEAT = "about/{}", "fault/{}", "beat/{}"
CALL = "call/{}"  # the number of each call that rank 0 has begun


# ------------------------------------------------------------------- the group


def open_store(started: TorchrunRank) -> dist.Store:
    """The store that all ranks of this attempt of torchrun share."""
    store, _, _ = next(rendezvous("env://", rank=started.rank, world_size=started.size))
    return dist.PrefixStore(f"turnwise/{started.attempt}", store)


def join_group(store: dist.Store, device: torch.device, rank: int, size: int, interface: str = LOOPBACK) -> Any:
    """Become a rank of torch's default group, and of one whose operations may take ``FILE_SECONDS``, which is returned.
    ``interface``: of the network, over which gloo connects where the user named none; empty: the one that the name of this
    machine resolves to."""
    name = "GLOO_SOCKET_IFNAME"
    chosen = name in os.environ or not interface
    if not chosen:
        os.environ[name] = interface
    try:
        timeout = datetime.timedelta(seconds=ANSWER_SECONDS)
        dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=size, timeout=timeout)
        return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=FILE_SECONDS))
    finally:
        if not chosen:
            del os.environ[name]


def interface_toward(address: str) -> tuple[str, str]:
    """This machine's address on the way to another one, and the network interface that has it; empty where none is known."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: the system looks the way up
        here = probe.getsockname()[0]
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                if socket.inet_ntoa(answer[20:24]) == here:
                    return here, name
        return here, ""
    return "", ""


def send_call(store: dist.Store, number: int, call: tuple[str, tuple[Any, ...]] | None) -> None:
    """Give the others the next call, from rank 0; None: there are no more."""
    data = io.BytesIO()
    pickler = pickle.Pickler(data, protocol=5)
    # a batch has many small tensors, and torch's way to pickle one takes five times as long
    as_array = lambda t: (torch.from_numpy, (t.detach().cpu().contiguous().numpy(),))  # noqa: E731
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: as_array}
    pickler.dump(call)
    store.set(CALL.format(number), "")
    dist.broadcast_object_list([data.getvalue()], 0)


def next_call(store: dist.Store, number: int) -> tuple[str, tuple[Any, ...]] | None:
    """Wait for the next call of rank 0. In the store, because a collective operation would end for want of an answer."""
    store.wait([CALL.format(number)], IDLE)
    box: list[Any] = [None]
    dist.broadcast_object_list(box, 0)
    return pickle.loads(box[0])


def say_end(store: dist.Store, rank: int, reason: TurnwiseError | str) -> None:
    """Say why this rank ends, once. An empty reason: because another one failed."""
    with contextlib.suppress(dist.DistError):  # rank 0 has ended, and the store with it
        store.compare_set(FAULT.format(rank), "", pickle.dumps(reason).hex())


def lost_connection(fault: BaseException) -> bool:
    """Whether a collective operation failed because another rank is gone or stuck."""
    return isinstance(fault, dist.DistError) or "gloo" in str(fault)


# ----------------------------------------------------------------------- rank 0


class RankProcess(NamedTuple):
    """The process of a rank, as the system of its machine knows it."""

    number: int
    machine: str = ""  # where it is not this one
    ended: bool = False  # or cannot be reached; told of other machines only


@dataclass
class Peer:
    """Another rank. ``about``: what it has said of itself; ``process``: where this process has started it."""

    rank: int
    process: WorkerProcess | None = None
    about: dict[str, Any] | None = None
    beats: int = -1  # signs of life so far ...
    heard: float = 0.0  # ... and when the last one came


class RankPool:
    """``size`` ranks, of which the calling process is the first."""

    def __init__(self, size: int, device: torch.device | str = "cpu", threads: int = 1) -> None:
        """Start the other ranks, or meet those of torchrun, and form the process group. ``threads``: of each rank."""
        if dist.is_initialized():
            raise SettingError(
                "this process already belongs to a torch process group, so it cannot have ranks of its own; close the other "
                "learner with ranks first"
            )
        check_torchrun(size)
        gpu = torch.device(device).type == "cuda"
        self.size, self.device, self.threads = size, torch.device("cuda", 0) if gpu else torch.device(device), threads
        self.peers = [Peer(rank) for rank in range(1, size)]
        self.files: Any = None  # a group whose operations may take long; None: the ranks have ended
        self._lock, self._caller, self._calls, self._left = threading.RLock(), 0, itertools.count(), False
        try:
            self._start(torchrun_rank())
        except BaseException:
            self.close()
            raise

    def _start(self, started: TorchrunRank | None) -> None:
        start = {"device": self.device.type, "threads": self.threads}
        if started is None:
            # our own socket: torch's would listen on every interface, and what is in the store is unpickled
            listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
            port = int(listener.getsockname()[1])
            self.store: dist.Store = dist.TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            for peer in self.peers:
                place = TorchrunRank(peer.rank, self.size, peer.rank, self.size, 0, "127.0.0.1")
                peer.process = WorkerProcess(WORKER, port, asdict(place), start)
        else:
            self.store = open_store(started)
            self.store.set(START, json.dumps(start))
        # Until every other rank has said where it is: then it has imported torch, and the group can be formed.
        until, address = time.monotonic() + START_SECONDS, started.address if started else "127.0.0.1"
        while missing := [peer for peer in self.peers if peer.about is None]:
            for peer in missing:
                if self.store.check([ABOUT.format(peer.rank)]):
                    peer.about = json.loads(self.store.get(ABOUT.format(peer.rank)))
                elif peer.process is not None and (how := peer.process.how_it_ended()):
                    raise RankFault(f"rank {peer.rank} of {self.size} {how}")
            if time.monotonic() > until:
                raise RankFault(
                    f"ranks {[peer.rank for peer in missing]} of {self.size} did not connect to {address} within "
                    f"{START_SECONDS:.0f} s; see the output of torchrun on their machines, and whether they can reach this one"
                )
            time.sleep(0.02)
        elsewhere = [peer.about["address"] for peer in self.peers if peer.about and peer.about["node"]]
        self.several_machines = bool(elsewhere)
        # by the way to a rank on another machine: one of this machine may know an address that leads nowhere else
        interface = interface_toward(elsewhere[0])[1] if elsewhere else LOOPBACK
        self.store.set(INTERFACE, interface)
        try:
            self.files = join_group(self.store, self.device, 0, self.size, interface)
        except RuntimeError as fault:
            raise self._cause(fault, name_silent=False) or RankFault(
                f"torch could not connect the ranks ({str(fault).splitlines()[0]}); GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
                "name the network interface that they use, on each machine"
            ) from fault

    @property
    def processes(self) -> list[RankProcess]:
        """Those of ranks 1, 2 ..."""
        processes = []
        for peer in self.peers:
            about = peer.about or {"process": 0, "node": 0}
            machine, ended = about["host"] if about["node"] else "", False
            if machine:  # only signs of life tell of a process on another machine
                with contextlib.suppress(dist.DistError):  # torchrun itself is gone
                    beats = self.store.add(BEAT.format(peer.rank), 0)
                    if beats != peer.beats:
                        peer.beats, peer.heard = beats, time.monotonic()
                ended = time.monotonic() - peer.heard >= SILENT_SECONDS
            processes.append(RankProcess(about["process"], machine, ended))
        return processes

    def call(
        self, method: Callable[..., Any], learner: Any, *arguments: Any, of_others: tuple[Any, ...] | None = None
    ) -> Any:
        """Let every rank make this call of its learner; what it returns here. ``of_others``: the arguments of the other ranks,
        where they are not the same."""
        if self._caller == threading.get_ident():  # inside another call, and so are the others
            return method(learner, *arguments)
        with self._lock:
            if self.files is None:
                raise RankFault("the ranks of this learner have ended")
            # rank 0 computes with as many threads as the others while they share the cores, and samples with its own number
            self._caller, threads = threading.get_ident(), torch.get_num_threads()
            torch.set_num_threads(self.threads)
            try:
                send_call(self.store, next(self._calls), (method.__name__, of_others or arguments))
                return method(learner, *arguments)
            except BaseException as fault:  # the ranks are no longer in step, so all end
                self.files = None
                cause = None if isinstance(fault, TurnwiseError) else self._cause(fault)
                self.close()
                if cause is not None:
                    raise cause from fault
                raise
            finally:
                self._caller = 0
                torch.set_num_threads(threads)

    def _cause(self, fault: BaseException, name_silent: bool = True) -> BaseException | None:
        """What another rank did that broke a connection here; None: this fault has its cause here. ``name_silent``: blame a rank
        that is neither seen to end nor says anything."""
        if not isinstance(fault, OSError | RuntimeError):
            return None
        self.store.set(END, "")  # a thread of each rank sees it, whatever the rank waits for
        until, silent = time.monotonic() + NAMING_SECONDS, list(self.peers)
        while silent and time.monotonic() < until:
            for peer in list(silent):
                how, key = peer.process.how_it_ended() if peer.process is not None else "", FAULT.format(peer.rank)
                # empty: it ended because another one failed; None: it has said nothing
                said = pickle.loads(bytes.fromhex(self.store.get(key).decode())) if self.store.check([key]) else None
                if isinstance(said, TurnwiseError):
                    return said
                if said or (how and said is None):
                    return RankFault(f"rank {peer.rank} of {self.size} {f'failed: {said}' if said else how}")
                if said is not None:
                    silent.remove(peer)
            time.sleep(0.05)
        if not silent or not name_silent or not lost_connection(fault):
            return None
        peer = silent[0]
        if peer.process is not None or peer.about is None:
            return RankFault(f"rank {peer.rank} of {self.size} is stopped or stuck")
        return RankFault(
            f"rank {peer.rank} of {self.size} (process {peer.about['process']} on {peer.about['host']}) has ended or cannot be "
            "reached; see the output of torchrun"
        )

    def close(self) -> None:
        """End the other ranks and leave the process group."""
        files, self.files = self.files, None
        if files is not None and any(peer.process is None for peer in self.peers):
            with contextlib.suppress(RuntimeError):  # one of them has died meanwhile
                send_call(self.store, next(self._calls), None)
        if not self._left and dist.is_initialized():  # once: a group that is formed later belongs to another pool
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        self._left = True
        for peer in self.peers:
            if peer.process is not None:
                peer.process.close()
        self.peers = []


def release_ranks(started: TorchrunRank) -> None:
    """Called by rank 0 at its end: the others of torchrun do not wait any longer for a learner, where there was none."""
    with contextlib.suppress(dist.DistError):  # torchrun itself is gone
        open_store(started).compare_set(START, "", OVER)
