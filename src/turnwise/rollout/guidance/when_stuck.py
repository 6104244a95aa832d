"""Help for groups that fail: the plain group first, and guided episodes only if none of it succeeds."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.core.protocols import Session
from turnwise.core.records import Group, Trajectory
from turnwise.errors import RecipeError
from turnwise.rollout.guidance.base import LiveGuidance, PlainGroups
from turnwise.rollout.guidance.support import Support
from turnwise.rollout.strategies.base import GroupRequest, Strategy, all_failed, close, park, succeeded

GUIDED = 200_000  # index of the first session of guided episodes


def parse_shares(text: str) -> tuple[float, ...]:
    """``0.25/0.5/0.75``: increasing shares of a solution, between 0 and 1."""
    try:
        shares = tuple(float(part) for part in text.split("/"))
    except ValueError:
        raise RecipeError(f"shares is {text!r}; write numbers separated by /, such as 0.25/0.5/0.75") from None
    if not shares or not all(0 < s < 1 for s in shares) or list(shares) != sorted(set(shares)):
        raise RecipeError(f"shares is {text!r}; write increasing numbers between 0 and 1")
    return shares


def guided_sessions(request: GroupRequest, count: int) -> list[Session]:
    """Sessions for guided episodes, which wait until the plain ones are done."""
    sessions = request.sessions(count, GUIDED)
    park(sessions)
    return sessions


# -------------------------------------------------- a growing share of the solution


@dataclass(frozen=True)
class GrowingPrefix:
    """A group without a success is sampled again with the first share of the solution in its prompt, then the next share. The
    last group sampled replaces the plain one: all of its trajectories have the same prompt, which is also trained under.

    No help in the first ``begin`` steps."""

    shares: str = "0.25/0.5/0.75"
    begin: int = 0

    requirements = frozenset({"solutions"})
    reads_rewards = True

    def __post_init__(self) -> None:
        parse_shares(self.shares)

    def open(self, seed: int) -> LiveGuidance:
        return _GrowingPrefix(rule=self, shares=parse_shares(self.shares))


@dataclass
class _GrowingPrefix(PlainGroups):
    rule: GrowingPrefix = field(default_factory=GrowingPrefix)
    shares: tuple[float, ...] = ()

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        plain = strategy.begin(request)
        if request.step < self.rule.begin:
            return plain
        return self._grow(request, plain, guided_sessions(request, len(self.shares) * request.size))

    async def _grow(self, request: GroupRequest, plain: Coroutine[Any, Any, Group], spare: list[Session]) -> Group:
        group, size = await plain, request.size
        self.count_results(group.trajectories)
        for tier, share in enumerate(self.shares):
            if not all_failed(group.trajectories):
                break
            self.count(f"tier_{tier + 1}_given")
            sessions, first = spare[tier * size :][:size], GUIDED + tier * size
            played = await request.play_all(sessions, first, support=Support(share=share))
            self.count_results(played)
            if not any(t.sampled for t in played):  # the help left no room in the context, or could not be made
                break
            group = replace(group, trajectories=tuple(played))
        close(spare)
        return group


# -------------------------------------------------------- the weakest hint that works


@dataclass(frozen=True)
class WeakestHint:
    """After ``warmup`` steps, a group without a success gets one episode for each tier of hints, weakest first, until one
    succeeds. That success, with its hinted prompt, replaces the last failed rollout of the group, which keeps its size."""

    tiers: int = 4
    warmup: int = 10

    requirements = frozenset({"hints"})
    reads_rewards = True

    def __post_init__(self) -> None:
        if not (self.tiers >= 1 and self.warmup >= 0):
            raise RecipeError(f"need tiers >= 1 and warmup >= 0, got {self}")

    def open(self, seed: int) -> LiveGuidance:
        return _WeakestHint(rule=self)


@dataclass
class _WeakestHint(PlainGroups):
    rule: WeakestHint = field(default_factory=WeakestHint)

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        plain = strategy.begin(request)
        if request.step < self.rule.warmup:
            return plain
        return self._grow(request, plain, guided_sessions(request, self.rule.tiers))

    async def _grow(self, request: GroupRequest, plain: Coroutine[Any, Any, Group], spare: list[Session]) -> Group:
        group = await plain
        self.count_results(group.trajectories)
        for tier, session in enumerate(spare, start=1):
            if not all_failed(group.trajectories):
                break
            self.count(f"tier_{tier}_given")
            (tried,) = await request.play_all([session], GUIDED + tier, support=Support(tier=tier))
            self.count_results([tried])
            if succeeded(tried):
                self.count(f"tier_{tier}_worked")
                group = with_success(group, tried)
        close(spare)
        return group


def with_success(group: Group, success: Trajectory) -> Group:
    """The group with ``success`` in the place of its last trajectory that failed and that no other forks from."""
    parents = {t.fork.parent for t in group.trajectories if t.fork is not None}
    failed = [i for i, t in enumerate(group.trajectories) if not succeeded(t) and t.id not in parents]
    members = list(group.trajectories)
    if failed:
        members[failed[-1]] = success
    return replace(group, trajectories=tuple(members))


# ------------------------------------------------------- a hint, and an off-policy ratio


@dataclass(frozen=True)
class HintWhenStuck:
    """A group without a success gets ``more`` further trajectories (0: as many as the group) sampled with a hint. The record
    does not contain the hint: the ratio compares the plain policy with the hinted one. ``union``: the failures stay as
    contrast; otherwise the hinted ones replace them."""

    more: int = 0
    tier: int = 1
    union: bool = True

    requirements = frozenset({"hints"})
    reads_rewards = True

    def __post_init__(self) -> None:
        if self.more < 0 or self.tier < 1:
            raise RecipeError(f"need more >= 0 and tier >= 1, got {self}")

    def open(self, seed: int) -> LiveGuidance:
        return _HintWhenStuck(rule=self)


@dataclass
class _HintWhenStuck(PlainGroups):
    rule: HintWhenStuck = field(default_factory=HintWhenStuck)

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        plain = strategy.begin(request)
        return self._grow(request, plain, guided_sessions(request, self.rule.more or request.size))

    async def _grow(self, request: GroupRequest, plain: Coroutine[Any, Any, Group], spare: list[Session]) -> Group:
        group = await plain
        self.count_results(group.trajectories)
        if not all_failed(group.trajectories):
            close(spare)
            return group
        self.count(f"tier_{self.rule.tier}_given")
        support = Support(tier=self.rule.tier, recorded=False)
        played = await request.play_all(spare, GUIDED, support=support)
        self.count_results(played)
        return replace(group, trajectories=(*(group.trajectories if self.rule.union else ()), *played))


# ------------------------------------------------------------ examples of solved tasks


@dataclass(frozen=True)
class SolvedExamples:
    """A group without a success gets ``more`` further trajectories (0: half as many as the group) whose prompt shows up to
    ``examples`` solved tasks: those whose first message shares most words with this one. Every success without help enters the
    corpus of at most ``corpus`` tasks. The hinted prompt is recorded and trained under."""

    examples: int = 2
    more: int = 0
    corpus: int = 256
    longest: int = 400  # characters of one example

    requirements = frozenset({"help"})
    reads_rewards = True

    def __post_init__(self) -> None:
        if not (self.examples >= 1 and self.more >= 0 and self.corpus >= 1 and self.longest >= 1):
            raise RecipeError(f"need examples, corpus, longest >= 1 and more >= 0, got {self}")

    def open(self, seed: int) -> LiveGuidance:
        return _SolvedExamples(rule=self)


@dataclass
class _SolvedExamples(PlainGroups):
    rule: SolvedExamples = field(default_factory=SolvedExamples)
    solved: dict[str, list[str]] = field(default_factory=dict)  # by task key: question, dialogue

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        plain = strategy.begin(request)
        return self._grow(request, plain, guided_sessions(request, self.rule.more or -(-request.size // 2)))

    async def _grow(self, request: GroupRequest, plain: Coroutine[Any, Any, Group], spare: list[Session]) -> Group:
        group = await plain
        self.count_results(group.trajectories)
        text = self.example_text(group) if all_failed(group.trajectories) else ""
        if not text:
            close(spare)
            return group
        self.count("examples_given")
        played = await request.play_all(spare, GUIDED, support=Support(text=text))
        self.count_results(played)
        return replace(group, trajectories=(*group.trajectories, *played))

    def example_text(self, group: Group) -> str:
        """The most similar solved tasks, as text; ties go to the latest."""
        question = next((_question(t) for t in group.trajectories if t.messages), "")
        words = set(question.split())
        ranked = sorted(
            (-_similarity(words, set(asked.split())), -n, shown)
            for n, (key, (asked, shown)) in enumerate(self.solved.items())
            if key != group.task.key
        )
        return "\n\n".join(f"a solved example:\n{shown}" for _, _, shown in ranked[: self.rule.examples])

    def observe(self, group: Group) -> None:
        for t in group.trajectories:
            if succeeded(t) and not t.guidance and t.messages and t.fork is None:
                self.solved.pop(group.task.key, None)
                shown = "\n".join(str(m.get("content", "")) for m in t.messages if m.get("role") != "system")
                self.solved[group.task.key] = [_question(t), shown[: self.rule.longest]]
                break
        for key in list(self.solved)[: -self.rule.corpus]:
            del self.solved[key]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "solved": self.solved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.solved = {key: list(value) for key, value in state["solved"].items()}

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "guidance/corpus": float(len(self.solved))}


def _question(trajectory: Trajectory) -> str:
    users = [m for m in trajectory.messages if m.get("role") == "user"]
    return str((users or list(trajectory.messages))[0].get("content", ""))


def _similarity(a: set[str], b: set[str]) -> float:
    """Shared words over all words."""
    return len(a & b) / max(1, len(a | b))
