"""Agents that live elsewhere: the run offers its episodes at an endpoint that stays up, and agents take them.

POST /sessions            take an episode: its task, base URL, key
POST /s/KEY/v1/...        talk
POST /s/KEY/step          act in the environment, where the task has one; its end ends the episode
POST /s/KEY/reward        say what the episode was worth; ends it
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from turnwise.rollout.agent_episode import AgentEpisode, AgentOutcome, within
from turnwise.rollout.agent_task import AgentTask
from turnwise.serve.server import EndpointHost


class ExternalAgent:
    """Offers each episode to whoever asks for one. Its time runs from the moment an agent takes it."""

    def __init__(self, host: str, port: int, token: str, announce: Callable[[str], None] = print) -> None:
        self._host, self._announce = EndpointHost(host, port, token), announce
        self._loop: asyncio.AbstractEventLoop | None = None

    async def play(self, task: AgentTask, episode: AgentEpisode, seconds: float = math.inf) -> AgentOutcome:
        task.episode, loop = episode, asyncio.get_running_loop()
        endpoint = self._host.endpoint(loop)
        if self._loop is not loop:
            self._loop = loop
            self._announce(f"endpoint: {endpoint.url}; agents take episodes with POST {endpoint.url}/sessions")
        opened = endpoint.sessions.open(episode, awaits_reward=True, task=task, offered=True)
        episode.session.park()  # nobody knows when an agent comes: the generator must not wait for it
        try:
            await opened.taken.wait()
            assert opened.outcome is not None
            return await within(seconds, opened.outcome)
        finally:
            endpoint.sessions.close(opened.key)
