"""Checks whether an environment can be trained in: plays scripted policies and malformed actions, and reports faults.

    report = check_env("my_package.my_module:MyEnvironment")
    print(report.text())

Works for any class with ``reset(seed)`` and ``step(action)``; optional methods (an oracle, splits, snapshots ...) are checked
if present. The class may be faulty in any way: every call has a time limit, every exception is caught, every returned value is
validated, and faults become findings. Does not know the rules of any environment, so it cannot detect a wrong reward, except
that the environment's own oracle must succeed; nor an order that differs only between processes (that of a set).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from statistics import median
from threading import Thread
from typing import Any

from turnwise.core.protocols import Action
from turnwise.core.text import clean
from turnwise.environments import load, settings
from turnwise.environments.base import SPLITS, text_action
from turnwise.environments.calls import UNSAFE_EXCEPTIONS, CallTimeout, call_environment
from turnwise.environments.checker.fuzz import malformed_actions
from turnwise.environments.contract import COUNTS, comparable, read_messages, read_state_key, read_step, tool_fault
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


class EnvironmentCheck:
    """Calls one environment class and collects findings. ``episodes``: of each difficulty."""

    def __init__(self, cls: type[Any], seconds: float = 30.0, episodes: int = 20) -> None:
        self.cls, self.seconds, self.episodes = cls, seconds, episodes
        self.loop = DriverLoop()
        self.new_threads = False  # whether every call comes from another thread
        self.inline = bool(getattr(cls, "inline", False))
        self.durations: dict[str, list[float]] = {}  # seconds by method
        self.settings = settings(cls)
        self.problems, self.warnings = Findings(), Findings()
        self.played: dict[str, PlayStats] = {}
        self.has_split = "split" in self.settings
        levels = getattr(cls, "difficulties", (1,))
        self.difficulties: tuple[int, ...] = levels if "difficulty" in self.settings else (1,)

    def abort(self, text: str, spec: EpisodeSpec, same: str = "") -> EpisodeAborted:
        """Add a problem after which the episode cannot go on; the caller raises what this returns."""
        self.problems.add(text, spec, same)
        return EpisodeAborted()

    def call(
        self, what: str, spec: EpisodeSpec, function: Callable[..., Any], *args: Any, optional: bool = False
    ) -> Any:
        """The result of a call into the environment; None where it does not support an ``optional`` one."""
        began = time.perf_counter()
        inline = self.inline or isinstance(function, partial)  # training constructs on the event loop in any case
        try:
            call = call_environment(function, *args, seconds=self.seconds, inline=inline, new_thread=self.new_threads)
            # a plain part and an awaited one have a limit each, and a cancelled one has time to end
            return self.loop.run(call, 3 * self.seconds + 5)
        except NotImplementedError:
            if optional:
                return None
            raise self.abort(f"{what} raises NotImplementedError; write it", spec) from None
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
            raise self.abort(f"{what} raises {type(error).__name__}: {text}; it must return a message", spec) from None
        finally:
            self.durations.setdefault(what, []).append(time.perf_counter() - began)

    def optional(self, env: Any, name: str, spec: EpisodeSpec, *arguments: Any) -> Any:
        """The result of an optional method; None if the environment does not have it."""
        method = getattr(env, name, None)
        return self.call(f"{name}()", spec, method, *arguments, optional=True) if callable(method) else None

    def new(self, spec: EpisodeSpec) -> Any:
        """An episode that is not yet reset."""
        make: Callable[..., Any] = self.cls
        arguments = {key: getattr(spec, key) for key in sorted(self.settings)}
        shown = ", ".join(f"{key}=..." for key in arguments)
        return self.call(f"{self.cls.__name__}({shown})", spec, partial(make, **arguments))

    def reset(self, env: Any, spec: EpisodeSpec) -> str:
        messages = self._valid("reset", spec, self.call("reset", spec, env.reset, spec.seed))
        if not messages:
            raise self.abort("reset returns no messages; the agent would have nothing to read", spec)
        return comparable(messages) + self._key(env, spec)

    def step(self, env: Any, action: Action, spec: EpisodeSpec, record: EpisodeRecord | None = None) -> str:
        """Apply an action, validate the step, and add it to the record; returns the step as a comparable line."""
        step = self._valid("step", spec, self.call("step", spec, env.step, action))
        # what an episode converts silently
        for name in ("terminated", "truncated"):
            value = getattr(step, name)
            if not is_flag(value):
                self.warnings.add(f"step: {name} is {value!r:.40}, taken as {bool(value)}; write True or False", spec)
        for name in COUNTS:
            count = step.info.get(name, 0)
            if not isinstance(count, Integral):
                odd = f"info[{name!r}] is {count!r}, taken as {int(count)}"
                self.warnings.add(f"step: {odd}; write a whole number", spec)
        # a method that requires a fact could not find out that it exists
        for name in step.info.get("facts", {}):
            if name not in getattr(env, "facts", ()):
                undeclared = f"step returns the fact {name!r}, which the class does not declare"
                self.warnings.add(f"{undeclared}; write facts = ({name!r}, ...)", spec)
        if record is not None:
            record.actions.append(action)
            record.reward += float(step.reward)
            record.ended = bool(step.terminated or step.truncated)
            success = step.info.get("success")
            if record.ended and is_flag(success):
                record.success = bool(success)
            elif record.ended:
                shown = repr(success) if "success" in step.info else "missing"
                self.problems.add(f"step: info['success'] of the last step is {shown}; it must be True or False", spec)
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

    def _read(self, spec: EpisodeSpec, read: Callable[..., Any], *arguments: Any) -> Any:
        """The returned value, validated as in an episode."""
        try:
            return read(*arguments)
        except EnvironmentFault as fault:
            violation = fault.args[0]
            raise self.abort(str(violation), spec, same=f"{violation.what} {violation.expected}") from None

    def _valid(self, what: str, spec: EpisodeSpec, value: Any) -> Any:
        """What ``reset`` or ``step`` returned, as an episode reads it; also looks at its messages as they are."""
        valid = self._read(spec, read_messages, value, what) if what == "reset" else self._read(spec, read_step, value)
        raw = value if what == "reset" else value[0] if isinstance(value, tuple) else value.messages
        for message in raw:
            content = message["content"]
            if message["role"] not in ROLES:
                role = f"a message has the role {message['role']!r}; write one of {', '.join(ROLES)}"
                raise self.abort(f"{what}: {role}", spec)
            if clean(content) != content:
                half = "a message holds half of a surrogate pair; training shows U+FFFD in its place"
                self.warnings.add(f"{what}: {half}", spec)
            if len(content) > LONG_OBSERVATION:
                long = f"an observation has {len(content):,} characters; no context window holds it, shorten it"
                self.warnings.add(f"{what}: {long}", spec, same=f"{what}: long")
        return valid

    def _key(self, env: Any, spec: EpisodeSpec) -> str:
        """The state key, read twice: reading must not change it."""
        if not callable(getattr(env, "state_key", None)):
            return ""
        keys = [self._read(spec, read_state_key, self.call("state_key()", spec, env.state_key)) for _ in range(2)]
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
        if (usual_step := median(steps)) > SLOW_STEP:
            self.warnings.add(f"a step takes {usual_step:.1f} s: a training step waits for the slowest of its episodes")
        if any(inspect.iscoroutinefunction(getattr(self.cls, name, None)) for name in ("reset", "step")):
            return facts
        if self.inline:
            facts["inline"] = "declared: calls run in the event loop's thread"
            if usual > SLOW_INLINE:
                slow = f"calls take {_milliseconds(usual)} although the class says inline = True"
                self.warnings.add(f"{slow}: every other episode waits for it")
        elif usual < QUICK:
            facts["inline"] = "inline = True is safe as far as seen, and saves a thread for each call"
        else:
            facts["inline"] = "no: a call may take long, so each runs in a thread"
        return facts

    # ---- the checks, each a method that adds to ``problems`` and ``warnings``
    def in_words(self) -> list[tuple[Callable[[], None], str]]:
        """The checks in their order, each as it is told to the user; a check that has nothing to do says so."""
        cls, count = self.cls, len(malformed_actions(getattr(self.cls, "tools", ())))
        levels = f"{self.episodes} tasks of every difficulty ({', '.join(map(str, self.difficulties))})"
        forks = all(callable(getattr(cls, name, None)) for name in ("snapshot", "restore"))
        splits = f"{levels} of both splits, for one that is in both"
        snapshots = "a snapshot at every turn, restored and played on"
        return [
            (self.scripted_policies, f"oracle, random and demonstrating policy, where there are such, on {levels}"),
            (self.malformed_actions, f"{count} kinds of malformed actions, each for an episode"),
            (self.determinism, "the same seeds and actions twice, and different seeds"),
            (self.threads, "every call of an episode in another thread"),
            (self.concurrency, f"{CONCURRENT} episodes at once"),
            (self.splits, splits if self.has_split else "no splits: __init__ takes none"),
            (self.snapshots, snapshots if forks else "no snapshots: there is no method"),
            (self.tools, "the schemas of its tools"),
        ]

    def signature(self) -> bool:
        for name, argument in (("reset", "seed"), ("step", "action")):
            try:
                inspect.signature(getattr(self.cls, name)).bind(None, None)
            except (AttributeError, TypeError, ValueError):
                self.problems.add(f"there is no {name} that takes one argument; write def {name}(self, {argument})")
        if not isinstance(self.difficulties, list | tuple) or not self.difficulties:
            self.problems.add(f"difficulties is {self.difficulties!r}; write a tuple such as (1, 2, 3)")
        if not self.has_split:
            self.warnings.add("__init__ takes no split: success cannot be measured on held-out tasks")
        return not self.problems.entries

    def _play(self, policy: str, spec: EpisodeSpec, counted: bool = False) -> EpisodeRecord | None:
        """An episode of one of the environment's scripted policies; None if it has no such policy or the episode was aborted."""
        spec, rng = replace(spec, policy=spec.policy or policy), random.Random(spec.seed)
        arguments = () if policy == "oracle" else (rng,)

        def act(env: Any) -> Action:
            action = self.optional(env, policy, spec, *arguments)
            if action is None and policy == "random_action":
                return text_action(rng.choice(FALLBACK_TEXTS))
            if action is None:
                raise EpisodeAborted  # there is no such policy
            if not isinstance(action, Action):
                raise self.abort(f"{policy} returns a {type(action).__name__}; return an Action", spec)
            return action

        try:
            record = self.play(spec, act)
        except EpisodeAborted:
            return None
        if not record.ended:
            self.problems.add(f"an episode {ENDLESS}", spec)
        if counted:
            self.played.setdefault(policy, PlayStats()).add(record)
        return record

    def _recorded(self, seeds: int, policy: str) -> Iterator[tuple[EpisodeSpec, EpisodeRecord]]:
        """Episodes of random actions, for each difficulty, that a check plays again."""
        for difficulty in self.difficulties:
            for seed in range(seeds):
                spec = EpisodeSpec(seed, difficulty, policy=policy)
                record = self._play("random_action", spec)
                if record is None:
                    raise EpisodeAborted
                yield spec, record

    def _fixed_play(self, spec: EpisodeSpec) -> EpisodeRecord:
        """The oracle's episode, or one of a fixed text: only the seed makes a difference."""
        record = self._play("oracle", spec) if "oracle" in self.played else None
        return record or self.play(spec, _always(text_action(FALLBACK_TEXTS[0])))

    def scripted_policies(self) -> None:
        """The oracle must succeed; random actions should not."""
        specs = [EpisodeSpec(seed, level) for level in self.difficulties for seed in range(self.episodes)]
        for policy in ("oracle", "random_action", "demonstrate"):
            for spec in specs:
                record = self._play(policy, spec, counted=True)
                if policy == "oracle" and record and record.ended and record.success is False:
                    self.problems.add("the oracle does not succeed", spec)
                if policy == "oracle" and record and record.success and record.reward <= 0:
                    self.warnings.add("the oracle succeeds but earns no reward", spec)
        blind = self.played.get("random_action", PlayStats())
        if blind.episodes and blind.won >= TOO_EASY * blind.episodes:
            wins = f"random actions succeed in {blind.won} of {blind.episodes} episodes"
            self.warnings.add(f"{wins}: there is little to learn")

    def malformed_actions(self) -> None:
        """An episode of each kind of malformed action."""
        for label, action in malformed_actions(getattr(self.cls, "tools", ())).items():
            spec = EpisodeSpec(0, self.difficulties[0], policy=label)
            with suppress(EpisodeAborted):
                if not self.play(spec, _always(action)).ended:
                    self.warnings.add(f"an episode of malformed actions {ENDLESS}", spec)

    def determinism(self) -> None:
        """Equal seeds give equal episodes, different seeds different ones."""
        for difficulty in self.difficulties:
            episodes = set()
            for seed in range(min(self.episodes, 8)):
                spec = EpisodeSpec(seed, difficulty)
                one, two = (self._play("random_action", spec) for _ in range(2))
                if one and two and one.lines != two.lines:
                    self.problems.add(NOT_DETERMINISTIC, spec)
                episodes.add(str(self._fixed_play(spec).lines))
            if len(episodes) == 1:  # a fixed text may show no difference
                findings = self.problems if "oracle" in self.played else self.warnings
                findings.add("all seeds give the same episode; reset must use its seed", f"difficulty {difficulty}")

    def threads(self) -> None:
        """An episode must go on in whichever thread calls it next."""
        # first in one thread, for comparison
        recorded = list(self._recorded(2, "each call in a new thread"))
        self.new_threads = True
        try:
            for spec, record in recorded:
                env, lines = self.replay(spec, record.actions)
                self.optional(env, "close", spec)
                if lines != record.lines:
                    self.problems.add("an episode differs when each call comes from another thread", spec)
        finally:
            self.new_threads = False

    def concurrency(self) -> None:
        """Episodes that run at the same time, as the rollouts of a step do, must give what each gives alone. Skipped if a single
        one is not deterministic."""
        if NOT_DETERMINISTIC in self.problems.entries:
            return
        recorded = list(self._recorded(CONCURRENT, "several at once"))
        envs = [self.new(spec) for spec, _ in recorded]

        async def call(function: Callable[..., Any], *args: Any) -> Any:
            return await call_environment(function, *args, seconds=self.seconds, inline=self.inline)

        async def key(env: Any) -> str:
            has_key = callable(getattr(env, "state_key", None))
            return f" [{read_state_key(await call(env.state_key))}]" if has_key else ""

        async def begin(env: Any, seed: int) -> str:
            return comparable(read_messages(await call(env.reset, seed), "reset")) + await key(env)

        async def go_on(env: Any, actions: list[Action], first: str | BaseException) -> list[str]:
            if isinstance(first, BaseException):
                raise first
            lines = [first]
            for action in actions:
                await asyncio.sleep(0)  # a model would answer here, and other episodes go on
                step = read_step(await call(env.step, action))
                lines.append(comparable(step.messages, step) + await key(env))
            return lines

        async def play_all() -> list[Any]:
            # all begin before the first goes on, so that no fault depends on the schedule
            begins = (begin(env, spec.seed) for env, (spec, _) in zip(envs, recorded))
            firsts = await asyncio.gather(*begins, return_exceptions=True)
            plays = (go_on(env, record.actions, first) for env, (_, record), first in zip(envs, recorded, firsts))
            return await asyncio.gather(*plays, return_exceptions=True)

        calls = sum(len(record.actions) + 1 for _, record in recorded)
        for (spec, record), result in zip(recorded, self.loop.run(play_all(), 3 * self.seconds * calls + 5)):
            if isinstance(result, CallTimeout):
                self.problems.add(f"beside other episodes: {result}", spec, same="beside other episodes")
            elif isinstance(result, BaseException):
                fault = f"{type(result).__name__}: {result}"
                self.problems.add(f"beside other episodes it raises {fault:.160}; {CHANGED}", spec, same=CHANGED)
            elif result != record.lines:
                self.problems.add(CHANGED, spec)
        for env in envs:
            self.optional(env, "close", recorded[0][0])

    def splits(self) -> None:
        """No episode may occur in both splits."""
        for difficulty in self.difficulties if self.has_split else ():
            # the same seeds in both splits: a class that ignores its split is found at once
            specs = [[EpisodeSpec(seed, difficulty, split) for seed in range(self.episodes)] for split in SPLITS]
            train, held_out = ({str(self._fixed_play(spec).lines): spec.seed for spec in each} for each in specs)
            both = train.keys() & held_out.keys()
            if len(train) == 1 and "oracle" not in self.played:
                self.warnings.add("without an oracle the check cannot see whether train and held_out share tasks")
            elif both:
                seeds = ", ".join(f"{train[k]} and {held_out[k]}" for k in sorted(both)[:3])
                shared = f"train and held_out share {len(both)} of {len(held_out)} episodes (seeds {seeds})"
                cure = "sample tasks with environments.base.sample_problem"
                self.problems.add(f"{shared}; {cure}", f"difficulty {difficulty}")

    def snapshots(self) -> None:
        """A restored episode continues exactly like the original, from any turn."""
        for spec, record in self._recorded(1, "snapshot"):
            for turn in range(min(len(record.actions), 12)):
                env, _ = self.replay(spec, record.actions[:turn])
                snapshot = self.optional(env, "snapshot", spec)
                if snapshot is None:
                    return
                try:
                    text = json.dumps(snapshot)
                except (TypeError, ValueError) as error:
                    self.problems.add(f"snapshot() cannot be written as JSON: {error}", spec)
                    return
                restored, _ = self.replay(spec, ())  # it is reset, as a forked episode is
                self.call("restore()", spec, restored.restore, json.loads(text))
                rest = record.actions[turn:]
                original, copy = ([self.step(each, action, spec) for action in rest] for each in (env, restored))
                if original != copy:
                    self.problems.add("an episode restored from its snapshot continues differently", spec)
                if json.dumps(snapshot) != text:
                    self.problems.add("a snapshot changes when its episode continues; copy the state into it", spec)

    def tools(self) -> None:
        fault = tool_fault(getattr(self.new(EpisodeSpec(0, self.difficulties[0])), "tools", ()))
        if fault:
            self.problems.add(fault)


def is_flag(value: Any) -> bool:
    """Whether a value is a bool, including NumPy's."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


FALLBACK_TEXTS = ("yes", "no", "1", "2", "go", "a")  # actions of a class without random_action
ENDLESS = "does not end within max_turns * 4 turns; truncate it at max_turns"
NOT_DETERMINISTIC = "the same seed and actions give another episode the second time"
CHANGED = "several episodes at once change each other; keep state on self, not on the class or in a module"
CONCURRENT = 8  # episodes at once
TOO_EASY = 0.9  # success rate of random actions above which there is little to learn


@dataclass
class PlayStats:
    """Counts over the episodes of one scripted policy."""

    episodes: int = 0
    won: int = 0
    turns: int = 0

    def add(self, record: EpisodeRecord) -> None:
        self.episodes += 1
        self.won += bool(record.success)
        self.turns += len(record.actions)

    def __str__(self) -> str:
        episodes = max(self.episodes, 1)
        return f"{self.episodes} episodes, {self.won / episodes:.0%} won, {self.turns / episodes:.1f} turns each"


@dataclass(frozen=True)
class CheckReport:
    """The findings. ``problems`` must be fixed; ``warnings`` should be reviewed."""

    name: str
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    played: dict[str, PlayStats] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)  # how fast it is
    tried: tuple[str, ...] = ()  # what was tried, in words; what was not, and why

    @property
    def ok(self) -> bool:
        return not self.problems

    def text(self) -> str:
        verdict = "ok" if self.ok else f"{len(self.problems)} problem{'s' * (len(self.problems) > 1)}"
        head = f"{self.name}: {verdict}" + f", {len(self.warnings)} to look at" * bool(self.warnings)
        lines = [f"  {name + ':':<15}{value}" for name, value in (self.played | self.facts).items()]
        lines += [f"  problem: {text}" for text in self.problems] + [f"  warning: {text}" for text in self.warnings]
        lines += [f"  tried: {text}" for text in self.tried]
        return "\n".join([head, *lines])


def check_env(cls: type[Any] | str, episodes: int = 20, seconds: float = 30.0) -> CheckReport:
    """Check a class, or the one that ``load`` returns. ``episodes`` per difficulty; ``seconds`` limits each call, by
    default as training does."""
    cls = load(cls) if isinstance(cls, str) else cls
    check = EnvironmentCheck(cls, seconds, max(episodes, 2))
    tried: list[str] = []
    try:
        for run, words in check.in_words() if check.signature() else ():
            tried.append(f"{words}: stopped by a problem above")
            with suppress(EpisodeAborted):  # already a finding; the other checks may find more
                run()
                tried[-1] = words
    except CallTimeout:
        pass  # already a finding
    finally:
        check.loop.close()
    facts = check.speed()
    return CheckReport(cls.__name__, check.problems.lines(), check.warnings.lines(), check.played, facts, tuple(tried))


def _always(action: Action) -> Callable[[Any], Action]:
    return lambda env: action
