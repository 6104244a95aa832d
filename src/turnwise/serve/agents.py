"""Agents that are no function of this process: a command, or programs that live elsewhere.

A command runs in a process per episode, which finds its session in the environment variables of stock clients.

    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY     the policy, for this episode only
    TURNWISE_TASK                                                             the task as JSON, also on standard input
    TURNWISE_STEP_URL                                                         where to act in the environment of the task

The last line that it prints is its verdict: a number, true or false, or an object with ``reward`` and ``success``. An exit status
other than 0 fails the episode, with the last line of standard error.

Agents that live elsewhere take the episodes that the run offers at an endpoint that stays up (its routes: ``serve.app``).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable

from turnwise.errors import EnvironmentFault
from turnwise.rollout.agent_client import AgentTask
from turnwise.rollout.agent_episode import AgentEpisode, AgentOutcome, NoVerdict, read_outcome, within
from turnwise.serve.server import EndpointHost
from turnwise.workers.process import exit_words, kill_group

MAX_OUTPUT = 1 << 20  # bytes that are kept of what a process prints
PARALLEL = 32  # processes at the same time


class ProcessAgent:
    """Runs ``command`` in a shell for every episode. The endpoint is started with the first one."""

    def __init__(self, command: str) -> None:
        self.command = command
        self._host = EndpointHost()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(PARALLEL)

    async def play(self, task: AgentTask, episode: AgentEpisode) -> AgentOutcome:
        task.episode, loop = episode, asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._slots = loop, asyncio.Semaphore(PARALLEL)
        endpoint = self._host.endpoint(loop)
        opened = endpoint.sessions.open(episode, task=task)
        episode.session.park()  # the process takes a while to start, and the generator must not wait for it
        try:
            async with self._slots:
                variables, described = endpoint.environment(opened.key), json.dumps(opened.description())
                output = await within(episode.limits.seconds, self._run(variables, described))
        finally:
            endpoint.sessions.close(opened.key)
        lines = output.decode(errors="replace").strip().splitlines()
        try:
            verdict = json.loads(lines[-1]) if lines else None
        except ValueError:
            printed = f"the last line that {self.command!r} printed is {lines[-1][:80]!r}"
            raise NoVerdict(f"{printed}; print a number, or an object with reward and success") from None
        return read_outcome(verdict)

    async def _run(self, variables: dict[str, str], task: str) -> bytes:
        process = await asyncio.create_subprocess_shell(
            self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **variables, "TURNWISE_TASK": task},
            start_new_session=True,
            limit=MAX_OUTPUT,
        )
        try:
            output, errors = await process.communicate(task.encode())
        except BaseException:
            kill_group(process.pid)
            await process.wait()
            raise
        if process.returncode:
            last_line = (errors.decode(errors="replace").strip().splitlines() or ["no message"])[-1][:300]
            raise EnvironmentFault(f"the agent {exit_words(process.returncode, last_line)}")
        return output[-MAX_OUTPUT:]


class ExternalAgent:
    """Offers each episode to whoever asks for one. Its time runs from the moment an agent takes it."""

    def __init__(self, host: str, port: int, token: str, announce: Callable[[str], None] = print) -> None:
        self._host, self._announce = EndpointHost(host, port, token), announce
        self._loop: asyncio.AbstractEventLoop | None = None

    async def play(self, task: AgentTask, episode: AgentEpisode) -> AgentOutcome:
        task.episode, loop = episode, asyncio.get_running_loop()
        endpoint = self._host.endpoint(loop)
        if self._loop is not loop:
            self._loop = loop
            key = endpoint.announce_key(self._host.token)
            self._announce(f"endpoint: {endpoint.url}; agents take episodes with POST {endpoint.url}/sessions; {key}")
        opened = endpoint.sessions.open(episode, awaits_reward=True, task=task, offered=True)
        episode.session.park()  # nobody knows when an agent comes: the generator must not wait for it
        try:
            await opened.taken.wait()
            assert opened.outcome is not None
            return await within(episode.limits.seconds, opened.outcome)
        finally:
            endpoint.sessions.close(opened.key)
