"""HTTP requests with JSON to one server: connections stay open between requests, and all can be broken at once.

Each request waits in a daemon thread of its own, with a short limit for connecting and one for the reply; redirects are not
followed, since they would carry the key elsewhere. The standard library serves: httpx2, which comes with Transformers, took 1.6
times as long for one small request and 7 times for each of 512 at a time, and 512 dialogues are nothing unusual. Knows no
protocol above HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import http.client
import json
import os
import re
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from turnwise.errors import ServerFault, SettingError
from turnwise.workers.sockets import keep_alive
from turnwise.workers.tokens import find_token

CONNECT_SECONDS = 2.0
IDLE_SECONDS = 2.0  # after which a connection is not used again: servers close idle ones, some after five seconds
MAX_FOREIGN_REPLY = 32 * 2**20  # bytes of a server that is not the run's
CHUNK = 65_536
HEADERS = {"Accept": "application/json", "Content-Type": "application/json", "User-Agent": "turnwise"}
OVERFLOW = re.compile(
    r"context[ _](length|window|size)|maximum context|too many tokens|(prompt|input) is too long|exceeds? .{0,20}context",
    re.IGNORECASE,
)
Result = TypeVar("Result")


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is, and the key that opens it. The key never appears in a text."""

    url: str  # without a slash at the end
    key: str = field(default="", repr=False)

    @classmethod
    def read(
        cls, url: str, key_variable: str = "", flag: str = "policy", words: str = "", path: str = "/v1"
    ) -> ServerAddress:
        """From what the user wrote. ``key_variable`` names the environment variable that holds the key, ``words`` what else the
        setting accepts, ``path`` how such an address ends."""
        text = url.strip().removesuffix("/").removesuffix("/chat/completions").rstrip("/")
        parts = urllib.parse.urlsplit(text)
        if parts.username or parts.password:
            raise SettingError(f"--{flag} holds a password; write the address alone, and --{flag}-key-env VARIABLE")
        usable = False
        with contextlib.suppress(ValueError):  # the port is no number of a port
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and parts.port != -1
        if not usable:
            raise SettingError(f"--{flag} is {url!r}; write an address such as http://localhost:8000{path}{words}")
        key = os.environ.get(key_variable, "").strip()
        if key or not key_variable:
            return cls(text, key)
        # what is no name, or begins as many keys do, is probably the key itself: it is not repeated here
        name = re.fullmatch(r"[A-Za-z_]\w*", key_variable) and not key_variable.startswith("sk")
        wanted = f"--{flag}-key-env takes the name of an environment variable that is set, not the key"
        unset = f"the environment variable {key_variable} is not set; --{flag}-key-env reads the key from it"
        raise SettingError(unset if name else wanted)

    @property
    def token(self) -> str:
        """The key; where the user named none, what a server of ours on this machine wrote for the runs of its user."""
        return self.key or find_token(self.url)

    def hide(self, text: str) -> str:
        """``text`` without the key: a server may repeat it in its message."""
        return text.replace(self.token, "***") if self.token else text


@dataclass(frozen=True)
class HttpReply:
    """Status, headers in lower case, and body of a reply."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON; None if it is not."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def text(self, limit: int = 300) -> str:
        """The beginning of the body on one line."""
        return " ".join(self.body[: 4 * limit].decode("utf-8", "replace").split())[:limit]


class _Request:
    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection, self.broken = connection, False

    def end(self) -> None:
        """Whoever waits for the reply gets an error."""
        self.broken = True
        if (opened := self.connection.sock) is not None:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)


class HttpPool:
    """Requests to one server. ``foreign``: one that is not the run's own; the proxies of the environment (``HTTPS_PROXY``,
    ``NO_PROXY``) are honoured, and its replies have a limit."""

    def __init__(self, address: ServerAddress, foreign: bool = False) -> None:
        self.address, self.foreign = address, foreign
        self._parts = urllib.parse.urlsplit(address.url)
        self._proxy = self._find_proxy() if foreign else None
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._busy: set[_Request] = set()
        self._lock = threading.Lock()

    async def call(self, path: str, body: Mapping[str, Any] | None = None, seconds: float | None = 30.0) -> HttpReply:
        """GET, or POST where there is a body. Raises ``ServerFault`` if the server cannot be reached, or is silent for
        ``seconds``; None waits until ``interrupt``. Where nobody waits any longer, the connection ends, and with it the server's
        work."""
        request = self._begin()
        try:
            return await in_daemon_thread(lambda: self.exchange(path, body, seconds, request))
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

    def exchange(
        self, path: str, body: Mapping[str, Any] | None, seconds: float | None, request: _Request | None = None
    ) -> HttpReply:
        """``call``, in this thread. ``request``: one that was begun, so that another thread can break it."""
        request = request or self._begin()
        # read for each request: a server of ours that was started again has another one
        key = self.address.token
        headers = {**HEADERS, **({"Authorization": f"Bearer {key}"} if key else {})}
        connection, connected, keep = request.connection, False, False
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
            target = f"{self._parts.path}{path}"
            # a proxy of HTTP is asked for the whole address; through that of HTTPS goes a tunnel
            if self._proxy is not None and self._parts.scheme == "http":
                target, headers = f"{self.address.url}{path}", {**headers, **self._proxy[2]}
            connection.request("GET" if body is None else "POST", target, data, headers)
            acknowledge_at_once(opened)
            reply = connection.getresponse()
            received = self._read(reply, seconds)
            keep = not reply.will_close
        except (OSError, http.client.HTTPException, ValueError) as fault:
            raise ServerFault(self.address.hide(fault_words(fault, connected, seconds))) from None
        finally:
            with self._lock:
                self._busy.discard(request)
                keep = keep and not request.broken
                if keep:
                    self._idle.append((connection, time.monotonic()))
            if not keep:
                connection.close()
        return received

    def _read(self, reply: http.client.HTTPResponse, seconds: float | None) -> HttpReply:
        # the limit holds for the whole body: a server that sends a byte now and then is silent, too
        deadline, received = time.monotonic() + (seconds or float("inf")), bytearray()
        while chunk := reply.read1(CHUNK):
            received += chunk
            if time.monotonic() > deadline:
                raise TimeoutError
            if self.foreign and len(received) > MAX_FOREIGN_REPLY:
                raise ValueError(f"the reply is longer than {MAX_FOREIGN_REPLY} bytes")
        if reply.length:  # of the body, and still missing
            raise http.client.IncompleteRead(bytes(received), reply.length)
        reply.close()  # otherwise the connection takes no other request
        return HttpReply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, bytes(received))

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
        secure, host, port = self._parts.scheme == "https", self._parts.hostname or "", self._parts.port
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        if self._proxy is None:
            return kind(host, port)
        connection = kind(*self._proxy[:2])
        if secure:
            connection.set_tunnel(host, port, self._proxy[2])
        return connection

    def _find_proxy(self) -> tuple[str, int, dict[str, str]] | None:
        """Host, port and headers of the proxy that the environment names for this address."""
        url = urllib.request.getproxies().get(self._parts.scheme, "")
        if not url or urllib.request.proxy_bypass(self._parts.netloc):
            return None
        proxy = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        user = f"{urllib.parse.unquote(proxy.username or '')}:{urllib.parse.unquote(proxy.password or '')}"
        key = base64.b64encode(user.encode()).decode()
        return proxy.hostname or "", proxy.port or 80, {"Proxy-Authorization": f"Basic {key}"} if proxy.username else {}


def acknowledge_at_once(connection: socket.socket) -> None:
    # some servers send headers and body apart, and the body only when the headers are acknowledged: by default 40 ms later
    if hasattr(socket, "TCP_QUICKACK"):  # of Linux; holds until the system changes it, so it is set for each reply
        with contextlib.suppress(OSError):  # a system that refuses it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def fault_words(fault: Exception, connected: bool, seconds: float | None) -> str:
    if isinstance(fault, TimeoutError):
        return f"no reply within {seconds:g} s" if connected else f"no connection within {CONNECT_SECONDS:g} s"
    if isinstance(fault, OSError) and fault.errno in (errno.EMFILE, errno.ENFILE):
        return f"no connection: this process has too many open files ({fault.strerror}); allow more: ulimit -n 65536"
    if not connected and isinstance(fault, OSError):
        return f"no connection: {fault.strerror or fault}"
    return f"the connection broke ({str(fault) or type(fault).__name__})"


def expect(holds: object, text: str, *seen: Any) -> None:
    """Raise a ``ServerFault`` with ``text`` about what was ``seen``, unless a condition about a reply holds."""
    if not holds:
        raise ServerFault(text.format(*seen))


def error_text(value: Any, fallback: str) -> str:
    error = value.get("error", value) if isinstance(value, Mapping) else value
    message = error.get("message", error.get("detail")) if isinstance(error, Mapping) else error
    text = message if isinstance(message, str) and message.strip() else fallback
    return " ".join(text.split())[:300]


def error_code(value: Any) -> Any:
    error = value.get("error") if isinstance(value, Mapping) else None
    return error.get("code") if isinstance(error, Mapping) else None


def is_overflow(status: int, value: Any, text: str) -> bool:
    return error_code(value) == "context_length_exceeded" or (status in (400, 413, 422) and bool(OVERFLOW.search(text)))


async def in_daemon_thread(work: Callable[[], Result]) -> Result:
    """The result of ``work``. A daemon thread does not keep the process alive when the user stops it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def resolve(value: Any, fault: BaseException | None) -> None:
        if not future.done():  # cancelled meanwhile
            future.set_exception(fault) if fault else future.set_result(value)

    def run() -> None:
        value, fault = None, None
        try:
            value = work()
        except BaseException as raised:
            fault = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(resolve, value, fault)

    threading.Thread(target=run, daemon=True, name="turnwise-http").start()
    return await future
