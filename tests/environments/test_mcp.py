"""Environments over an MCP server: a real one, started as a process, with tasks and a reward function of the user."""

from __future__ import annotations

import json
import sys

import pytest

from turnwise import environments
from turnwise.core.protocols import Action, ToolCall
from turnwise.environments.base import text_action
from turnwise.environments.contract import read_step
from turnwise.environments.families.mcp import split_rows
from turnwise.errors import EnvironmentFault, SettingError

SERVER = '''
from mcp.server.mcpserver import MCPServer

server, shelf = MCPServer("shop"), {"tea": 3, "rice": 5}

@server.tool()
def stock(item: str) -> str:
    """How many there are."""
    return str(shelf[item])

@server.tool()
def sell(item: str, count: int) -> str:
    """Take some from the shelf."""
    shelf[item] -= count
    return "sold"

@server.tool()
def renew() -> str:
    """As at the start."""
    shelf.update(tea=3, rice=5)
    return "new"

server.run()
'''
SCORE = """
def score(task, answer, call):
    return float(call("stock", item=task["item"]) == task["left"])

def wordy(task, answer, call):
    return "a lot"
"""
ROWS = [
    {"prompt": f"sell {n} {item}", "item": item, "left": str(there - n), "answer": "done",
     "calls": [{"name": "sell", "arguments": {"item": item, "count": n}}]}
    for item, there in (("tea", 3), ("rice", 5)) for n in range(1, there + 1)
]  # fmt: skip


@pytest.fixture
def shop(tmp_path):
    """The specification of a shop without reward and further options."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "score.py").write_text(SCORE)
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return f"mcp:{sys.executable} {tmp_path}/server.py,tasks={tmp_path}/tasks.jsonl", tmp_path


def play(cls, choose, seed=0):
    env = cls()
    env.reset(seed)
    try:
        for _ in range(20):
            step = read_step(env.step(choose(env)))
            if step.terminated or step.truncated:
                return step
    finally:
        env.close()
    raise AssertionError("it did not end")


def call(name, **arguments):
    return Action("", (ToolCall(name, arguments),))


@pytest.mark.integration
@pytest.mark.slow
def test_the_reward_function_asks_the_server_of_the_episode(shop):
    pytest.importorskip("mcp")
    name, folder = shop
    cls = environments.load(f"{name},reward={folder}/score.py:score,reset=renew")
    assert [tool["function"]["name"] for tool in cls.tools] == ["stock", "sell"]
    assert cls.tools[1]["function"]["parameters"]["required"] == ["item", "count"]
    assert all(play(cls, lambda env: env.oracle(), seed).info["success"] for seed in range(4))
    assert play(cls, lambda env: text_action("done")).reward == 0.0
    env = cls()
    env.reset(0)
    wrong = env.step(call("sell", item="tea"))
    assert wrong.info == {"tool_calls": 1, "tool_errors": 1} and "count" in wrong.messages[0]["content"]
    assert env.step(call("steal")).info["tool_errors"] == 1
    assert env.step(Action("", faults=("no JSON",))).info["tool_errors"] == 1
    env.close()


@pytest.mark.integration
@pytest.mark.slow
def test_every_episode_has_a_process_of_its_own_without_a_reset_tool(shop):
    pytest.importorskip("mcp")
    cls = environments.load(shop[0])  # answers are compared
    one, two = cls(), cls()
    for env in (one, two):
        env.reset(0)
    one.step(call("sell", item="tea", count=2))
    left = [env.step(call("stock", item="tea")).messages[0]["content"] for env in (one, two)]
    for env in (one, two):
        env.close()
    assert left == ["1", "3"]
    assert play(cls, lambda env: text_action(" DONE ")).info["success"]


@pytest.mark.integration
def test_what_cannot_be_used_is_refused_in_words(shop, tmp_path):
    pytest.importorskip("mcp")
    name, folder = shop
    (tmp_path / "broken.py").write_text("raise SystemExit('no licence')")
    (tmp_path / "open.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}')
    tasks = name.split(",")[1]
    for spec, words in {
        "mcp:true": "tasks=FILE",
        f"mcp:no-such-program-{id(shop)},{tasks}": "cannot be used",
        f"mcp:{sys.executable} {tmp_path}/broken.py,{tasks}": "no licence",
        f"{name},rewards=x": "reward",
        f"{name},reset=renw": "renew",
        f"{name},turns=0": "at least 1",
        f"mcp:true,tasks={tmp_path}/open.jsonl": "an answer in every row",
        f"{name},reward={folder}/score.py:scre": "score",
    }.items():
        with pytest.raises(SettingError, match=words):
            environments.load(spec)


@pytest.mark.integration
@pytest.mark.slow
def test_a_reward_that_is_no_number_fails_the_episode(shop):
    pytest.importorskip("mcp")
    cls = environments.load(f"{shop[0]},reward={shop[1]}/score.py:wordy")
    with pytest.raises(EnvironmentFault, match="'a lot'"):
        play(cls, lambda env: text_action("done"))


def test_held_out_rows_do_not_depend_on_the_order_of_the_file():
    split, other = split_rows(ROWS), split_rows(ROWS[::-1])
    assert split == other and len(split["held_out"]) == 1 and len(split["train"]) == len(ROWS) - 1
