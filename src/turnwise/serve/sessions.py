"""Open episodes by an unguessable key, which is minted for each and never reused.

A repeated request (an SDK retries after a lost reply) gets the same answer: the header says that it is a retry, and the body says
of what. Agents that live elsewhere take episodes that wait for one. Knows neither formats nor HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.core.records import Message
from turnwise.core.stateful import remember
from turnwise.rollout.agent_client import AgentTask
from turnwise.rollout.agent_episode import AgentEpisode, AgentOutcome, CallRefused, CallReply, CallRequest
from turnwise.serve.wires import check
from turnwise.workers.tokens import new_token, same_token

KEY_BYTES = 24
ENDED = 10_000  # keys of ended episodes that are remembered, to say so
ENDED_WORDS = "this episode has ended; its reward is final"
KEPT_ANSWERS = 64  # of a session, for retries: the latest


@dataclass
class OpenEpisode:
    """One episode that is played over HTTP."""

    key: str
    episode: AgentEpisode
    task: AgentTask | None = None  # whose environment the agent may act in
    answers: dict[str, asyncio.Future[Any]] = field(default_factory=dict)  # by digest of the request
    outcome: asyncio.Future[AgentOutcome] | None = None  # set by a posted reward, where the agent lives elsewhere
    taken: asyncio.Event = field(default_factory=asyncio.Event)  # an agent that lives elsewhere has begun to play
    # by id of a response, for ``previous_response_id``
    dialogues: dict[str, list[Message]] = field(default_factory=dict)

    async def answer(self, request: CallRequest, body: bytes, retried: bool) -> list[CallReply]:
        """Answer a call once. A retry waits for, or repeats, the answer to the same body."""
        digest = hashlib.sha256(body).hexdigest()
        if retried and digest in self.answers:
            self.episode.retries += 1
            return list(await asyncio.shield(self.answers[digest]))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        remember(self.answers, digest, future, KEPT_ANSWERS)
        try:
            replies = await self.episode.call(request)
            self.episode.session.park()  # nobody knows when the agent calls again: the generator must not wait for it
        except BaseException as fault:
            refused = isinstance(fault, CallRefused)
            future.set_exception(fault if refused else CallRefused("cancelled", "the call was cancelled"))
            future.exception()  # retrieved: a refused call that nobody repeats is no warning
            raise
        future.set_result(replies)
        return replies

    async def step(self, message: Any) -> tuple[list[Message], bool]:
        """Let an assistant message act in the environment of the task. Its end is the end of an episode played elsewhere."""
        here = self.task is not None and self.task.environment is not None
        check(here, "this episode has no environment to act in; post a reward instead", code="no_environment")
        assert self.task is not None
        messages = await self.task.step(message)
        if self.task.done and self.outcome is not None and not self.outcome.done():
            self.outcome.set_result(AgentOutcome())
        return messages, self.task.done

    def post(self, outcome: AgentOutcome) -> None:
        """Take the reward of an agent that lives elsewhere; it ends the episode."""
        ended = self.episode.ended or (self.outcome is not None and self.outcome.done())
        check(not ended, ENDED_WORDS, code="episode_ended")
        unwanted = "the reward of this episode is what its agent returns; nothing is posted"
        check(self.outcome is not None, unwanted, code="no_reward_expected")
        assert self.outcome is not None
        self.outcome.set_result(outcome)

    def description(self) -> dict[str, Any]:
        """The task as an agent in another process reads it."""
        if self.task is None:
            return {}
        task = self.task
        facts: dict[str, Any] = {"messages": task.messages, "tools": list(task.tools), "row": dict(task.row)}
        where = {"seed": task.seed, "split": task.task.split, "difficulty": task.task.difficulty}
        return dict(json.loads(json.dumps({**facts, **where}, default=str)))

    def abandon(self) -> None:
        """The agent gives up: the episode fails."""
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_exception(CallRefused("abandoned", "the agent abandoned its session"))


class Sessions:
    """The open episodes of a server. ``token``: what an agent must present to take an episode; empty: a new one.

    ``opener`` makes an episode for an agent that asks for one (where the agents decide what is played); without it, agents take
    the episodes that a run offers. ``single`` makes an episode for one call of a client that opened no session."""

    def __init__(
        self,
        token: str = "",
        opener: Callable[[Sessions, Mapping[str, Any]], OpenEpisode] | None = None,
        single: Callable[[Sessions], OpenEpisode] | None = None,
    ) -> None:
        self.token, self.opener, self.single = token or new_token(), opener, single
        self._open: dict[str, OpenEpisode] = {}
        self._ended: dict[str, None] = {}
        self._offered: deque[OpenEpisode] = deque()
        self._news = asyncio.Event()

    def open(
        self, episode: AgentEpisode, awaits_reward: bool = False, task: AgentTask | None = None, offered: bool = False
    ) -> OpenEpisode:
        """Mint the key of an episode. ``offered``: to an agent that lives elsewhere."""
        key = secrets.token_urlsafe(KEY_BYTES)
        outcome = asyncio.get_running_loop().create_future() if awaits_reward else None
        opened = self._open[key] = OpenEpisode(key, episode, task, outcome=outcome)
        if offered:
            self._offered.append(opened)
            self._news.set()
        return opened

    async def take(self, wanted: Mapping[str, Any], seconds: float) -> OpenEpisode | None:
        """An episode for an agent that asks for one; None if none is offered within ``seconds``."""
        if self.opener is not None:
            return self.opener(self, wanted)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    while self._offered:
                        opened = self._offered.popleft()
                        if opened.key in self._open:  # otherwise its run gave it up
                            opened.taken.set()
                            return opened
                    self._news.clear()
                    await self._news.wait()
        return None

    def close(self, key: str) -> None:
        """End an episode: later calls with its key are told so."""
        if self._open.pop(key, None) is not None:
            remember(self._ended, key, None, ENDED)

    def find(self, key: str) -> OpenEpisode:
        check(key not in self._ended, ENDED_WORDS, code="episode_ended")
        if key not in self._open and self.single is not None and self.admits(key):
            return self.single(self)
        check(key in self._open, "no open episode has this key", code="invalid_api_key")
        return self._open[key]

    def counting_refusals(self, key: str) -> contextlib.AbstractContextManager[None]:
        """A call that cannot be read counts for the episode of its key, if there is one."""
        opened = self._open.get(key)
        return contextlib.nullcontext() if opened is None else opened.episode.counting_refusals()

    def admits(self, token: str) -> bool:
        """Whether a token lets an agent in. Compared in constant time."""
        return same_token(token, self.token)

    def knows(self, key: str) -> bool:
        """Whether a key means anything here: that of an open or ended episode, or the token."""
        return key in self._open or key in self._ended or self.admits(key)

    def __len__(self) -> int:
        return len(self._open)
