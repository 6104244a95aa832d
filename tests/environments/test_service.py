"""Customer service: the rules, the tools that do not enforce them, and success by the state of the database."""

from __future__ import annotations

import random

import pytest

from turnwise.core.protocols import Action, ToolCall
from turnwise.environments.base import text_action, tool_action
from turnwise.environments.builtin.service import TURNS, CustomerService, is_allowed, perform
from turnwise.environments.checker.check import check_env


def started(seed=0, difficulty=1):
    env = CustomerService(difficulty=difficulty)
    env.reset(seed)
    return env


def task_where(wanted, difficulty=1):
    """The first conversation whose only request is allowed, or is not."""
    for seed in range(100):
        env = started(seed, difficulty)
        request = env.task.requests[0]
        if is_allowed(request.wish, env.task.orders[request.order], env.task.customer) == wanted:
            return env
    raise AssertionError("no such task")


@pytest.mark.parametrize(
    ("wish", "change", "allowed"),
    [
        ("cancel", {}, True), ("cancel", {"state": "came"}, False), ("move", {}, True), ("move", {"customer": "bob"}, False),
        ("refund", {}, False), ("refund", {"state": "came", "days": 30}, True), ("refund", {"state": "came", "days": 31}, False),
    ],
)  # fmt: skip
def test_the_rules(wish, change, allowed):
    order = {"item": "lamp", "customer": "ann", "city": "rome", "state": "open", "days": 3} | change
    assert is_allowed(wish, order, "ann") == allowed


def test_saying_done_without_acting_fails_and_acting_succeeds():
    env = task_where(True)
    assert not env.step(text_action("done")).info["success"]
    env = task_where(True)
    request = env.task.requests[0]
    perform(request.wish, env.database[request.order], request.city)
    last = env.step(text_action("sorry"))  # words do not count
    assert last.info["success"] and last.reward == 1.0


def test_the_tools_do_what_the_rules_forbid():
    env = task_where(False)
    request = env.task.requests[0]
    more = {"city": request.city} if request.city else {}
    assert env.step(tool_action(request.wish, order=request.order, **more)).messages[0]["content"] == "ok"
    assert not env.step(text_action("done")).info["success"]


def test_the_number_is_said_only_when_asked():
    env = started()
    first = env.reset(0)
    number = str(env.task.requests[0].order)
    assert number not in first[1]["content"] and "number" in first[0]["content"]
    assert number in env.step(text_action("order number?")).messages[0]["content"]


@pytest.mark.parametrize(
    "call",
    [
        ToolCall("look", {}),
        ToolCall("look", {"order": "x"}),
        ToolCall("steal", {"order": 10}),
        ToolCall("look", {"order": 1000}),
    ],
)
def test_a_wrong_call_is_answered_and_changes_nothing(call):
    env = started()
    step = env.step(Action("", (call,)))
    assert step.info["tool_errors"] == 1 and "error" in step.messages[0]["content"]
    assert env.database == env.task.start()


def test_a_clerk_who_never_ends_is_cut_off():
    env = started()
    steps = [env.step(text_action("hm")) for _ in range(TURNS)]
    assert steps[-1].truncated and steps[-1].info["success"] is False and not steps[-2].truncated


def test_the_checker_finds_nothing():
    report = check_env(CustomerService, episodes=4)
    assert report.ok and report.played["oracle"].won == report.played["oracle"].episodes, report.text()


def test_an_imperfect_clerk_leaves_something_to_learn():
    won = 0
    for seed in range(60):
        env, rng = started(seed, 2), random.Random(seed)
        while not env.done:
            step = env.step(env.demonstrate(rng))
        won += bool(step.info["success"])
    assert 10 <= won <= 50
