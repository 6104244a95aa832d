"""Connections to one server that are kept open between requests, for many requests at a time; all can be interrupted at once.

Each request waits in a daemon thread of its own. Proxies are not used: these servers belong to the run. Knows no protocol above
HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
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
from turnwise.workers.sockets import keep_alive

IDLE_SECONDS = 2.0  # after which a connection is not used again: servers close idle ones, some after five seconds
HEADERS = {"Accept": "application/json", "Content-Type": "application/json", "User-Agent": "turnwise"}


class _Request:
    """One request, and the connection that it has."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection, self.broken = connection, False

    def end(self) -> None:
        """Whoever waits for the reply gets an error."""
        self.broken = True
        if (opened := self.connection.sock) is not None:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)


class HttpPool:
    """Requests to one server."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        parts = urllib.parse.urlsplit(address.url)
        self._secure, self._place, self._path = parts.scheme == "https", parts.netloc.rpartition("@")[2], parts.path
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._busy: set[_Request] = set()
        self._lock = threading.Lock()

    async def call(self, path: str, body: Mapping[str, Any] | None = None, seconds: float | None = 30.0) -> HttpReply:
        """GET, or POST where there is a body. Raises ``ServerFault`` if the server cannot be reached, or is silent for
        ``seconds``; None waits until ``interrupt``. Where nobody waits any longer, the connection ends, and with it the server's
        work."""
        request = self._begin()
        try:
            return await in_daemon_thread(lambda: self._exchange(request, path, body, seconds))
        except asyncio.CancelledError:
            with self._lock:
                if request in self._busy:  # otherwise another one may have its connection
                    request.end()
            raise

    def interrupt(self) -> None:
        """Break every connection: whoever waits for a reply gets a ``ServerFault``."""
        with self._lock:
            for request in self._busy:
                request.end()
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def exchange(self, path: str, body: Mapping[str, Any] | None, seconds: float | None) -> HttpReply:
        """``call``, in this thread."""
        return self._exchange(self._begin(), path, body, seconds)

    def _exchange(
        self, request: _Request, path: str, body: Mapping[str, Any] | None, seconds: float | None
    ) -> HttpReply:
        headers = {**HEADERS, **({"Authorization": f"Bearer {self.address.key}"} if self.address.key else {})}
        connection, connected = request.connection, False
        try:
            data = None if body is None else json.dumps(body).encode()
            if connection.sock is None:
                connection.timeout = min(CONNECT_SECONDS, seconds or CONNECT_SECONDS)
                connection.connect()
            connected = True
            if request.broken:  # while it connected, when there was nothing to break
                raise ConnectionResetError("nobody waits for the reply")
            opened: socket.socket = connection.sock
            keep_alive(opened)
            opened.settimeout(seconds)
            connection.request("GET" if body is None else "POST", f"{self._path}{path}", data, headers)
            acknowledge_at_once(opened)
            reply = connection.getresponse()
            received = HttpReply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        except (OSError, http.client.HTTPException, ValueError) as fault:
            self._drop(request)
            raise ServerFault(self.address.hide(_words(fault, connected, seconds))) from None
        except BaseException:
            self._drop(request)
            raise
        self._keep(request, reply.will_close)
        return received

    def _begin(self) -> _Request:
        with self._lock:
            now = time.monotonic()
            fresh = [(c, used) for c, used in self._idle if now - used < IDLE_SECONDS]
            old = [c for c, used in self._idle if now - used >= IDLE_SECONDS]
            request = _Request(fresh.pop()[0] if fresh else self._new())
            self._idle = fresh
            self._busy.add(request)
        for unused in old:
            unused.close()
        return request

    def _new(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._place)

    def _keep(self, request: _Request, closing: bool) -> None:
        with self._lock:
            self._busy.discard(request)
            if not (closing or request.broken):
                self._idle.append((request.connection, time.monotonic()))
                return
        request.connection.close()

    def _drop(self, request: _Request) -> None:
        with self._lock:
            self._busy.discard(request)
        request.connection.close()


def acknowledge_at_once(connection: socket.socket) -> None:
    """Some servers send headers and body apart, and the body only when the headers are acknowledged: by default 40 ms later."""
    if hasattr(socket, "TCP_QUICKACK"):  # of Linux; holds until the system changes it, so it is set for each reply
        with contextlib.suppress(OSError):  # a system that refuses it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _words(fault: Exception, connected: bool, seconds: float | None) -> str:
    """What happened, in words."""
    if isinstance(fault, TimeoutError):
        return f"no reply within {seconds:g} s" if connected else f"no connection within {CONNECT_SECONDS:g} s"
    if isinstance(fault, OSError) and fault.errno in (errno.EMFILE, errno.ENFILE):
        return (
            f"no connection: this process has too many open files ({fault.strerror}); raise the limit: ulimit -n 65536"
        )
    if not connected and isinstance(fault, OSError):
        return f"no connection: {fault.strerror or fault}"
    return f"the connection broke ({str(fault) or type(fault).__name__})"
