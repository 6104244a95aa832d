"""Agents of other packages, with their code as it is in ``examples/agents``: each plays and trains, and the certificate counts
its calls. The full runs are in ``docs/agents.md``."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.agent_runs import SMALL, same, solve, weights

from turnwise.training import api
from turnwise.training.interrupt import RunStopped

FOLDER = Path(__file__).parent.parent.parent / "examples" / "agents"
pytestmark = pytest.mark.integration


ROW = {
    "prompt": "what is the seat of zelo?",
    "notes": ["the seat of zelo is mika."],
    "answer": '<tool_call>{"name": "search", "arguments": {"query": "seat of zelo"}}</tool_call>',
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "packages", "exact"),
    [
        ("openai_client", ("openai",), True),
        ("openai_stream", ("openai",), True),
        ("openai_responses", ("openai",), True),
        ("anthropic_client", ("anthropic",), True),
        ("openai_agents_sdk", ("agents",), True),
        ("langgraph_react", ("langgraph", "langchain_openai"), True),
        ("pydantic_ai_agent", ("pydantic_ai", "openai"), True),
        ("agno_agent", ("agno", "openai"), True),
        ("smolagents_tools", ("smolagents",), False),
    ],
)  # fmt: skip
def test_an_agent_of_another_package_trains_with_its_code_unchanged(example, packages, exact, tmp_path):
    for name in ("starlette", "uvicorn", *packages):
        pytest.importorskip(name)
    small = {**SMALL, "steps": 1, "eval_tasks": 2, "cold_steps": 40, "groups": 1, "group_size": 4}
    small |= {"max_tokens": 64, "context": 900, "held_out_share": 0.5}
    agent = f"{FOLDER / example}.py:solve"
    if exact:  # their tasks are rows; what is imitated is a call of the tool, so every episode has later calls
        rows = [{**ROW, "prompt": f"{ROW['prompt']} {n}"} for n in range(8)]
        data = tmp_path / "tasks.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        summary = api.train(data=str(data), agent=agent, out=str(tmp_path), name="x", **small)
    else:
        summary = api.train(env="calculator", agent=agent, out=str(tmp_path), name="x", **small)
    counted = summary["exactness"]
    assert counted["episodes"] == 4 and counted["unfinished"]["count"] == 0, counted
    if exact:
        # None: after so short a start the policy may answer without a call, and then there are no later calls
        assert counted["continued_share"] in (None, 1.0) and not counted["restarts"]


@pytest.mark.slow
def test_an_agent_in_this_process_repeats_and_resumes_bit_for_bit(tmp_path):
    whole = api.train(
        env="guess", agent=solve, out=str(tmp_path), name="whole", **{**SMALL, "steps": 3, "checkpoint_every": 1}
    )
    again = api.train(
        env="guess", agent=solve, out=str(tmp_path), name="again", **{**SMALL, "steps": 3, "checkpoint_every": 1}
    )
    assert same(weights(whole), weights(again))
    asked = []

    async def stops(task, client):
        asked.append(1)
        if len(asked) == 12:
            signal.raise_signal(signal.SIGINT)
        await solve(task, client)

    with pytest.raises(RunStopped):
        api.train(
            env="guess", agent=stops, out=str(tmp_path), name="cut", **{**SMALL, "steps": 3, "checkpoint_every": 1}
        )
    resumed = api.resume(str(tmp_path / "cut"), agent=solve, quiet=True)
    assert same(weights(whole), weights(resumed))
    assert resumed["exactness"]["continued_share"] == 1.0
