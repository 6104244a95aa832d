"""Archive: a list longer than the context, which the policy edits by its own notes."""

from __future__ import annotations

import asyncio

import pytest

from turnwise import environments
from turnwise.core.protocols import ToolCall
from turnwise.core.records import Status, Task
from turnwise.environments.base import text_action, tool_action, user_message
from turnwise.environments.builtin.archive import NAMES, PAGES, Archive, ContextEditor, EditRefused
from turnwise.environments.checker.check import check_env
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import play_scripted
from turnwise.training.build import byte_tokenizer


def test_keep_leaves_the_task_and_the_notes():
    env = Archive(difficulty=2)
    task, first = env.reset(1)
    step = env.step(tool_action("keep", notes="bab,  dig"))
    assert [m["content"] for m in step.context] == [task["content"], "notes: bab, dig"]
    assert step.messages[0]["content"].startswith("page 2") and first not in step.context


def test_drop_forgets_the_oldest_pages():
    env = Archive(difficulty=2)
    env.reset(1)
    second = env.step(text_action("next")).messages[0]
    step = env.step(tool_action("drop", turns=1))
    texts = [m["content"] for m in step.context]
    assert second["content"] in texts and not any("page 1" in text for text in texts)


@pytest.mark.parametrize(
    "call",
    [
        ToolCall("keep", {}), ToolCall("keep", {"notes": " "}), ToolCall("keep", {"notes": "x" * 99}), ToolCall("burn", {}),
        ToolCall("drop", {"turns": 0}), ToolCall("drop", {"turns": 9}), ToolCall("drop", {"turns": True}),
    ],
)  # fmt: skip
def test_an_edit_that_cannot_be_made_changes_nothing(call):
    editor = ContextEditor([user_message("task")], 20, exchanges=[[user_message("page")]])
    before = editor.context
    with pytest.raises(EditRefused, match="error"):
        editor.apply(call)
    assert editor.context == before


def play(env, context):
    renderer = Renderer(byte_tokenizer())
    return asyncio.run(play_scripted("oracle", env, "x", Task("archive", 3), renderer, EpisodeLimits(12, context)))


def longest(played):
    """Ids of the longest sequence that the policy reads or writes."""
    lengths, length = [], 0
    for turn in played.turns:
        length = (0 if turn.restart else length) + len(turn.context) + len(turn.tokens)
        lengths.append(length)
    return max(lengths)


def test_editing_fits_a_context_in_which_reading_on_does_not():
    room = longest(play(Archive(difficulty=3), 10**6)) + 1
    edited, whole = play(Archive(difficulty=3), room), play(Archive(difficulty=3, editing=False), room)
    assert edited.success and any(turn.restart for turn in edited.turns)
    assert whole.status == Status.TRUNCATED and "context" in whole.reason and not whole.success


def test_without_editing_there_are_no_tools():
    cls = environments.load("archive,editing=false")
    env = cls(difficulty=1)
    env.reset(0)
    assert not env.tools
    assert env.step(tool_action("keep", notes="a")).info["tool_errors"] == 1


def test_half_of_the_names_is_half_of_the_reward_in_any_order():
    env = Archive(difficulty=1)
    env.reset(0)
    for _ in range(PAGES[1]):
        env.step(text_action("next"))
    other = next(name for name in NAMES if name not in env.register.marked)
    step = env.step(text_action(f"answer: {other}, {env.register.marked[0]}"))
    assert step.reward == 0.5 and not step.info["success"] and step.terminated


def test_the_checker_finds_nothing():
    report = check_env(Archive, episodes=4)
    assert report.ok and report.played["oracle"].won == report.played["oracle"].episodes, report.text()
