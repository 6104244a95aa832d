"""Connections to one server that are kept open between requests, for many requests at a time; all can be interrupted at once.

Each request waits in a daemon thread of its own. Proxies are not used: these servers belong to the run. Knows no protocol above
HTTP.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from turnwise.engines.remote.transport import CONNECT_SECONDS, HttpReply, ServerAddress, in_daemon_thread
from turnwise.errors import ServerFault

IDLE_SECONDS = 2.0  # after which a connection is not used again: servers close idle ones, some after five seconds
HEADERS = {"Accept": "application/json", "Content-Type": "application/json", "User-Agent": "turnwise"}


class HttpPool:
    """Requests to one server."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        parts = urllib.parse.urlsplit(address.url)
        self._secure, self._place, self._path = parts.scheme == "https", parts.netloc.rpartition("@")[2], parts.path
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    async def call(self, path: str, body: Mapping[str, Any] | None = None, seconds: float | None = 30.0) -> HttpReply:
        """GET, or POST where there is a body. Raises ``ServerFault`` if the server cannot be reached, or is silent for
        ``seconds``; None waits until ``interrupt``."""
        return await in_daemon_thread(lambda: self.exchange(path, body, seconds))

    def interrupt(self) -> None:
        """Break every connection: whoever waits for a reply gets a ``ServerFault``."""
        with self._lock:
            connections = [*self._busy, *(connection for connection, _ in self._idle)]
            self._idle = []
        for connection in connections:
            if connection.sock is not None:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def exchange(self, path: str, body: Mapping[str, Any] | None, seconds: float | None) -> HttpReply:
        """``call``, in this thread."""
        headers = {**HEADERS, **({"Authorization": f"Bearer {self.address.key}"} if self.address.key else {})}
        data = None if body is None else json.dumps(body).encode()
        connection, connected = self._take(), False
        try:
            if connection.sock is None:
                connection.timeout = min(CONNECT_SECONDS, seconds or CONNECT_SECONDS)
                connection.connect()
            connected = True
            opened: socket.socket = connection.sock
            opened.settimeout(seconds)
            connection.request("GET" if body is None else "POST", f"{self._path}{path}", data, headers)
            acknowledge_at_once(opened)
            reply = connection.getresponse()
            received = HttpReply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        except (OSError, http.client.HTTPException, ValueError) as fault:
            self._drop(connection)
            raise ServerFault(self.address.hide(_words(fault, connected, seconds))) from None
        self._keep(connection, reply.will_close)
        return received

    def _take(self) -> http.client.HTTPConnection:
        with self._lock:
            now = time.monotonic()
            fresh = [(c, used) for c, used in self._idle if now - used < IDLE_SECONDS]
            old = [c for c, used in self._idle if now - used >= IDLE_SECONDS]
            connection = fresh.pop()[0] if fresh else self._new()
            self._idle = fresh
            self._busy.add(connection)
        for unused in old:
            unused.close()
        return connection

    def _new(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._place)

    def _keep(self, connection: http.client.HTTPConnection, closing: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if not closing:
                self._idle.append((connection, time.monotonic()))

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()


def acknowledge_at_once(connection: socket.socket) -> None:
    """Some servers send headers and body apart, and the body only when the headers are acknowledged: by default 40 ms later."""
    if hasattr(socket, "TCP_QUICKACK"):  # of Linux; holds until the system changes it, so it is set for each reply
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _words(fault: Exception, connected: bool, seconds: float | None) -> str:
    """What happened, in words."""
    if isinstance(fault, TimeoutError):
        return f"no reply within {seconds:g} s" if connected else f"no connection within {CONNECT_SECONDS:g} s"
    if not connected and isinstance(fault, OSError):
        return f"no connection: {fault.strerror or fault}"
    return f"the connection broke ({str(fault) or type(fault).__name__})"
