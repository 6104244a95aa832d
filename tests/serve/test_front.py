"""The front of every server: a request that a page or a stranger can send changes nothing, and a half-sent one does not stay."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import stat
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from support.agents import SAMPLING, HashSession
from support.endpoint import LIMITS, call, new_episode
from support.episodes import RENDERER, TASK
from support.generator_servers import SAMPLING as SHORT
from support.generator_servers import connected, served, weights_of
from support.generators import make

from turnwise.engines.remote import replica as replica_room
from turnwise.engines.remote.http import ServerAddress
from turnwise.errors import GeneratorLost
from turnwise.rollout.agent_episode import AgentEpisode, CallRefused, CallRequest
from turnwise.rollout.lineage import Lineage
from turnwise.serve import app
from turnwise.serve import front as front_room
from turnwise.serve.app import MAX_BRACKETS, read_body, session_front
from turnwise.serve.front import Front, names_of
from turnwise.serve.server import listen_on, serving
from turnwise.serve.sessions import Sessions
from turnwise.workers.tokens import find_token, new_token, remove_token, same_token, token_file, write_token

pytestmark = pytest.mark.integration
JSON, HERE, EVIL = "Content-Type: application/json\r\n", "Host: {host}\r\n", "http://evil.example"
# what a page can send without the server's consent, what it could after a name was pointed to this machine, and a process without
# the token. Each: status, method and path, headers ({bearer} is the right token), body
ATTACKS = {
    "no token": (401, "POST /pause", f"{HERE}{JSON}", "{}"),
    "no token, empty body": (401, "POST /pause", HERE, ""),
    "a wrong token": (401, "POST /pause", f"{HERE}Authorization: Bearer x\r\n", ""),
    "a token in the address": (401, "POST /pause?token={token}", HERE, ""),
    "a token in a cookie": (401, "POST /pause", f"{HERE}Cookie: token={{token}}\r\n", ""),
    "a token as a password": (401, "POST /pause", f"{HERE}Authorization: Basic {{token}}\r\n", ""),
    "reading": (401, "GET /turnwise/v1/info", HERE, ""),
    "text of a page": (403, "POST /pause", f"{HERE}Origin: {EVIL}\r\nContent-Type: text/plain\r\n{{bearer}}", "{}"),
    "a page of a file": (403, "POST /pause", f"{HERE}Origin: null\r\n{JSON}{{bearer}}", "{}"),
    "a page of another port": (403, "POST /pause", f"{HERE}Origin: http://127.0.0.1:1\r\n{JSON}{{bearer}}", "{}"),
    "an image": (403, "GET /is_paused", f"{HERE}Sec-Fetch-Site: cross-site\r\nSec-Fetch-Dest: image\r\n{{bearer}}", ""),
    "a frame": (403, "GET /is_paused", f"{HERE}Sec-Fetch-Site: same-site\r\nSec-Fetch-Dest: iframe\r\n{{bearer}}", ""),
    "a link that posts": (403, "POST /pause", f"{HERE}Sec-Fetch-Site: cross-site\r\nSec-Fetch-Dest: document\r\n{{bearer}}", ""),
    "text": (415, "POST /pause", f"{HERE}Content-Type: text/plain\r\n{{bearer}}", "{}"),
    "a form": (415, "POST /pause", f"{HERE}Content-Type: application/x-www-form-urlencoded\r\n{{bearer}}", "mode=abort"),
    "a file": (415, "POST /pause", f"{HERE}Content-Type: multipart/form-data; b=application/json\r\n{{bearer}}", "--"),
    "no type": (415, "POST /pause", f"{HERE}{{bearer}}", "{}"),
    "a longer type": (415, "POST /pause", f"{HERE}Content-Type: application/jsonx\r\n{{bearer}}", "{}"),
    "a foreign name": (421, "POST /pause", f"Host: evil.example\r\n{JSON}{{bearer}}", "{}"),
    "a foreign name, its page": (421, "POST /pause", f"Host: evil.example\r\nOrigin: {EVIL}\r\n{JSON}{{bearer}}", "{}"),
    "a name that begins as ours": (421, "POST /pause", f"Host: 127.0.0.1.evil.example\r\n{JSON}{{bearer}}", "{}"),
    "a name behind a password": (421, "POST /pause", f"Host: 127.0.0.1@evil.example\r\n{JSON}{{bearer}}", "{}"),
    "another address": (421, "POST /pause", f"Host: 10.1.2.3\r\n{JSON}{{bearer}}", "{}"),
    "an empty name": (421, "POST /pause", f"Host: \r\n{JSON}{{bearer}}", "{}"),
    "two names": (400, "POST /pause", f"{HERE}Host: evil.example\r\n{JSON}{{bearer}}", "{}"),
    "no name": (400, "POST /pause", f"{JSON}{{bearer}}", "{}"),
    "a preflight": (401, "OPTIONS /pause", f"{HERE}Access-Control-Request-Method: POST\r\n", ""),
}  # fmt: skip


def exchange(url, request, headers, body="", token=""):
    """Status and whole text of the reply to a request that is sent as it is written."""
    host = url.removeprefix("http://")
    text = f"{request} HTTP/1.1\r\n{headers}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    for name, value in (("host", host), ("token", token), ("bearer", f"Authorization: Bearer {token}\r\n")):
        text = text.replace(f"{{{name}}}", value)
    address, port = host.split(":")
    with socket.create_connection((address, int(port)), 30) as connection:
        connection.sendall(text.encode())
        reply = b"".join(iter(lambda: connection.recv(65_536), b""))
    return int(reply.split()[1]), reply.decode()


@pytest.fixture(scope="module")
def server():
    with served(make(seed=1)) as running:
        yield running


@pytest.mark.parametrize("name", ATTACKS)
def test_a_request_of_a_page_or_a_stranger_changes_nothing(server, name):
    status, request, headers, body = ATTACKS[name]
    answered, reply = exchange(server.url, request, headers, body, find_token(server.url))
    assert answered == status and not server.host.paused
    assert "access-control-allow" not in reply.lower()
    assert find_token(server.url) not in reply


def test_the_same_request_with_the_token_is_answered(server):
    for host in ("{host}", "LOCALHOST.:7", "[::1]\r\nSec-Fetch-Site: none"):
        headers = f"Host: {host}\r\n{JSON}"
        for path, paused in (("pause", True), ("resume", False)):
            status, _ = exchange(server.url, f"POST /{path}", headers + "{bearer}", "{}", find_token(server.url))
            assert status == 200 and server.host.paused is paused


def test_a_refusal_comes_before_the_body_and_closes_the_connection(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(f"POST /pause HTTP/1.1\r\nHost: {host}\r\n{JSON}Content-Length: 99999\r\n\r\n".encode())
        reply = b"".join(iter(lambda: connection.recv(65_536), b""))  # ends, though the body never came
    assert b" 401 " in reply and b"TOKEN" in reply


def test_websockets_are_not_spoken(server):
    upgrade = "Host: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    status, _ = exchange(server.url, "GET /is_paused", f"{upgrade}Sec-WebSocket-Key: eA==\r\n")
    assert status == 401


def test_a_forged_host_opens_no_session_and_is_not_repeated():
    async def run():
        sessions = Sessions("secret")
        sessions.open(new_episode(), awaits_reward=True, offered=True)
        async with serving(sessions) as endpoint:
            for host in ("evil.example", "evil.example:80", "127.0.0.1@evil.example", "6.6.6.6"):
                headers = f"Host: {host}\r\n{JSON}{{bearer}}"
                status, reply = await asyncio.to_thread(exchange, endpoint.url, "POST /sessions", headers, "{}", "secret")
                assert status == 421 and "base_url" not in reply
            headers = f"Host: {{host}}\r\n{JSON}{{bearer}}"
            status, _ = await asyncio.to_thread(exchange, endpoint.url, "POST /sessions", headers, "{}", "wrong")
            assert status == 401
            _, reply = await asyncio.to_thread(exchange, endpoint.url, "POST /sessions", headers, "{}", "secret")
            assert f'"base_url":"{endpoint.url}/s/' in reply

    asyncio.run(run())


def test_an_endpoint_without_a_chosen_token_has_one_of_its_own():
    async def run():
        sessions = Sessions()
        opened, front = sessions.open(new_episode(), awaits_reward=True, offered=True), session_front(sessions)
        front.names |= {"test"}
        json_body = (b"content-type", b"application/json")
        statuses = []
        for key in ("", "any", opened.key, sessions.token):
            head = [json_body, (b"authorization", f"Bearer {key}".encode())]
            statuses += [(await call(front, "POST", "/sessions", b"{}", head))[0]]
            statuses += [(await call(front, "GET", "/v1/models", b"", head[1:]))[0]]
        return statuses

    # a session's key opens that session, and no other
    assert asyncio.run(run()) == [401, 401, 401, 401, 401, 200, 200, 200]


def test_names_of_a_server(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Node7")
    with listen_on("127.0.0.1", 0) as near, listen_on("0.0.0.0", 0, "secret") as far:
        assert names_of(near, ["", " Proxy.example "]) == {"localhost", "127.0.0.1", "::1", "proxy.example"}
        assert "node7" in names_of(far) and "node7" not in names_of(near)

    async def run():
        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        return await call(Front(app, lambda request: True), "GET", "/")

    assert asyncio.run(run())[0] == 200, "the address that a client connected to is a name"


def test_the_url_of_a_session_has_the_port_of_the_server(monkeypatch):
    monkeypatch.setenv("TURNWISE_ENDPOINT_NAMES", "proxy.example, other.example")

    async def run():
        async with serving(Sessions(opener=lambda sessions, wanted: sessions.open(new_episode()))) as endpoint:
            port, token = endpoint.url.rpartition(":")[2], endpoint.sessions.token
            urls = []
            for host in ("127.0.0.1:9999", "localhost", "[::1]:1", "Proxy.example:9999", "other.example"):
                head = f"Host: {host}\r\n{{bearer}}"
                _, reply = await asyncio.to_thread(exchange, endpoint.url, "POST /sessions", head, "", token)
                urls.append(json.loads(reply.partition("\r\n\r\n")[2])["base_url"].partition("/s/")[0])
            return urls, port

    urls, port = asyncio.run(run())
    own = [f"http://127.0.0.1:{port}", f"http://localhost:{port}", f"http://[::1]:{port}"]
    assert [url.lower() for url in urls] == [*own, "http://proxy.example:9999", "http://other.example"]


# ------------------------------------------------------------------- requests that do not arrive


def closed(connections):
    """Wait until the server has closed each connection; more than it sends at most is an error."""
    return all(any(not connection.recv(4000) for _ in range(10)) for connection in connections)


def test_requests_that_are_sent_in_part_do_not_stay(monkeypatch):
    monkeypatch.setattr(front_room, "ARRIVAL_SECONDS", 0.2)
    monkeypatch.setattr(front_room, "GRACE_SECONDS", 0.1)
    with served(make(seed=1)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        bearer = f"Authorization: Bearer {find_token(server.url)}\r\n"
        whole = f"GET /is_paused HTTP/1.1\r\nHost: {host}\r\n{bearer}\r\n".encode()
        head = f"POST /pause HTTP/1.1\r\nHost: {host}\r\n{JSON}{bearer}Content-Length: 9\r\n\r\n{{".encode()
        parts = [b"", b"G", b"GET / HTTP/1.1\r\nHost: ", head]
        waiting = [socket.create_connection((host, int(port)), 30) for _ in range(5 * len(parts))]
        for n, connection in enumerate(waiting):
            connection.sendall(parts[n % len(parts)])
        again = socket.create_connection((host, int(port)), 30)
        again.sendall(whole)
        assert b"200 OK" in again.recv(4000), "the others hold up nobody"
        again.sendall(b"GET")  # a second request on the same connection, in part
        # and several that came in one piece with the first, which is answered
        behind = [socket.create_connection((host, int(port)), 30) for _ in range(2)]
        for connection, part in zip(behind, (parts[2], head)):
            connection.sendall(whole + part)
            assert b"200 OK" in connection.recv(4000)
        assert closed([*waiting, again, *behind]) and not server.host.paused
        for connection in (*waiting, again, *behind):
            connection.close()


def test_an_idle_connection_stays_for_the_next_request(monkeypatch):
    monkeypatch.setattr(front_room, "ARRIVAL_SECONDS", 0.05)
    monkeypatch.setattr(front_room, "GRACE_SECONDS", 0.05)
    with served(make(seed=1)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        request = f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        with socket.create_connection((host, int(port)), 30) as connection:
            replies = b""
            for sent, count in ((request * 2, 2), (request, 3)):  # two arrive in one piece, and are answered one by one
                connection.sendall(sent)
                while replies.count(b"200 OK") < count:
                    part = connection.recv(4000)
                    assert part, "it was closed"
                    replies += part
                threading.Event().wait(0.5)


def test_more_requests_in_part_than_may_be_close_the_oldest(monkeypatch):
    monkeypatch.setattr(front_room, "MAX_ARRIVING", 3)
    monkeypatch.setattr(front_room, "GRACE_SECONDS", -1.0)
    with served(make(seed=1)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        waiting = [socket.create_connection((host, int(port)), 30) for _ in range(8)]
        assert closed(waiting[:5])
        request = f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        waiting[-1].sendall(request)
        assert b"200 OK" in waiting[-1].recv(4000)
        behind = []
        for _ in range(8):
            behind.append(connection := socket.create_connection((host, int(port)), 30))
            connection.sendall(request + b"POST /pause HTTP/1.1\r\nX: y")
            assert b"200 OK" in connection.recv(4000)
        assert closed(behind[:5]), "a request in part counts behind a whole one, too"
        for connection in (*waiting, *behind):
            connection.close()


# ------------------------------------------------------------------- long texts


MANY = {  # each far below the limit of bytes
    "empty lists": '{"token_ids":[' + "[]," * 300_000 + "1]}",
    "ids": '{"token_ids":[' + "1," * 2_100_000 + "1]}",
    "tools": '{"tools":[' + '{"function":{"parameters":{}}},' * 6_000 + "1]}",
    "messages": '{"messages":[' + '{"role":"user","content":"a"},' * 17_000 + "1]}",
}


def body_of(text, **options):
    async def receive():
        return {"type": "http.request", "body": text.encode(), "more_body": False}

    return asyncio.run(read_body(Request({"type": "http", "headers": []}, receive), **options))[0]


@pytest.mark.parametrize("name", MANY)
def test_a_body_of_many_parts_is_refused_before_it_is_looked_at(name):
    with pytest.raises(CallRefused, match="more parts than are read") as refused:
        body_of(MANY[name])
    assert refused.value.code == "body_too_large"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    ),
    st.integers(0, 10_000),
    st.sampled_from('[]{},:"1 '),
    st.sampled_from([4, 30, 1 << 16]),
)
def test_a_body_is_read_in_pieces_as_it_is_at_once(value, at, mark, piece):
    text = json.dumps(value, indent=at % 2 or None)
    damaged = text[: at % len(text)] + mark + text[at % len(text) + 1 :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "PIECE", piece)
        assert app.read_json(text, 1 << 20) == value
        try:
            expected = json.loads(damaged)
        except ValueError:
            with pytest.raises((ValueError, CallRefused)):
                app.read_json(damaged, 1 << 20)
        else:
            assert app.read_json(damaged, 1 << 20) == expected


WIDE = {  # each as large as the limits allow
    "dialogues": '{"changes":[' + ",".join('{"op":"open","x":[1]}' for _ in range(65_000)) + "]}",
    "ids": '{"token_ids":[' + "12345," * 2_000_000 + "1]}",
    "lists": '{"a":[' + "[]," * 130_000 + "1]}",
    "keys": "{" + ",".join(f'"{n}":1' for n in range(130_000)) + "}",
}


@pytest.mark.parametrize("name", WIDE)
def test_health_is_answered_while_a_body_of_many_parts_is_read(name):
    """Processor time of this process between two turns of the event loop, which a busy machine does not change."""

    async def longest() -> float:
        async def receive():
            return {"type": "http.request", "body": WIDE[name].encode(), "more_body": False}

        request = Request({"type": "http", "headers": []}, receive)
        reading = asyncio.ensure_future(read_body(request, parts=MAX_BRACKETS))
        gaps, last = [], time.process_time()
        while not reading.done():
            await asyncio.sleep(0.001)
            gaps.append(time.process_time() - last)
            last = time.process_time()
        assert await reading
        return max(gaps)

    gc.collect()
    gc.freeze()  # a pass over what other tests made is not the server's
    try:
        assert asyncio.run(longest()) < 0.05
    finally:
        gc.unfreeze()


def test_brackets_in_a_text_are_no_parts_and_a_run_may_open_many_dialogues():
    assert len(body_of(json.dumps({"content": "[{" * 20_000}))["content"]) == 40_000
    changes = [["open", f"s{n}", n] for n in range(65_536)]
    assert len(body_of(json.dumps({"changes": changes}), parts=MAX_BRACKETS)["changes"]) == 65_536


def test_messages_that_cannot_fit_are_refused_before_they_are_encoded(monkeypatch):
    encoded = []
    monkeypatch.setattr(Lineage, "place", lambda *given: encoded.append(given))
    episode = new_episode()
    request = CallRequest([{"role": "user", "content": "a" * (LIMITS.context * RENDERER.longest_token + 1)}])
    for ask in (episode.call, episode.count_tokens):
        with pytest.raises(CallRefused, match="no room in the context window of 4000 tokens") as refused:
            asyncio.run(ask(request))
        assert refused.value.code == "context_length_exceeded" and not encoded
    assert episode.refusals == {"context_length_exceeded": 1}, "counting tokens is no call of the policy"


def test_long_messages_are_encoded_while_other_episodes_go_on(monkeypatch):
    place, where = Lineage.place, []

    def noted(*given):
        where.append(threading.current_thread() is threading.main_thread())
        return place(*given)

    monkeypatch.setattr(Lineage, "place", noted)
    for size in (10, 20_000):
        episode = AgentEpisode("g.0", TASK, HashSession(), RENDERER, SAMPLING, LIMITS)
        with pytest.raises(CallRefused) if size > 10 else memoryview(b""):
            asyncio.run(episode.call(CallRequest([{"role": "user", "content": "1+" * (size // 2)}])))
    assert where == [True, False]


@pytest.mark.parametrize("text", ["1 + 2 = 3 <|c|> é\n", "ab", " "])
def test_a_long_text_has_the_ids_of_the_tokenizer(text):
    whole = text * (40_000 // len(text))
    assert RENDERER.encode(whole) == RENDERER.tokenizer.encode(whole, add_special_tokens=False)


# ------------------------------------------------------------------- tokens and runs


def test_a_token_is_found_by_processes_of_its_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    token = new_token()
    file = write_token(8800, token)
    assert file == token_file(8800) and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700 and [f.name for f in file.parent.iterdir()] == [file.name]
    for url in ("http://127.0.0.1:8800", "http://localhost:8800/v1", "http://[::1]:8800"):
        assert find_token(url) == token and ServerAddress(url).token == token
    for url in ("http://127.0.0.1:8801", "http://other:8800", "http://10.0.0.1:8800", "nonsense", "http://localhost:x"):
        assert find_token(url) == ""
    assert ServerAddress("http://localhost:8800", "mine").token == "mine"
    assert token not in repr(ServerAddress("http://localhost:8800"))
    remove_token(8800, "that of an earlier server")
    assert find_token("http://localhost:8800") == token
    remove_token(8800, token)
    assert find_token("http://localhost:8800") == "" and not same_token("", "")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way")
    assert write_token(1, token) is None


def test_a_run_names_a_pause_that_it_did_not_ask_for_and_gives_the_server_up(caplog, monkeypatch):
    monkeypatch.setattr(replica_room, "HEALTH_SECONDS", 0.1)

    async def play():
        model = make(seed=1)
        with served(model) as server:
            generator = await connected([server.url], model, seconds=2.0)
            await generator.publish(weights_of(model), 1)  # its own pauses are no news
            assert not caplog.records and generator.alive()
            status, _ = await asyncio.to_thread(
                exchange, server.url, "POST /pause", "Host: {host}\r\n{bearer}", "", find_token(server.url)
            )
            assert status == 200
            with pytest.raises(GeneratorLost, match=r"paused, and not by this run, for \d+ s; let it go on: POST .*/resume"):
                await generator.open(1).generate([1, 2, 3], SHORT)

    asyncio.run(play())
    assert "was paused, and not by this run; it is given up after 2 s (--generator-seconds)" in caplog.text
