"""Driving an environment that may be wrong in any way: every call is timed, caught and looked at, and noted in words.

Used by ``environments.check``. It does not know which episodes are worth playing, nor which environments exist.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from turnwise.core.protocols import Action
from turnwise.environments import settings
from turnwise.environments.checker.rules import is_flag, oddities, role_fault, unlisted
from turnwise.environments.contract import Wrong, read_messages, read_state_key, read_step
from turnwise.errors import EnvironmentFault

TURNS = 64  # for a class that does not say how long its episodes are


class Broken(Exception):
    """This episode cannot go on; the reason is already noted."""


class Hang(Exception):
    """A call did not return: nothing more can be checked safely."""


@dataclass
class Notes:
    """Each thing said once, with how often it was seen and where first."""

    seen: dict[str, tuple[int, str, str]] = field(default_factory=dict)

    def add(self, text: str, where: str = "", same: str = "") -> None:
        """``same`` tells what is one thing where the text does not: equal mistakes quote different values."""
        count, first, words = self.seen.get(same or text, (0, where, text))
        self.seen[same or text] = (count + 1, first, words)

    def lines(self) -> tuple[str, ...]:
        def line(text: str, count: int, where: str) -> str:
            times = f"seen {count} times, first" if count > 1 else "seen"
            return f"{text} ({times} at {where})" if where else text

        return tuple(line(text, count, where) for count, where, text in self.seen.values())


@dataclass(frozen=True, slots=True)
class Spot:
    """Which episode: enough to play it again by hand."""

    seed: int
    difficulty: int = 1
    split: str = "train"
    player: str = ""

    def __str__(self) -> str:
        return f"difficulty {self.difficulty}, {self.split}, seed {self.seed}" + f", {self.player}" * bool(self.player)


@dataclass
class Record:
    """One episode as it was seen: comparable lines, and what was done."""

    lines: list[str] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    success: bool | None = None
    reward: float = 0.0
    ended: bool = False


class Worker:
    """A thread that does one call at a time, so that a call that hangs can be left behind: Python cannot end it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        Thread(target=self._work, daemon=True).start()

    def run(self, function: Callable[[], Any], seconds: float) -> Any:
        self._jobs.put(function)
        try:
            value, error = self._results.get(timeout=seconds)
        except Empty:
            raise Hang from None
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                value = job()
                self._results.put((asyncio.run(_wait(value)) if inspect.isawaitable(value) else value, None))
            except BaseException as error:  # also SystemExit: an environment must not end the check
                self._results.put((None, error))


async def _wait(value: Any) -> Any:
    return await value


class Probe:
    """One environment class under inspection."""

    def __init__(self, cls: type[Any], seconds: float) -> None:
        self.cls, self.seconds = cls, seconds
        self.worker = Worker()
        self.settings = settings(cls)
        self.problems, self.warnings = Notes(), Notes()

    def call(self, what: str, spot: Spot | None, function: Callable[[], Any]) -> Any:
        """The value of a call into the environment; ``NotImplementedError`` passes, it means "I cannot"."""
        where = str(spot) if spot else ""
        try:
            return self.worker.run(function, self.seconds)
        except NotImplementedError:
            raise
        except Hang:
            self.problems.add(f"{what} did not return within {self.seconds:g} s; the check stopped there", where)
            raise
        except BaseException as error:
            # the message may quote the nonsense it was given, and must still be printable
            text = " ".join(str(error).split())[:120].encode("ascii", "backslashreplace").decode()
            self.problems.add(f"{what} raises {type(error).__name__}: {text}; it must answer in words", where)
            raise Broken from None

    def new(self, spot: Spot) -> Any:
        wanted = {key: getattr(spot, key) for key in self.settings}
        return self.call(
            f"{self.cls.__name__}({', '.join(f'{k}=...' for k in sorted(wanted))})", spot, lambda: self.cls(**wanted)
        )

    def optional(self, env: Any, name: str, spot: Spot, *arguments: Any) -> Any:
        """The value of an optional method; None where there is none."""
        method = getattr(env, name, None)
        if not callable(method):
            return None
        try:
            return self.call(f"{name}()", spot, lambda: method(*arguments))
        except NotImplementedError:
            return None

    def turns(self, env: Any) -> int:
        turns = getattr(env, "max_turns", TURNS)
        if isinstance(turns, int) and turns >= 1:
            return turns
        self.problems.add(f"max_turns is {turns!r}; it must be a whole number of at least 1")
        return TURNS

    def reset(self, env: Any, spot: Spot) -> str:
        answer = self._required("reset", spot, lambda: env.reset(spot.seed))
        messages = self._read(spot, read_messages, answer, "reset")
        self._roles("reset", messages, spot)
        if not messages:
            self.problems.add("reset returns no messages; the agent would have nothing to read", str(spot))
            raise Broken
        return _text(messages) + self._key(env, spot)

    def step(self, env: Any, action: Action, spot: Spot, record: Record) -> str:
        """Act, look at the answer, and write it into the record."""
        step = self._read(spot, read_step, self._required("step", spot, lambda: env.step(action)))
        self._roles("step", step.messages, spot)
        for words in (*oddities(step), *unlisted(step, getattr(env, "facts", ()))):
            self.warnings.add(words, str(spot))
        record.actions.append(action)
        record.reward += float(step.reward)
        record.ended = bool(step.terminated or step.truncated)
        if record.ended:
            record.success = self._success(step, spot)
        flags = f"{float(step.reward)!r} {bool(step.terminated)} {bool(step.truncated)}"
        return f"{_text(step.messages)} {flags}{self._key(env, spot)}"

    def play(self, spot: Spot, player: Callable[[Any], Action]) -> Record:
        """A whole episode, or four times as many turns as one may have."""
        env, record = self.new(spot), Record()
        record.lines.append(self.reset(env, spot))
        limit = 4 * self.turns(env)
        while not record.ended and len(record.actions) < limit:
            record.lines.append(self.step(env, player(env), spot, record))
        self.optional(env, "close", spot)
        return record

    def _required(self, what: str, spot: Spot, function: Callable[[], Any]) -> Any:
        try:
            return self.call(what, spot, function)
        except NotImplementedError:
            self.problems.add(f"{what} raises NotImplementedError; it must be written", str(spot))
            raise Broken from None

    def _read(self, spot: Spot, read: Callable[..., Any], *answer: Any) -> Any:
        """The answer as an episode would read it."""
        try:
            return read(*answer)
        except EnvironmentFault as fault:
            wrong: Wrong = fault.args[0]
            self.problems.add(str(wrong), str(spot), same=f"{wrong.what} {wrong.wanted}")
            raise Broken from None

    def _roles(self, what: str, messages: Any, spot: Spot) -> None:
        wrong = role_fault(messages)
        if wrong:
            self.problems.add(f"{what}: {wrong}", str(spot))
            raise Broken

    def _success(self, step: Any, spot: Spot) -> bool | None:
        success = step.info.get("success")
        if is_flag(success):
            return bool(success)
        seen = repr(success) if "success" in step.info else "missing"
        self.problems.add(f"step: info['success'] of the last step is {seen}; it must be True or False", str(spot))
        return None

    def _key(self, env: Any, spot: Spot) -> str:
        """The state key, looked at twice: asking must not change it."""
        if not callable(getattr(env, "state_key", None)):
            return ""
        first, second = (
            self._read(spot, read_state_key, self._required("state_key()", spot, lambda: env.state_key()))
            for _ in range(2)
        )
        if first != second:
            self.problems.add("state_key() changes when asked twice without a step between", str(spot))
        return f" [{first}]"


def _text(messages: Any) -> str:
    return json.dumps([dict(message) for message in messages], sort_keys=True, default=repr)
