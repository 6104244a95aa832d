"""The policy of a run at an endpoint that stays up: what ``turnwise endpoint`` calls.

An agent opens a session, talks, and posts what the episode was worth; each finished session becomes a row of a file. A client
that opens no session is answered too, one call at a time. Nothing is trained here: ``turnwise train --agent external`` does that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from turnwise.core.protocols import Generator
from turnwise.core.records import Sampling, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.errors import SettingError
from turnwise.rollout.agent_episode import AgentEpisode, AgentOutcome, within
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.renderer import Renderer
from turnwise.serve.server import Endpoint, listen_on, read_address, require_packages, serving
from turnwise.serve.sessions import OpenEpisode, Sessions
from turnwise.store.database import EpisodeFacts
from turnwise.training.certificate import certificate
from turnwise.training.env_spec import EnvSpec
from turnwise.training.evaluation import select_policy
from turnwise.workers.sockets import allow_many_files

TURNS = 10_000  # of a session
MAX_SESSIONS = 4096  # open at the same time
FILE = "endpoint.jsonl"  # in the run directory


@dataclass
class PolicyServer:
    """Makes the episodes of sessions. ``seconds``: how long one may stay open. ``file``: where finished ones are written."""

    generator: Generator
    renderer: Renderer
    sampling: Sampling
    limits: EpisodeLimits
    seed: int
    seconds: float
    file: Path
    finished: list[EpisodeFacts] = field(default_factory=list)
    _numbers: Any = field(default_factory=count)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def sessions(self, token: str) -> Sessions:
        return Sessions(token, self._open, self._single)

    def _episode(self, number: int) -> AgentEpisode:
        session = self.generator.open(stable_seed(self.seed, "endpoint", number))
        session.park()
        task = Task("endpoint", number)
        return AgentEpisode(f"endpoint.{number}", task, session, self.renderer, self.sampling, self.limits)

    def _single(self, sessions: Sessions) -> OpenEpisode:
        return sessions.open(self._episode(next(self._numbers)))

    def _open(self, sessions: Sessions, asked: Mapping[str, Any]) -> OpenEpisode:
        if len(sessions) >= MAX_SESSIONS:
            raise SettingError(f"{len(sessions)} sessions are open")
        opened = sessions.open(self._episode(next(self._numbers)), awaits_reward=True)
        self._start(self._play(sessions, opened, asked.get("name")))
        return opened

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, sessions: Sessions, opened: OpenEpisode, name: Any) -> None:
        async def agent(episode: AgentEpisode) -> AgentOutcome:
            assert opened.outcome is not None
            return await within(self.seconds, opened.outcome)

        try:
            self._keep(await opened.episode.run(agent, None), name)
        finally:
            sessions.close(opened.key)

    def _keep(self, t: Trajectory, name: Any) -> None:
        """Write a finished session as a row."""
        self.finished.append(EpisodeFacts(t.status, t.reason, t.sampled, False, t.facts))
        outcome = {
            "reward": t.reward,
            "rewards": dict(t.rewards),
            "success": t.success,
            "status": t.status,
            "reason": t.reason,
        }
        row = {
            "session": t.id,
            "name": name,
            "messages": t.messages,
            **outcome,
            "calls": len(t.turns),
            "tokens": t.sampled,
        }
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({**row, "facts": dict(t.facts)}, default=str) + "\n")


def serve_run(
    run: str,
    address: str,
    token: str,
    seconds: float,
    tell: Callable[[str], None],
    ready: Callable[[Endpoint], None] | None = None,
) -> dict[str, Any]:
    """Serve the policy of ``run`` until interrupted; returns what happened. ``ready`` is called when the endpoint is up."""
    require_packages()
    host, port = read_address(address)
    listen_on(host, 0, token).close()  # refuses an address that cannot be used, before the model is loaded
    settings, folder = select_policy(run, {})
    from turnwise.training import build, engines, memory  # late: import torch

    assert folder is not None
    tokenizer = build.load_tokenizer(
        settings, EnvSpec(settings, object), folder
    )  # its agent and environment are not needed
    renderer = build.make_renderer(settings, tokenizer)
    model = build.load_model(settings, len(tokenizer), folder)
    cache = memory.sampling_cache(settings, model)
    generator = engines.make_local_generator(settings, model, renderer, deterministic=False, cache=cache)
    sampling = build.sampling_settings(settings, settings.eval_temperature)
    limits = EpisodeLimits(TURNS, settings.context)
    server = PolicyServer(generator, renderer, sampling, limits, settings.seed, seconds, Path(run) / FILE)
    asyncio.run(_serve(server, host, port, token, tell, ready))
    return {
        "run": run,
        "file": str(server.file),
        "sessions": len(server.finished),
        "exactness": certificate(server.finished),
    }


async def _serve(
    server: PolicyServer,
    host: str,
    port: int,
    token: str,
    tell: Callable[[str], None],
    ready: Callable[[Endpoint], None] | None,
) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(number, stopped.set)
    allow_many_files()
    async with serving(server.sessions(token), host, port, token) as endpoint:
        tell(
            f"OPENAI_BASE_URL={endpoint.url}/v1   ANTHROPIC_BASE_URL={endpoint.url}   API key: {'your token' if token else 'any'}"
        )
        tell(f"sessions: POST {endpoint.url}/sessions, then POST a reward; finished ones are written to {server.file}")
        tell("Ctrl-C stops the endpoint")
        if ready is not None:
            ready(replace(endpoint, stop=lambda: loop.call_soon_threadsafe(stopped.set)))
        await stopped.wait()
