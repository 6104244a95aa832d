"""Drives an environment that may be faulty in any way: every call has a time limit, every exception is caught, every returned
value is validated, and faults become findings.

Used by ``environments.checker.check``. Does not know which episodes to play, nor which environments exist.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from turnwise.core.protocols import Action
from turnwise.environments import settings
from turnwise.environments.calls import UNSAFE_EXCEPTIONS, CallTimeout, call_environment, with_timeout
from turnwise.environments.checker.rules import (
    implicit_conversions,
    is_flag,
    role_fault,
    text_faults,
    undeclared_facts,
)
from turnwise.environments.contract import ContractViolation, read_messages, read_state_key, read_step
from turnwise.errors import EnvironmentFault

DEFAULT_MAX_TURNS = 64  # of a class without max_turns


class EpisodeAborted(Exception):
    """The episode cannot continue; the reason is already among the findings."""


@dataclass
class Findings:
    """Distinct messages, each with its count and the first episode in which it occurred."""

    entries: dict[str, tuple[int, str, str]] = field(default_factory=dict)  # by key: count, first episode, message

    def add(self, text: str, where: str = "", same: str = "") -> None:
        """``same`` is the key of messages that are one mistake although they quote different values."""
        count, first, message = self.entries.get(same or text, (0, where, text))
        self.entries[same or text] = (count + 1, first, message)

    def lines(self) -> tuple[str, ...]:
        def line(text: str, count: int, where: str) -> str:
            times = f"seen {count} times, first" if count > 1 else "seen"
            return f"{text} ({times} at {where})" if where else text

        return tuple(line(text, count, where) for count, where, text in self.entries.values())


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Identifies an episode: enough to reproduce it."""

    seed: int
    difficulty: int = 1
    split: str = "train"
    policy: str = ""

    def __str__(self) -> str:
        return f"difficulty {self.difficulty}, {self.split}, seed {self.seed}" + f", {self.policy}" * bool(self.policy)


@dataclass
class EpisodeRecord:
    """One played episode: its returned values as comparable lines, and its actions."""

    lines: list[str] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    success: bool | None = None
    reward: float = 0.0
    ended: bool = False


class DriverLoop:
    """An event loop in a thread of its own, on which environments are called as in training."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
        """The result; a ``CallTimeout`` if even the loop does not answer, because a call holds its thread."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout=seconds)
        except FutureTimeout:
            raise CallTimeout("the event loop is blocked") from None

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


async def call_in_new_thread(function: Callable[..., Any], *args: Any, seconds: float, inline: bool) -> Any:
    """``call_environment``, but never in the thread of an earlier call: what training does whenever several episodes play."""
    if inline or inspect.iscoroutinefunction(function):
        return await call_environment(function, *args, seconds=seconds, inline=inline)
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def work() -> None:
        try:
            value, fault = function(*args), None
        except BaseException as caught:
            value, fault = None, caught if isinstance(caught, Exception) else RuntimeError(repr(caught))
        loop.call_soon_threadsafe(lambda: done.set_exception(fault) if fault else done.set_result(value))

    Thread(target=work, daemon=True).start()
    value = await with_timeout(done, seconds)
    return await with_timeout(value, seconds) if inspect.isawaitable(value) else value


class EnvironmentDriver:
    """Calls one environment class and collects findings."""

    def __init__(self, cls: type[Any], seconds: float) -> None:
        self.cls, self.seconds = cls, seconds
        self.loop = DriverLoop()
        self.call_method = call_environment
        self.inline = bool(getattr(cls, "inline", False))
        self.durations: dict[str, list[float]] = {}  # seconds by method
        self.settings = settings(cls)
        self.problems, self.warnings = Findings(), Findings()

    def call(self, what: str, spec: EpisodeSpec | None, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a call into the environment; ``NotImplementedError`` propagates: the method is not supported."""
        where, began = str(spec) if spec else "", time.perf_counter()
        try:
            call = self.call_method(
                function, *args, seconds=self.seconds, inline=self.inline or isinstance(function, _Constructor)
            )
            return self.loop.run(call, 3 * self.seconds + 5)
        except NotImplementedError:
            raise
        except CallTimeout as fault:
            detail = str(fault).partition("(")[2].rstrip(")")
            at = f" ({detail})" if detail else ""
            self.problems.add(f"{what} did not return within {self.seconds:g} s{at}; the check stopped there", where)
            raise
        except BaseException as caught:
            error = caught.__context__ if isinstance(caught.__context__, UNSAFE_EXCEPTIONS) else caught
            self.problems.add(
                f"{what} raises {type(error).__name__}: {_quoted(error)}; it must return a message", where
            )
            raise EpisodeAborted from None
        finally:
            self.durations.setdefault(what, []).append(time.perf_counter() - began)

    def new(self, spec: EpisodeSpec) -> Any:
        arguments = {key: getattr(spec, key) for key in self.settings}
        return self.call(
            f"{self.cls.__name__}({', '.join(f'{k}=...' for k in sorted(arguments))})",
            spec,
            _Constructor(self.cls, arguments),
        )

    def optional(self, env: Any, name: str, spec: EpisodeSpec, *arguments: Any) -> Any:
        """The result of an optional method; None if the environment does not have it."""
        method = getattr(env, name, None)
        if not callable(method):
            return None
        try:
            return self.call(f"{name}()", spec, method, *arguments)
        except NotImplementedError:
            return None

    def max_turns(self, env: Any) -> int:
        turns = getattr(env, "max_turns", DEFAULT_MAX_TURNS)
        if isinstance(turns, int) and turns >= 1:
            return turns
        self.problems.add(f"max_turns is {turns!r}; it must be a whole number of at least 1")
        return DEFAULT_MAX_TURNS

    def reset(self, env: Any, spec: EpisodeSpec) -> str:
        value = self._required("reset", spec, env.reset, spec.seed)
        messages = self._read(spec, read_messages, value, "reset")
        self._roles("reset", messages, spec)
        self._texts("reset", value, spec)
        if not messages:
            self.problems.add("reset returns no messages; the agent would have nothing to read", str(spec))
            raise EpisodeAborted
        return _text(messages) + self._key(env, spec)

    def step(self, env: Any, action: Action, spec: EpisodeSpec, record: EpisodeRecord) -> str:
        """Apply an action, validate the step, and add it to the record; returns the step as a comparable line."""
        value = self._required("step", spec, env.step, action)
        step = self._read(spec, read_step, value)
        self._roles("step", step.messages, spec)
        self._texts("step", value[0] if isinstance(value, tuple) else value.messages, spec)
        for message in (*implicit_conversions(step), *undeclared_facts(step, getattr(env, "facts", ()))):
            self.warnings.add(message, str(spec))
        record.actions.append(action)
        record.reward += float(step.reward)
        record.ended = bool(step.terminated or step.truncated)
        if record.ended:
            record.success = self._success(step, spec)
        flags = f"{float(step.reward)!r} {bool(step.terminated)} {bool(step.truncated)}"
        return f"{_text(step.messages)} {flags}{self._key(env, spec)}"

    @staticmethod
    def comparable(values: list[Any]) -> list[str]:
        """The messages of a reset and the parts of steps, as the lines of a record without state keys."""
        first, *steps = values
        flags = [f"{_text(m)} {reward!r} {terminated} {truncated}" for m, reward, terminated, truncated in steps]
        return [_text(first), *flags]

    def play(self, spec: EpisodeSpec, policy: Callable[[Any], Action]) -> EpisodeRecord:
        """A whole episode, or four times ``max_turns`` turns of it."""
        env, record = self.new(spec), EpisodeRecord()
        record.lines.append(self.reset(env, spec))
        limit = 4 * self.max_turns(env)
        while not record.ended and len(record.actions) < limit:
            record.lines.append(self.step(env, policy(env), spec, record))
        self.optional(env, "close", spec)
        return record

    def _required(self, what: str, spec: EpisodeSpec, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return self.call(what, spec, function, *args)
        except NotImplementedError:
            self.problems.add(f"{what} raises NotImplementedError; write it", str(spec))
            raise EpisodeAborted from None

    def _read(self, spec: EpisodeSpec, read: Callable[..., Any], *arguments: Any) -> Any:
        """The returned value, validated as in an episode."""
        try:
            return read(*arguments)
        except EnvironmentFault as fault:
            violation: ContractViolation = fault.args[0]
            self.problems.add(str(violation), str(spec), same=f"{violation.what} {violation.expected}")
            raise EpisodeAborted from None

    def _roles(self, what: str, messages: Any, spec: EpisodeSpec) -> None:
        fault = role_fault(messages)
        if fault:
            self.problems.add(f"{what}: {fault}", str(spec))
            raise EpisodeAborted

    def _texts(self, what: str, messages: Any, spec: EpisodeSpec) -> None:
        for fault in text_faults(messages):
            self.warnings.add(f"{what}: {fault}", str(spec), same=f"{what} {fault.partition(';')[2]}")

    def _success(self, step: Any, spec: EpisodeSpec) -> bool | None:
        success = step.info.get("success")
        if is_flag(success):
            return bool(success)
        shown = repr(success) if "success" in step.info else "missing"
        self.problems.add(f"step: info['success'] of the last step is {shown}; it must be True or False", str(spec))
        return None

    def _key(self, env: Any, spec: EpisodeSpec) -> str:
        """The state key, read twice: reading must not change it."""
        if not callable(getattr(env, "state_key", None)):
            return ""
        first, second = (
            self._read(spec, read_state_key, self._required("state_key()", spec, env.state_key)) for _ in range(2)
        )
        if first != second:
            self.problems.add("state_key() changes when asked twice without a step between", str(spec))
        return f" [{first}]"


@dataclass(frozen=True)
class _Constructor:
    """Training constructs an environment on the event loop, whatever ``inline`` says."""

    cls: type[Any]
    arguments: dict[str, Any]

    def __call__(self) -> Any:
        return self.cls(**self.arguments)


def _quoted(error: BaseException) -> str:
    """The message on one line. It may quote a malformed action, and must still be printable."""
    text = " ".join(str(error).split())[:160].encode("ascii", "backslashreplace").decode()
    if "thread" in text.lower():
        return f"{text} (training calls a method in any thread of a pool: let the object be used there, or write inline = True)"
    return text


def _text(messages: Any) -> str:
    return json.dumps([dict(message) for message in messages], sort_keys=True, default=repr)
