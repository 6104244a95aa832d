"""Hostile requests: each gets a clear status, no session sees another, and what was sampled is not lost."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from support.endpoint import call, new_episode

from turnwise.core.records import Status
from turnwise.rollout.agent_episode import AgentOutcome
from turnwise.serve.sessions import Sessions

pytest.importorskip("uvicorn")

from turnwise.serve.app import MAX_BODY, make_app
from turnwise.serve.server import serving

pytestmark = pytest.mark.integration
ASK = b'{"messages": [{"role": "user", "content": "a"}]}'
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/reward", "/step", "/v1/messages/count_tokens")
JUNK = (
    None,
    True,
    -1,
    1e308,
    "",
    "x",
    "\ud800",
    [],
    [[]],
    [None],
    {},
    {"a": {}},
    [{"role": "user"}],
    "a" * 1000,
    [1, "x"],
)
FIELDS = (
    "messages", "input", "tools", "tool_choice", "max_tokens", "max_output_tokens", "n", "stop", "stop_sequences", "logprobs",
    "system", "instructions", "stream", "stream_options", "previous_response_id", "reward", "success", "message", "text",
    "nonsense", "return_token_ids", "response_format", "logit_bias", "top_logprobs", "truncation", "wait",
)  # fmt: skip


def malformed(seed):
    """A request that means nothing: random junk in random fields of a random path."""
    rng = random.Random(seed)
    body = {name: rng.choice(JUNK) for name in rng.sample(FIELDS, rng.randint(1, 5))}
    if rng.random() < 0.3:
        body["messages"] = [
            {"role": rng.choice(("user", "tool", "assistant", "robot", 7)), "content": rng.choice(JUNK)}
        ]
    if rng.random() < 0.3:
        kind = rng.choice(("message", "function_call", "image", None))
        body["input"] = [{"type": kind, "role": "user", "name": rng.choice(JUNK)}]
    raw = json.dumps(body).encode()
    if rng.random() < 0.3:
        raw = rng.choice((raw[: len(raw) // 2], b"\xff\xfe" + raw, b"[" * 5000, b"null", b"3", b'"text"', b"{}", b""))
    return rng.choice(PATHS), raw


def test_two_hundred_malformed_requests_get_a_clear_status():
    async def run():
        sessions = Sessions()
        opened = sessions.open(new_episode())
        app, statuses = make_app(sessions), []
        for seed in range(200):
            path, body = malformed(seed)
            status, content = await call(app, "POST", f"/s/{opened.key}{path}", body)
            statuses.append(status)
            assert status in (200, 400, 404, 409, 413), (path, body[:200], status, content[:300])
            if status != 200:
                error = json.loads(content)["error"]
                assert len(error["message"]) > 10, (path, body[:200], content)
                assert opened.key not in content.decode(), "a reply repeats the key"
        status, _ = await call(app, "POST", f"/s/{opened.key}/v1/chat/completions", ASK)
        assert status == 200, "the session still works"
        return statuses

    statuses = asyncio.run(run())
    assert statuses.count(400) > 120


def test_keys_of_others_and_guessed_ones_open_nothing():
    async def run():
        sessions = Sessions("the token")
        one, two = sessions.open(new_episode()), sessions.open(new_episode())
        app, ask = make_app(sessions), b'{"messages": [{"role": "user", "content": "a secret"}]}'
        await call(app, "POST", f"/s/{one.key}/v1/chat/completions", ask)
        for key in (
            "",
            "x",
            one.key[:-1],
            one.key + "x",
            one.key.swapcase(),
            "../" + one.key,
            "the token",
            "%00",
            "é" * 40,
        ):
            head = [(b"authorization", f"Bearer {key}".encode())]
            status, _ = await call(app, "POST", "/v1/chat/completions", ask, head)
            assert status == 401, key
        for token in (b"", b"Bearer x", b"Bearer the token2"):
            status, _ = await call(app, "POST", "/sessions", b"{}", [(b"authorization", token)])
            assert status == 401
        body = json.dumps({"input": "b", "previous_response_id": "resp_1"}).encode()
        status, _ = await call(app, "POST", f"/s/{two.key}/v1/responses", body)
        assert status == 404, "a response of another session is not found"
        return one, two

    one, two = asyncio.run(run())
    assert (len(one.episode.turns), len(two.episode.turns)) == (1, 0)
    assert not two.episode.lineage.turns


@pytest.mark.parametrize("path", PATHS)
def test_an_oversized_body_is_refused(path):
    async def run():
        sessions = Sessions()
        opened = sessions.open(new_episode())
        return await call(make_app(sessions), "POST", f"/s/{opened.key}{path}", b" " * (MAX_BODY + 1))

    assert asyncio.run(run())[0] == 413


def test_unknown_paths_and_methods_say_what_is_known():
    async def run():
        app = make_app(Sessions())
        unknown = (("GET", "/"), ("GET", "/v1/embeddings"), ("PUT", "/v1/messages"))
        return [await call(app, method, path) for method, path in unknown]

    for status, content in asyncio.run(run()):
        assert status in (404, 405) and "/v1/chat/completions" in content.decode()


def test_slow_and_vanishing_clients_hold_up_nobody_and_lose_nothing():
    async def run():
        sessions = Sessions()
        gone, slow, well = (sessions.open(new_episode()) for _ in range(3))
        body = b'{"messages": [{"role": "user", "content": "a"}], "stream": true}'

        def request(key, length):
            head = f"POST /s/{key}/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n"
            return f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode()

        async with serving(sessions) as endpoint:
            host, port = endpoint.url.removeprefix("http://").split(":")
            writers = []
            for key, part in ((gone.key, body), (slow.key, body[:10])):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(request(key, len(body)) + part)
                await writer.drain()
                writers.append(writer)
            writers[0].transport.abort()  # does not wait for its reply
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request(well.key, len(body)) + body)
            reply = await asyncio.wait_for(reader.read(), 30)
            writers[1].transport.abort()  # in the middle of its request
            writer.close()
            await asyncio.sleep(0.1)
            retry = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
            status, _ = await call(make_app(sessions), "POST", f"/s/{slow.key}/v1/chat/completions", retry)
        return reply, status, gone, slow, well

    reply, status, gone, slow, well = asyncio.run(run())
    assert b"200 OK" in reply and b"[DONE]" in reply and status == 200
    assert [len(o.episode.turns) for o in (slow, well)] == [1, 1]
    assert len(gone.episode.turns) <= 1 and not gone.episode.ended


def test_an_answer_that_nobody_received_is_given_to_the_retry():
    async def run():
        sessions = Sessions()
        opened = sessions.open(new_episode())
        app, ask = make_app(sessions), b'{"messages": [{"role": "user", "content": "a"}]}'
        path, again = f"/s/{opened.key}/v1/chat/completions", [(b"x-stainless-retry-count", b"1")]
        first = asyncio.create_task(call(app, "POST", path, ask))
        retry = asyncio.create_task(call(app, "POST", path, ask, again))  # while the first is still sampled
        return await first, await retry, opened

    first, retry, opened = asyncio.run(run())
    assert json.loads(first[1])["choices"] == json.loads(retry[1])["choices"]
    assert len(opened.episode.turns) == 1 and opened.episode.retries == 1


def test_more_calls_than_may_wait_are_told_to_come_back():
    async def run():
        sessions = Sessions()
        opened = sessions.open(new_episode())
        app, ask = make_app(sessions, max_waiting=0), b'{"messages": [{"role": "user", "content": "a"}]}'
        return await call(app, "POST", f"/s/{opened.key}/v1/chat/completions", ask)

    status, content = asyncio.run(run())
    assert status == 429 and json.loads(content)["error"]["code"] == "busy"


def test_calls_while_an_episode_ends_are_refused_and_the_record_stays():
    async def run():
        sessions = Sessions()
        opened = sessions.open(new_episode(), awaits_reward=True)
        app, ask = make_app(sessions), b'{"messages": [{"role": "user", "content": "a"}]}'

        async def agent(episode):
            return await opened.outcome

        playing = asyncio.create_task(opened.episode.run(agent))
        await call(app, "POST", f"/s/{opened.key}/v1/chat/completions", ask)
        await call(app, "POST", f"/s/{opened.key}/reward", b'{"reward": 0.5}')
        played = await playing
        requests = (("/reward", b"{}"), ("/v1/chat/completions", ask))
        late = [await call(app, "POST", f"/s/{opened.key}{path}", body) for path, body in requests]
        return played, [status for status, _ in late]

    played, late = asyncio.run(run())
    assert (played.status, played.reward, len(played.turns)) == (Status.FINISHED, 0.5, 1) and late == [409, 409]
    assert AgentOutcome(0.5).reward == played.reward
