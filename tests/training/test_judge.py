"""A model as judge: scores of groups, its failures, and runs that learn from it."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.judged import rule
from turnwise.core.chat import ChatReply
from turnwise.core.records import Group, Status, Task, Trajectory, Turn
from turnwise.errors import RequestRefused, ServerFault, SettingError
from turnwise.rewards.judge import DEFAULT_RUBRIC, AnswerCache
from turnwise.rollout.helper import Helper
from turnwise.rollout.scoring import JudgeScorer
from turnwise.training.plan import read_rubric

TASK = Task("test", 1)


def trajectory(key: str, answer: str, **more) -> Trajectory:
    messages = ({"role": "user", "content": "a digit?"}, {"role": "assistant", "content": answer})
    return Trajectory(key, TASK, (Turn((1,), (2,), reward=0.25),), messages=messages, **more)


def group(*answers: str) -> Group:
    return Group("7", TASK, tuple(trajectory(f"7.{n}", answer) for n, answer in enumerate(answers)))


class RuleJudge:
    """Scores a transcript by the digit it ends with; ``replies`` come before, whatever they are."""

    name = "rule"

    def __init__(self, *replies) -> None:
        self.replies, self.asked = list(replies), []

    async def reply(self, messages, sampling, seed, tools=(), schema=None):
        self.asked.append(messages)
        await asyncio.sleep(0)
        if self.replies:
            first = self.replies.pop(0)
            if isinstance(first, Exception):
                raise first
            return ChatReply(first)
        return ChatReply(rule(messages[1]["content"], "A" in str(schema)))

    def close(self) -> None:
        pass


def judging(model, *more, cache=None, **named) -> JudgeScorer:
    return JudgeScorer(Helper(model, cache or AnswerCache(), "judge"), *more, **named)


def scores(scorer: JudgeScorer, judged: Group) -> list[float]:
    return [t.rewards.get("judge", -1.0) for t in asyncio.run(scorer.score(judged)).trajectories]


@pytest.mark.parametrize("mode", ["each", "group"])
def test_a_judge_adds_a_named_reward(mode):
    scorer = judging(RuleJudge(), "rubric", mode, weight=2.0)
    done = asyncio.run(scorer.score(group("3", "7", "3", "none")))
    assert [t.rewards["judge"] for t in done.trajectories] == [0.3, 0.7, 0.3, 0.0]
    assert [t.reward for t in done.trajectories] == pytest.approx([0.85, 1.65, 0.85, 0.25])
    assert len(scorer.judge.model.asked) == (1 if mode == "group" else 3)  # equal transcripts are judged once
    assert scorer.judge.cache.verdict("7/7.1").reason == "ends with 7"


def test_metrics_are_those_since_the_last_time():
    scorer = judging(RuleJudge(), "rubric")
    asyncio.run(scorer.score(group("3", "7", "3")))
    first = scorer.metrics()
    assert (first["judge/calls"], first["judge/cached"], first["judge/failed"]) == (2, 1, 0)
    assert first["judge/seconds"] >= 0 and scorer.metrics()["judge/calls"] == 0


@pytest.mark.parametrize("mode", ["each", "group"])
def test_nothing_is_asked_twice(mode, tmp_path):
    first = judging(RuleJudge(), "rubric", mode, cache=AnswerCache(tmp_path / "answers.sqlite"))
    expected = scores(first, group("1", "2", "3"))
    again = judging(RuleJudge(), "rubric", mode, cache=AnswerCache(tmp_path / "answers.sqlite"))
    assert scores(again, group("1", "2", "3")) == expected and not again.judge.model.asked
    assert (
        scores(again, group("3", "1", "2")) == [expected[2], expected[0], expected[1]] and not again.judge.model.asked
    )
    other = judging(RuleJudge(), "another rubric", mode, cache=AnswerCache(tmp_path / "answers.sqlite"))
    assert scores(other, group("1", "2", "3")) == expected and other.judge.model.asked


def test_prose_is_answered_once_with_what_is_wrong():
    scorer = judging(RuleJudge("I like it."), "rubric")
    assert scores(scorer, group("4")) == [0.4]
    told = scorer.judge.model.asked[1][-1]["content"]
    assert told.startswith("error: the reply is not JSON: 'I like it.'")


def test_a_judge_that_never_gives_a_verdict_fails_the_trajectory_and_no_other():
    scorer = judging(RuleJudge("hm", "hm", '{"reason": "", "score": 7}', '{"reason": "", "score": 8}'), "rubric")

    async def one_after_the_other():
        return [await scorer.score(group(answer)) for answer in ("1", "2", "3")]

    first, second, third = [done.trajectories[0] for done in asyncio.run(one_after_the_other())]
    assert first.status == second.status == Status.FAILED and third.rewards == {"judge": 0.3}
    assert "no answer in 2 attempts: the reply is not JSON: 'hm'" in first.reason
    assert "8; write a number from 0 to 1" in second.reason
    assert scorer.metrics()["judge/failed"] == 2


def test_a_failure_is_kept_too(tmp_path):
    first = judging(RuleJudge("hm", "hm"), "rubric", cache=AnswerCache(tmp_path / "answers.sqlite"))
    failed = asyncio.run(first.score(group("1"))).trajectories[0]
    again = judging(RuleJudge(), "rubric", cache=AnswerCache(tmp_path / "answers.sqlite"))
    assert asyncio.run(again.score(group("1"))).trajectories[0] == failed and not again.judge.model.asked


def test_a_refused_request_fails_its_trajectory_and_a_broken_server_is_raised():
    scorer = judging(RuleJudge(RequestRefused("too long")), "rubric")
    done = asyncio.run(scorer.score(group("1"))).trajectories[0]
    assert done.status == Status.FAILED and "too long" in done.reason
    with pytest.raises(ServerFault, match="gone"):
        asyncio.run(judging(RuleJudge(ServerFault("gone")), "rubric").score(group("1")))


def test_failed_trajectories_are_not_judged():
    judged = Group("7", TASK, (trajectory("7.0", "1").failed("hung"), trajectory("7.1", "2")))
    scorer = judging(RuleJudge(), "rubric", "group")
    done = asyncio.run(scorer.score(judged))
    assert done.trajectories[0] == judged.trajectories[0] and done.trajectories[1].rewards == {"judge": 0.2}
    nobody = Group("8", TASK, (trajectory("8.0", "1").failed("hung"),))
    assert asyncio.run(scorer.score(nobody)) == nobody


def test_rubrics(tmp_path):
    file = tmp_path / "rubric.md"
    file.write_text("Be strict.\n")
    assert read_rubric("") == DEFAULT_RUBRIC
    assert read_rubric("Is it short?") == "Is it short?"
    assert read_rubric(str(file)) == "Be strict."
    with pytest.raises(SettingError, match="cannot be read"):
        read_rubric("nowhere.txt")
    file.write_text("")
    with pytest.raises(SettingError, match="is empty"):
        read_rubric(str(file))
