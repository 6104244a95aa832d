"""Drives an environment that may be faulty in any way: every call has a time limit, every exception is caught, every returned
value is validated, and faults become findings. Also the rules of the checker beyond those an episode enforces
(``environments.contract``).

Used by ``environments.checker.check``. Does not know which episodes to play, nor which environments exist.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from statistics import median
from threading import Thread
from typing import Any

from turnwise.core.protocols import Action, Step
from turnwise.core.text import clean
from turnwise.environments import settings
from turnwise.environments.calls import UNSAFE_EXCEPTIONS, CallTimeout, call_environment
from turnwise.environments.contract import COUNTS, ContractViolation, read_messages, read_state_key, read_step
from turnwise.errors import EnvironmentFault

DEFAULT_MAX_TURNS = 64  # of a class without max_turns
LONG_OBSERVATION = 100_000  # characters
ROLES = ("system", "user", "assistant", "tool")
SLOW_STEP = 1.0  # seconds, median
SLOW_INLINE = 0.1  # seconds of one call that holds up all episodes
QUICK = 0.002  # seconds below which a thread costs more than the call


class EpisodeAborted(Exception):
    """The episode cannot continue; the reason is already among the findings."""


@dataclass
class Findings:
    """Distinct messages, each with its count and the first episode in which it occurred."""

    entries: dict[str, tuple[int, str, str]] = field(default_factory=dict)  # by key: count, first episode, message

    def add(self, text: str, where: object = "", same: str = "") -> None:
        """``same`` is the key of messages that are one mistake although they quote different values."""
        count, first, message = self.entries.get(same or text, (0, str(where or ""), text))
        self.entries[same or text] = (count + 1, first, message)

    def lines(self) -> tuple[str, ...]:
        def line(count: int, where: str, text: str) -> str:
            times = f"seen {count} times, first" if count > 1 else "seen"
            return f"{text} ({times} at {where})" if where else text

        return tuple(line(*entry) for entry in self.entries.values())


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


class EnvironmentDriver:
    """Calls one environment class and collects findings."""

    def __init__(self, cls: type[Any], seconds: float) -> None:
        self.cls, self.seconds = cls, seconds
        self.loop = DriverLoop()
        self.new_threads = False  # whether every call comes from another thread
        self.inline = bool(getattr(cls, "inline", False))
        self.durations: dict[str, list[float]] = {}  # seconds by method
        self.settings = settings(cls)
        self.problems, self.warnings = Findings(), Findings()

    def call(self, what: str, spec: EpisodeSpec, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a call into the environment; ``NotImplementedError`` propagates: the method is not supported."""
        began = time.perf_counter()
        inline = self.inline or isinstance(function, partial)  # training constructs on the event loop in any case
        try:
            call = call_environment(function, *args, seconds=self.seconds, inline=inline, new_thread=self.new_threads)
            return self.loop.run(call, 3 * self.seconds + 5)
        except NotImplementedError:
            raise
        except CallTimeout as fault:
            detail = str(fault).partition("(")[2].rstrip(")")
            at = f" ({detail})" if detail else ""
            self.problems.add(f"{what} did not return within {self.seconds:g} s{at}; the check stopped there", spec)
            raise
        except BaseException as caught:
            error = caught.__context__ if isinstance(caught.__context__, UNSAFE_EXCEPTIONS) else caught
            # the message on one line: it may quote a malformed action, and must still be printable
            text = " ".join(str(error).split())[:160].encode("ascii", "backslashreplace").decode()
            if "thread" in text.lower():
                text += " (training calls a method in any thread of a pool: let the object be used there, or write inline = True)"
            self.problems.add(f"{what} raises {type(error).__name__}: {text}; it must return a message", spec)
            raise EpisodeAborted from None
        finally:
            self.durations.setdefault(what, []).append(time.perf_counter() - began)

    def new(self, spec: EpisodeSpec) -> Any:
        make: Callable[..., Any] = self.cls
        arguments = {key: getattr(spec, key) for key in sorted(self.settings)}
        shown = ", ".join(f"{key}=..." for key in arguments)
        return self.call(f"{self.cls.__name__}({shown})", spec, partial(make, **arguments))

    def optional(self, env: Any, name: str, spec: EpisodeSpec, *arguments: Any) -> Any:
        """The result of an optional method; None if the environment does not have it."""
        method = getattr(env, name, None)
        if not callable(method):
            return None
        try:
            return self.call(f"{name}()", spec, method, *arguments)
        except NotImplementedError:
            return None

    def reset(self, env: Any, spec: EpisodeSpec) -> str:
        messages = self._valid("reset", spec, self._required("reset", spec, env.reset, spec.seed))
        if not messages:
            self.problems.add("reset returns no messages; the agent would have nothing to read", spec)
            raise EpisodeAborted
        return comparable(messages) + self._key(env, spec)

    def step(self, env: Any, action: Action, spec: EpisodeSpec, record: EpisodeRecord | None = None) -> str:
        """Apply an action, validate the step, and add it to the record; returns the step as a comparable line."""
        step = self._valid("step", spec, self._required("step", spec, env.step, action))
        for message in accepted_but_odd(step, getattr(env, "facts", ())):
            self.warnings.add(message, spec)
        if record is not None:
            record.actions.append(action)
            record.reward += float(step.reward)
            record.ended = bool(step.terminated or step.truncated)
            if record.ended:
                record.success = self._success(step, spec)
        return comparable(step.messages, step) + self._key(env, spec)

    def play(self, spec: EpisodeSpec, policy: Callable[[Any], Action]) -> EpisodeRecord:
        """A whole episode, or four times ``max_turns`` turns of it."""
        env, record = self.new(spec), EpisodeRecord()
        record.lines.append(self.reset(env, spec))
        turns = getattr(env, "max_turns", DEFAULT_MAX_TURNS)
        if not isinstance(turns, int) or turns < 1:
            self.problems.add(f"max_turns is {turns!r}; it must be a whole number of at least 1")
            turns = DEFAULT_MAX_TURNS
        while not record.ended and len(record.actions) < 4 * turns:
            record.lines.append(self.step(env, policy(env), spec, record))
        self.optional(env, "close", spec)
        return record

    def replay(self, spec: EpisodeSpec, actions: Sequence[Action]) -> tuple[Any, list[str]]:
        """A new episode after these actions, and its lines."""
        env = self.new(spec)
        return env, [self.reset(env, spec), *(self.step(env, action, spec) for action in actions)]

    def _required(self, what: str, spec: EpisodeSpec, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return self.call(what, spec, function, *args)
        except NotImplementedError:
            self.problems.add(f"{what} raises NotImplementedError; write it", spec)
            raise EpisodeAborted from None

    def _read(self, spec: EpisodeSpec, read: Callable[..., Any], *arguments: Any) -> Any:
        """The returned value, validated as in an episode."""
        try:
            return read(*arguments)
        except EnvironmentFault as fault:
            violation: ContractViolation = fault.args[0]
            self.problems.add(str(violation), spec, same=f"{violation.what} {violation.expected}")
            raise EpisodeAborted from None

    def _valid(self, what: str, spec: EpisodeSpec, value: Any) -> Any:
        """What ``reset`` or ``step`` returned, as an episode reads it; also looks at its messages as they are."""
        valid = self._read(spec, read_messages, value, what) if what == "reset" else self._read(spec, read_step, value)
        raw = value if what == "reset" else value[0] if isinstance(value, tuple) else value.messages
        for message in raw:
            content = message["content"]
            if message["role"] not in ROLES:
                roles = ", ".join(ROLES)
                self.problems.add(f"{what}: a message has the role {message['role']!r}; write one of {roles}", spec)
                raise EpisodeAborted
            if clean(content) != content:
                half = "a message holds half of a surrogate pair; training shows U+FFFD in its place"
                self.warnings.add(f"{what}: {half}", spec)
            if len(content) > LONG_OBSERVATION:
                long = f"an observation has {len(content):,} characters; no context window holds it, shorten it"
                self.warnings.add(f"{what}: {long}", spec, same=f"{what}: long")
        return valid

    def _success(self, step: Step, spec: EpisodeSpec) -> bool | None:
        success = step.info.get("success")
        if is_flag(success):
            return bool(success)
        shown = repr(success) if "success" in step.info else "missing"
        self.problems.add(f"step: info['success'] of the last step is {shown}; it must be True or False", spec)
        return None

    def _key(self, env: Any, spec: EpisodeSpec) -> str:
        """The state key, read twice: reading must not change it."""
        if not callable(getattr(env, "state_key", None)):
            return ""
        keys = [self._read(spec, read_state_key, self._required("state_key()", spec, env.state_key)) for _ in range(2)]
        if keys[0] != keys[1]:
            self.problems.add("state_key() changes when asked twice without a step between", spec)
        return f" [{keys[0]}]"

    def speed(self) -> dict[str, str]:
        """How long the calls took, and whether ``inline`` fits; a finding where it does not."""
        steps, resets = self.durations.get("step", []), self.durations.get("reset", [])
        if not steps or not resets:
            return {}
        ordered = sorted([*steps, *resets])
        usual = ordered[int(0.95 * (len(ordered) - 1))]  # one slow call of twenty may be the machine's
        times = zip(("reset", "step", "slowest"), (median(resets), median(steps), ordered[-1]))
        facts = {"speed": ", ".join(f"{name} {_milliseconds(seconds)}" for name, seconds in times)}
        if median(steps) > SLOW_STEP:
            self.warnings.add(
                f"a step takes {median(steps):.1f} s: a training step waits for the slowest of its episodes"
            )
        if any(inspect.iscoroutinefunction(getattr(self.cls, name, None)) for name in ("reset", "step")):
            return facts
        if self.inline:
            facts["inline"] = "declared: calls run in the event loop's thread"
            if usual > SLOW_INLINE:
                self.warnings.add(
                    f"calls take {_milliseconds(usual)} although the class says inline = True: every other episode waits for it"
                )
        elif usual < QUICK:
            facts["inline"] = "inline = True is safe as far as seen, and saves a thread for each call"
        else:
            facts["inline"] = "no: a call may take long, so each runs in a thread"
        return facts


def comparable(messages: Any, step: Step | None = None) -> str:
    """Messages and the outcome of a step as one line."""
    text = json.dumps([dict(message) for message in messages], sort_keys=True, default=repr)
    return text if step is None else f"{text} {float(step.reward)!r} {bool(step.terminated)} {bool(step.truncated)}"


def is_flag(value: Any) -> bool:
    """Whether a value is a bool, including NumPy's."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"


def accepted_but_odd(step: Step, facts: Sequence[str]) -> Iterator[str]:
    """Values that an episode converts, and facts that the class does not declare: a method that requires them could not find
    out that they exist."""
    for name in ("terminated", "truncated"):
        value = getattr(step, name)
        if not is_flag(value):
            yield f"step: {name} is {value!r:.40}, taken as {bool(value)}; write True or False"
    for name in COUNTS:
        count = step.info.get(name, 0)
        if not isinstance(count, Integral):
            yield f"step: info[{name!r}] is {count!r}, taken as {int(count)}; write a whole number"
    for name in step.info.get("facts", {}):
        if name not in facts:
            yield f"step returns the fact {name!r}, which the class does not declare; write facts = ({name!r}, ...)"


def tool_fault(tools: Any) -> str:
    """What is wrong with a list of OpenAI tool schemas; empty if nothing is."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        return f"tools is a {type(tools).__name__}; it must be a list of OpenAI tool schemas"
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            return f"a tool is {tool!r:.60}; write {{'type': 'function', 'function': {{...}}}}"
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name.isidentifier():
            return f"a tool has the name {name!r}; it must be a plain word"
        if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
            return f"parameters of tool {name!r} must be a JSON schema of type 'object'"
        unknown = set(parameters.get("required", ())) - set(parameters.get("properties", ()))
        if unknown:
            return f"tool {name!r} requires {sorted(unknown)}, which are not among its properties"
    return ""


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
