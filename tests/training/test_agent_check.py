"""An agent is tried before a run, and its problems are told in words."""

from __future__ import annotations

import pytest

from turnwise.errors import SettingError
from turnwise.training.agents import try_agent

AGENTS = """
async def solve(task, client):
    messages = list(task.messages)
    while not task.done:
        reply = await client.chat.completions.create(messages=messages, tools=list(task.tools))
        messages += [reply.choices[0].message, *await task.step(reply.choices[0].message)]

async def fails(task, client):
    await client.chat.completions.create(messages=list(task.messages))
    raise ValueError("odd")

async def generous(task, client):
    await client.chat.completions.create(messages=list(task.messages))
    return 1.0

async def forgets(task, client):
    await client.chat.completions.create(messages=list(task.messages))
"""


def check(tmp_path, monkeypatch, name, **values):
    (tmp_path / "my_agents.py").write_text(AGENTS)
    return try_agent({"env": "lookup", "agent": f"{tmp_path}/my_agents.py:{name}", **values}, 3)


def test_a_good_agent_has_no_problems_and_what_was_tried_is_told(tmp_path, monkeypatch):
    report = check(tmp_path, monkeypatch, "solve")
    assert report.ok, report.text()
    assert (
        "policy oracle: 0 failed, mean reward 1.00" in report.text() and "the same calls and rewards" in report.text()
    )
    assert "(100.0%) continued token for token" in report.text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fails", "ValueError: odd"),
        ("forgets", "what its episode was worth"),
        ("generous", "get the same reward, 1"),
    ],
)
def test_a_bad_agent_has_problems(name, words, tmp_path, monkeypatch):
    report = check(tmp_path, monkeypatch, name)
    assert not report.ok and any(words in problem for problem in report.problems)


def test_without_an_agent_there_is_nothing_to_check():
    with pytest.raises(SettingError, match="--agent"):
        try_agent({"env": "lookup"})
