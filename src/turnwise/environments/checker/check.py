"""Checks whether an environment can be trained in: plays scripted policies and malformed actions, and reports faults.

    report = check_env("my_package.my_module:MyEnvironment")
    print(report.text())

Works for any class with ``reset(seed)`` and ``step(action)``; optional methods (an oracle, splits, snapshots ...) are checked
if present. Does not know the rules of any environment, so it cannot detect a wrong reward, except that the environment's own
oracle must succeed; nor an order that differs only between processes (that of a set).
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from turnwise.core.protocols import Action
from turnwise.environments import load
from turnwise.environments.base import SPLITS, text_action
from turnwise.environments.calls import CallTimeout
from turnwise.environments.checker.concurrent import check_concurrency, check_threads, speed
from turnwise.environments.checker.driver import (
    EnvironmentDriver,
    EpisodeAborted,
    EpisodeRecord,
    EpisodeSpec,
)
from turnwise.environments.checker.malformed_actions import malformed_actions
from turnwise.environments.checker.report import CheckReport, PlayStats
from turnwise.environments.checker.rules import tool_fault

FALLBACK_TEXTS = ("yes", "no", "1", "2", "go", "a")  # actions of a class without random_action
ENDLESS = "does not end within max_turns * 4 turns; truncate it at max_turns"
NOT_DETERMINISTIC = "the same seed and actions give another episode the second time"
CONCURRENT = 8  # episodes at once
TOO_EASY = 0.9  # success rate of random actions above which there is little to learn


def check_env(cls: type[Any] | str, episodes: int = 20, seconds: float = 30.0) -> CheckReport:
    """Check a class, or the one that ``load`` returns. ``episodes`` per difficulty; ``seconds`` limits each call, by
    default as training does."""
    cls = load(cls) if isinstance(cls, str) else cls
    check = EnvironmentCheck(EnvironmentDriver(cls, seconds), max(episodes, 2))
    words, tried = check.in_words() if check.signature() else {}, list[str]()
    try:
        for name in words:
            tried.append(f"{words[name]}: stopped by a problem above")
            with suppress(EpisodeAborted):  # already a finding; the other checks may find more
                getattr(check, name)()
                tried[-1] = words[name]
    except CallTimeout:
        pass  # already a finding
    finally:
        check.driver.loop.close()
    facts = speed(check.driver)
    return CheckReport(cls.__name__, check.problems.lines(), check.warnings.lines(), check.played, facts, tuple(tried))


class EnvironmentCheck:
    """One check per method; each adds to ``problems`` and ``warnings``."""

    def __init__(self, driver: EnvironmentDriver, episodes: int) -> None:
        self.driver, self.episodes = driver, episodes
        self.problems, self.warnings = driver.problems, driver.warnings
        self.played: dict[str, PlayStats] = {}
        self.difficulties: tuple[int, ...] = getattr(driver.cls, "difficulties", (1,))
        if "difficulty" not in driver.settings:
            self.difficulties = (1,)

    def in_words(self) -> dict[str, str]:
        """The checks in their order, each as it is told to the user; a check that has nothing to do says so."""
        cls, count = self.driver.cls, len(malformed_actions(getattr(self.driver.cls, "tools", ())))
        levels = f"{self.episodes} tasks of every difficulty ({', '.join(map(str, self.difficulties))})"
        split = "split" in self.driver.settings
        forks = callable(getattr(cls, "snapshot", None)) and callable(getattr(cls, "restore", None))
        return {
            "scripted_policies": f"oracle, random and demonstrating policy, where there are such, on {levels}",
            "malformed_actions": f"{count} kinds of malformed actions, each for an episode",
            "determinism": "the same seeds and actions twice, and different seeds",
            "isolation": "two episodes in turns, as if each were alone",
            "threads": "every call of an episode in another thread",
            "concurrency": f"{CONCURRENT} episodes at once",
            "splits": f"{levels} of both splits, for one that is in both"
            if split
            else "no splits: __init__ takes none",
            "snapshots": "a snapshot at every turn, restored and played on"
            if forks
            else "no snapshots: there is no method",
            "tools": "the schemas of its tools",
        }

    def signature(self) -> bool:
        for name, argument in (("reset", "seed"), ("step", "action")):
            try:
                inspect.signature(getattr(self.driver.cls, name)).bind(None, None)
            except (AttributeError, TypeError, ValueError):
                self.problems.add(f"there is no {name} that takes one argument; write def {name}(self, {argument})")
        if not isinstance(self.difficulties, list | tuple) or not self.difficulties:
            self.problems.add(f"difficulties is {self.difficulties!r}; write a tuple such as (1, 2, 3)")
        if "split" not in self.driver.settings:
            self.warnings.add("__init__ takes no split: success cannot be measured on held-out tasks")
        return not self.problems.entries

    def _play(self, policy: str, spec: EpisodeSpec) -> EpisodeRecord | None:
        """An episode of one of the environment's scripted policies; None if it has no such policy or the episode was aborted."""
        spec, rng = replace(spec, policy=policy), random.Random(spec.seed)
        arguments = () if policy == "oracle" else (rng,)

        def act(env: Any) -> Action:
            action = self.driver.optional(env, policy, spec, *arguments)
            if action is None and policy == "random_action":
                return text_action(rng.choice(FALLBACK_TEXTS))
            if not isinstance(action, Action):
                if action is not None:
                    self.problems.add(f"{policy} returns a {type(action).__name__}; return an Action", str(spec))
                raise EpisodeAborted
            return action

        try:
            record = self.driver.play(spec, act)
        except EpisodeAborted:
            return None
        if not record.ended:
            self.problems.add(f"an episode {ENDLESS}", str(spec))
        self.played.setdefault(policy, PlayStats()).add(record)
        return record

    def _specs(self, split: str = "train") -> Iterator[EpisodeSpec]:
        for difficulty in self.difficulties:
            for seed in range(self.episodes):
                yield EpisodeSpec(seed, difficulty, split)

    def scripted_policies(self) -> None:
        """The oracle must succeed; random actions should not."""
        for policy in ("oracle", "random_action", "demonstrate"):
            for spec in self._specs():
                record = self._play(policy, spec)
                if policy == "oracle" and record and record.ended and record.success is False:
                    self.problems.add("the oracle does not succeed", str(spec))
                if policy == "oracle" and record and record.success and record.reward <= 0:
                    self.warnings.add("the oracle succeeds but earns no reward", str(spec))
        random_play = self.played.get("random_action", PlayStats())
        if random_play.episodes and random_play.won >= TOO_EASY * random_play.episodes:
            self.warnings.add(
                f"random actions succeed in {random_play.won} of {random_play.episodes} episodes: there is little to learn"
            )

    def malformed_actions(self) -> None:
        """An episode of each kind of malformed action."""
        for label, action in malformed_actions(getattr(self.driver.cls, "tools", ())).items():
            spec = EpisodeSpec(0, self.difficulties[0], policy=label)
            try:
                record = self.driver.play(spec, _always(action))
            except EpisodeAborted:
                continue
            if not record.ended:
                self.warnings.add(f"an episode of malformed actions {ENDLESS}", str(spec))

    def determinism(self) -> None:
        """Equal seeds give equal episodes, different seeds different ones."""
        for difficulty in self.difficulties:
            episodes = set()
            for seed in range(min(self.episodes, 8)):
                spec = EpisodeSpec(seed, difficulty)
                one, two = (self._play_uncounted("random_action", spec) for _ in range(2))
                if one and two and one.lines != two.lines:
                    self.problems.add(NOT_DETERMINISTIC, str(spec))
                episodes.add(str(self._fixed_play(spec).lines))
            if len(episodes) == 1:
                findings = (
                    self.problems if "oracle" in self.played else self.warnings
                )  # a fixed text may show no difference
                findings.add("all seeds give the same episode; reset must use its seed", f"difficulty {difficulty}")

    def _play_uncounted(self, policy: str, spec: EpisodeSpec) -> EpisodeRecord | None:
        """``_play`` without adding to the statistics."""
        counted, self.played = self.played, {}
        try:
            return self._play(policy, spec)
        finally:
            self.played = counted

    def _fixed_play(self, spec: EpisodeSpec) -> EpisodeRecord:
        """The oracle's episode, or one of a fixed text: only the seed makes a difference."""
        record = self._play_uncounted("oracle", spec) if "oracle" in self.played else None
        return record or self.driver.play(spec, _always(text_action(FALLBACK_TEXTS[0])))

    def isolation(self) -> None:
        """Two interleaved episodes must not affect each other. Skipped if a single one is not deterministic."""
        if NOT_DETERMINISTIC in self.problems.entries:
            return
        for difficulty in self.difficulties:
            specs = (EpisodeSpec(0, difficulty, policy="two at once"), EpisodeSpec(1, difficulty, policy="two at once"))
            alone = [self._play_uncounted("random_action", spec) for spec in specs]
            if alone[0] is None or alone[1] is None:
                return
            envs = [self.driver.new(spec) for spec in specs]
            lines = [[self.driver.reset(env, spec)] for env, spec in zip(envs, specs)]
            for turn in range(max(len(record.actions) for record in alone if record)):
                for i, record in enumerate(alone):
                    if record and turn < len(record.actions):
                        lines[i].append(self.driver.step(envs[i], record.actions[turn], specs[i], EpisodeRecord()))
            if any(record and record.lines != interleaved for record, interleaved in zip(alone, lines)):
                where = str(specs[0])
                self.problems.add("two episodes at once change each other; keep state on self, not on the class", where)

    def threads(self) -> None:
        """Each call in another thread."""
        check_threads(self.driver, [self._recorded(seed) for seed in range(2)])

    def concurrency(self) -> None:
        """Several episodes at once. Skipped if a single one is not deterministic."""
        if NOT_DETERMINISTIC not in self.problems.entries:
            check_concurrency(self.driver, [self._recorded(seed) for seed in range(CONCURRENT)])

    def _recorded(self, seed: int) -> tuple[EpisodeSpec, EpisodeRecord]:
        spec = EpisodeSpec(seed, self.difficulties[0], policy="several at once")
        record = self._play_uncounted("random_action", spec)
        if record is None:
            raise EpisodeAborted
        return spec, record

    def splits(self) -> None:
        """No episode may occur in both splits."""
        if "split" not in self.driver.settings:
            return
        for difficulty in self.difficulties:
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
                self.problems.add(
                    f"{shared}; sample tasks with environments.base.sample_problem", f"difficulty {difficulty}"
                )

    def snapshots(self) -> None:
        """A restored episode continues exactly like the original, from any turn."""
        for difficulty in self.difficulties:
            spec = EpisodeSpec(0, difficulty, policy="snapshot")
            record = self._play_uncounted("random_action", spec)
            for turn in range(min(len(record.actions), 12) if record else 0):
                if record and not self._check_snapshot(spec, record, turn):
                    return

    def _check_snapshot(self, spec: EpisodeSpec, record: EpisodeRecord, turn: int) -> bool:
        """Compare the original and the restored episode from ``turn`` on. False if there is no usable snapshot."""
        env = self.driver.new(spec)
        self.driver.reset(env, spec)
        for action in record.actions[:turn]:
            self.driver.step(env, action, spec, EpisodeRecord())
        snapshot = self.driver.optional(env, "snapshot", spec)
        if snapshot is None:
            return False
        try:
            text = json.dumps(snapshot)
        except (TypeError, ValueError) as error:
            self.problems.add(f"snapshot() cannot be written as JSON: {error}", str(spec))
            return False
        restored = self.driver.new(spec)
        self.driver.reset(restored, spec)  # as a forked episode does
        self.driver.call("restore()", spec, restored.restore, json.loads(text))
        later = record.actions[turn:]
        original, copy = (
            [self.driver.step(each, action, spec, EpisodeRecord()) for action in later] for each in (env, restored)
        )
        if original != copy:
            self.problems.add("an episode restored from its snapshot continues differently", str(spec))
        if json.dumps(snapshot) != text:
            self.problems.add("a snapshot changes when its episode continues; copy the state into it", str(spec))
        return True

    def tools(self) -> None:
        fault = tool_fault(getattr(self.driver.new(EpisodeSpec(0, self.difficulties[0])), "tools", ()))
        if fault:
            self.problems.add(fault)


def _always(action: Action) -> Callable[[Any], Action]:
    return lambda env: action
