"""Agents of other packages, with their code as it is in ``examples/agents``: each plays and trains, and the certificate counts
its calls. The full runs are in ``docs/agents.md``."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.agent_runs import SMALL, same, solve, weights

from turnwise.training import api
from turnwise.training.interrupt import RunStopped

FOLDER = Path(__file__).parent.parent.parent / "examples" / "agents"
pytestmark = pytest.mark.integration


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "package", "exact"),
    [
        ("openai_client", "openai", True),
        ("anthropic_client", "anthropic", True),
        ("openai_agents_sdk", "agents", True),
        ("langgraph_react", "langgraph", True),
        ("smolagents_tools", "smolagents", False),
    ],
)  # fmt: skip
def test_an_agent_of_another_package_trains_with_its_code_unchanged(example, package, exact, tmp_path):
    for name in ("starlette", "uvicorn", package):
        pytest.importorskip(name)
    if example == "langgraph_react":
        pytest.importorskip("langchain_openai")
    small = {**SMALL, "steps": 1, "eval_tasks": 2, "cold_steps": 30, "groups": 1, "group_size": 4}
    small |= {"max_tokens": 40, "context": 700}
    agent = f"{FOLDER / example}.py:solve"
    summary = api.train(env="calculator", agent=agent, out=str(tmp_path), name="x", **small)
    found = summary["exactness"]
    assert found["episodes"] == 4 and found["unfinished"]["count"] == 0, found
    if exact:
        # None: after so short a start the policy may answer without a call, and then there are no later calls
        assert found["continued_share"] in (None, 1.0) and not found["restarts"]


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
