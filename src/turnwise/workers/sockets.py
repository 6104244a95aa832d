"""Options of sockets: how many there may be, and that the loss of the other machine is noticed. Knows no protocol."""

from __future__ import annotations

import contextlib
import socket

OPEN_FILES = 65_536
# a machine that is gone is noticed after two minutes, and a router does not forget a connection on which nothing is said
KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


def allow_many_files() -> None:
    """Raise this process's limit of open files, which many systems set to 1,024: each request that waits has a connection."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # a system without such limits, or one that refuses
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_alive(handle: socket.socket) -> None:
    # let the system ask regularly whether the other side is there. Where it refuses, nobody asks
    with contextlib.suppress(OSError):
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if hasattr(socket, name):
                handle.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
