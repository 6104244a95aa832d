"""Environments behind the wire of OpenEnv: a server of our own that speaks it, and the package's own where it is installed."""

from __future__ import annotations

import random
import threading
import time

import pytest

pytest.importorskip("websockets", reason="the extra openenv is not installed")

from support.openenv_server import TEXT_SCHEMA, openenv_server

from turnwise.core.protocols import Action
from turnwise.environments import load, make
from turnwise.environments.base import tool_action
from turnwise.errors import EnvironmentFault, SettingError


@pytest.fixture(scope="module")
def url():
    with openenv_server() as address:
        yield address


def texts(messages):
    return [message["content"] for message in messages]


def test_an_episode_is_a_session_of_the_server(url):
    env = make(f"openenv:{url},goal=find the number.")
    assert texts(env.reset(4)) == ["find the number.\nhint: guess\nleft: 3"]
    assert [tool["function"]["name"] for tool in env.tools] == ["act"]
    assert env.tools[0]["function"]["parameters"]["required"] == ["number"]
    step = env.step(tool_action("act", number=2))
    assert texts(step.messages) == ["hint: higher\nleft: 2"] and not step.terminated
    last = env.step(tool_action("act", number=4))
    assert last.terminated and last.reward == 1.0 and last.info["success"]
    assert env.step(tool_action("act", number=4)).terminated
    env.close()


def test_sessions_are_apart_and_the_seed_decides(url):
    one, other, same = (make(f"openenv:{url}") for _ in range(3))
    for env, seed in ((one, 3), (other, 5), (same, 3)):
        env.reset(seed)
    words = [texts(env.step(tool_action("act", number=4)).messages)[0].split()[1] for env in (one, other, same)]
    assert words == ["lower", "higher", "lower"]
    for env in (one, other, same):
        env.close()


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (Action("five"), "call the tool act"),
        (tool_action("guess", number=3), "no tool 'guess'"),
        (tool_action("act", number="three"), "no integer"),
        (Action("{", faults=("unreadable call",)), "unreadable"),
    ],
)
def test_a_wrong_action_is_answered_in_words_and_costs_a_turn(url, action, words):
    env = make(f"openenv:{url},turns=2")
    env.reset(4)
    step = env.step(action)
    assert words in texts(step.messages)[0] and step.info["tool_errors"] == 1 and not step.truncated
    last = env.step(action)
    assert last.truncated and not last.info["success"]
    env.close()


def test_an_action_of_one_text_needs_no_tool():
    with openenv_server(TEXT_SCHEMA) as address:
        env = make(f"openenv:{address},success=0.5,turns=1")
        env.reset(0)
        step = env.step(Action("hello"))
        assert not env.tools and texts(step.messages) == ["hello"] and step.reward == 0.5 and step.info["success"]
        assert env.random_action(random.Random(0)).text and not env.random_action(random.Random(0)).calls
        env.close()


def test_random_actions_follow_the_schema(url):
    env = make(f"openenv:{url}")
    numbers = {env.random_action(random.Random(seed)).calls[0].arguments["number"] for seed in range(80)}
    assert numbers == set(range(10))


def test_a_server_that_is_gone_fails_the_episode_and_not_the_process():
    with openenv_server() as address:
        cls = load(f"openenv:{address},seconds=5")
    with pytest.raises(EnvironmentFault, match="no session"):
        cls().reset(0)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("openenv:127.0.0.1:9", "http://HOST:PORT"),
        ("openenv:http://127.0.0.1:9,seconds=2", "no OpenEnv server answers"),
        ("openenv:", "names nothing"),
    ],
)
def test_an_address_without_a_server_is_refused(spec, words):
    with pytest.raises(SettingError, match=words):
        load(spec)


def test_an_unknown_option_is_refused(url):
    with pytest.raises(SettingError, match="turns"):
        load(f"openenv:{url},turn=3")


@pytest.mark.slow
@pytest.mark.integration
def test_a_server_of_the_package_itself():
    server = pytest.importorskip("openenv.core.env_server", reason="openenv-core is not installed")
    uvicorn = pytest.importorskip("uvicorn")
    types = pytest.importorskip("openenv.core.env_server.types")

    class Guess(types.Action):
        number: int

    class Hint(types.Observation):
        hint: str = ""

    class World(server.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **others):
            self.secret = (seed or 0) // 2 % 10
            return Hint(hint="guess")

        def step(self, action, timeout_s=None, **others):
            right = action.number == self.secret
            return Hint(hint="yes" if right else "no", reward=float(right), done=right)

        @property
        def state(self):
            return types.State()

    config = uvicorn.Config(server.create_fastapi_app(World, Guess, Hint, 8), port=0, log_level="error")
    running = uvicorn.Server(config)
    threading.Thread(target=running.run, daemon=True).start()
    for _ in range(600):
        if running.started:
            break
        time.sleep(0.05)
    port = running.servers[0].sockets[0].getsockname()[1]
    one, other = (make(f"openenv:http://127.0.0.1:{port}") for _ in range(2))
    assert texts(one.reset(7)) == ["guess"] and texts(other.reset(2)) == ["guess"]
    assert texts(one.step(tool_action("act", number=2)).messages) == ["no"]
    assert "error" in texts(one.step(tool_action("act", number="x")).messages)[0]
    last = other.step(tool_action("act", number=2))
    assert last.terminated and last.info["success"]
    for env in (one, other):
        env.close()
    running.should_exit = True
