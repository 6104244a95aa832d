"""The client of served models: what it sends, what it makes of replies, what it retries, and what it says when it gives up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.chat_servers import ChatStub, completion, free_address, serving, slowly, text
from turnwise.core.records import Sampling, Stop
from turnwise.engines.remote import chat_server as wire
from turnwise.engines.remote.chat_server import FAILED_IN_A_ROW, ChatServer, RetryPolicy, find_model
from turnwise.engines.remote.http import HttpPool, ServerAddress
from turnwise.errors import ContextOverflow, ServerFault, SettingError

ASK = [{"role": "user", "content": "hello"}]
QUICK = RetryPolicy(seconds=5.0, attempts=4, pause=0.001)


def ask(stub: ChatStub, times: int = 1, key: str = "", retry: RetryPolicy = QUICK, model: str = "m", **more):
    """The replies to ``times`` requests at once, and the server object."""
    told: list[str] = []

    async def run():
        server = ChatServer(ServerAddress(url, key), model, retry, parallel=3, tell=told.append)
        sampling = more.pop("sampling", Sampling(0.5, max_tokens=9))
        replies = [server.reply(ASK, sampling, n, **more) for n in range(times)]
        return server, await asyncio.gather(*replies, return_exceptions=True)

    with serving(stub) as url:
        server, replies = asyncio.run(run())
    server.told = told
    return server, replies


def after(*first, then=None):
    """Replies one after the other, then always the last."""
    queue = itertools.chain(first, itertools.repeat(then or text("ok")))
    return ChatStub(lambda body: next(queue))


def test_a_reply_and_what_was_sent():
    stub = ChatStub(lambda body: text("ok", ("add", {"a": 1})))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    _, (reply,) = ask(stub, tools=tools)
    assert (reply.text, reply.tokens, reply.stop) == ("ok", 7, Stop.TOKEN)
    assert [(call.name, call.arguments, call.id) for call in reply.calls] == [("add", {"a": 1}, "id-0")]
    sent = stub.seen[0]
    assert sent == {
        "model": "m", "messages": ASK, "temperature": 0.5, "max_tokens": 9, "seed": 0, "tools": tools,
    }  # fmt: skip
    assert "authorization" not in stub.headers[0]


def test_filters_and_stops_are_sent_only_if_set():
    stub = ChatStub(lambda body: text("ok"))
    ask(stub, sampling=Sampling(0.0, top_p=0.9, top_k=5, min_p=0.1, max_tokens=3, stop=("x",)))
    assert {k: stub.seen[0][k] for k in ("top_p", "top_k", "min_p", "stop")} == {
        "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["x"],
    }  # fmt: skip


def test_a_busy_a_failing_and_a_dropping_server_are_asked_again():
    stub = after((429, {"headers": {"Retry-After": "0"}}), (500, {"error": {"message": "oops"}}), None)
    server, (reply,) = ask(stub)
    assert reply.text == "ok"
    assert (server.requests, server.retries) == (4, 3)
    assert len(server.told) == 3 and "status 429" in server.told[0]


def test_a_reply_that_is_none_is_asked_for_again():
    server, (reply,) = ask(after("<html>", (200, {"choices": []}), (200, {"choices": [{"message": None}]})))
    assert reply.text == "ok" and server.retries == 3


def test_attempts_are_bounded_and_the_error_says_why():
    server, (fault,) = ask(after(then=(503, {"error": {"message": "warming up"}})))
    assert isinstance(fault, ServerFault) and not isinstance(fault, ContextOverflow)
    assert "status 503: warming up (4 attempts)" in str(fault)
    assert server.fatal is None  # another request may succeed


def test_many_failures_in_a_row_end_everything():
    server, faults = ask(after(then=(503, {})), times=FAILED_IN_A_ROW + 4)
    assert server.fatal is not None and f"{FAILED_IN_A_ROW} requests in a row failed" in str(server.fatal)
    assert all(isinstance(fault, ServerFault) for fault in faults)
    assert server.requests < (FAILED_IN_A_ROW + 4) * QUICK.attempts  # the last ones were not sent any more


def test_a_slow_server_is_told_apart_from_an_absent_one():
    _, (fault,) = ask(ChatStub(slowly(1.0, text("late"))), retry=RetryPolicy(0.2, 2, 0.001))
    assert "no reply within 0.2 s (2 attempts)" in str(fault)


def test_a_context_overflow_is_an_error_of_its_own():
    for body in (
        {"error": {"message": "too long", "code": "context_length_exceeded"}},
        {"error": {"message": "This model's maximum context length is 64 tokens."}},
        {"message": "the request exceeds the available context size"},
    ):
        server, (fault,) = ask(after(then=(400, body)))
        assert isinstance(fault, ContextOverflow), body
        assert server.requests == 1 and server.fatal is None


def test_an_unknown_model_is_answered_with_the_known_ones():
    stub = ChatStub(
        lambda body: (404, {"error": {"message": "The model `n` does not exist"}}), models=("qwen", "llama")
    )
    server, (fault,) = ask(stub, model="qwem")
    assert "did you mean 'qwen'? known: llama, qwen" in str(fault)
    assert server.requests == 1 and server.fatal is fault


def test_a_wrong_key_is_not_tried_again_and_never_shown():
    stub = ChatStub(lambda body: (401, {"error": {"message": "wrong key sk-secret"}}))
    server, (fault,) = ask(stub, key="sk-secret")
    assert stub.headers[0]["authorization"] == "Bearer sk-secret"
    assert "401" in str(fault) and "--policy-key-env" in str(fault) and "sk-secret" not in str(fault)
    assert server.requests == 1
    assert "sk-secret" not in repr(server)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_proxy_of_the_environment_is_asked(monkeypatch, scheme):
    """A proxy of plain HTTP gets the whole address, one of HTTPS the request for a tunnel; each with its password."""
    lines = []

    def answer(listener):
        connection, _ = listener.accept()
        lines.extend(connection.recv(4096).decode().splitlines())
        connection.sendall(b"HTTP/1.1 403 no\r\nContent-Length: 0\r\n\r\n")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        threading.Thread(target=answer, args=(proxy,), daemon=True).start()
        monkeypatch.setenv(f"{scheme}_proxy", f"http://me:pass@127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        with contextlib.suppress(ServerFault):
            asyncio.run(HttpPool(ServerAddress(f"{scheme}://far.example/v1"), foreign=True).call("/models", None, 5.0))
    assert (
        lines[0].split()[:2]
        == {"http": ["GET", "http://far.example/v1/models"], "https": ["CONNECT", "far.example:443"]}[scheme]
    )
    assert "Proxy-Authorization: Basic bWU6cGFzcw==" in lines


def test_a_redirect_is_not_followed():
    stub = ChatStub(lambda body: (307, {"headers": {"Location": "http://elsewhere/v1"}}))
    _, (fault,) = ask(stub, key="sk-secret")
    assert "http://elsewhere/v1" in str(fault) and len(stub.seen) == 1


def test_fields_that_a_server_refuses_are_replaced_or_left_out():
    def respond(body):
        if "max_tokens" in body:
            return 400, {"error": {"message": "use max_completion_tokens"}}
        if "response_format" in body:
            return 400, {"error": {"message": "response_format is not supported"}}
        return text("ok")

    stub = ChatStub(respond)
    _, replies = ask(stub, times=2, schema={"type": "object"})
    assert [reply.text for reply in replies] == ["ok", "ok"]
    assert stub.seen[-1].keys() >= {"max_completion_tokens"} and "response_format" not in stub.seen[-1]


def test_requests_at_the_same_time_are_limited():
    stub = ChatStub(slowly(0.05, text("ok")))
    ask(stub, times=9)
    assert stub.most_at_once == 3


def test_nobody_listens():
    with pytest.raises(SettingError, match="no connection"):
        asyncio.run(find_model(ServerAddress.read(free_address()), "m", "policy"))


def test_the_only_model_is_taken_and_one_of_several_must_be_named():
    async def found(models, name=""):
        with serving(ChatStub(lambda body: None, models)) as url:
            return await find_model(ServerAddress.read(url), name, "policy")

    assert asyncio.run(found(("one",))) == "one"
    assert asyncio.run(found(("one", "two"), "two")) == "two"
    with pytest.raises(SettingError, match=r"serves 2 models.*one, two"):
        asyncio.run(found(("one", "two")))
    with pytest.raises(SettingError, match="names no model"):
        asyncio.run(found(()))


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://h/v1", "http://", "http://h:port/v1", "http://h/v1?a=b"])
def test_an_address_that_is_none(url):
    with pytest.raises(SettingError, match="http://localhost:8000/v1"):
        ServerAddress.read(url)


def test_an_address_as_people_copy_it():
    for url in ("http://h:1/v1", "http://h:1/v1/", " http://h:1/v1/chat/completions "):
        assert ServerAddress.read(url).url == "http://h:1/v1"


def test_a_key_is_named_by_its_variable(monkeypatch):
    monkeypatch.setenv("MY_KEY", "abc")
    assert ServerAddress.read("http://h/v1", "MY_KEY").key == "abc"
    assert "abc" not in repr(ServerAddress.read("http://h/v1", "MY_KEY"))
    with pytest.raises(SettingError, match="NOT_SET is not set"):
        ServerAddress.read("http://h/v1", "NOT_SET")
    for key in ("sk-1234", "sk_1234"):
        with pytest.raises(SettingError) as refused:
            ServerAddress.read("http://h/v1", key)
        assert "1234" not in str(refused.value)
    with pytest.raises(SettingError) as refused:
        ServerAddress.read("http://me:secret@h/v1")
    assert "secret" not in str(refused.value)


# ----------------------------------------------------------------------- the wire


def test_arguments_that_are_no_json_are_the_models_mistake():
    message = text("", ("add", {}))
    message["tool_calls"][0]["function"]["arguments"] = "{a: 1"
    reply = wire.read_reply(completion(message))
    assert not reply.calls and "add" in reply.faults[0]


@pytest.mark.parametrize("arguments", [None, "", "  ", {}, "{}"])
def test_a_call_without_arguments(arguments):
    message = text(None, ("now", {}))
    message["tool_calls"][0]["function"]["arguments"] = arguments
    assert wire.read_reply(completion(message)).calls[0].arguments == {}


def test_a_reply_of_parts_a_length_and_reasoning():
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    reply = wire.read_reply(completion(text(parts, reasoning_content="hm"), "length"))
    assert (reply.text, reply.stop, reply.thinking) == ("ab", Stop.LENGTH, "hm")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)


@given(json_values)
def test_any_json_is_a_reply_or_a_server_fault(value):
    for body in (value, {"choices": value}, {"choices": [value]}, {"choices": [{"message": value}]}):
        with contextlib.suppress(ServerFault):
            wire.read_reply(body)


@given(json_values, json_values)
def test_any_message_is_a_reply_or_a_server_fault(content, calls):
    try:
        reply = wire.read_reply({"choices": [{"message": {"content": content, "tool_calls": calls}}], "usage": calls})
    except ServerFault:
        return
    json.dumps(reply.text)
    assert reply.tokens >= 0


@given(st.integers(1, 60), st.text(max_size=6))
def test_pauses_are_bounded(attempt, asked_for):
    assert 0 <= RetryPolicy().wait(attempt, 3, asked_for) <= 30
