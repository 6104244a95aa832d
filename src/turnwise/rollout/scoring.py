"""Scoring a finished group: named rewards, their weighted total and a verdict are added to trajectories that were played.

A ``GroupScorer`` sees all trajectories of one task, so it may score each alone or compare them. The collector calls it before a
group is stored and admitted, the evaluator on the samples of one task. Knows not who played.

A scorer leaves failed trajectories as they are. It never raises for an answer it cannot score: that trajectory fails with the
reason, and its siblings are unaffected.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from turnwise.core.protocols import GroupScorer, Session
from turnwise.core.records import Group, Message, Status, Task, Trajectory
from turnwise.environments.calls import call_environment
from turnwise.errors import EnvironmentFault, scarcity
from turnwise.rewards.builtin import final_answer, normalise
from turnwise.rewards.conventions import AnswerGroup, AnswerSample, RewardOutcome
from turnwise.rewards.functions import RewardFunction
from turnwise.rewards.judge import (
    NO_ERROR,
    AnswerError,
    JudgeQuestion,
    Transcript,
    Verdict,
    as_text,
    count_steps,
    question,
    read_answer,
    steps_of,
)
from turnwise.rollout.helper import Helper
from turnwise.rollout.strategies import EpisodeRunner, succeeded

MAX_REWARD = 3.4e38  # rewards are float32 on a batch


@dataclass(frozen=True, slots=True)
class RewardScore:
    """What a scorer adds to one trajectory. ``RewardScore({"exact": 1.0}, total=0.5, success=True)``"""

    rewards: Mapping[str, float] = field(default_factory=dict)  # by name, without weights
    total: float = 0.0  # weighted sum, added to the reward of the last turn
    success: bool | None = None  # None: this scorer gives no verdict
    failure: str = ""  # why it could not be scored: the trajectory fails
    lost: bool = False  # by a fault of the machine


@dataclass(frozen=True)
class ScorerChain:
    """Several scorers, one after the other; a later one sees the rewards that earlier ones gave."""

    scorers: tuple[GroupScorer, ...]

    async def score(self, group: Group) -> Group:
        for scorer in self.scorers:
            group = await scorer.score(group)
        return group

    def close(self) -> None:
        for scorer in self.scorers:
            scorer.close()


def scorable(group: Group) -> list[int]:
    """Indices of the trajectories that a scorer scores: those that did not fail and took a turn."""
    return [i for i, t in enumerate(group.trajectories) if t.status != Status.FAILED and t.turns]


def apply_scores(group: Group, scores: Mapping[int, RewardScore]) -> Group:
    """The group with ``scores`` added, by index; trajectories without a score stay as they are."""
    scored = [_apply(t, scores[i]) if i in scores else t for i, t in enumerate(group.trajectories)]
    return replace(group, trajectories=tuple(scored))


def _apply(trajectory: Trajectory, score: RewardScore) -> Trajectory:
    """Add a score. An episode succeeds if everything that gives a verdict says so: environment and rewards alike."""
    failure = score.failure
    for name, value in {**score.rewards, "the weighted sum of rewards": score.total}.items():
        if not failure and (not math.isfinite(value) or abs(value) > MAX_REWARD):
            failure = f"{name} is {value:g}; a reward must be finite and at most {MAX_REWARD:g}"
    if failure:
        return trajectory.failed(failure, score.lost)
    last = trajectory.turns[-1]
    verdicts = [v for v in (trajectory.success, score.success) if v is not None]
    return replace(
        trajectory,
        turns=(*trajectory.turns[:-1], replace(last, reward=last.reward + score.total)),
        rewards={**trajectory.rewards, **score.rewards},
        success=all(verdicts) if verdicts else None,
    )


def scored_play(play: EpisodeRunner, scorer: GroupScorer) -> EpisodeRunner:
    """``play`` with every trajectory scored alone, as soon as it ends: for strategies that read rewards while a group grows
    (``reads_rewards``)."""

    async def run(key: str, task: Task, session: Session, temperature_scale: float = 1.0, **more: Any) -> Trajectory:
        scale = () if temperature_scale == 1 else (temperature_scale,)
        played = await play(key, task, session, *scale, **more)
        alone = replace(played, fork=None)  # a group holds a fork only together with its parent
        scored = await scorer.score(Group(key, task, (alone,)))
        return replace(scored.trajectories[0], fork=played.fork)

    return run


# ----------------------------------------------------------------------------
# Scores groups with the reward functions of a run: named rewards, their weighted sum, and a verdict.


ENVIRONMENT = "environment"  # name of the environment's own reward
THREADS = 16  # calls of reward processes that wait at the same time

Columns = Callable[[Group], tuple[str | list[Message] | None, Mapping[str, Any]]]
"""The prompt of a group as its row has it (None: that of the dialogue), and the columns of its row."""


@dataclass(frozen=True)
class FunctionScorer:
    """``environment_weight`` multiplies what the environment paid; None: it pays nothing and is not reported."""

    functions: tuple[RewardFunction, ...]
    columns: Columns
    seconds: float = 10.0
    environment_weight: float | None = None
    unscored: float | None = None  # the reward where a function fails; None: the trajectory fails

    async def score(self, group: Group) -> Group:
        indices = scorable(group)
        if not indices:
            return group
        weighed = replace(group, trajectories=tuple(self._weigh(t) for t in group.trajectories))
        answers = self._answers(group, indices)
        columns = await asyncio.gather(*(self._call(function, answers) for function in self.functions))
        scores = {i: self._combine([outcomes[n] for outcomes in columns]) for n, i in enumerate(indices)}
        return apply_scores(weighed, scores)

    def _weigh(self, trajectory: Trajectory) -> Trajectory:
        weight = self.environment_weight
        if weight is None or not trajectory.turns:
            return trajectory
        turns = tuple(replace(turn, reward=turn.reward * weight) for turn in trajectory.turns)
        named = {ENVIRONMENT: trajectory.reward, **trajectory.rewards}
        return replace(trajectory, turns=turns if weight != 1 else trajectory.turns, rewards=named)

    def _answers(self, group: Group, indices: Sequence[int]) -> AnswerGroup:
        prompt, columns = self.columns(group)
        members = [group.trajectories[i] for i in indices]
        dialogues, samples = [split_dialogue(t.messages) for t in members], []
        for t, (_, completion) in zip(members, dialogues):
            spoken = [m["content"] for m in completion if m.get("role") == "assistant"]
            ids = [int(token) for turn in t.turns for token in turn.tokens]
            samples.append(AnswerSample(spoken[-1] if spoken else "", [dict(m) for m in completion], ids))
        return AnswerGroup(dialogues[0][0] if prompt is None else prompt, tuple(samples), columns)

    async def _call(self, function: RewardFunction, answers: AnswerGroup) -> list[RewardOutcome]:
        try:
            if not function.runs_here:
                return await asyncio.get_running_loop().run_in_executor(_executor(), function.score, answers)
            return list(await call_environment(function.score, answers, seconds=self.seconds, inline=False))
        except Exception as fault:
            words = scarcity(fault, of_call=True)
            if not words and not (function.runs_here and isinstance(fault, EnvironmentFault | RuntimeError)):
                raise
            return [RewardOutcome(fault=words or str(fault), lost=bool(words))] * len(answers.answers)

    def _combine(self, outcomes: Sequence[RewardOutcome]) -> RewardScore:
        """One trajectory's score from the outcome of every function."""
        rewards: dict[str, float] = {}
        total, verdicts = 0.0, []
        for function, outcome in zip(self.functions, outcomes):
            name, score = function.spec.name, outcome.score
            if outcome.fault and (self.unscored is None or outcome.lost):
                return RewardScore(failure=f"reward {name}: {outcome.fault}", lost=outcome.lost)
            score = self.unscored if outcome.fault else score
            if score is None:
                continue  # does not apply to this row
            rewards |= {name: score, **{f"{name}/{key}": value for key, value in outcome.extra.items()}}
            total += function.spec.weight * score
            verdicts += [outcome.success] if outcome.success is not None else []
        if not rewards and self.environment_weight is None:
            return RewardScore(failure="no reward function applies to this row: all returned None")
        return RewardScore(rewards, total, all(verdicts) if verdicts else None)

    def close(self) -> None:
        for function in self.functions:
            function.close()


class AnswerLabels:
    """A ``GroupScorer`` that changes no reward: the fact ``said`` is the same number for finished episodes that end with the same
    answer, whatever they reasoned before. An episode that says nothing has none."""

    async def score(self, group: Group) -> Group:
        labelled = []
        for t in group.trajectories:
            said = normalise(final_answer(last_spoken(t.messages))) if not t.unfinished else ""
            facts = {**t.facts, "said": float(zlib.crc32(said.encode()))} if said else t.facts
            labelled.append(replace(t, facts=facts))
        return replace(group, trajectories=tuple(labelled))

    def close(self) -> None:
        pass


def last_spoken(messages: Sequence[Message]) -> str:
    """The last message by the policy: its text, or its calls where it has no text."""
    spoken = [m for m in messages if m.get("role") == "assistant"]
    return str(spoken[-1].get("content") or spoken[-1].get("tool_calls") or "") if spoken else ""


def split_dialogue(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """What the agent read first, and everything from its first message on."""
    first = next((i for i, m in enumerate(messages) if m.get("role") == "assistant"), len(messages))
    return list(messages[:first]), list(messages[first:])


@cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="reward")


# ----------------------------------------------------------------------------
# A model as judge of finished groups: asks it, keeps its verdicts, and adds them as the reward ``judge``.


JUDGE_REWARD = "judge"
EACH, GROUP = "each", "group"
MODES = (EACH, GROUP)
REPLY_TOKENS, TOKENS_PER_VERDICT = 2048, 128  # room for a judge that thinks first, and for each further verdict


@dataclass(frozen=True)
class ModelScorer:
    """What scorers that ask a model share."""

    judge: Helper

    def metrics(self) -> dict[str, float]:
        return self.judge.metrics()

    def totals(self) -> dict[str, dict[str, int]]:
        return self.judge.totals()

    def close(self) -> None:
        self.judge.close()


@dataclass(frozen=True)
class JudgeScorer(ModelScorer):
    """A ``GroupScorer``. ``mode``: ``each`` trajectory alone, or the whole ``group`` in one verdict."""

    rubric: str
    mode: str = EACH
    weight: float = 1.0

    async def score(self, group: Group) -> Group:
        indices = scorable(group)
        transcripts = [group.trajectories[i].messages for i in indices]
        outcomes = await self.judged(transcripts) if transcripts else []
        scores: dict[int, RewardScore] = {}
        for i, transcript, outcome in zip(indices, transcripts, outcomes):
            if isinstance(outcome, str):
                scores[i] = RewardScore(failure=outcome)
                self.judge.count("failed")
            else:
                scores[i] = RewardScore({JUDGE_REWARD: outcome.score}, self.weight * outcome.score)
                self.judge.cache.record(f"{group.id}/{group.trajectories[i].id}", transcript, outcome)
        return apply_scores(group, scores)

    async def judged(self, transcripts: Sequence[Transcript]) -> list[Verdict | str]:
        """The verdict on each transcript, or why there is none."""
        sets = [transcripts] if self.mode == GROUP else [[transcript] for transcript in transcripts]
        questions = [JudgeQuestion.about(self.rubric, some, self.mode == GROUP) for some in sets]
        answers = await asyncio.gather(*map(self._verdicts, questions))
        by_transcript = [answers[0]] * len(transcripts) if self.mode == GROUP else answers
        return [a if isinstance(a, str) else a[as_text(t)] for a, t in zip(by_transcript, transcripts)]

    async def _verdicts(self, question: JudgeQuestion) -> dict[str, Verdict] | str:
        room = REPLY_TOKENS + TOKENS_PER_VERDICT * len(question.letters)
        answer = await self.judge.ask(question.messages(), question.read, room, schema=question.schema())
        return answer.failure or question.read(answer.text)

    def describe(self) -> str:
        """One line for the log."""
        what = "each episode alone" if self.mode == EACH else "all episodes of a task in one verdict"
        return f"{self.judge.describe()}, {what}, weight {self.weight:g}"


# ----------------------------------------------------------------------------
# A generative reward model as judge of the way: asks which step of a success was the first wrong one, and records the fact.


FIRST_ERROR = "error"  # the number of the first wrong step, −1 for none
FIRST_ERROR_TOKENS = 8  # of the reply "error: 2"


@dataclass(frozen=True)
class FirstErrorScorer(ModelScorer):
    """A ``GroupScorer`` that changes no reward: the fact ``error`` replaces what the environment told."""

    async def score(self, group: Group) -> Group:
        if group.task.split != "train":
            return group
        marked = list(group.trajectories)
        for i in scorable(group):
            if succeeded(marked[i]):
                error = float(await self._first_error(marked[i]))
                self.judge.count("flawed", float(error != NO_ERROR))
                turns = [replace(turn, facts={**turn.facts, FIRST_ERROR: error}) for turn in marked[i].turns]
                marked[i] = replace(marked[i], turns=tuple(turns))
        return replace(group, trajectories=tuple(marked))

    async def _first_error(self, trajectory: Trajectory) -> int:
        lines = steps_of(trajectory.messages)

        def read(reply: str) -> int:
            error = read_answer(reply)
            if error is None:
                raise AnswerError(f"{reply!r:.40} names no step")
            return error

        answer = await self.judge.ask(question(lines), read, FIRST_ERROR_TOKENS)
        self.judge.count("failed", float(bool(answer.failure)))  # also where it is longer than what the model reads
        error = NO_ERROR if answer.failure else read(answer.text)
        return NO_ERROR if error >= count_steps(lines) else error

    def metrics(self) -> dict[str, float]:
        return {"judge/flawed": 0.0, **self.judge.metrics()}

    def describe(self) -> str:
        """One line for the log."""
        return "judge: a reward model that names the first wrong step of each success"
