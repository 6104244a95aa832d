import json
import random

from players import play

from turnwise.environments.base import call, say
from turnwise.environments.encyclopedia import COUNTS, WORLDS, Question, world
from turnwise.environments.lookup import MOST_CALLS, Lookup
from turnwise.ports import Action, ToolCall


def test_worlds_hold_together():
    for number in range(WORLDS):
        here = world("train", number)
        assert len(here.articles) == sum(COUNTS.values()) == len(set(here.names))
        for name, facts in here.facts.items():
            assert name in facts.get("capital", name) or here.facts[facts["capital"]]["land"] == name
            assert "spouse" not in facts or here.facts[facts["spouse"]]["spouse"] == name
            assert set(facts.values()) <= set(here.names)


def test_splits_share_no_name():
    names = {split: {n for i in range(WORLDS) for n in world(split, i).names} for split in ("train", "held_out")}
    assert not names["train"] & names["held_out"]


def test_a_world_is_made_once():
    assert world("train", 3) is world("train", 3)


def test_every_article_is_found_by_its_name():
    here = world("train", 0)
    assert all(here.index.top(name, 1) == [i] for i, name in enumerate(here.names))


def test_question_text():
    question = Question(("zelor", "mikan", "tobar"), ("founder", "birthplace"))
    assert question.text == "what is the birthplace of the founder of zelor?"
    assert question.answer == "tobar"


def test_tool_messages():
    env = Lookup()
    env.reset(0)
    start = env.question.names[0]
    step = env.step(Action("", calls=(ToolCall("search", {"query": start}, id="c1"),)))
    (message,) = step.messages
    assert message["role"] == "tool" and message["name"] == "search" and message["tool_call_id"] == "c1"
    assert message["content"].startswith(f"{start} is a ") and env.answer() in message["content"]
    assert step.info == {"tool_calls": 1, "tool_errors": 0}
    assert env.step(call("search", query="qqqq")).messages[0]["content"] == "nothing found"


def test_too_many_calls_are_answered_but_not_run():
    env = Lookup()
    env.reset(0)
    step = env.step(Action("", calls=(ToolCall("search", {"query": "company"}),) * (MOST_CALLS + 2)))
    assert len(step.messages) == MOST_CALLS + 2 and step.info["tool_errors"] == 2


def test_answers_are_read_leniently_in_case_and_end_only():
    texts = {"Answer: {}.": True, "i think\nanswer: {}": True, "{}": False, "answer: {} maybe": False}
    for text, right in texts.items():
        env = Lookup()
        env.reset(1)
        step = env.step(say(text.format(env.answer().upper())))
        assert step.info.get("success", False) is right


def test_guessing_without_searching_never_ends_well():
    _, step, _ = play(Lookup(difficulty=2), 0, lambda env: say(f"answer: {env.question.names[0]}"))
    assert step.terminated and step.info["success"] is False


def test_state_key_and_restore():
    for seed in range(20):
        env, fresh, rng = Lookup(difficulty=3), Lookup(), random.Random(seed)
        env.reset(seed)
        assert env.state_key() == ""
        for _ in range(rng.randrange(4)):
            env.step(env.oracle())
        fresh.restore(json.loads(json.dumps(env.snapshot())))
        assert fresh.state_key() == env.state_key() and fresh.snapshot() == env.snapshot()
        assert fresh.step(fresh.oracle()) == env.step(env.oracle())
