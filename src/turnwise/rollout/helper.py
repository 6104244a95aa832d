"""One door to models that are asked in words: the judge of a run, and its helper, which reflects, hints and judges steps.

A question is messages and a reader of replies. A reply that is no answer is answered once with what is wrong. Answers are kept by
who was asked, its weights and the question. A server that is gone raises and stops the run. What a model answers is text: its
tokens are no experience of the policy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.core.chat import ChatModel, ChatReply
from turnwise.core.records import Message, Sampling
from turnwise.core.seeds import stable_seed
from turnwise.core.text import clean
from turnwise.environments.calls import call_environment
from turnwise.errors import HostFault, RequestRefused, host_fault
from turnwise.rewards.judge import Answer, AnswerCache, AnswerError, as_text, digest_of

ATTEMPTS = 2


@dataclass
class Helper:
    """A model that is asked, with counts since the last metrics. ``who`` it is begins their names and its messages."""

    model: ChatModel
    cache: AnswerCache = field(default_factory=AnswerCache)
    who: str = "helper"
    attempts: int = ATTEMPTS
    counts: dict[str, float] = field(default_factory=dict)
    _asking: dict[str, asyncio.Lock] = field(default_factory=dict)

    async def ask(
        self,
        messages: Sequence[Message],
        read: Callable[[str], object],
        room: int,
        temperature: float = 0.0,
        schema: Mapping[str, Any] | None = None,
    ) -> Answer:
        """An answer that ``read`` accepts, which raises ``AnswerError`` for others, of at most ``room`` tokens: from the cache,
        or from the model. An equal question that is being asked at this moment is waited for."""
        key = f"{self.who}/{self.model.name}/{digest_of(as_text(messages), str(temperature), str(room))}"
        async with self._asking.setdefault(key, asyncio.Lock()):
            answer = self.cache.find(key)
            if answer is None:
                sampling = Sampling(temperature=temperature, max_tokens=room)
                answer = await self._ask(list(messages), read, sampling, stable_seed(self.who, key), schema)
                self.cache.store(key, self.who, answer)
            else:
                self.count("cached")
        self._asking.pop(key, None)
        return answer

    async def _ask(
        self,
        messages: list[Message],
        read: Callable[[str], object],
        sampling: Sampling,
        seed: int,
        schema: Mapping[str, Any] | None,
    ) -> Answer:
        fault = AnswerError()
        for attempt in range(1, self.attempts + 1):
            began = time.perf_counter()
            try:
                reply = await self.model.reply(messages, sampling, seed, schema=schema)
            except RequestRefused as refused:
                return Answer(failure=f"the {self.who} refused to answer: {refused}", calls=attempt)
            finally:
                self.count("calls")
                self.count("seconds", time.perf_counter() - began)
            try:
                read(reply.text)
                return Answer(reply.text, calls=attempt)
            except AnswerError as unreadable:
                fault = unreadable
            words = f"error: {fault}. Reply again, in the form asked for and with nothing else."
            messages += [{"role": "assistant", "content": reply.text or "(empty)"}, {"role": "user", "content": words}]
        return Answer(failure=f"the {self.who} gave no answer in {self.attempts} attempts: {fault}", calls=attempt)

    def count(self, name: str, amount: float = 1.0) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + amount

    def metrics(self) -> dict[str, float]:
        counts, self.counts = {"calls": 0.0, "cached": 0.0, "failed": 0.0, "seconds": 0.0, **self.counts}, {}
        return {f"{self.who}/{name}": value for name, value in counts.items()}

    def totals(self) -> dict[str, dict[str, int]]:
        """Of all who are asked in this run: questions, requests, and questions without an answer."""
        return self.cache.totals()

    def describe(self) -> str:
        """One line for the log."""
        return f"{self.who}: {self.model.name}"

    def close(self) -> None:
        self.model.close()
        self.cache.close()


@dataclass(frozen=True)
class FunctionModel:
    """A Python function as a model: the text of a question in, the text of a reply out. What it raises is no answer."""

    name: str
    function: Callable[[str], Any]
    seconds: float

    async def reply(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        seed: int,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
    ) -> ChatReply:
        prompt = "\n\n".join(str(message["content"]) for message in messages)
        try:
            text = await call_environment(self.function, prompt, seconds=self.seconds, inline=False)
        except Exception as fault:
            if words := host_fault(fault):
                raise HostFault(f"{self.name}: {words}") from None
            raise RequestRefused(f"{self.name}: {type(fault).__name__}: {fault}") from None
        if not isinstance(text, str):
            raise RequestRefused(f"{self.name} returned {type(text).__name__}; return a text")
        return ChatReply(clean(text))

    def close(self) -> None:
        pass
