"""Agents that live elsewhere: they take an episode, talk, act or post a reward; a trained run is served the same way."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request

import pytest
from support.agent_runs import SMALL
from support.agents import SAMPLING, HashSession
from support.endpoint import LIMITS, call, new_episode
from support.episodes import RENDERER

from turnwise import environments
from turnwise.core.records import Status, Task
from turnwise.errors import SettingError
from turnwise.rollout.agent_client import AgentTask, FunctionAgent, open_task
from turnwise.rollout.agent_episode import AgentEpisode
from turnwise.serve.agents import ExternalAgent
from turnwise.serve.server import EndpointHost, listen_on, read_address
from turnwise.serve.sessions import Sessions
from turnwise.training import api
from turnwise.training.serve import serve_run
from turnwise.workers.tokens import find_token

pytest.importorskip("uvicorn")

from turnwise.serve.app import make_app

pytestmark = pytest.mark.integration


def post(url, body=None):
    """The reply to a client that has the token of a server on this machine, if it wrote one."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {find_token(url)}"}
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def worker(url, ended, play):
    """An agent elsewhere: takes episodes until the run has ended."""
    while not ended.is_set():
        try:
            taken = post(f"{url}/sessions", {"wait": 1})
            if taken["state"] == "open":
                play(taken)
        except (urllib.error.URLError, OSError):
            ended.wait(0.05)


def rewarded(taken):
    messages = taken["task"]["messages"]
    for _ in range(2):
        reply = post(f"{taken['base_url']}/chat/completions", {"messages": messages})
        messages = [*messages, reply["choices"][0]["message"], {"role": "user", "content": "on"}]
    post(taken["reward_url"], {"reward": 0.5, "success": True})


def acting(taken):
    messages, done = taken["task"]["messages"], False
    while not done:
        reply = post(f"{taken['base_url']}/chat/completions", {"messages": messages, "tools": taken["task"]["tools"]})
        message = reply["choices"][0]["message"]
        step = post(taken["step_url"], {"message": message})
        messages, done = [*messages, message, *step["messages"]], step["done"]


def play_outside(play, name="lookup", seed=3):
    announced, ended = [], threading.Event()

    async def run():
        agent = ExternalAgent("127.0.0.1", 0, "", announced.append)
        task = Task(name, seed, "train", 1)
        episode = AgentEpisode("g.0", task, HashSession(seed=seed), RENDERER, SAMPLING, LIMITS)
        opened = await open_task(task, environments.make(name), 5.0)
        playing = asyncio.create_task(episode.run(lambda e: agent.play(opened, e)))
        while not announced:
            await asyncio.sleep(0.01)
        url = announced[0].split()[1].rstrip(";")
        thread = threading.Thread(target=worker, args=(url, ended, play), daemon=True)
        thread.start()
        try:
            return await playing
        finally:
            ended.set()

    return asyncio.run(run())


def test_an_agent_elsewhere_takes_an_episode_and_posts_its_reward():
    t = play_outside(rewarded)
    assert (t.status, t.reward, t.success, len(t.turns)) == (Status.FINISHED, 0.5, True, 2)
    assert t.facts["agent/exact"] == 1.0


def test_an_agent_elsewhere_acts_in_the_environment_of_the_run():
    t = play_outside(acting)
    assert t.status == Status.FINISHED and t.success is not None and not any(turn.restart for turn in t.turns)


def test_an_agent_that_gives_up_fails_its_episode():
    def give_up(taken):
        request = urllib.request.Request(taken["anthropic_base_url"], method="DELETE")
        urllib.request.urlopen(request, timeout=30).close()

    t = play_outside(give_up)
    assert t.status == Status.FAILED and "abandoned" in t.reason


def test_taking_an_episode_waits_and_says_when_there_is_none():
    async def run():
        sessions = Sessions("token")
        app, head = make_app(sessions), [(b"authorization", b"Bearer token")]
        none = await call(app, "POST", "/sessions", b'{"wait": 0.05}', head)
        waiting = asyncio.create_task(call(app, "POST", "/sessions", b'{"wait": 30}', head))
        await asyncio.sleep(0.05)
        task = AgentTask(Task("x", 1), [{"role": "user", "content": "a"}], row={"level": 3})
        offered = sessions.open(new_episode(), awaits_reward=True, task=task, offered=True)
        return none, await waiting, offered, await call(app, "POST", "/sessions", b'{"wait": 1e9}', head)

    none, taken, offered, wrong = asyncio.run(run())
    assert none[0] == 202 and json.loads(none[1]) == {"state": "waiting"} and wrong[0] == 400
    body = json.loads(taken[1])
    assert body["api_key"] == offered.key and body["task"]["row"] == {"level": 3} and offered.taken.is_set()


def test_a_run_is_trained_by_agents_elsewhere(tmp_path):
    ended = threading.Event()
    with listen_on("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    thread = threading.Thread(target=worker, args=(f"http://127.0.0.1:{port}", ended, acting), daemon=True)
    thread.start()
    small = {**SMALL, "steps": 1, "cold_steps": 1, "eval_tasks": 2, "groups": 1, "group_size": 2}
    try:
        where = {"agent": "external", "agent_address": f"127.0.0.1:{port}", "out": str(tmp_path), "name": "x"}
        summary = api.train(env="lookup", **where, **small)
    finally:
        ended.set()
    assert summary["exactness"]["episodes"] == 2 and summary["exactness"]["continued_share"] == 1.0


@pytest.mark.parametrize(
    ("address", "words"),
    [("nowhere", "HOST:PORT"), ("127.0.0.1:99999", "HOST:PORT"), ("0.0.0.0:8700", "ENDPOINT_TOKEN"), ("1.2.3.4:0", "TOKEN")],
)  # fmt: skip
def test_addresses_that_cannot_be_used_are_refused_before_anything_is_built(address, words, tmp_path):
    with pytest.raises(SettingError, match=words):
        api.train(env="lookup", agent="external", agent_address=address, out=str(tmp_path), **SMALL)
    assert not list(tmp_path.iterdir())


def test_addresses():
    assert read_address("8700") == ("127.0.0.1", 8700) and read_address("[::1]:1") == ("::1", 1)
    with listen_on("127.0.0.1", 0) as taken, pytest.raises(SettingError, match="another process listens there; choose"):
        listen_on("127.0.0.1", taken.getsockname()[1])


def test_a_function_that_is_not_async_runs_in_a_thread_and_reaches_its_episode_over_http():
    def solve(task, client):
        messages = list(task.messages)
        while not task.done:
            body = {"messages": messages, "tools": list(task.tools)}
            message = post(f"{client.base_url}/chat/completions", body)["choices"][0]["message"]
            messages += [message, *task.wait(task.step(message))]

    async def run():
        task = Task("lookup", 2, "train", 1)
        episode = AgentEpisode("g.0", task, HashSession(seed=2), RENDERER, SAMPLING, LIMITS)
        opened = await open_task(task, environments.make("lookup"), 5.0)
        host = EndpointHost()
        t = await episode.run(lambda e: FunctionAgent(solve, host).play(opened, e))
        return t, len(host.endpoint(asyncio.get_running_loop()).sessions)

    t, left = asyncio.run(run())
    assert t.status == Status.FINISHED and t.success is not None and left == 0


def test_a_trained_run_is_served_and_finished_sessions_become_rows(tmp_path):
    run = api.train(
        env="lookup", out=str(tmp_path), name="x", **{**SMALL, "steps": 1, "cold_steps": 1, "eval_tasks": 0}
    )["run"]
    results, told = [], []

    def use(endpoint):
        def work():
            try:
                one = post(f"{endpoint.url}/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
                taken = post(f"{endpoint.url}/sessions", {"name": "mine"})
                rewarded({**taken, "task": {"messages": [{"role": "user", "content": "b"}]}})
                results.append(one)
            finally:
                stop()

        stop = endpoint.stop
        threading.Thread(target=work, daemon=True).start()

    served = serve_run(run, "127.0.0.1:0", "", 60.0, told.append, use)
    assert results[0]["choices"] and served["sessions"] == 1 and "OPENAI_BASE_URL" in told[0]
    (row,) = map(json.loads, (tmp_path / "x" / "endpoint.jsonl").read_text().splitlines())
    assert (row["name"], row["reward"], row["calls"]) == ("mine", 0.5, 2) and served["exactness"][
        "continued_share"
    ] == 1.0
