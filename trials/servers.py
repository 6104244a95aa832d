"""Attacks on the servers of this machine: who asks, for what, with which body and at which moment are drawn from a grammar."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trials.outcome import Outcome, Results

SEED, BLOCK, BLOCKS, SHORT_BLOCKS = 33, 50, 10, 1  # blocks of each server
PATIENCE = 30.0  # seconds for any answer; the machine may be busy
EVIL = "evil.example"
JSON = "Content-Type: application/json"
OWNER = "a client"  # has the token, and sends nonsense
WHO: dict[str, tuple[str, ...]] = {  # headers; {host}, {port} and {token} are those of the server
    "a process": ("Host: {host}", JSON),
    "a process, another token": ("Host: {host}", JSON, "Authorization: Bearer {other}"),
    "a process, token as a cookie": ("Host: {host}", JSON, "Cookie: token={token}"),
    "a page": ("Host: {host}", f"Origin: http://{EVIL}", "Content-Type: text/plain", "Authorization: Bearer {token}"),
    "a page with JSON": ("Host: {host}", f"Origin: http://{EVIL}", JSON, "Authorization: Bearer {token}"),
    "a page of a file": ("Host: {host}", "Origin: null", JSON, "Authorization: Bearer {token}"),
    "a page of another port": ("Host: {host}", "Origin: http://127.0.0.1:1", JSON, "Authorization: Bearer {token}"),
    "a frame of a page": ("Host: {host}", "Sec-Fetch-Site: cross-site", JSON, "Authorization: Bearer {token}"),
    "a form": ("Host: {host}", "Content-Type: application/x-www-form-urlencoded", "Authorization: Bearer {token}"),
    "a rebound name": (
        f"Host: {EVIL}:{{port}}",
        f"Origin: http://{EVIL}:{{port}}",
        JSON,
        "Authorization: Bearer {token}",
    ),
    "a name that begins as ours": (f"Host: 127.0.0.1.{EVIL}:{{port}}", JSON, "Authorization: Bearer {token}"),
    OWNER: ("Host: {host}", JSON, "Authorization: Bearer {token}"),
}
NEEDS_BODY = ("a page", "a form")  # whom the type of a body gives away, or nothing
BODIES: dict[str, Callable[[random.Random], bytes]] = {
    "{}": lambda rng: b"{}",
    "fields of nonsense": lambda rng: json.dumps({rng.choice(FIELDS): rng.choice(JUNK) for _ in range(4)}).encode(),
    "no JSON": lambda rng: rng.randbytes(rng.randint(1, 400)),
    "a megabyte": lambda rng: json.dumps({"messages": [{"role": "user", "content": "a" * 1_000_000}]}).encode(),
    "many brackets": lambda rng: b"[" * rng.randint(100, 50_000),
}
FIELDS = (
    "messages",
    "token_ids",
    "prompt",
    "sampling_params",
    "max_tokens",
    "reward",
    "message",
    "mode",
    "key",
    "input",
    "n",
)
JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e308,
    "",
    "x" * 3000,
    [],
    [[]],
    {},
    {"a": {}},
    [{"role": "user"}],
    "\ud800",
    10**30,
)
MOMENTS = ("alone", "in pieces", "twice at once", "behind half a request", "beside requests of the owner")


@dataclass(frozen=True)
class Server:
    """A running server. ``state`` is what no attack may change; ``harmless``: a request that its owner gets answered."""

    url: str
    token: str
    state: Callable[[], Any]
    harmless: str
    resources: tuple[str, ...]  # what strangers want
    calls: tuple[str, ...]  # what a client may send nonsense to

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


def trial(short: bool, results: Results, progress: Callable[[str], None], seed: int = SEED) -> Iterator[Outcome]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    progress(f"servers: attacks are drawn with seed {seed}")
    for name, start in (("serve", _generator), ("endpoint", _endpoint)):
        with start() as server:
            for block in range(SHORT_BLOCKS if short else BLOCKS):
                row = f"{name}: {block * BLOCK} to {block * BLOCK + BLOCK - 1}, seed {seed}"
                if not results.done("servers", row):
                    yield from _block(server, name, row, random.Random(f"{seed} {name} {block}"))


def _block(server: Server, name: str, row: str, rng: random.Random) -> Iterator[Outcome]:
    slowest, broken = 0.0, 0
    for number in range(BLOCK):
        who, moment, body = rng.choice(tuple(WHO)), rng.choice(MOMENTS), rng.choice(tuple(BODIES))
        what = rng.choice(server.calls if who == OWNER else server.resources)
        if who in NEEDS_BODY and what.startswith("GET"):
            who = "a page with JSON"
        data = b"" if what.startswith("GET") else BODIES[body](rng)
        began = time.monotonic()
        fault = _attack(server, who, what, data, moment)
        slowest = max(slowest, time.monotonic() - began)
        if fault:
            broken += 1
            text = f"{row}, {number}: {who}, {what}, {body}, {moment}"
            yield Outcome("servers", text, "not held", fault, time.monotonic() - began, kind=name)
    yield Outcome("servers", row, "held", "", slowest, BLOCK - broken, name)


def _attack(server: Server, who: str, what: str, data: bytes, moment: str) -> str:
    """What went wrong; empty if the server held."""
    before, statuses = server.state(), list[int]()
    raw = _request(server, who, what, data)
    try:
        with contextlib.ExitStack() as around:
            if moment == "behind half a request":
                half = around.enter_context(socket.create_connection(("127.0.0.1", server.port), PATIENCE))
                half.sendall(raw[: max(20, len(raw) // 3)][:200])
            if moment == "beside requests of the owner":
                asker = threading.Thread(target=lambda: [_status(server, _owners(server)) for _ in range(3)])
                asker.start()
                around.callback(asker.join)
            if moment == "twice at once":
                other = threading.Thread(target=lambda: statuses.append(_exchange(server, raw)[0]))
                other.start()
                around.callback(other.join)
            status, reply = _exchange(server, raw, pieces=moment == "in pieces")
        statuses.append(status)
        owner = _status(server, _owners(server))
    except OSError as gone:
        return f"no answer within {PATIENCE:g} s: {gone}"
    if who != OWNER and any(s < 400 for s in statuses):
        return f"it was answered with {statuses}"
    if any(s >= 500 for s in statuses):
        return f"it broke the server: {statuses}"
    if server.token in reply or "access-control-allow" in reply.lower():
        return "the reply holds the token, or lets a page read it"
    if server.state() != before:
        return f"the server changed: {before} became {server.state()}"
    return "" if owner == 200 else f"its owner then got {owner}"


def _request(server: Server, who: str, what: str, data: bytes) -> bytes:
    given = {
        "host": f"127.0.0.1:{server.port}",
        "port": server.port,
        "token": server.token,
        "other": "0" * len(server.token),
    }
    head = [
        f"{what} HTTP/1.1",
        *(line.format(**given) for line in WHO[who]),
        f"Content-Length: {len(data)}",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + data


def _owners(server: Server) -> bytes:
    return _request(server, OWNER, server.harmless, b"")


def _status(server: Server, raw: bytes) -> int:
    return _exchange(server, raw)[0]


def _exchange(server: Server, raw: bytes, pieces: bool = False) -> tuple[int, str]:
    """Status and text of a reply. A refusal may come before the whole request was sent, and close the connection."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        reply = b""
        with contextlib.suppress(ConnectionError):
            for part in (raw[:7], raw[7:60], raw[60:]) if pieces else (raw,):
                connection.sendall(part)
                time.sleep(0.005 * pieces)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65_536):
                reply += part
    words = reply.split(maxsplit=2)
    return (int(words[1]) if len(words) > 1 else 400), reply.decode(errors="replace")  # closed without a word: refused


@contextlib.contextmanager
def _generator() -> Iterator[Server]:
    from support.generator_servers import served
    from support.generators import make

    from turnwise.workers.tokens import find_token

    with served(make(seed=1)) as running:
        owned = (
            "/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update", "/abort_requests",
            "/init_weight_transfer_engine", "/turnwise/v1/attach", "/turnwise/v1/release", "/inference/v1/generate",
        )  # fmt: skip
        read = ("GET /is_paused", "GET /turnwise/v1/info", "GET /weight_info", "GET /v1/models", "OPTIONS /pause")
        calls = (
            "POST /inference/v1/generate",
            "POST /turnwise/v1/attach",
            "POST /turnwise/v1/sessions",
            "POST /nowhere",
        )
        host = running.host
        state = lambda: (host.paused, host.client, host.run, host.generator.version, host.update, len(host.sessions))  # noqa: E731
        strangers = (*(f"POST {path}" for path in owned), *read)
        yield Server(running.url, find_token(running.url), state, "GET /turnwise/v1/info", strangers, calls)


@contextlib.contextmanager
def _endpoint() -> Iterator[Server]:
    from support.endpoint import new_episode

    from turnwise.serve.server import serving
    from turnwise.serve.sessions import Sessions

    sessions, episode, ready, loop = Sessions(), new_episode(), threading.Event(), asyncio.new_event_loop()
    url, opened, end = list[str](), list[Any](), asyncio.Event()

    async def serve() -> None:
        opened.append(sessions.open(episode, awaits_reward=True))
        async with serving(sessions) as endpoint:
            url.append(endpoint.url)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(60)
    paths = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/reward", "/step", "/sessions")
    strangers = (
        *(f"POST {path}" for path in paths),
        "GET /v1/models",
        "OPTIONS /v1/chat/completions",
        "DELETE /s/nobody",
    )
    calls = (
        *(f"POST {path}" for path in paths[:3]),
        "POST /v1/messages/count_tokens",
        "POST /nowhere",
        "GET /s/nobody",
    )
    state = lambda: (opened[0].outcome.done(), episode.ended, len(episode.turns))  # noqa: E731
    try:
        yield Server(url[0].removesuffix("/v1"), sessions.token, state, "GET /v1/models", strangers, calls)
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(20)
