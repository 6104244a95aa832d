"""Ranks that torchrun started, on one machine or on several: each connects to rank 0, then does what that says.

torchrun starts the same command once for each rank. Rank 0 runs it; the others serve its learner until it closes. Where rank 0
listens, and the key without which it refuses a connection, are in torchrun's own store, which is as open as the collective
operations of torch are: use it in a network that you trust. A second connection of each rank ends
with the process on the other side; on it a rank says only that it has lost another one.

Knows processes and connections; does not know what the verbs compute.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from turnwise.engines.sharded import messages
from turnwise.engines.sharded.rank_files import remove_copies
from turnwise.engines.sharded.torchrun import TorchrunRank
from turnwise.errors import RankFault
from turnwise.workers.sockets import keep_alive, set_timeout

WAIT_FOR_RUN = datetime.timedelta(days=7)  # rank 0 may download and prepare a model first; torchrun ends us if it fails
HELLO_SECONDS = 10.0  # until a connection that does not say which rank it is is closed
LISTENING, OVER = "listening", "over"
LOST_A_PEER = b"lost a peer"
SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def open_store(started: TorchrunRank) -> dist.Store:
    """The store that all ranks of this attempt share."""
    store, _, _ = next(rendezvous("env://", rank=started.rank, world_size=started.size))
    return dist.PrefixStore(f"turnwise/{started.attempt}", store)


@dataclass
class JoinedRank:
    """Another rank, as rank 0 sees it."""

    rank: int
    host: str
    process: int  # its id on its own machine
    node: int
    connection: Connection
    watch: Connection
    seconds: float
    _socket: socket.socket = field(init=False)
    _told: bool = False

    def __post_init__(self) -> None:
        self._socket = prepared(self.connection)
        prepared(self.watch).close()
        set_timeout(self._socket, socket.SO_SNDTIMEO, self.seconds)

    def send(self, message: object) -> None:
        try:
            self.connection.send_bytes(messages.encode(message))
        except BlockingIOError:
            raise RankFault(
                f"rank {self.rank} on {self.host} does not answer: it has read nothing for {self.seconds:.0f} s: it is stopped "
                "or stuck"
            ) from None

    @property
    def elsewhere(self) -> str:
        """Its machine; empty where that is this one."""
        return self.host if self.node else ""

    @property
    def own_interface(self) -> str:
        """The network interface by which rank 0 talks to it."""
        return interface_of(self._socket)

    @property
    def lost_peer(self) -> bool:
        """Whether it ended because another rank had: then it has said so."""
        with contextlib.suppress(OSError, EOFError):
            self._told = self._told or (self.watch.poll(0) and self.watch.recv_bytes() == LOST_A_PEER)
        return self._told

    def how_it_ended(self) -> str:
        """In words; empty while its connection stands."""
        try:
            ended = self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return ""
        except OSError:
            ended = True
        return (
            f"(process {self.process} on {self.host}) has ended or cannot be reached; see the output of torchrun"
            if ended
            else ""
        )

    def close(self) -> None:
        for connection in (self.connection, self.watch, self._socket):
            connection.close()


def accept_ranks(store: dist.Store, started: TorchrunRank, seconds: float, answer_seconds: float) -> list[JoinedRank]:
    """Wait until every other rank has connected. ``answer_seconds``: until one that reads nothing counts as stuck."""
    key, until = secrets.token_bytes(32), time.monotonic() + seconds
    hellos: dict[tuple[int, str], tuple[dict[str, Any], Connection]] = {}
    wanted = {(rank, part) for rank in range(1, started.size) for part in ("work", "watch")}
    with socket.create_server(("127.0.0.1" if started.one_machine else "", 0), backlog=2 * started.size) as listener:
        listener.settimeout(1.0)
        store.set(LISTENING, f"{listener.getsockname()[1]} {key.hex()}")
        while set(hellos) != wanted:
            with contextlib.suppress(OSError, AuthenticationError, EOFError):
                hello, connection = _authenticated(listener.accept()[0], key)
                hellos[hello["rank"], hello["part"]] = (hello, connection)
            if time.monotonic() > until:
                missing = sorted({rank for rank, _ in wanted - set(hellos)})
                for _, connection in hellos.values():
                    connection.close()
                raise RankFault(
                    f"ranks {missing} of {started.size} did not connect to {started.address} within {seconds:.0f} s; see the "
                    "output of torchrun on their machines, and whether they can reach this one"
                )
    ranks = []
    for rank in range(1, started.size):
        hello, connection = hellos[rank, "work"]
        watch = hellos[rank, "watch"][1]
        about = (rank, hello["host"], hello["process"], hello["node"])
        ranks.append(JoinedRank(*about, connection, watch, answer_seconds))
    return ranks


def release_ranks(started: TorchrunRank) -> None:
    """Called by rank 0 at its end: the others do not wait any longer for a learner, where there was none."""
    with contextlib.suppress(dist.DistError):  # torchrun itself is gone
        open_store(started).compare_set(LISTENING, "", OVER)


def lost_connection(fault: BaseException) -> bool:
    """Whether a collective operation failed because another rank is gone."""
    return isinstance(fault, dist.DistError) or "gloo" in str(fault)


def shared_interface(ranks: Sequence[JoinedRank], loopback: str) -> str:
    """The network interface of rank 0 that all ranks can reach; empty where it is not known. Ranks of its own machine may have
    connected by an address that leads nowhere else."""
    if not any(rank.node for rank in ranks):
        return loopback
    return next((rank.own_interface for rank in ranks if rank.node), "")


def prepared(connection: Connection) -> socket.socket:
    """A second handle of a connection, which then sends at once and notices when the other machine is gone."""
    handle = socket.socket(fileno=os.dup(connection.fileno()))
    handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # verbs are small, and each is awaited
    keep_alive(handle)
    return handle


def _authenticated(accepted: socket.socket, key: bytes) -> tuple[dict[str, Any], Connection]:
    """A connection whose other side has shown that it knows the key, and what it says of itself."""
    set_timeout(accepted, socket.SO_RCVTIMEO, HELLO_SECONDS)
    connection = Connection(os.dup(accepted.fileno()))
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        hello = messages.receive(connection)
    except BaseException:
        connection.close()
        raise
    finally:
        set_timeout(accepted, socket.SO_RCVTIMEO, 0.0)
        accepted.close()
    return hello, connection


def interface_of(connection: socket.socket) -> str:
    """The network interface of this side of a connection; empty where the system does not tell."""
    own = connection.getsockname()[0]
    for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # an interface without an address
            found = fcntl.ioctl(connection, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            if socket.inet_ntoa(found[20:24]) == own:
                return name
    return ""


@contextlib.contextmanager
def connected(started: TorchrunRank, ends_with: int) -> Iterator[tuple[Connection, dist.Store, str]]:
    """The connection of this process, rank 1 or higher, to rank 0, once that listens; the store, and the network interface. This
    process ends with the status ``ends_with`` when rank 0 has ended, also from inside a collective operation."""
    store = open_store(started)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python could not handle it while torch waits
    store.wait([LISTENING], WAIT_FOR_RUN)
    if (found := store.get(LISTENING).decode()) == OVER:
        raise SystemExit(0)
    port, key = found.split()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the run, whose rank 0 then closes
    hello = {"rank": started.rank, "node": started.node, "host": socket.gethostname(), "process": os.getpid()}

    def connect(part: str) -> Connection:
        connection = Client((started.address, int(port)), "AF_INET", authkey=bytes.fromhex(key))
        messages.send(connection, {**hello, "part": part})
        return connection

    work, watch = connect("work"), connect("watch")
    with prepared(work) as own:
        interface = interface_of(own)
    prepared(watch).close()
    over = threading.Event()

    def end_with_rank_0() -> None:
        with contextlib.suppress(EOFError, OSError):
            watch.recv_bytes()
        if not over.wait(5.0):  # where this process waits for a verb, it has noticed by itself
            remove_copies()
            os._exit(ends_with)

    threading.Thread(target=end_with_rank_0, daemon=True).start()
    try:
        yield work, store, interface
    except Exception as fault:
        if lost_connection(fault):
            with contextlib.suppress(OSError):
                watch.send_bytes(LOST_A_PEER)
        raise
    finally:
        over.set()
        remove_copies()
        work.close()
