"""The front of every server: who may ask, and how long a request may take to arrive. Knows nothing of what is served.

Any page in a browser of this machine can send requests to its loopback addresses, though it reads no reply, and so can any
process. So a request is answered only if

- its ``Host`` is a name of this server: a foreign name that was pointed to this machine makes a page of the same origin of it;
- ``Origin`` and ``Sec-Fetch-Site``, which a browser writes and a page cannot, name no other page. Following a link is no attack;
- a body says that it is JSON: a page may send forms and text anywhere, JSON only where the server agrees, and none of ours does;
- it carries the token of this start, or a key that was given to it with one.

A refused request is answered before its body is read, and its connection closed. Where a request does not arrive whole, the
connection is closed after a while.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from turnwise.rollout.agent_episode import CallRefused
from turnwise.serve.wires import CHAT, MESSAGES, STATUS, check
from turnwise.workers.tokens import LOOPBACK_NAMES

ARRIVAL_SECONDS = 20.0  # from the first byte of a request, or from its connection, to its last byte
GRACE_SECONDS = 1.0  # for what waits in the socket while the event loop is busy: that is not the client's fault
MAX_ARRIVING = 1024  # connections whose request has not arrived; more close the oldest, unless they all came just now
HOST = re.compile(r"\[?([\w.:-]*?)\]?(:\d+)?")
NAMES_VARIABLE = "TURNWISE_ENDPOINT_NAMES"


class Front:
    """An ASGI application before ``app``. ``admits`` says whether a request carries a token or key; ``refuse`` words a refusal;
    ``names``: hosts under which clients may reach the server, beside the address that they connected to."""

    def __init__(
        self,
        app: Any,
        admits: Callable[[Request], bool],
        names: Iterable[str] = LOOPBACK_NAMES,
        refuse: Callable[[Request, Any], Awaitable[Response]] | None = None,
    ) -> None:
        self.app, self.admits, self.names, self.refuse = app, admits, frozenset(names), refuse or refused
        self.forwarded = frozenset[str]()  # names that the user set: what forwards from there may have another port

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope)
        try:
            self.check(request)
        except CallRefused as refusal:
            response = await self.refuse(request, refusal)
            response.headers["Connection"] = "close"  # which a stranger cannot keep open
            await response(scope, receive, send)
            return
        await self.app({**scope, "headers": self._with_own_port(scope)}, receive, send)

    def _with_own_port(self, scope: Any) -> list[tuple[bytes, bytes]]:
        # the URL of a session is made of this header, and its port is the client's word
        port = (scope.get("server") or ("", None))[1]

        def own(name: bytes, value: bytes) -> bytes:
            match = HOST.fullmatch(value.decode("latin-1")) if name == b"host" and port else None
            if match is None or host_name(match) in self.forwarded:
                return value
            return value.removesuffix((match[2] or "").encode()) + f":{port}".encode()

        return [(name, own(name, value)) for name, value in scope["headers"]]

    def check(self, request: Request) -> None:
        """Raise ``CallRefused`` for a request that is not answered."""
        headers, (address, _) = request.headers, request.scope.get("server") or ("", 0)
        host = headers.get("host", "")
        match = HOST.fullmatch(host)
        named = match is not None and host_name(match) in {*self.names, address}
        wrong = "this server is not {!r:.60}; use the address that it printed, or start it with {}={!r:.60}"
        check(named, wrong, host, NAMES_VARIABLE, match[1] if match else "NAME", code="wrong_host")
        site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
        link = request.method == "GET" and headers.get("sec-fetch-dest") == "document"
        ours = origin is None or origin.partition("://")[2].lower() == host.lower()
        page = "a page of another site ({!r:.60}) cannot use this server"
        check(ours and (site in ("none", "same-origin") or link), page, origin or site, code="foreign_page")
        body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        cure = "the body has the type {!r:.60}; send JSON, with the header Content-Type: application/json"
        check(not body or kind == "application/json", cure, kind, code="unsupported_media_type")
        missing = (
            "the token of this server is missing or wrong; send it as Authorization: Bearer TOKEN, or as the API key"
        )
        check(self.admits(request), missing, code="invalid_api_key")


def host_name(match: re.Match[str]) -> str:
    return match[1].lower().rstrip(".")


def key_of(request: Request) -> str:
    """The key that a client sends: in the path of a session, or as its API key."""
    parts = request.url.path.split("/")
    inside = parts[2] if parts[1:2] == ["s"] and len(parts) > 2 else ""
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    return inside or request.headers.get("x-api-key") or bearer


async def refused(request: Request, fault: Any) -> Response:
    """A refusal of ours, or Starlette's of a path or method that it does not know."""
    code, text = getattr(fault, "code", "invalid_request"), str(fault)
    if status := getattr(fault, "status_code", 0):
        paths = "known: /v1/chat/completions, /v1/responses, /v1/messages, /v1/models, /sessions, /step, /reward"
        code, text = "not_found", f"no {request.method} {request.url.path[:80]}; {paths}"
    # in the format of the client, as far as the path shows it
    wire = MESSAGES if "/v1/messages" in request.url.path else CHAT
    # stock clients repeat a call that gets 409, with pauses; what we refuse, we refuse again
    again = {} if code in ("busy", "stuck") else {"x-should-retry": "false"}
    return JSONResponse(wire.error_body(code, text), status_code=status or STATUS.get(code, 400), headers=again)


def names_of(listener: socket.socket, more: Iterable[str] = ()) -> frozenset[str]:
    """The names of a server by where it listens, and ``more``."""
    host = listener.getsockname()[0]
    local = host in LOOPBACK_NAMES or host.startswith("127.")
    machine = () if local else (socket.gethostname().lower(),)
    return LOOPBACK_NAMES.union((host,), machine, (name.strip().lower() for name in more if name.strip()))


# ------------------------------------------------------------------- requests that do not arrive


def arrival_limits() -> type[asyncio.Protocol]:
    """uvicorn's protocol of a connection, with limits for requests that are sent in part. It has one for idle connections alone,
    which the first byte ends."""
    arriving = dict[Any, tuple[float, asyncio.TimerHandle]]()  # since when, and its time limit; the oldest first

    class Limited(H11Protocol):  # whose rest behind a request can be read, which that of ``httptools`` cannot
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._look()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # a part of the next request may have come with this one, and nothing more may follow
            if not self.cycle.response_complete or self.conn.trailing_data[0]:
                self._look()

        def connection_lost(self, fault: Exception | None) -> None:
            self._arrived()
            super().connection_lost(fault)

        def _look(self) -> None:
            # uvicorn's cycle is the latest request whose head is here
            cycle = self.cycle
            waits = cycle is None or cycle.response_complete or cycle.more_body
            if not waits or self.transport.is_closing():
                self._arrived()
            elif self not in arriving:
                late = self.loop.call_later(ARRIVAL_SECONDS, self._last_call)
                arriving[self] = (self.loop.time(), late)
                oldest = next(iter(arriving))
                if len(arriving) > MAX_ARRIVING and self.loop.time() - arriving[oldest][0] > GRACE_SECONDS:
                    oldest.give_up()

        def _last_call(self) -> None:
            arriving[self] = (arriving[self][0], self.loop.call_later(GRACE_SECONDS, self.give_up))

        def _arrived(self) -> None:
            if self in arriving:
                arriving.pop(self)[1].cancel()

        def give_up(self) -> None:
            self._arrived()
            self.transport.close()

    return Limited
