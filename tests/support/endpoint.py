"""What the tests of the endpoint share: an episode, and a request without a client library."""

from __future__ import annotations

from support.agents import SAMPLING, HashSession
from support.episodes import RENDERER, TASK
from turnwise.rollout.agent_episode import AgentEpisode
from turnwise.rollout.episode import EpisodeLimits

LIMITS = EpisodeLimits(turns=50, context=4000)


def new_episode():
    return AgentEpisode("g.0", TASK, HashSession(), RENDERER, SAMPLING, LIMITS)


async def call(app, method, path, body=b"", headers=()):
    """One request to an ASGI application, without a library that would refuse to send nonsense."""
    sent, parts = [], [{"type": "http.request", "body": body, "more_body": False}]
    path, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(), "root_path": "", "scheme": "http", "server": ("test", 80), "client": ("test", 1),
        "headers": [(b"host", b"test"), (b"content-length", str(len(body)).encode()), *headers],
    }  # fmt: skip

    async def receive():
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    status = next(m["status"] for m in sent if m["type"] == "http.response.start")
    content = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    return status, content
