"""HTTP requests with JSON, from a coroutine: one daemon thread per request, a short limit for connecting, one for the reply.

Uses the standard library: which HTTP package is installed beside Transformers depends on its version. Proxies of the environment
(``HTTPS_PROXY``, ``NO_PROXY``) are honoured; redirects are not followed, since they would carry the key elsewhere. Knows no
protocol above HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from turnwise.errors import ServerFault, SettingError

CONNECT_SECONDS = 2.0
MAX_REPLY_BYTES = 32 * 2**20
CHUNK = 65_536
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
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or _port(parts) is None:
            raise SettingError(f"--{flag} is {url!r}; write an address such as http://localhost:8000{path}{words}")
        return cls(text, _key(key_variable, flag))

    def hide(self, text: str) -> str:
        """``text`` without the key: a server may repeat it in its message."""
        return text.replace(self.key, "***") if self.key else text


def _port(parts: urllib.parse.SplitResult) -> int | None:
    """The port, 0 if none is given, None if it is not a number of a port."""
    try:
        return parts.port or 0
    except ValueError:
        return None


def _key(variable: str, flag: str) -> str:
    if not variable:
        return ""
    if not re.fullmatch(r"[A-Za-z_]\w*", variable):  # probably the key itself: it is not repeated here
        raise SettingError(f"--{flag}-key-env takes the name of an environment variable, not the key")
    value = os.environ.get(variable, "").strip()
    if not value and variable.startswith("sk"):
        raise SettingError(f"--{flag}-key-env takes the name of an environment variable; it names none that is set")
    if not value:
        raise SettingError(f"the environment variable {variable} is not set; --{flag}-key-env reads the key from it")
    return value


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


async def request(address: ServerAddress, path: str, body: Mapping[str, Any] | None, seconds: float) -> HttpReply:
    """GET, or POST where there is a body. Raises ``ServerFault`` if no reply comes within ``seconds``."""
    return await in_daemon_thread(lambda: _exchange(address, path, body, seconds))


def _exchange(address: ServerAddress, path: str, body: Mapping[str, Any] | None, seconds: float) -> HttpReply:
    headers = {"Accept": "application/json", "Content-Type": "application/json", "User-Agent": "turnwise"}
    if address.key:
        headers["Authorization"] = f"Bearer {address.key}"
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"{address.url}{path}", data, headers)
    deadline = time.monotonic() + seconds
    try:
        try:
            with _opener().open(asked, timeout=seconds) as reply:
                return _read(reply, deadline)
        except urllib.error.HTTPError as reply:  # a status of 300 and above is a reply like any other
            with reply:
                return _read(reply, deadline)
    except TimeoutError:
        raise ServerFault(f"no reply within {seconds:g} s") from None
    except urllib.error.URLError as fault:
        if isinstance(fault.reason, TimeoutError):
            raise ServerFault(f"no connection within {CONNECT_SECONDS:g} s") from None
        raise ServerFault(address.hide(f"no connection: {fault.reason}")) from None
    except (OSError, http.client.HTTPException, ValueError) as fault:
        raise ServerFault(address.hide(f"the connection broke: {type(fault).__name__}: {fault}")) from None


def _read(reply: Any, deadline: float) -> HttpReply:
    parts: list[bytes] = []
    while chunk := reply.read1(CHUNK):
        parts.append(chunk)
        if time.monotonic() > deadline:
            raise TimeoutError
        if sum(map(len, parts)) > MAX_REPLY_BYTES:
            raise ServerFault(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
    body = b"".join(parts)
    expected = reply.headers.get("Content-Length", "")
    if expected.isdigit() and len(body) < int(expected):
        raise http.client.IncompleteRead(body, int(expected) - len(body))
    return HttpReply(reply.status, {name.lower(): value for name, value in reply.headers.items()}, body)


# ------------------------------------------------------------------ connection


class _QuickConnect:
    """Connects under the short limit, then waits for the reply under the long one."""

    timeout: Any
    sock: Any

    def connect(self) -> None:
        seconds, self.timeout = self.timeout, min(self.timeout, CONNECT_SECONDS)
        super().connect()  # type: ignore[misc]
        self.timeout = seconds
        self.sock.settimeout(seconds)


class _HttpConnection(_QuickConnect, http.client.HTTPConnection):
    pass


class _HttpsConnection(_QuickConnect, http.client.HTTPSConnection):
    pass


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, asked: urllib.request.Request) -> Any:
        return self.do_open(_HttpConnection, asked)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, asked: urllib.request.Request) -> Any:
        return self.do_open(_HttpsConnection, asked)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_HttpHandler, _HttpsHandler, _NoRedirect)


# --------------------------------------------------------------------- threads


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
