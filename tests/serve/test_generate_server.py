"""The routes of a generator server: vLLM's names, refusals in words, pauses and updates in their order."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request

import pytest
from support.generator_servers import served, weights_of
from support.generators import make
from support.prompting import V

from turnwise.core.records import Completion, Stop
from turnwise.engines.remote.http import acknowledge_at_once
from turnwise.engines.remote.weight_files import WeightFolder
from turnwise.errors import SettingError
from turnwise.rollout.agent_episode import CallRefused
from turnwise.serve.generate_api import read_call, reply_body, version_spans
from turnwise.serve.server import listen_on
from turnwise.workers.tokens import find_token

JSON = {"Content-Type": "application/json"}


def ask(url, path, body=None, token=None):
    """Status and JSON of a reply. ``body`` bytes are sent as they are. Without ``token``, the one that the server wrote."""
    token = find_token(url) if token is None else token
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {**JSON, "Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as reply:
        return reply.status, json.load(reply)


@pytest.fixture(scope="module")
def server():
    with served(make(seed=1)) as running:
        yield running


def params(**more):
    return {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5, "seed": 7, **more}}


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "'sampling_params' is None; write an object"),
        ({"sampling_params": {}}, "'token_ids' is None; write a list of at least one token id"),
        ({"sampling_params": {}, "token_ids": []}, "write a list of at least one token id"),
        ({"sampling_params": {}, "token_ids": [1, 99]}, r"holds 99 at position 1; this model has the ids 0 to 9"),
        ({"sampling_params": {}, "token_ids": [1, True]}, "holds True at position 1"),
        ({"sampling_params": {"n": 2}, "token_ids": [1]}, r"sampling_params\.n is 2; write 1"),
        ({"sampling_params": {"beam": 2}, "token_ids": [1]}, "has 'beam', which this server does not know"),
        ({"sampling_params": {"temperature": -1}, "token_ids": [1]}, "temperature is -1.0; write a number in"),
        ({"sampling_params": {"temperature": "hot"}, "token_ids": [1]}, "temperature is 'hot'; write a number"),
        ({"sampling_params": {"top_p": 0}, "token_ids": [1]}, r"top_p is 0.0; write a number in \(0, 1\]"),
        ({"sampling_params": {"max_tokens": 0}, "token_ids": [1]}, "max_tokens is 0; write a whole number from 1"),
        ({"sampling_params": {"seed": 2**64}, "token_ids": [1]}, "seed is"),
        ({"sampling_params": {"stop": [3]}, "token_ids": [1]}, "stop is .*; write a list of texts"),
        ({"sampling_params": {"stop_token_ids": [4]}, "token_ids": [1]}, r"this server ends a turn at \[2, 3\]"),
        ({"sampling_params": {}, "token_ids": [1], "stream": True}, "'stream' is true"),
        ({"sampling_params": {}, "token_ids": [1], "session": 3}, "'session' or 'request_id' is no text"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_write(body, told):
    with pytest.raises(CallRefused, match=told):
        read_call(body, 1, 10, (2, 3))


def test_values_that_mean_nothing_else_are_accepted():
    call = read_call(
        {"token_ids": [1], "sampling_params": {"n": 1, "top_k": -1, "repetition_penalty": 1.0, "logprobs": 0, "min_p": None}},
        3, 10, (),
    )  # fmt: skip
    assert (call.sampling.top_k, call.sampling.max_tokens, call.seed, call.session) == (0, 16, 3, "")


def test_a_reply_says_which_weights_sampled_which_tokens_and_keeps_every_bit():
    logp = [-0.1, -1 / 3, -2.0000000298023224]
    done = Completion([4, 5, 6], logp, [0.0, -0.25, 0.0], [3, 3, 4], Stop.CANCELLED)
    body = json.loads(json.dumps(reply_body("r", done, {3: "three", 4: "4"})))
    choice = body["choices"][0]
    assert choice["finish_reason"] == "abort" and choice["turnwise"]["mass"] == [0.0, -0.25, 0.0]
    assert [row["logprob"] for row in choice["logprobs"]["content"]] == logp
    assert choice["weight_versions"] == [
        {"version": "three", "start": 0, "end": 2},
        {"version": "4", "start": 2, "end": 3},
    ]
    assert version_spans([], {}) == []


# ------------------------------------------------------------------ routes


def test_a_request_without_a_dialogue_is_answered_and_repeats(server):
    status, first = ask(server.url, "/inference/v1/generate", params())
    _, second = ask(server.url, "/inference/v1/generate", params())
    assert status == 200 and first["choices"] == [{**second["choices"][0], "turnwise": first["choices"][0]["turnwise"]}]
    assert len(first["choices"][0]["token_ids"]) == 5
    assert first["choices"][0]["weight_versions"][0]["version"] == "initial"


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/inference/v1/generate", b"{", 400, "the body is not JSON"),
        ("/inference/v1/generate", b"[]", 400, "write a JSON object"),
        ("/inference/v1/generate", {"token_ids": [V], "sampling_params": {}}, 400, "this model has the ids"),
        (
            "/inference/v1/generate",
            {"token_ids": [1] * 128, "sampling_params": {}},
            400,
            "the context of this server is 128",
        ),
        ("/inference/v1/generate", {**params(), "session": "s9"}, 409, "no run is attached"),
        ("/pause?mode=keep", {}, 400, "write abort or wait"),
        ("/start_weight_update", {}, 409, "POST /pause first"),
        ("/update_weights", {"update_info": {}}, 409, "POST /start_weight_update first"),
        ("/finish_weight_update", {}, 409, "POST /start_weight_update first"),
        ("/init_weight_transfer_engine", {}, 400, "'init_info' is None"),
        ("/abort_requests", {"request_ids": "x"}, 400, "write a list of texts"),
        ("/turnwise/v1/attach", {"client": "x"}, 400, "'stop_ids' is None"),
        ("/turnwise/v1/sessions", {"client": "x"}, 409, "no run is attached"),
        ("/pause?mode=abort", {"client": "x"}, 409, "no run is attached"),
        ("/resume", {"client": "x"}, 409, "no run is attached"),
        ("/start_weight_update", {"client": "x"}, 409, "no run is attached"),
        ("/update_weights", {"client": "x", "update_info": {}}, 409, "no run is attached"),
        ("/finish_weight_update", {"client": "x"}, 409, "no run is attached"),
        ("/nothing", {}, 404, "known: /inference/v1/generate"),
    ],
)
def test_mistakes_are_answered_with_a_status_and_words(server, path, body, status, told):
    answered, value = ask(server.url, path, body)
    assert answered == status and told in value["error"]["message"]


def test_a_body_that_is_too_long_is_not_read(server):
    request = urllib.request.Request(server.url + "/update_weights", b"x", {**JSON, "Content-Length": str(1 << 40)})
    request.add_header("Authorization", f"Bearer {find_token(server.url)}")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60)
    assert refused.value.code == 413


def test_the_state_is_told(server):
    assert ask(server.url, "/health") == (200, {"status": "ok"})
    assert ask(server.url, "/is_paused") == (200, {"is_paused": False})
    assert ask(server.url, "/get_world_size") == (200, {"world_size": 1})
    model = ask(server.url, "/v1/models")[1]["data"][0]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("small", "turnwise", 128)
    assert ask(server.url, "/turnwise/v1/info")[1]["server"] == "turnwise"
    assert ask(server.url, "/abort_requests", {}) == (200, {"status": "aborted", "aborted": 0})


def test_the_four_calls_of_an_update(tmp_path):
    folder, model = WeightFolder(str(tmp_path)), make(seed=2)
    with served(make(seed=1)) as server:
        before = ask(server.url, "/inference/v1/generate", params())[1]["choices"][0]
        file = folder.write(weights_of(model), 4)
        partial = folder.write({"model.norm.weight": weights_of(model)["model.norm.weight"]}, 5)
        assert ask(server.url, "/init_weight_transfer_engine", {"init_info": {}})[0] == 200
        assert ask(server.url, "/pause?mode=abort", {})[0] == 200
        assert ask(server.url, "/start_weight_update", {})[0] == 200
        assert ask(server.url, "/update_weights", {"update_info": partial.as_dict()})[0] == 200
        status, refused = ask(server.url, "/finish_weight_update", {"weight_version": "4"})
        assert status == 400 and "were not sent" in refused["error"]["message"]
        assert ask(server.url, "/weight_info")[1]["weight_version"] == "initial"
        ask(server.url, "/start_weight_update", {})
        status, refused = ask(server.url, "/update_weights", {"update_info": {**file.as_dict(), "sha256": "0"}})
        assert status == 400 and "it was changed or cut" in refused["error"]["message"]
        assert ask(server.url, "/update_weights", {"update_info": file.as_dict()})[0] == 200
        assert ask(server.url, "/finish_weight_update", {"weight_version": "four"})[0] == 200
        assert ask(server.url, "/resume", {})[0] == 200
        told = {"weight_version": "four", "sha256": file.sha256}
        assert ask(server.url, "/weight_info")[1] == {**told, "adapters": "merged", "base": "", "dtypes": {}}
        after = ask(server.url, "/inference/v1/generate", params())[1]["choices"][0]
    assert after["weight_versions"] == [{"version": "four", "start": 0, "end": 5}]
    assert after["logprobs"] != before["logprobs"]


def test_dialogues_are_changed_in_order_and_a_repeated_message_only_once(server):
    attach = {"client": "me", "stop_ids": [], "slots": 4, "context": 64}
    assert ask(server.url, "/turnwise/v1/attach", attach)[1]["slots"] == 4
    first = {"client": "me", "number": 1, "changes": [["open", "a", 1], ["open", "b", 2]]}
    assert [ask(server.url, "/turnwise/v1/sessions", first)[1] for _ in range(2)] == [{"open": 2}] * 2
    status, refused = ask(server.url, "/turnwise/v1/sessions", {**first, "number": 3})
    assert status == 409 and "the next is 2" in refused["error"]["message"]
    closing = {"client": "me", "number": 2, "changes": [["close", "a"], ["park", "b"], ["close", "x"]]}
    assert ask(server.url, "/turnwise/v1/sessions", closing)[1] == {"open": 1}
    bad = {"client": "me", "number": 3, "changes": [["fly", "b"]]}
    assert ask(server.url, "/turnwise/v1/sessions", bad)[0] == 400
    other = {**attach, "client": "other", "context": 128}
    status, refused = ask(server.url, "/turnwise/v1/attach", other)
    assert status == 409 and "it serves the run 'me'" in refused["error"]["message"]
    assert ask(server.url, "/turnwise/v1/release", {"client": "me"})[0] == 200
    assert ask(server.url, "/turnwise/v1/attach", other)[1]["context"] == 128
    assert ask(server.url, "/turnwise/v1/info")[1]["sessions"] == 0


def test_a_token_guards_all_but_health():
    with served(token="secret") as server:
        assert ask(server.url, "/health", token="")[0] == 200
        for path in ("/v1/models", "/turnwise/v1/info", "/weight_info"):
            assert ask(server.url, path, token="")[0] == 401
            assert ask(server.url, path, token="wrong")[0] == 401
            assert ask(server.url, path, token="secret")[0] == 200


def test_an_address_that_others_reach_needs_a_token():
    with pytest.raises(SettingError, match="set a token in TURNWISE_ENDPOINT_TOKEN"):
        listen_on("0.0.0.0", 0)


def test_a_fault_of_the_server_is_told_in_its_words(monkeypatch):
    with served() as server:

        async def fails(call):
            raise RuntimeError("no memory is left")

        monkeypatch.setattr(server.host, "generate", fails)
        status, body = ask(
            server.url, "/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        )
    assert status == 500 and "RuntimeError: no memory is left" in str(body)


def test_replies_leave_at_once():
    """Headers and body are two writes: without TCP_NODELAY the second waits 40 ms for the acknowledgement of the first."""
    with listen_on("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted = listener.accept()[0]
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if hasattr(socket, "TCP_QUICKACK"):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            acknowledge_at_once(client)
            assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK)
