"""How an episode failed, in words: one cause each, without the names and numbers of the single case."""

from dataclasses import replace

import pytest

from turnwise.core.records import Limit, Status, Stop, Task, Trajectory, Turn
from turnwise.evaluation.evaluator import Evaluation
from turnwise.evaluation.failures import failure

ASK, SAY = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "answer: 5"}
NOT_JSON = "the tool call is not JSON"
CALL = {"role": "assistant", "content": "<tool_call>"}


def episode(*turns, messages=(ASK, SAY), **fields):
    turns = tuple(Turn((1,), (2,), **turn) for turn in turns or ({},))
    return Trajectory("a", Task("x", 1), turns, messages=messages, success=False, **fields)


def failed_call(role, text):
    """A call that failed, what came back, and an answer after it."""
    return episode({"tool_calls": 1, "tool_errors": 1}, {}, messages=(ASK, CALL, {"role": role, "content": text}, SAY))


@pytest.mark.parametrize(
    ("trajectory", "cause"),
    [
        (episode(), "wrong answer, no tool called"),
        (episode({"tool_calls": 1}, {}), "wrong answer after tool calls"),
        (failed_call("tool", "NameError: no name 'n'"), "tool error, then a wrong answer: NameError: no name '…'"),
        (failed_call("tool", "error: line 12\ntrace"), "tool error, then a wrong answer: error: line #"),
        (failed_call("tool", f"error: {NOT_JSON}"), f"malformed call, then a wrong answer: error: {NOT_JSON}"),
        (failed_call("user", "Call python."), "action not understood, then a wrong answer: Call python."),
        (episode({"tool_errors": 1}), "malformed or refused action at the end"),
        (episode({"stop": Stop.LENGTH}), "last answer cut off at its token limit"),
        (episode(limit=Limit.TURNS), "ran out of turns"),
        (episode(rewards={"right": 0.0, "short": 1.0}), "no reward for right"),
        (episode(status=Status.FAILED, reason="port 8080 refused"), "broke off: port # refused"),
    ],
)  # fmt: skip
def test_one_cause_each(trajectory, cause):
    assert failure(trajectory) == cause


def test_every_limit_has_words():
    assert len({failure(episode(limit=limit)) for limit in Limit}) == len(Limit)


def test_a_solved_episode_has_none():
    assert failure(replace(episode(), success=True)) == ""


def test_a_fork_counts_turns_from_its_end():
    """The messages of its parent come first, and it has no turns of its own for them."""
    reply = {"role": "tool", "content": "error: no"}
    trajectory = episode({"tool_errors": 1}, {}, messages=(ASK, SAY, ASK, CALL, reply, SAY))
    assert failure(trajectory).endswith("error: no")


def test_an_evaluation_stores_the_cause():
    solved = replace(episode(), success=True)
    rows = Evaluation((solved.task,) * 2, ((solved,), (episode(),))).rows()
    assert "failure" not in rows[0] and rows[1]["failure"] == "wrong answer, no tool called"
