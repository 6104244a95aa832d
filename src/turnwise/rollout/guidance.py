"""Guidance: what help the episodes of a group get besides their task. A piece is frozen; ``open`` returns its live state.

    begin · observe · state_dict · load_state_dict · metrics

Guidance decides around a strategy: it may let the strategy grow the plain group first, and play guided episodes after it.
Knows trajectories and tiers of help; no token, no environment, no loss.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from turnwise.core.limits import Declared, number
from turnwise.core.protocols import Session
from turnwise.core.records import Group, Status, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.core.stateful import Stateful, remember
from turnwise.errors import RecipeError
from turnwise.rollout.scripted import as_expert
from turnwise.rollout.strategies import GroupRequest, Strategy, all_failed, close, park, succeeded
from turnwise.rollout.support import Support

IN_FLIGHT, WEIGHTS = 4096, 65536  # groups whose cases are remembered, and words that have a weight
GUIDED = 200_000  # index of the first session of guided episodes
Growing = Coroutine[Any, Any, Group]


@dataclass
class LiveGuidance(Stateful):
    """Guidance in a run, with its counters. As it stands, the strategy alone grows every group."""

    rule: Any
    seed: int = 0
    counts: dict[str, int] = field(default_factory=dict)  # groups, groups with help, successes with and without it

    saved: ClassVar[tuple[str, ...]] = ("counts",)
    sizes: ClassVar[dict[str, str]] = {}  # metrics that say how much an attribute holds

    def begin(self, request: GroupRequest, strategy: Strategy) -> Growing:
        """Grow a group. Opens every session synchronously, before anything is awaited."""
        return strategy.begin(request)

    def observe(self, group: Group) -> None:
        """Learn from a finished group."""

    def count(self, name: str, by: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + by

    def count_results(self, trajectories: Sequence[Trajectory]) -> None:
        """Count episodes and successes, with and without help."""
        for t in trajectories:
            kind = "guided" if t.guidance else "plain"
            self.count(f"{kind}_episodes")
            self.count(f"{kind}_successes", int(succeeded(t)))

    def metrics(self) -> dict[str, float]:
        counts = {f"guidance/{name}": float(n) for name, n in sorted(self.counts.items())}
        return {**counts, **{f"guidance/{name}": float(len(getattr(self, held))) for name, held in self.sizes.items()}}


class AfterFailure(LiveGuidance):
    """Interface: the strategy grows the plain group; where it has no success, ``help`` plays guided episodes. Their sessions are
    opened together with the plain ones, because a generator must know the whole batch before it samples."""

    def spare(self, request: GroupRequest) -> int:
        """How many sessions help may need; 0: no help for this group."""
        raise NotImplementedError

    async def help(self, request: GroupRequest, group: Group, spare: list[Session]) -> Group:
        raise NotImplementedError

    def begin(self, request: GroupRequest, strategy: Strategy) -> Growing:
        plain, count = strategy.begin(request), self.spare(request)
        return self._grow(request, plain, guided_sessions(request, count)) if count else plain

    async def _grow(self, request: GroupRequest, plain: Growing, spare: list[Session]) -> Group:
        group = await plain
        self.count_results(group.trajectories)
        if all_failed(group.trajectories):
            group = await self.help(request, group, spare)
        close(spare)  # a session that was played is closed already, which does no harm
        return group


class WholeGroup(LiveGuidance):
    """Interface: all episodes of a group get the same help, or none does: guided and plain ones are never compared."""

    def support(self, request: GroupRequest) -> Support | None:
        """The help of this group; None: the strategy grows it."""
        raise NotImplementedError

    def begin(self, request: GroupRequest, strategy: Strategy) -> Growing:
        support = self.support(request)
        return strategy.begin(request) if support is None else self._grow(request, request.sessions(), support)

    async def _grow(self, request: GroupRequest, sessions: list[Session], support: Support) -> Group:
        return request.grown(await request.play_all(sessions, support=support))

    def observe(self, group: Group) -> None:
        self.count_results(group.trajectories)


class PartOfGroup(LiveGuidance):
    """Interface: a part of a group is played plainly; from it follows which help the others get."""

    def plain(self, size: int) -> int:
        """How many episodes of a group of ``size`` get no help; 0: the strategy grows it alone."""
        raise NotImplementedError

    def support(self, group: Group) -> Support | None:
        raise NotImplementedError

    def begin(self, request: GroupRequest, strategy: Strategy) -> Growing:
        count = self.plain(request.size)
        if not count:
            return strategy.begin(request)
        plain = strategy.begin(replace(request, size=count))
        return self._grow(request, plain, guided_sessions(request, request.size - count))

    async def _grow(self, request: GroupRequest, plain: Growing, spare: list[Session]) -> Group:
        group = await plain
        support = self.support(group)
        more: dict[str, Any] = {} if support is None else {"support": support}
        group = replace(group, trajectories=(*group.trajectories, *await request.play_all(spare, GUIDED, **more)))
        self.count_results(group.trajectories)
        return group


class Guidance(Declared):
    """Interface: the frozen description. ``requirements``: what the environment must provide. ``reads_rewards``: rewards are
    read while a group grows, so each trajectory is scored alone. A subclass names the class of its live state in ``live``."""

    live: ClassVar[type[LiveGuidance]] = LiveGuidance
    requirements: ClassVar[frozenset[str]] = frozenset()
    reads_rewards: ClassVar[bool] = False

    def open(self, seed: int) -> LiveGuidance:
        return self.live(self, seed)


class NoGuidance(Guidance):
    """No help: the strategy alone grows the group."""


SOLUTIONS, HINTS, HELP = frozenset({"solutions"}), frozenset({"hints"}), frozenset({"help"})
LATE_TURNS = frozenset({"solutions", "later turns"})  # of solutions, to begin at


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


def first_message(trajectory: Trajectory) -> str:
    """What the first user message of a trajectory says."""
    users = [m for m in trajectory.messages if m.get("role") == "user"]
    return str((users or list(trajectory.messages))[0].get("content", ""))


def question_of(group: Group) -> list[str]:
    """The words of a task's first message."""
    return next((first_message(t) for t in group.trajectories if t.messages), "").split()


# -------------------------------------------------- when a group fails: a growing share of the solution


class _GrowingPrefix(AfterFailure):
    def spare(self, request: GroupRequest) -> int:
        return 0 if request.step < self.rule.begin else len(parse_shares(self.rule.shares)) * request.size

    async def help(self, request: GroupRequest, group: Group, spare: list[Session]) -> Group:
        size = request.size
        for tier, share in enumerate(parse_shares(self.rule.shares)):
            if not all_failed(group.trajectories):
                break
            self.count(f"tier_{tier + 1}_given")
            sessions, first = spare[tier * size :][:size], GUIDED + tier * size
            played = await request.play_all(sessions, first, support=Support(share=share))
            self.count_results(played)
            if not any(t.sampled for t in played):  # the help left no room in the context, or could not be made
                break
            group = replace(group, trajectories=tuple(played))
        return group


class GrowingPrefix(Guidance):
    """A group without a success is sampled again with the first share of the solution in its prompt, then the next share. The
    last group sampled replaces the plain one: all of its trajectories have the same prompt, which is also trained under.

    No help in the first ``begin`` steps."""

    live, requirements, reads_rewards = _GrowingPrefix, SOLUTIONS, True
    shares: str = "0.25/0.5/0.75"
    begin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_shares(self.shares)


# ------------------------------------------------ when a group fails: the weakest hint that works


class _WeakestHint(AfterFailure):
    def spare(self, request: GroupRequest) -> int:
        return 0 if request.step < self.rule.warmup else self.rule.tiers

    async def help(self, request: GroupRequest, group: Group, spare: list[Session]) -> Group:
        for tier, session in enumerate(spare, start=1):
            if not all_failed(group.trajectories):
                break
            self.count(f"tier_{tier}_given")
            (tried,) = await request.play_all([session], GUIDED + tier, support=Support(tier=tier))
            self.count_results([tried])
            if succeeded(tried):
                self.count(f"tier_{tier}_worked")
                # in the place of the last trajectory that failed and that no other forks from
                parents = {t.fork.parent for t in group.trajectories if t.fork is not None}
                failed = [i for i, t in enumerate(group.trajectories) if not succeeded(t) and t.id not in parents]
                members = list(group.trajectories)
                if failed:
                    members[failed[-1]] = tried
                group = replace(group, trajectories=tuple(members))
        return group


class WeakestHint(Guidance):
    """After ``warmup`` steps, a group without a success gets one episode for each tier of hints, weakest first, until one
    succeeds. That success, with its hinted prompt, replaces the last failed rollout of the group, which keeps its size."""

    live, requirements, reads_rewards = _WeakestHint, HINTS, True
    tiers: int = number(4, least=1)
    warmup: int = number(10, least=0)


# --------------------------------------------- when a group fails: a hint, and an off-policy ratio


class _HintWhenStuck(AfterFailure):
    def spare(self, request: GroupRequest) -> int:
        return self.rule.more or request.size

    async def help(self, request: GroupRequest, group: Group, spare: list[Session]) -> Group:
        self.count(f"tier_{self.rule.tier}_given")
        played = await request.play_all(spare, GUIDED, support=Support(tier=self.rule.tier, recorded=False))
        self.count_results(played)
        return replace(group, trajectories=(*(group.trajectories if self.rule.union else ()), *played))


class HintWhenStuck(Guidance):
    """A group without a success gets ``more`` further trajectories (0: as many as the group) sampled with a hint. The record
    does not contain the hint: the ratio compares the plain policy with the hinted one. ``union``: the failures stay as
    contrast; otherwise the hinted ones replace them."""

    live, requirements, reads_rewards = _HintWhenStuck, HINTS, True
    more: int = number(0, least=0)
    tier: int = number(1, least=1)
    union: bool = True


# -------------------------------------------------- when a group fails: examples of solved tasks


@dataclass
class _SolvedExamples(AfterFailure):
    solved: dict[str, list[str]] = field(default_factory=dict)  # by task key: question, dialogue
    saved, sizes = ("counts", "solved"), {"corpus": "solved"}

    def spare(self, request: GroupRequest) -> int:
        return self.rule.more or -(-request.size // 2)

    async def help(self, request: GroupRequest, group: Group, spare: list[Session]) -> Group:
        text = self.example_text(group)
        if not text:
            return group
        self.count("examples_given")
        played = await request.play_all(spare, GUIDED, support=Support(text=text))
        self.count_results(played)
        return replace(group, trajectories=(*group.trajectories, *played))

    def example_text(self, group: Group) -> str:
        """The solved tasks that share most of all their words with this one, as text; ties go to the latest."""
        question = set(question_of(group))
        ranked = []
        for n, (key, (solved_question, dialogue)) in enumerate(self.solved.items()):
            words = set(solved_question.split())
            if key != group.task.key:
                ranked.append((-len(question & words) / max(1, len(question | words)), -n, dialogue))
        return "\n\n".join(f"a solved example:\n{dialogue}" for _, _, dialogue in sorted(ranked)[: self.rule.examples])

    def observe(self, group: Group) -> None:
        for t in group.trajectories:
            if succeeded(t) and not t.guidance and t.messages and t.fork is None:
                dialogue = "\n".join(str(m.get("content", "")) for m in t.messages if m.get("role") != "system")
                entry = [first_message(t), dialogue[: self.rule.longest]]
                remember(self.solved, group.task.key, entry, self.rule.corpus)
                break


class SolvedExamples(Guidance):
    """A group without a success gets ``more`` further trajectories (0: half as many as the group) whose prompt shows up to
    ``examples`` solved tasks: those whose first message shares most words with this one. Every success without help enters the
    corpus of at most ``corpus`` tasks. The hinted prompt is recorded and trained under."""

    live, requirements, reads_rewards = _SolvedExamples, HELP, True
    examples: int = number(2, least=1)
    more: int = number(0, least=0)
    corpus: int = number(256, least=1)
    longest: int = number(400, least=1)  # characters of one example


# ----------------------------------------------------------- when a group fails: plans


@dataclass
class _SelfRolledPlans(AfterFailure):
    traced: list[str] = field(default_factory=list)  # keys of tasks that have a success, planned or not, oldest first
    saved, sizes = ("counts", "traced"), {"traced_tasks": "traced"}

    def spare(self, request: GroupRequest) -> int:
        return 0 if request.task.key in self.traced else self.rule.tries

    async def help(self, request: GroupRequest, group: Group, spare: list[Session]) -> Group:
        for n, session in enumerate(spare):
            (rolled,) = await request.play_all([session], GUIDED + n, support=Support(plan=True, recorded=False))
            self.count_results([rolled])
            self.count("plans_given")
            if succeeded(rolled):
                self.count("plans_worked")
                # expert data: what the policy played with the plan is not of the policy with the plain prompt
                return replace(group, trajectories=(*group.trajectories, as_expert(rolled)))
        return group

    def observe(self, group: Group) -> None:
        if any(map(succeeded, group.trajectories)) and group.task.key not in self.traced:
            self.traced = [*self.traced, group.task.key][-self.rule.tasks :]


class SelfRolledPlans(Guidance):
    """A group without a success whose task has no trace yet gets up to ``tries`` episodes of the policy with the plan of the
    scripted solution in its prompt, one after the other until one succeeds: what the policy plays so is close to what it can
    say, unlike the expert's own trace. The success joins the group as expert data: the record contains no plan and no
    log-probabilities of the planned policy. A task is played so once; ``tasks`` are remembered."""

    live, requirements, reads_rewards = _SelfRolledPlans, SOLUTIONS, True
    tries: int = number(4, least=1)
    tasks: int = number(65536, least=1)


# ------------------------------------------------- by task: the shortest prefix that works


@dataclass
class _ShortestPrefix(WholeGroup):
    hard: dict[str, list[int]] = field(default_factory=dict)  # by task key: share, tries with it, works, guided next
    saved, sizes = ("counts", "hard"), {"hard_tasks": "hard"}

    def support(self, request: GroupRequest) -> Support | None:
        level, _, _, guided = self.hard.get(request.task.key, (0, 0, 0, 0))
        return Support(share=parse_shares(self.rule.shares)[level]) if guided else None

    def observe(self, group: Group) -> None:
        super().observe(group)
        key, solved = group.task.key, any(map(succeeded, group.trajectories))
        guided = all(t.guidance for t in group.trajectories)
        if not guided and solved:
            self.count("withdrawn", int(self.hard.pop(key, None) is not None))
            return
        level, tries, works, _ = self.hard.get(key, (0, 0, 0, 0))
        if guided:
            self.count(f"tier_{level + 1}_given")
            tries, works = tries + len(group.trajectories), int(works or solved)
            if not works and tries >= self.rule.tries:
                level, tries = (level + 1) % len(parse_shares(self.rule.shares)), 0
        remember(self.hard, key, [level, tries, works, int(not guided)])


class ShortestPrefix(Guidance):
    """Hard tasks, those whose last plain group had no success, are sampled with and without help in turn. Help is the shortest
    of the ``shares`` of the solution, in the prompt, from which at least one of ``tries`` rollouts succeeded; while none has, the
    shares are tried in order, and after the last the first again. The first plain success of a task ends its help.

    Groups are guided as a whole, so guided and plain rollouts are never compared. Tasks must come back: use a pool."""

    live, requirements = _ShortestPrefix, SOLUTIONS
    shares: str = "0.25/0.5/0.75"
    tries: int = number(8, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_shares(self.shares)


# --------------------------------------------------- by task: prefixes of recorded solutions


def uniform(*parts: object) -> float:
    """A number in [0, 1) that depends on ``parts`` alone."""
    return stable_seed(*parts) / 2**63


class _RecordedPrefixes(WholeGroup):
    def support(self, request: GroupRequest) -> Support | None:
        # a group that is issued again has another number behind "~", and must start at the same place
        k = int(uniform(self.seed, "which", request.group.split("~")[0]) * (self.rule.prefixes + 1))
        if k == self.rule.prefixes:
            return None
        return Support(share=self.rule.cut(self.seed, request.task.key, k), played=True)


class RecordedPrefixes(Guidance):
    """Of ``prefixes`` + 1 groups of a task, one starts at the prompt; the others continue one of ``prefixes`` cuts of the
    solution, uniform between ``low`` and ``high`` of its ids and fixed for the task. The prefix is context: it is played in the
    environment and never trained on."""

    live, requirements = _RecordedPrefixes, SOLUTIONS
    prefixes: int = number(3, least=0)
    low: float = number(0.4, least=0, most="high")
    high: float = number(0.8, most=1)

    def cut(self, seed: int, task: str, k: int) -> float:
        """Where the k-th prefix of a task ends, as a share of the solution."""
        return self.low + (self.high - self.low) * uniform(seed, "cut", task, k)


# ------------------------------------------------------ by task: starts near the end of a solution


@dataclass
class _BackwardStarts(WholeGroup):
    left: dict[str, int] = field(default_factory=dict)  # by task key
    saved = ("counts", "left")

    def support(self, request: GroupRequest) -> Support:
        return Support(turns_left=self.left.get(request.task.key, self.rule.first))

    def observe(self, group: Group) -> None:
        super().observe(group)
        key, rate = group.task.key, sum(map(succeeded, group.trajectories)) / max(1, len(group.trajectories))
        before = self.left.get(key, self.rule.first)
        at_prompt = not any(t.guidance for t in group.trajectories)  # then there is no earlier start
        if at_prompt:
            self.count("withdrawn", int(rate >= self.rule.enough))
        remember(self.left, key, before if at_prompt and rate else self.rule.move(before, rate))

    def metrics(self) -> dict[str, float]:
        mean = sum(self.left.values()) / max(1, len(self.left))
        return {**super().metrics(), "guidance/turns_left": mean}


class BackwardStarts(Guidance):
    """A group starts ``first`` turns before the end of its task's solution. Where at least ``enough`` of its episodes succeed,
    the task's next group starts ``by`` turns earlier; where none does, ``by`` turns later, but never nearer to the end than
    ``first``. Beyond the beginning of the solution groups start at the prompt. Tasks must come back: use a pool."""

    live, requirements = _BackwardStarts, LATE_TURNS
    first: int = number(1, least=1)
    by: int = number(1, least=1)
    enough: float = number(0.5, above=0, most=1)

    def move(self, left: int, rate: float) -> int:
        """The turns that are left to a task's next group, after one of which a share ``rate`` succeeded."""
        return left + self.by if rate >= self.enough else max(self.first, left - self.by) if rate == 0 else left


class _LateStarts(WholeGroup):
    def support(self, request: GroupRequest) -> Support | None:
        k = stable_seed(self.seed, "start", request.group.split("~")[0]) * (self.rule.starts + 1) >> 63
        return Support(turns_left=k * self.rule.apart) if k else None


class LateStarts(Guidance):
    """Every group starts at one of ``starts`` + 1 places with equal chances: at the prompt, or k·``apart`` turns before the end
    of its task's solution, k = 1 ... ``starts``. All episodes of a group start at the same place."""

    live, requirements = _LateStarts, LATE_TURNS
    starts: int = number(3, least=0)
    apart: int = number(2, least=1)


# ------------------------------------------------------- help for a part of every group


class _HintByDifficulty(PartOfGroup):
    def plain(self, size: int) -> int:
        return (size + 1) // 2

    def support(self, group: Group) -> Support | None:
        share = self.rule.share(sum(map(succeeded, group.trajectories)) / max(1, len(group.trajectories)))
        self.count("hints_given", int(bool(share)))
        return Support(share=share, played=True) if share else None


class HintByDifficulty(Guidance):
    """Half of a group is played without help. The harder it was, d = 1 − success rate, the longer the prefix of the solution that
    the other half continues: share = ``most``·d; d = 0 means no help. The prefix is context."""

    live, requirements, reads_rewards = _HintByDifficulty, SOLUTIONS, True
    most: float = number(0.8, above=0, most=1)

    def share(self, success: float) -> float:
        return self.most * (1 - success)


@dataclass
class _HalfInContext(LiveGuidance):
    def __post_init__(self) -> None:
        path = self.rule.document
        self.text = Path(path).read_text(encoding="utf-8").strip() if path else ""

    def begin(self, request: GroupRequest, strategy: Strategy) -> Growing:
        guided = int(self.rule.share * request.size)
        plain = strategy.begin(replace(request, size=request.size - guided))
        return self._grow(request, plain, request.sessions(guided, GUIDED))

    async def _grow(self, request: GroupRequest, plain: Growing, sessions: list[Session]) -> Group:
        support = Support(tier=0 if self.text else self.rule.tier, text=self.text, recorded=False)
        group, played = await asyncio.gather(plain, request.play_all(sessions, GUIDED, support=support))
        group = replace(group, trajectories=(*group.trajectories, *played))
        self.count_results(group.trajectories)
        return group


class HalfInContext(Guidance):
    """``share`` of each group reads a document in its prompt: the text of a file, or hints 1 to ``tier`` of the environment. The
    record does not contain it, so what is trained is the policy without the document. The strategy grows the other part."""

    live = _HalfInContext
    share: float = number(0.5, least=0, below=1)
    tier: int = number(1, least=1)
    document: str = ""  # path of a text file; empty: the environment's hints

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.document and not Path(self.document).is_file():
            raise RecipeError(f"there is no file {self.document}; write the path of a text, or leave document out")

    @property
    def requirements(self) -> frozenset[str]:  # type: ignore[override]
        return HELP if self.document else HINTS


@dataclass
class _CaseMemory(PartOfGroup):
    stored: dict[str, list[Any]] = field(default_factory=dict)  # by task key: first message, dialogue, success
    weights: dict[str, float] = field(default_factory=lambda: {"likeness": 1.0})  # of the value of a case
    shown: dict[str, list[dict[str, float]]] = field(
        default_factory=dict
    )  # by group: what each shown case had in common
    saved, sizes = ("counts", "stored", "weights", "shown"), {"cases": "stored"}

    def plain(self, size: int) -> int:
        return 0 if size < 2 or not self.rule.cases else 1

    def support(self, group: Group) -> Support | None:
        """The cases of the highest value as text; ties go to the latest."""
        question = Counter(question_of(group))
        others = [case for key, case in self.stored.items() if key != group.task.key]
        relations = [relation(question, case, self.rule.rate > 0) for case in others]
        order = sorted(range(len(others)), key=lambda n: (-self.value(relations[n]), -n))[: self.rule.cases]
        nearest = [others[n] for n in order]
        remember(self.shown, group.id, [relations[n] for n in order], IN_FLIGHT)
        kinds = (("earlier tasks that were solved:", True), ("earlier tasks that failed, do otherwise:", False))
        parts = [[title, *(shown for _, shown, good in nearest if good == kind)] for title, kind in kinds]
        text = "\n\n".join("\n".join(part) for part in parts if len(part) > 1)
        self.count("groups_with_cases", int(bool(text)))
        return Support(text=text) if text else None

    def value(self, related: Mapping[str, float]) -> float:
        """Q = σ(w·x): the probability that a case helps a task."""
        return 1 / (1 + math.exp(-sum(self.weights.get(name, 0.0) * x for name, x in related.items())))

    def learn(self, group: Group) -> None:
        """A step of cross-entropy for each episode that saw cases: its label is whether it succeeded."""
        cases = self.shown.pop(group.id, ())
        for trajectory in group.trajectories:
            if not trajectory.guidance or trajectory.status == Status.FAILED:
                continue
            for related in cases:
                error = self.rule.rate * (float(succeeded(trajectory)) - self.value(related))
                for name, x in related.items():
                    remember(self.weights, name, self.weights.get(name, 0.0) + error * x, WEIGHTS)

    def observe(self, group: Group) -> None:
        self.learn(group)
        members = [t for t in group.trajectories if t.messages and t.fork is None]
        question = next((first_message(t) for t in members if not t.guidance), "")
        if not question:
            return
        best = next((t for t in members if succeeded(t)), members[0])
        # what was said after the first user message: without the cases that a guided prompt holds
        begin = next((n for n, m in enumerate(best.messages) if m.get("role") == "user"), 0)
        dialogue = "\n".join([question, *(str(m.get("content", "")) for m in best.messages[begin + 1 :])])
        case = [question, dialogue[: self.rule.longest], succeeded(best)]
        remember(self.stored, group.task.key, case, self.rule.size)

    def metrics(self) -> dict[str, float]:
        solved = sum(bool(good) for *_, good in self.stored.values())
        return {**super().metrics(), "guidance/cases_solved": float(solved)}


def relation(question: Counter[str], case: Sequence[Any], learned: bool) -> dict[str, float]:
    """What a case has to do with a task: how alike their first messages are and, where more is learned from, whether it was
    solved and which words both have."""
    words = Counter(case[0].split())
    related = {"likeness": cosine(question, words)}
    both = sorted(question.keys() & words.keys()) if learned else []
    return related | ({"": 1.0, "solved": float(case[2])} if learned else {}) | {f"both {word}": 1.0 for word in both}


def cosine(a: Counter[str], b: Counter[str]) -> float:
    """Of two word counts, in [0, 1]; 0 where one is empty."""
    norm = math.sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()))
    return sum(n * b[word] for word, n in a.items()) / norm if norm else 0.0


class CaseMemory(Guidance):
    """The first trajectory of a group is sampled plainly and tells the first message of the task. The prompts of the others show
    the ``cases`` finished tasks of the highest value Q: at first those with the most similar first message (cosine of word
    counts). With a ``rate`` above 0 it is learned which cases help: logistic regression on likeness, success and common words,
    one step for each episode and case that it saw. Each task leaves one case, a success where there is one; the memory
    holds the last ``size``. The prompt with the cases is recorded and trained under."""

    live, requirements = _CaseMemory, HELP
    cases: int = number(4, least=0)
    size: int = number(256, least=1)
    longest: int = number(400, least=1)  # characters of one case
    rate: float = number(0.0, least=0)
