"""The two servers as ASGI applications: the endpoint of agents, and, at the end, a generator for trainers.

The endpoint has routes, keys and limits. A session's key is in the path, or it is the API key.

    POST /v1/chat/completions            Authorization: Bearer KEY
    POST /v1/responses                   Authorization: Bearer KEY
    POST /v1/messages                    x-api-key: KEY
    POST /s/KEY/v1/...                   the same with the key in the path
    POST /s/KEY/step                     {"message": ...}: act in the environment of the task
    POST /s/KEY/reward                   {"reward": 1.0}, where the agent lives elsewhere; it ends the episode
    DELETE /s/KEY                        give up
    POST /sessions                       take an episode: {"wait": seconds}
    GET  /v1/models

Knows sessions and formats; neither episodes nor generators.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnwise.errors import EnvironmentFault
from turnwise.rollout.agent_episode import CallRefused, read_outcome
from turnwise.serve.front import Front, key_of, refused
from turnwise.serve.generate_api import GenerateApi
from turnwise.serve.policy_host import PolicyHost
from turnwise.serve.sessions import OpenEpisode, Sessions
from turnwise.serve.wires import CHAT, MESSAGES, RESPONSES, Wire, behind, check, keep_history, read_assistant
from turnwise.workers.tokens import same_token

MAX_BODY = 16 << 20  # bytes of a request
MAX_BRACKETS, MAX_COMMAS = 1 << 17, 1 << 21  # in its text, of which messages have some, too
MAX_PARTS = 1 << 14  # objects and lists in it: each is looked at while other requests wait
TOO_MANY = "the body has more parts than are read: at most {} objects and lists"
PIECE = 1 << 16  # characters that are read at once, a millisecond
SPACE = re.compile(r"[ \t\n\r]*")
FLAT = r'(?:[^\[\]{}"]++|"(?:[^"\\]++|\\.)*+")*+'
SMALL = re.compile(rf"[\[{{]{FLAT}(?:[\[{{]{FLAT}[\]}}]{FLAT})*+[\]}}]", re.DOTALL)  # with one level of others in it
PLAIN = re.compile(r'([^\[\]{}",][^\[\]{}"]*),')  # numbers and words of a list
MAX_WAIT = 60.0  # seconds that a request for an episode may wait
MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "turnwise"}


class Api:
    """The routes over ``sessions``; beyond ``max_waiting`` calls in flight a client is told to come back."""

    def __init__(self, sessions: Sessions, max_waiting: int = 4096) -> None:
        self.sessions, self.max_waiting, self.waiting = sessions, max_waiting, 0

    @contextlib.contextmanager
    def opened(self, request: Request) -> Iterator[OpenEpisode]:
        """The session that a request belongs to. One that was made for this request alone ends with it."""
        count = len(self.sessions)
        opened = self.sessions.find(key_of(request))
        single = len(self.sessions) > count
        try:
            yield opened
        finally:
            if single:
                self.sessions.close(opened.key)
                opened.episode.session.close()

    # ------------------------------------------------------------------- calls
    def calls(self, wire: Wire) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            body, raw = await read_body(request)
            with self.sessions.counting_refusals(key_of(request)):
                call = wire.read_request(body)  # what cannot be read is refused whoever asks
            retried = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
            with self.opened(request) as opened:
                if body.get("previous_response_id") is not None:
                    call = behind(call, body["previous_response_id"], opened.dialogues)
                room = self.waiting < self.max_waiting
                check(room, "{} calls are waiting; try again later", self.waiting, code="busy")
                self.waiting += 1
                try:
                    replies = await opened.answer(call, raw, retried)
                finally:
                    self.waiting -= 1
                number = len(opened.episode.turns)
                if wire is RESPONSES:
                    keep_history(opened.dialogues, number, call, replies)
            if body.get("stream"):  # a reply is sampled whole, so its events are sent in one piece
                return Response("".join(wire.events(replies, number, body)), media_type="text/event-stream")
            return JSONResponse(wire.whole_body(replies, number, body))

        return answer

    def counting(self, wire: Wire, name: str) -> Callable[[Request], Any]:
        async def count(request: Request) -> Response:
            body, _ = await read_body(request)
            call = wire.read_request(body)
            with self.opened(request) as opened:
                return JSONResponse({"object": name, "input_tokens": await opened.episode.count_tokens(call)})

        return count

    # ---------------------------------------------------------------- sessions
    async def take(self, request: Request) -> Response:
        """Open a session: an episode that a run offers, or a new one."""
        wrong = "the token of this endpoint is missing or wrong"
        check(self.sessions.admits(key_of(request)), wrong, code="invalid_api_key")
        body, _ = await read_body(request, empty=True)
        wait = body.get("wait", 0)
        usable = type(wait) in (int, float) and 0 <= wait <= MAX_WAIT
        check(usable, "'wait' is {!r:.60}; write seconds from 0 to {:g}", wait, MAX_WAIT)
        opened = await self.sessions.take(body, wait)
        if opened is None:
            return JSONResponse({"state": "waiting"}, status_code=202)
        path = f"{str(request.base_url).rstrip('/')}/s/{opened.key}"
        where = {"base_url": f"{path}/v1", "anthropic_base_url": path, "api_key": opened.key}
        more = {"step_url": f"{path}/step", "reward_url": f"{path}/reward"}
        return JSONResponse({"state": "open", **where, **more, "task": opened.description()})

    async def step(self, request: Request) -> Response:
        body, _ = await read_body(request)
        with self.opened(request) as opened:
            messages, done = await opened.step(read_assistant(body.get("message")))
            return JSONResponse({"messages": messages, "done": done})

    async def reward(self, request: Request) -> Response:
        body, _ = await read_body(request)
        with self.opened(request) as opened:
            opened.post(read_outcome(body))
            return JSONResponse({"accepted": True})

    async def abandon(self, request: Request) -> Response:
        with self.opened(request) as opened:
            opened.abandon()
            return JSONResponse({"accepted": True})

    async def models(self, request: Request) -> Response:
        name = request.path_params.get("name")
        return JSONResponse({**MODEL, "id": name} if name else {"object": "list", "data": [MODEL], "has_more": False})


def make_app(sessions: Sessions, max_waiting: int = 4096) -> Starlette:
    api = Api(sessions, max_waiting)
    routes = [
        Route(f"{prefix}{path}", function, methods=[method])
        for prefix in ("", "/s/{key}")
        for path, function, method in (
            ("/v1/chat/completions", api.calls(CHAT), "POST"),
            ("/v1/responses", api.calls(RESPONSES), "POST"),
            ("/v1/responses/input_tokens", api.counting(RESPONSES, "response.input_tokens"), "POST"),
            # a client of Anthropic adds /v1 itself, also to the base_url of the others, which ends in it
            *((f"{twice}/v1/messages", api.calls(MESSAGES), "POST") for twice in ("", "/v1")),
            *(
                (f"{twice}/v1/messages/count_tokens", api.counting(MESSAGES, "message_tokens"), "POST")
                for twice in ("", "/v1")
            ),
            ("/v1/models", api.models, "GET"),
            ("/v1/models/{name}", api.models, "GET"),
            ("/step", api.step, "POST"),
            ("/reward", api.reward, "POST"),
        )
    ]
    routes += [Route("/s/{key}", api.abandon, methods=["DELETE"]), Route("/sessions", api.take, methods=["POST"])]
    handlers: Mapping[Any, Any] = {CallRefused: refused, EnvironmentFault: refused, ClientDisconnect: _gone}
    return Starlette(routes=routes, exception_handlers={**handlers, 404: refused, 405: refused})


async def read_body(request: Request, empty: bool = False, parts: int = MAX_PARTS) -> tuple[dict[str, Any], bytes]:
    """The JSON object of a request, of bounded size, and its bytes. ``empty``: a missing body is an empty object. ``parts``: at
    most so many objects and lists."""
    length = request.headers.get("content-length", "0")
    fits = length.isdigit() and int(length) <= MAX_BODY
    check(fits, "the body has {} bytes; at most {} are read", length, MAX_BODY, code="body_too_large")
    received = bytearray()
    async for part in request.stream():
        received += part
        # the header may be missing, or not the truth
        check(len(received) <= MAX_BODY, "the body has more than {} bytes", MAX_BODY, code="body_too_large")
    if empty and not received:
        return {}, b""
    # counted before it is read: that takes milliseconds
    brackets = received.count(b"[") + received.count(b"{")
    fits = brackets <= MAX_BRACKETS and received.count(b",") <= MAX_COMMAS
    check(fits, TOO_MANY, parts, code="body_too_large")
    try:
        if len(received) <= PIECE and brackets <= parts:
            value = json.loads(received)
        else:  # other requests are answered between two pieces
            value = await asyncio.to_thread(read_json, received.decode(), parts)
    except (ValueError, RecursionError) as fault:
        raise CallRefused("invalid_json", f"the body is not JSON: {str(fault)[:100]}") from fault
    check(isinstance(value, dict), "the body is {!r:.60}; write a JSON object", value)
    return value, bytes(received)


def read_json(text: str, parts: int) -> Any:
    """What ``json.loads`` reads, by many short calls of it: every other thread of the process waits for each. Refuses more than
    so many objects and lists, or too many keys in one."""
    decoder: Any = json.JSONDecoder()
    left, scan = parts, decoder.scan_once

    def skip(at: int, mark: str = "") -> int:
        if not text.startswith(mark, at):
            raise ValueError(f"no {mark} at character {at}")
        return at + len(mark) + len(SPACE.match(text, at + len(mark))[0])  # type: ignore[index]

    def count(more: int) -> None:
        nonlocal left
        left -= more
        check(left >= 0, TOO_MANY, parts, code="body_too_large")

    def read(at: int) -> tuple[Any, int]:
        end = {"[": "]", "{": "}"}.get(text[at : at + 1])
        if end is None or SMALL.match(text, at, at + PIECE):
            value, behind = scan(text, at)
            if end is not None:
                nested = text.count("[", at, behind) + text.count("{", at, behind) > 1
                count(containers(value) if nested else 1)
            return value, skip(behind)
        count(1)
        items, named = list[Any](), dict[str, Any]()
        at = skip(at + 1)
        while not text.startswith(end, at):
            if end == "}":
                key, behind = scan(text, at)
                named[key], at = read(skip(skip(behind), ":" if isinstance(key, str) else "a name in quotes"))
                check(len(named) <= MAX_BRACKETS, TOO_MANY, parts, code="body_too_large")
            else:
                if run := PLAIN.match(text, at, at + PIECE):
                    items += json.loads(f"[{run[1]}]")
                    at = skip(run.end())
                item, at = read(at)
                items.append(item)
            if not text.startswith(end, at):
                at = skip(at, ",")
                if text.startswith(end, at):
                    raise ValueError(f"a comma before {end} at character {at}")
        return named if end == "}" else items, skip(at, end)

    try:
        value, at = read(skip(0))
    except StopIteration as fault:
        raise ValueError(f"no value at character {fault.value}") from None
    if at != len(text):
        raise ValueError(f"more behind the value, from character {at} on")
    return value


def containers(value: Any) -> int:
    """How many objects and lists a value consists of."""
    parts = value.values() if type(value) is dict else value if type(value) is list else None
    return 0 if parts is None else 1 + sum(map(containers, parts))


async def _gone(request: Request, fault: Exception) -> Response:
    return Response(status_code=499)


# ------------------------------------------------------------------- generator


def make_generate_app(host: PolicyHost) -> Starlette:
    """A generator server over ``host``."""
    api = GenerateApi(host)

    async def answer(request: Request) -> Response:
        # of a GET, too: what comes behind the body says that the client is gone
        body, _ = await read_body(request, empty=True, parts=MAX_BRACKETS)  # a run opens many dialogues at once
        reply = asyncio.ensure_future(api.answer(request.method, request.url.path, {**body, **request.query_params}))
        gone = asyncio.ensure_future(request.receive())  # the next message after the body: the client hung up
        try:
            await asyncio.wait([reply, gone], return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise ClientDisconnect
            status, value = reply.result()
            return JSONResponse(value, status_code=status)
        finally:
            for task in (reply, gone):
                task.cancel()

    routes = [Route("/{path:path}", answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])]
    handlers: Mapping[Any, Any] = {CallRefused: refused, ClientDisconnect: _gone}
    return Starlette(routes=routes, exception_handlers=handlers)


# ------------------------------------------------------------------- fronts


def session_front(sessions: Sessions) -> Front:
    """The endpoint over ``sessions``. A key that was given with an episode opens that one; the token, what the server offers."""
    return Front(make_app(sessions), lambda request: sessions.knows(key_of(request)))


def generate_front(host: PolicyHost, token: str) -> Front:
    """A generator server over ``host``. All but ``/health``, which schedulers ask, needs the token."""

    def admits(request: Request) -> bool:
        return request.url.path == "/health" or same_token(key_of(request), token)

    return Front(make_generate_app(host), admits)
