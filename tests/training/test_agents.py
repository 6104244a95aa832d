"""Runs whose episodes an agent plays: the same weights as with the turn loop, resumable, refused where they cannot be."""

from __future__ import annotations

import json

import pytest
from support.agent_runs import SMALL, same, solve, weights

from turnwise.environments.isolated import PROCESSES
from turnwise.errors import SettingError
from turnwise.training import api


@pytest.mark.parametrize("env", ["guess", "lookup"])
def test_an_agent_trains_to_the_same_weights_as_the_turn_loop(env, tmp_path):
    by_loop = api.train(env=env, out=str(tmp_path), name="loop", **SMALL)
    by_agent = api.train(env=env, agent=solve, out=str(tmp_path), name="agent", **SMALL)
    assert same(weights(by_loop), weights(by_agent))


@pytest.mark.slow
def test_an_agent_in_an_isolated_environment_leaves_no_episode_behind(tmp_path):
    by_loop = api.train(env="guess", out=str(tmp_path), name="loop", **SMALL)
    by_agent = api.train(env="guess", agent=solve, isolate_env=True, out=str(tmp_path), name="agent", **SMALL)
    try:
        assert same(weights(by_loop), weights(by_agent))
        assert PROCESSES.workers and {worker.users for worker in PROCESSES.workers} == {0}
    finally:
        PROCESSES.stop()


def test_an_agent_with_rows_returns_its_own_reward(tmp_path):
    rows = [{"prompt": f"say {n}", "answer": str(n), "level": n % 3} for n in range(40)]
    seen = []

    async def answer(task, client):
        reply = await client.chat.completions.create(messages=task.messages)
        seen.append(task.row["level"])
        return {"exact": float(reply.choices[0].message.content.strip() == task.row["answer"]), "short": 0.5}

    api.train(data=rows, agent=answer, out=str(tmp_path), name="rows", **SMALL)
    assert set(seen) <= {0, 1, 2} and seen
    row = json.loads((tmp_path / "rows" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["reward/short"] == 0.5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"agent": "nowhere:solve"}, "no module"),
        ({"agent": "json:nothing"}, "no function"),
        ({"agent": 3}, "module:function"),
        ({"agent": solve, "method": "spo_chain"}, "cannot be copied"),
        ({"agent": solve, "method": "gigpo"}, "states of turns"),
    ],
)  # fmt: skip
def test_what_an_agent_cannot_do_is_refused_with_the_reason(settings, words, tmp_path):
    with pytest.raises(SettingError, match=words):
        api.train(out=str(tmp_path), **{**SMALL, "env": "keydoor", **settings})
    assert not list(tmp_path.iterdir())


def test_a_run_of_an_agent_without_a_name_asks_for_it_again(tmp_path):
    calls = []

    async def nameless(task, client):
        calls.append(1)
        await solve(task, client)

    run = api.train(env="guess", agent=nameless, out=str(tmp_path), name="x", **SMALL)["run"]
    (tmp_path / "x" / "summary.json").unlink()
    with pytest.raises(SettingError, match="agent"):
        api.resume(run, quiet=True)
    assert api.resume(run, agent=nameless, quiet=True)["steps"] == 2
