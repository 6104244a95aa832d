"""The server of a run: the application on a socket of this machine, in the event loop of the run."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from errno import EADDRINUSE
from functools import partial
from typing import TYPE_CHECKING, Any

from turnwise.errors import SettingError
from turnwise.rollout.agent_episode import AgentEpisode
from turnwise.serve.sessions import Sessions
from turnwise.workers.tokens import remove_token, write_token

if TYPE_CHECKING:
    from turnwise.serve.front import Front  # imports Starlette, which is optional

STOP_SECONDS = 5.0
KEEP_ALIVE = 120  # seconds: tools of agents take longer than the five that servers allow by default
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Endpoint:
    """Where agents reach the policy."""

    url: str
    sessions: Sessions
    stop: Callable[[], object] = lambda: None  # ends an endpoint that stays up, from any thread

    def announce_key(self, chosen: str) -> str:
        """What a person is told of the API key: a token that they did not choose, which is also written for their programs."""
        if chosen:
            return "API key: your token"
        file = write_token(int(self.url.rpartition(":")[2]), self.sessions.token)
        return f"API key: {self.sessions.token}" + (f" (also in {file})" if file else "")

    def environment(self, key: str) -> dict[str, str]:
        """The variables by which stock clients find their session."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/s/{key}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": f"{self.url}/s/{key}",
            "ANTHROPIC_API_KEY": key,
            "TURNWISE_STEP_URL": f"{self.url}/s/{key}/step",
            "TURNWISE_REWARD_URL": f"{self.url}/s/{key}/reward",
        }


def read_address(address: str) -> tuple[str, int]:
    """``HOST:PORT``, or a port alone."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise SettingError(f"the address of the endpoint is {address!r}; write HOST:PORT, for example 127.0.0.1:8700")
    return host.strip("[]") or LOOPBACK, int(port)


def listen_on(host: str, port: int, token: str = "") -> socket.socket:
    """A listening socket; loopback only unless the user chose a token: a new one would be of no use to other machines."""
    private = host == "localhost"
    with contextlib.suppress(ValueError):  # a name: it may mean any machine
        private = ipaddress.ip_address(host).is_loopback
    if not token and not private:
        reach = f"the endpoint would be reachable from other machines at {host}"
        raise SettingError(f"{reach}; set a token in TURNWISE_ENDPOINT_TOKEN, or listen on {LOOPBACK}")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    except (OSError, OverflowError) as fault:
        reason = "another process listens there" if getattr(fault, "errno", 0) == EADDRINUSE else fault
        raise SettingError(
            f"no server can listen on {host}:{port}: {reason}; choose another address or port"
        ) from fault
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve_on(listener: socket.socket, sessions: Sessions, name: str) -> None:
    from turnwise.serve.app import session_front

    await serve_app(listener, session_front(sessions), name, sessions.token)


async def serve_app(listener: socket.socket, front: Front, name: str, token: str) -> None:
    """Serve an application behind its front until cancelled. ``name``: the host that it was started with. Where ``token`` was
    written for others on this machine, it is removed."""
    import uvicorn

    from turnwise.serve.front import NAMES_VARIABLE, arrival_limits, names_of

    port = listener.getsockname()[1]
    chosen = os.environ.get(NAMES_VARIABLE, "").split(",")
    front.names |= names_of(listener, [name, *chosen])
    front.forwarded = frozenset(part.strip().lower() for part in chosen)
    quiet: Any = {"log_level": "error", "access_log": False, "lifespan": "off", "ws": "none", "http": arrival_limits()}
    config = uvicorn.Config(front, **quiet, timeout_graceful_shutdown=1, timeout_keep_alive=KEEP_ALIVE)

    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # the run handles signals

    server = Quiet(config)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(task)
    finally:
        server.should_exit = True
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(task, STOP_SECONDS)
        listener.close()
        remove_token(port, token)


@contextlib.asynccontextmanager
async def serving(sessions: Sessions, host: str = LOOPBACK, port: int = 0, token: str = "") -> AsyncIterator[Endpoint]:
    """Serve until the context ends. Port 0 takes a free one. ``token``: the one that the user chose, which the sessions have."""
    listener = listen_on(host, port, token)
    task = asyncio.create_task(serve_on(listener, sessions, host))
    try:
        yield Endpoint(url_of(listener), sessions)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@dataclass
class EndpointHost:
    """The endpoint of the running event loop, started when it is first needed, from any thread."""

    host: str = LOOPBACK
    port: int = 0
    token: str = ""
    _loop: asyncio.AbstractEventLoop | None = None
    _endpoint: Endpoint | None = None
    _task: asyncio.Task[None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def endpoint(self, loop: asyncio.AbstractEventLoop) -> Endpoint:
        """The endpoint of ``loop``. Connections wait at its socket until the server has started."""
        with self._lock:
            if self._loop is not loop or self._endpoint is None:
                listener = listen_on(self.host, self.port, self.token)
                self._loop, self._endpoint = loop, Endpoint(url_of(listener), Sessions(self.token))
                start = partial(serve_on, listener, self._endpoint.sessions, self.host)
                # the event loop alone would let go of the task
                loop.call_soon_threadsafe(lambda: setattr(self, "_task", asyncio.ensure_future(start())))
            return self._endpoint

    @contextlib.contextmanager
    def offered(self, episode: AgentEpisode) -> Iterator[Callable[[AgentEpisode], tuple[str, str]]]:
        """While the context lasts, a function that opens the episode and returns its URL and its key."""
        loop, opened = asyncio.get_running_loop(), []

        def connect(played: AgentEpisode) -> tuple[str, str]:
            endpoint = self.endpoint(loop)
            session = endpoint.sessions.open(played)
            opened.append((endpoint.sessions, session.key))
            return f"{endpoint.url}/s/{session.key}/v1", session.key

        try:
            yield connect
        finally:
            for sessions, key in opened:
                sessions.close(key)
