"""Tools for the prompts of a file: calls are executed, the first turn without one is the answer, nonsense is refused."""

from __future__ import annotations

import asyncio
import json

import pytest

import turnwise
from turnwise.core.protocols import Action, ToolCall
from turnwise.environments.base import text_action, tool_action
from turnwise.environments.prompts import MAX_CALLS, MAX_TURNS, PromptProblem, prompt_class, tool_prompts
from turnwise.errors import EnvironmentFault, SettingError

ROWS = {"train": {0: PromptProblem(({"role": "user", "content": "6 times 7?"},), "42")}, "held_out": {}}


def double(n: int) -> int:
    """Twice a number."""
    return 2 * n


def untyped(n):
    """Not shown to a model."""


def opened(*names: str, rows=ROWS):
    made = tool_prompts(prompt_class(rows), names)()
    return made, made.reset(0)


def step(env, action):
    return asyncio.run(env.step(action))


def test_a_call_is_answered_and_text_ends():
    env, _ = opened(f"{__name__}:double")
    assert [schema["function"]["name"] for schema in env.tools] == ["double"]
    found = step(env, tool_action("double", n=21))
    assert found.messages[0]["content"] == "42" and not found.terminated and found.info["tool_errors"] == 0
    assert step(env, text_action("42")).terminated


def test_python_keeps_its_names_and_counts_its_errors():
    env, _ = opened("python")
    try:
        assert step(env, tool_action("python", code="x = 6")).messages[0]["content"] == "(nothing printed)"
        assert step(env, tool_action("python", code="x * 7")).messages[0]["content"] == "42"
        failed = step(env, tool_action("python", code="1 / 0"))
        assert "ZeroDivisionError" in failed.messages[0]["content"] and failed.info["tool_errors"] == 1
    finally:
        env.close()


def test_wrong_calls_are_answered_in_words():
    env, _ = opened(f"{__name__}:double")
    assert "no tool 'treble'" in step(env, tool_action("treble", n=1)).messages[0]["content"]
    assert step(env, Action("", (), faults=("unreadable",))).info["tool_errors"] == 1
    many = Action("", tuple(ToolCall("double", {"n": 1}) for _ in range(MAX_CALLS + 1)))
    assert "at most" in step(env, many).messages[0]["content"]


def test_turns_end():
    env, _ = opened(f"{__name__}:double")
    ended = [step(env, tool_action("double", n=1)).truncated for _ in range(MAX_TURNS)]
    assert ended == [False] * (MAX_TURNS - 1) + [True]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("search",), "no tool 'search'; write python, module:function"),
        (("nowhere_at_all:f",), "no module 'nowhere_at_all'"),
        ((f"{__name__}:duble",), "did you mean 'double'"),
        ((f"{__name__}:untyped",), "'n' has no type"),
        (("python", "python"), "named twice"),
    ],
)
def test_nonsense_is_refused(names, message):
    with pytest.raises(SettingError, match=message):
        tool_prompts(prompt_class(ROWS), names)


def test_rows_with_tools_of_their_own_are_refused():
    own = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    rows = {"train": {0: PromptProblem(({"role": "user", "content": "?"},), "1", own)}, "held_out": {}}
    with pytest.raises(EnvironmentFault, match="tools of its own"):
        opened("python", rows=rows)


def test_tools_without_prompts_are_refused():
    with pytest.raises(SettingError, match="--data FILE --reward FUNCTION"):
        turnwise.train(method="grpo", env="calculator", tools=["python"])


@pytest.mark.slow
def test_a_run_with_tools(tmp_path):
    rows = [{"prompt": f"{a} times {b}?", "answer": str(a * b)} for a in range(2, 8) for b in range(2, 8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = turnwise.train(
        method="grpo", data=str(tmp_path / "rows.jsonl"), reward=["exact"], tools=["python"], quiet=True,
        out=str(tmp_path), name="run",
        steps=1, groups=2, group_size=2, cold_steps=2, eval_tasks=2, hidden=32, layers=1,
    )  # fmt: skip
    assert run is not None and json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["tools"] == [
        "python"
    ]
