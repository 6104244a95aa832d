"""Scoring finished groups: what a score adds, composition, and strategies that read rewards while a group grows."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.core.batch import pack
from turnwise.core.records import Fork, Group, Status, Stop, Task, Trajectory, Turn
from turnwise.credit.fact import SameAnswer
from turnwise.evaluation.evaluator import Evaluation, scored
from turnwise.rollout.scoring import AnswerLabels, RewardScore, ScorerChain, apply_scores, scorable, scored_play

TASK = Task("test", 1)


def trajectory(key: str = "0.0", rewards: tuple[float, ...] = (0.25, 0.5), **other) -> Trajectory:
    return Trajectory(key, TASK, tuple(Turn((1,), (2,), reward=r) for r in rewards), **other)


def group(*trajectories: Trajectory) -> Group:
    return Group("0", TASK, trajectories or (trajectory(),))


@dataclass(frozen=True)
class Adds:
    """Gives every trajectory the same score."""

    given: RewardScore

    async def score(self, group: Group) -> Group:
        return apply_scores(group, dict.fromkeys(scorable(group), self.given))

    def close(self) -> None:
        pass


@given(st.floats(-1e6, 1e6), st.lists(st.floats(-10, 10), min_size=1, max_size=4))
def test_the_total_is_added_to_the_last_turn_only(total, rewards):
    before = trajectory(rewards=tuple(rewards))
    after = apply_scores(group(before), {0: RewardScore({"a": 1.0}, total)}).trajectories[0]
    assert [t.reward for t in after.turns[:-1]] == rewards[:-1]
    assert after.turns[-1].reward == rewards[-1] + total and after.rewards == {"a": 1.0}


@pytest.mark.parametrize(
    ("environment", "reward", "expected"),
    [(None, None, None), (None, True, True), (True, None, True), (True, False, False), (False, True, False)],
)
def test_an_episode_succeeds_if_every_verdict_says_so(environment, reward, expected):
    after = apply_scores(group(trajectory(success=environment)), {0: RewardScore(success=reward)})
    assert after.trajectories[0].success is expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_a_reward_beyond_float32_fails_its_trajectory_in_words(value):
    scores = {0: RewardScore({"mine": value}, 0.0), 1: RewardScore({"mine": 1.0}, 1.0)}
    bad, good = apply_scores(group(trajectory("0.0"), trajectory("0.1")), scores).trajectories
    assert bad.status == Status.FAILED and "mine is" in bad.reason and "finite" in bad.reason
    assert good.status == Status.FINISHED and good.rewards == {"mine": 1.0}


def test_a_weighted_sum_beyond_float32_fails_too():
    after = apply_scores(group(), {0: RewardScore({"a": 3e38, "b": 3e38}, 6e38)}).trajectories[0]
    assert after.status == Status.FAILED and "weighted sum" in after.reason


def test_failed_and_empty_trajectories_are_not_scored():
    three = group(trajectory("0.0").failed("no display"), trajectory("0.1"), Trajectory("0.2", TASK, ()))
    assert scorable(three) == [1]
    done = asyncio.run(Adds(RewardScore({"a": 1.0}, 1.0)).score(three))
    assert [t.rewards for t in done.trajectories] == [{}, {"a": 1.0}, {}]


def test_scorers_compose_in_order():
    chain = ScorerChain((Adds(RewardScore({"a": 1.0}, 1.0)), Adds(RewardScore({"b": 2.0}, 4.0))))
    done = asyncio.run(chain.score(group())).trajectories[0]
    assert done.rewards == {"a": 1.0, "b": 2.0} and done.reward == 0.75 + 5.0


def test_a_fork_is_scored_alone_and_stays_a_fork():
    async def play(key, task, session, **more):
        return trajectory(key, fork=Fork("0.0", 1))

    scored_alone = scored_play(play, Adds(RewardScore({"a": 1.0}, 1.0)))
    done = asyncio.run(scored_alone("0.1", TASK, None))
    assert done.fork == Fork("0.0", 1) and done.rewards == {"a": 1.0}


def test_the_samples_of_an_evaluation_are_scored_task_by_task():
    sizes = []

    class Counting(Adds):
        async def score(self, group):
            sizes.append(len(group.trajectories))
            return await super().score(group)

    rows = tuple((trajectory(f"{n}.0"), trajectory(f"{n}.1")) for n in range(3))
    done = asyncio.run(scored(Evaluation((TASK,) * 3, rows), Counting(RewardScore({"a": 1.0}, 1.0))))
    assert sizes == [2, 2, 2] and all(t.rewards == {"a": 1.0} for row in done.trajectories for t in row)


def spoken(key, *texts, **more):
    messages = tuple({"role": "assistant", "content": text} for text in texts)
    return replace(trajectory(key), messages=messages, **more)


def test_equal_answers_are_labelled_alike_whatever_came_before():
    cut = Turn((1,), (2,), stop=Stop.LENGTH)
    told = group(
        spoken("0.0", "look", "I think <answer>12.0</answer>"), spoken("0.1", "\\boxed{12}"), spoken("0.2", "so it is\n#### 13"),
        spoken("0.3", "<answer>12</answer>", turns=(cut,)), spoken("0.4"), spoken("0.5", "12", status=Status.TRUNCATED),
    )  # fmt: skip
    said = [t.facts.get("said") for t in asyncio.run(AnswerLabels().score(told)).trajectories]
    assert said[0] == said[1] != said[2] and None not in said[:3] and said[3:] == [None, None, None]
    assert [t.reward for t in told.trajectories] == [t.reward for t in asyncio.run(AnswerLabels().score(told)).trajectories]


def test_copo_tells_answers_of_lookup_apart():
    """Four different answers were one class where the flag of the answering turn stood for the answer."""
    turn = Turn((1,), (2, 3), logp=(-0.1, -0.1), version=(0, 0), facts={"answer": 1.0})
    told = group(*(spoken(f"0.{n}", f"answer: {name}", turns=(turn,)) for n, name in enumerate(("mika", "toba", "Mika", "lira"))))
    same = SameAnswer()(pack([asyncio.run(AnswerLabels().score(told))]))
    assert same.count == 3 and same.label[0] == same.label[2]
