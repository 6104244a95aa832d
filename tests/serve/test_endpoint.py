"""The endpoint with stock clients: the same ids and rewards as the turn loop; what is wrong gets a clear status."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace

import pytest
from support.agents import SAMPLING, TEXTS, HashSession
from support.episodes import RENDERER, TASK

from turnwise import environments
from turnwise.core.records import Status, Task
from turnwise.rollout.agent_client import AgentTask, open_task
from turnwise.rollout.agent_episode import AgentEpisode, AgentOutcome
from turnwise.rollout.episode import Episode, EpisodeLimits

starlette = pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from turnwise.serve.app import MAX_BODY, make_app  # noqa: E402
from turnwise.serve.sessions import Sessions  # noqa: E402
from turnwise.serve.wires import CHAT, MESSAGES, RESPONSES  # noqa: E402

pytestmark = pytest.mark.integration
LIMITS = EpisodeLimits(turns=12, context=4000)
READABLE = tuple(
    text for text in TEXTS if "broken" not in text
)  # a reply to a call that was none has no place in that protocol


def new_episode(session=None, task=TASK, limits=LIMITS):
    return AgentEpisode("g.0", task, session or HashSession(), RENDERER, SAMPLING, limits)


def http(sessions, library=httpx):
    return library.AsyncClient(transport=library.ASGITransport(make_app(sessions)), base_url="http://test")


def user(text):
    return {"role": "user", "content": text}


async def whitebox(name, task, seed, texts=TEXTS):
    env = environments.make(name)
    return await Episode("g.0", task, env, HashSession(texts, seed), RENDERER, SAMPLING, LIMITS).run()


def recorded(turns):
    return [(t.context, t.tokens, t.logp, t.restart, t.reward) for t in turns]


async def opened(name, task, seed, texts=TEXTS):
    sessions, episode = Sessions(), new_episode(HashSession(texts, seed), task)
    world = await open_task(task, environments.make(name), 5.0)
    world.episode = episode
    return sessions, sessions.open(episode), world


# ------------------------------------------------------------- stock clients


@pytest.mark.parametrize("name", ["calculator", "lookup"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stock_openai_client_is_recorded_like_the_turn_loop(name, stream):
    openai = pytest.importorskip("openai")

    async def run(seed):
        task = Task(name, seed, "train", 1)
        sessions, session, world = await opened(name, task, seed)
        async with http(sessions) as transport:
            client = openai.AsyncOpenAI(base_url="http://test/v1", api_key=session.key, http_client=transport)
            messages = list(world.messages)
            while not world.done:
                asked = {"model": "policy", "messages": messages, "tools": list(world.tools) or openai.NOT_GIVEN}
                message = await (streamed if stream else whole)(client, asked)
                messages += [message, *await world.step(message)]
        plain = await whitebox(name, task, seed)
        assert recorded(world.episode.turns) == recorded(plain.turns)
        assert world.episode.success == plain.success

    async def whole(client, asked):
        return (await client.chat.completions.create(**asked)).choices[0].message.model_dump(exclude_none=True)

    async def streamed(client, asked):
        text, calls = "", {}
        async for chunk in await client.chat.completions.create(stream=True, **asked):
            delta = chunk.choices[0].delta
            text += delta.content or ""
            for call in delta.tool_calls or ():
                calls[call.index] = call.model_dump(exclude={"index"})
        return {"role": "assistant", "content": text or None, **({"tool_calls": list(calls.values())} if calls else {})}

    for seed in range(4):
        asyncio.run(run(seed))


@pytest.mark.parametrize("stream", [False, True])
def test_a_stock_anthropic_client_is_recorded_like_the_turn_loop(stream):
    anthropic = pytest.importorskip("anthropic")
    library = sys.modules.get("httpx2", httpx)  # newer SDKs use the successor of httpx

    async def run(seed):
        task = Task("lookup", seed, "train", 1)
        sessions, session, world = await opened("lookup", task, seed, READABLE)
        functions = [tool["function"] for tool in world.tools]
        tools = [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions
        ]
        async with http(sessions, library) as transport:
            base = ("http://test", "http://test/v1")[seed % 2]  # it adds /v1 also to the address of the other clients
            client = anthropic.AsyncAnthropic(base_url=base, api_key=session.key, http_client=transport)
            messages = list(world.messages)
            while not world.done:
                asked = {"model": "policy", "max_tokens": 200, "messages": messages, "tools": tools}
                if stream:
                    async with client.messages.stream(**asked) as events:
                        reply = await events.get_final_message()
                else:
                    reply = await client.messages.create(**asked)
                blocks = [block.model_dump(exclude_none=True) for block in reply.content]
                messages += [{"role": "assistant", "content": blocks}, *as_blocks(await world.step(as_openai(blocks)))]
        plain = await whitebox("lookup", task, seed, READABLE)
        assert [t.tokens for t in world.episode.turns] == [t.tokens for t in plain.turns]
        assert not any(t.restart for t in world.episode.turns)

    for seed in range(4):
        asyncio.run(run(seed))


def as_openai(blocks):
    calls = [b for b in blocks if b["type"] == "tool_use"]
    made = [{"id": b["id"], "function": {"name": b["name"], "arguments": json.dumps(b["input"])}} for b in calls]
    text = "".join(b["text"] for b in blocks if b["type"] == "text")
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def as_blocks(messages):
    return [
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": m["tool_call_id"], "content": m["content"]}],
        }
        if m["role"] == "tool" and "tool_call_id" in m
        else {"role": "user", "content": m["content"]}
        for m in messages
    ]


# ------------------------------------------------------------------ manners


def post(path, key="", body=None, headers=None, sessions=None, content=None):
    async def run():
        async with http(sessions or Sessions()) as client:
            auth = {"Authorization": f"Bearer {key}"} if key else {}
            return await client.post(path, json=body, content=content, headers={**auth, **(headers or {})})

    return asyncio.run(run())


BODY = {"messages": [user("a")]}


@pytest.mark.parametrize(
    ("status", "code", "request_"),
    [
        (401, "invalid_api_key", {"body": BODY}),
        (401, "invalid_api_key", {"body": BODY, "key": "guessed"}),
        (400, "invalid_json", {"content": b"{", "key": "x"}),
        (400, "invalid_json", {"content": b"[" * 100_000, "key": "x"}),
        (400, "invalid_request", {"content": b"[1]", "key": "x"}),
        (400, "invalid_messages", {"body": {}, "key": "x"}),
        (400, "unsupported_parameter", {"body": {**BODY, "logit_bias": {"1": 1}}, "key": "x"}),
        (413, "body_too_large", {"content": b" " * (MAX_BODY + 1), "key": "x"}),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_gets_a_status_and_a_code(status, code, request_):
    reply = post("/v1/chat/completions", **request_)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


def test_a_retry_gets_the_same_answer_and_a_second_question_another_sample():
    async def run():
        sessions, session = Sessions(), HashSession()
        opened = sessions.open(new_episode(session))
        async with http(sessions) as client:
            path, again = f"/s/{opened.key}/v1/chat/completions", {"x-stainless-retry-count": "1"}
            first = await client.post(path, json=BODY)
            retry = await client.post(path, json=BODY, headers=again)
            other = await client.post(path, json=BODY)
        return first.json(), retry.json(), other.json(), opened

    first, retry, other, opened = asyncio.run(run())
    assert first["choices"] == retry["choices"] and opened.episode.retries == 1
    assert len(opened.episode.turns) == 2 and other["choices"]


def test_keys_open_their_own_episode_only_and_none_after_its_end():
    async def run():
        sessions = Sessions()
        one, two = sessions.open(new_episode()), sessions.open(new_episode())
        async with http(sessions) as client:
            await client.post(f"/s/{one.key}/v1/chat/completions", json=BODY)
            sessions.close(one.key)
            ended = await client.post("/v1/chat/completions", json=BODY, headers={"Authorization": f"Bearer {one.key}"})
        return one, two, ended

    one, two, ended = asyncio.run(run())
    assert len(one.key) >= 32 and one.key != two.key
    assert (len(one.episode.turns), len(two.episode.turns)) == (1, 0)
    assert (ended.status_code, ended.json()["error"]["code"]) == (409, "episode_ended")


def test_a_posted_reward_ends_the_episode_once():
    async def run():
        sessions = Sessions()
        opened = sessions.open(new_episode(), awaits_reward=True)
        async with http(sessions) as client:
            await client.post(f"/s/{opened.key}/v1/chat/completions", json=BODY)
            bodies = {"reward": "x"}, {"reward": 1, "success": True}, {"reward": 2}
            replies = [await client.post(f"/s/{opened.key}/reward", json=body) for body in bodies]
        return opened, [r.status_code for r in replies]

    opened, statuses = asyncio.run(run())
    assert statuses == [400, 200, 409] and opened.outcome.result() == AgentOutcome(1.0, success=True)


@pytest.mark.parametrize(
    ("wire", "fields", "most"),
    [
        (CHAT, {"parallel_tool_calls": False}, 1),
        (RESPONSES, {"parallel_tool_calls": False}, 1),
        (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, 1),
        (CHAT, {"tool_choice": "none"}, 0),
        (RESPONSES, {"tool_choice": "none"}, 0),
        (MESSAGES, {"tool_choice": {"type": "none"}}, 0),
        (MESSAGES, {"tool_choice": {"type": "auto"}}, None),
    ],
)
def test_every_format_says_how_many_tools_a_reply_may_call(wire, fields, most):
    messages = {"input": "a"} if wire is RESPONSES else {"messages": [user("a")]}
    read = wire.read_request({**messages, "max_output_tokens" if wire is RESPONSES else "max_tokens": 9, **fields})
    assert (read.most_calls, read.max_tokens, read.overruled) == (most, 9, ())


# ----------------------------------------------------------------- processes

SCRIPT = """
import json, os, sys, urllib.request
task = json.loads(os.environ["TURNWISE_TASK"])
assert json.load(sys.stdin) == task
def ask(messages):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages}).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = task["messages"]
for _ in range(2):
    messages += [ask(messages), {"role": "user", "content": "on"}]
print("some noise")
print(json.dumps({"reward": 0.5, "success": True}))
"""


def run_process(source, tmp_path, seconds=60.0):
    pytest.importorskip("uvicorn")
    from turnwise.serve.agents import ProcessAgent

    (tmp_path / "agent.py").write_text(source)
    agent = ProcessAgent(f"{sys.executable} {tmp_path}/agent.py")

    async def run():
        task = AgentTask(TASK, [user("begin")])
        limits = replace(LIMITS, seconds=seconds)
        return await new_episode(limits=limits).run(lambda episode: agent.play(task, episode))

    return asyncio.run(run())


def test_a_command_plays_an_episode_through_its_environment_variables(tmp_path):
    t = run_process(SCRIPT, tmp_path)
    assert (t.status, t.reason, t.success, t.reward, len(t.turns)) == (Status.FINISHED, "", True, 0.5, 2)
    assert not any(turn.restart for turn in t.turns)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import sys; sys.exit('no luck')", "no luck"),
        ("print('great')", "last line"),
        ("raise ValueError('odd')", "ValueError: odd"),
        ("print(1.0)", "made no call"),
        ("import time; time.sleep(600)", "--agent-seconds"),
    ],
)  # fmt: skip
def test_a_command_that_fails_is_a_record(source, words, tmp_path):
    t = run_process(source, tmp_path, 60.0 if "sleep" not in source else 1.0)
    assert t.status == Status.FAILED and words in t.reason
