"""Checks whether an environment can be trained in: plays scripted policies and malformed actions, and reports faults.

    report = check_env("my_package.my_module:MyEnvironment")
    print(report.text())

Works for any class with ``reset(seed)`` and ``step(action)``; optional methods (an oracle, splits, snapshots ...) are checked
if present. Does not know the rules of any environment, so it cannot detect a wrong reward, except that the environment's own
oracle must succeed; nor an order that differs only between processes (that of a set).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.core.protocols import Action
from turnwise.environments import load
from turnwise.environments.base import SPLITS, text_action
from turnwise.environments.calls import CallTimeout, call_environment
from turnwise.environments.checker.adversarial import malformed_actions
from turnwise.environments.checker.driver import (
    EnvironmentDriver,
    EpisodeAborted,
    EpisodeRecord,
    EpisodeSpec,
    comparable,
    tool_fault,
)
from turnwise.environments.contract import read_messages, read_state_key, read_step

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
    check = EnvironmentCheck(EnvironmentDriver(cls, seconds), max(episodes, 2))
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
        check.driver.loop.close()
    facts = check.driver.speed()
    return CheckReport(cls.__name__, check.problems.lines(), check.warnings.lines(), check.played, facts, tuple(tried))


class EnvironmentCheck:
    """One check per method; each adds to ``problems`` and ``warnings``."""

    def __init__(self, driver: EnvironmentDriver, episodes: int) -> None:
        self.driver, self.episodes = driver, episodes
        self.problems, self.warnings = driver.problems, driver.warnings
        self.played: dict[str, PlayStats] = {}
        self.has_split = "split" in driver.settings
        self.difficulties: tuple[int, ...] = getattr(driver.cls, "difficulties", (1,))
        if "difficulty" not in driver.settings:
            self.difficulties = (1,)

    def in_words(self) -> list[tuple[Callable[[], None], str]]:
        """The checks in their order, each as it is told to the user; a check that has nothing to do says so."""
        cls, count = self.driver.cls, len(malformed_actions(getattr(self.driver.cls, "tools", ())))
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
                inspect.signature(getattr(self.driver.cls, name)).bind(None, None)
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
            action = self.driver.optional(env, policy, spec, *arguments)
            if action is None and policy == "random_action":
                return text_action(rng.choice(FALLBACK_TEXTS))
            if not isinstance(action, Action):
                if action is not None:
                    self.problems.add(f"{policy} returns a {type(action).__name__}; return an Action", spec)
                raise EpisodeAborted
            return action

        try:
            record = self.driver.play(spec, act)
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
        return record or self.driver.play(spec, _always(text_action(FALLBACK_TEXTS[0])))

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
            self.warnings.add(
                f"random actions succeed in {blind.won} of {blind.episodes} episodes: there is little to learn"
            )

    def malformed_actions(self) -> None:
        """An episode of each kind of malformed action."""
        for label, action in malformed_actions(getattr(self.driver.cls, "tools", ())).items():
            spec = EpisodeSpec(0, self.difficulties[0], policy=label)
            with suppress(EpisodeAborted):
                if not self.driver.play(spec, _always(action)).ended:
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
        recorded = list(self._recorded(2, "each call in a new thread"))
        self.driver.new_threads = True
        try:
            for spec, record in recorded:
                env, lines = self.driver.replay(spec, record.actions)
                self.driver.optional(env, "close", spec)
                if lines != record.lines:
                    self.problems.add("an episode differs when each call comes from another thread", spec)
        finally:
            self.driver.new_threads = False

    def concurrency(self) -> None:
        """Episodes that run at the same time, as the rollouts of a step do, must give what each gives alone. Skipped if a single
        one is not deterministic."""
        if NOT_DETERMINISTIC in self.problems.entries:
            return
        driver, recorded = self.driver, list(self._recorded(CONCURRENT, "several at once"))
        envs = [driver.new(spec) for spec, _ in recorded]

        async def call(function: Callable[..., Any], *args: Any) -> Any:
            return await call_environment(function, *args, seconds=driver.seconds, inline=driver.inline)

        async def key(env: Any) -> str:
            return (
                f" [{read_state_key(await call(env.state_key))}]" if callable(getattr(env, "state_key", None)) else ""
            )

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

        async def play_all() -> list[
            Any
        ]:  # all begin before the first goes on, so that no fault depends on the schedule
            begins = (begin(env, spec.seed) for env, (spec, _) in zip(envs, recorded))
            firsts = await asyncio.gather(*begins, return_exceptions=True)
            plays = (go_on(env, record.actions, first) for env, (_, record), first in zip(envs, recorded, firsts))
            return await asyncio.gather(*plays, return_exceptions=True)

        calls = sum(len(record.actions) + 1 for _, record in recorded)
        for (spec, record), result in zip(recorded, driver.loop.run(play_all(), 3 * driver.seconds * calls + 5)):
            if isinstance(result, CallTimeout):
                self.problems.add(f"beside other episodes: {result}", spec, same="beside other episodes")
            elif isinstance(result, BaseException):
                fault = f"{type(result).__name__}: {result}"
                self.problems.add(f"beside other episodes it raises {fault:.160}; {CHANGED}", spec, same=CHANGED)
            elif result != record.lines:
                self.problems.add(CHANGED, spec)
        for env in envs:
            driver.optional(env, "close", recorded[0][0])

    def splits(self) -> None:
        """No episode may occur in both splits."""
        for difficulty in self.difficulties if self.has_split else ():
            train, held_out = (
                {
                    str(self._fixed_play(EpisodeSpec(seed, difficulty, split)).lines): seed
                    for seed in range(self.episodes)
                }
                for split in SPLITS
            )
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
                if not self._check_snapshot(spec, record, turn):
                    return

    def _check_snapshot(self, spec: EpisodeSpec, record: EpisodeRecord, turn: int) -> bool:
        """Compare the original and the restored episode from ``turn`` on. False if there is no usable snapshot."""
        env, _ = self.driver.replay(spec, record.actions[:turn])
        snapshot = self.driver.optional(env, "snapshot", spec)
        if snapshot is None:
            return False
        try:
            text = json.dumps(snapshot)
        except (TypeError, ValueError) as error:
            self.problems.add(f"snapshot() cannot be written as JSON: {error}", spec)
            return False
        restored, _ = self.driver.replay(spec, ())  # it is reset, as a forked episode is
        self.driver.call("restore()", spec, restored.restore, json.loads(text))
        original, copy = (
            [self.driver.step(each, action, spec) for action in record.actions[turn:]] for each in (env, restored)
        )
        if original != copy:
            self.problems.add("an episode restored from its snapshot continues differently", spec)
        if json.dumps(snapshot) != text:
            self.problems.add("a snapshot changes when its episode continues; copy the state into it", spec)
        return True

    def tools(self) -> None:
        fault = tool_fault(getattr(self.driver.new(EpisodeSpec(0, self.difficulties[0])), "tools", ()))
        if fault:
            self.problems.add(fault)


def _always(action: Action) -> Callable[[Any], Action]:
    return lambda env: action
