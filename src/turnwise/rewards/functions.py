"""The reward functions of a run: each scores groups of answers in its own processes, or, where only this process has it, here.

Never raises for an answer: what cannot be scored has a fault. Blocking; use it from a thread. Knows no trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from turnwise.config.named_object import GIVEN_OBJECT
from turnwise.errors import SettingError
from turnwise.rewards.conventions import AnswerGroup, RewardCall, RewardFailure, RewardOutcome, Signature
from turnwise.rewards.process import MIB, CallFailed, ProcessSettings, ScoringPool
from turnwise.rewards.spec import RewardSpec


@dataclass(frozen=True)
class RewardLimits:
    """Limits of one call of a reward function."""

    seconds: float = 10.0
    memory_mib: int = 4096


class ProcessReward:
    """A function that processes of its own load by name."""

    runs_here = False

    def __init__(self, spec: RewardSpec, limits: RewardLimits) -> None:
        self.spec, memory = spec, limits.memory_mib * MIB
        settings = ProcessSettings(spec.target, f"reward {spec.label!r}", False, spec.options, memory, limits.seconds)
        self._pool = ScoringPool(settings)

    @cached_property
    def signature(self) -> Signature:
        """Loads the function; raises ``SettingError`` if that is not possible."""
        s = self._pool.signature
        return Signature(tuple(s["parameters"]), tuple(s["required"]), bool(s["takes_any"]), bool(s["is_async"]))

    def score(self, group: AnswerGroup) -> list[RewardOutcome]:
        """The outcome of every answer. One that hangs or crashes the function does not affect the others."""
        if not self.signature.whole_group:
            return [self._call_one(group.only(i)) for i in range(len(group.answers))]
        try:
            return self._call(group)
        except CallFailed as fault:
            # find the answers that fail alone, and score the others together: a function may compare them
            count = len(group.answers)
            if count == 1:
                return [RewardOutcome(fault=str(fault))]
            alone = [self._call_one(group.only(i)) for i in range(count)]
            good = [i for i, outcome in enumerate(alone) if not outcome.fault]
            if len(good) == count:
                return [
                    RewardOutcome(fault=f"{fault} (for {count} answers together; each alone can be scored)")
                ] * count
            outcomes = dict(enumerate(alone))
            if good:
                try:
                    outcomes |= dict(zip(good, self._call(group.only(*good))))
                except CallFailed as again:
                    outcomes |= {i: RewardOutcome(fault=str(again)) for i in good}
            return [outcomes[i] for i in range(count)]

    def _call_one(self, group: AnswerGroup) -> RewardOutcome:
        try:
            return self._call(group)[0]
        except CallFailed as fault:
            if fault.lost and self.spec.built_in:
                success = False if self.spec.gives_verdict else None
                return RewardOutcome(0.0, success=success)  # no right answer keeps our own functions busy
            return RewardOutcome(fault=str(fault))

    def _call(self, group: AnswerGroup) -> list[RewardOutcome]:
        reply = self._pool.call(group=group, columns=dict(self.spec.columns))
        return [RewardOutcome(**outcome) for outcome in reply["outcomes"]]

    def close(self) -> None:
        self._pool.close()


class LocalReward:
    """A function that only this process has: a closure, a notebook's function, an object. It cannot be killed."""

    runs_here = True

    def __init__(self, spec: RewardSpec, function: Callable[..., Any]) -> None:
        self.spec = spec
        self.signature = Signature.of(function)
        self._call = RewardCall(function, spec.options, spec.columns, self.signature)

    def score(self, group: AnswerGroup) -> list[RewardOutcome]:
        try:
            return self._call.score(group)
        except RewardFailure as fault:
            return [RewardOutcome(fault=str(fault))] * len(group.answers)

    def close(self) -> None:
        pass


RewardFunction = ProcessReward | LocalReward


def open_rewards(
    specs: Sequence[RewardSpec], limits: RewardLimits, objects: Mapping[str, Callable[..., Any]] | None = None
) -> tuple[RewardFunction, ...]:
    """The functions of these specifications; ``objects`` holds those that were given in Python, by target."""
    for spec in specs:
        if spec.target not in (objects or {}) and spec.target.startswith(GIVEN_OBJECT):
            raise SettingError(
                f"the reward {spec.name} was given to train() as an object, which no name refers to; give it again in Python: "
                "resume(run, reward=...), or move the function into a module"
            )
    return tuple(
        LocalReward(spec, objects[spec.target]) if objects and spec.target in objects else ProcessReward(spec, limits)
        for spec in specs
    )


def check_rewards(functions: Iterable[RewardFunction], columns: Iterable[str]) -> None:
    """Load every function, and refuse one whose arguments no row provides."""
    names = sorted(columns)
    for function in functions:
        spec = function.spec
        function.signature.check(f"reward {spec.label!r}", names, spec.columns, spec.options)
