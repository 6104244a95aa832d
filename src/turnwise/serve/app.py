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
import hmac
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnwise.errors import EnvironmentFault
from turnwise.rollout.agent_episode import CallRefused, CallReply, CallRequest, read_outcome
from turnwise.serve import anthropic_wire, openai_wire, responses_wire
from turnwise.serve.generate_api import STATUS, GenerateApi
from turnwise.serve.policy_host import PolicyHost
from turnwise.serve.sessions import OpenEpisode, Sessions

MAX_BODY = 16 << 20  # bytes of a request
MAX_WAIT = 60.0  # seconds that a request for an episode may wait
MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "turnwise"}


class Wire(Protocol):
    """A format of calls: pure functions."""

    def read_request(self, body: Mapping[str, Any]) -> CallRequest: ...

    def whole_body(self, replies: Sequence[CallReply], number: int, body: Mapping[str, Any]) -> dict[str, Any]: ...

    def events(self, replies: Sequence[CallReply], number: int, body: Mapping[str, Any]) -> Iterator[str]: ...

    def error_body(self, code: str, message: str) -> dict[str, Any]: ...


class Api:
    """The routes over ``sessions``; beyond ``max_waiting`` calls in flight a client is told to come back."""

    def __init__(self, sessions: Sessions, max_waiting: int = 4096) -> None:
        self.sessions, self.max_waiting, self.waiting = sessions, max_waiting, 0

    # ------------------------------------------------------------------- calls
    def calls(self, wire: Wire) -> Callable[[Request], Any]:
        """The route that answers calls in one format."""

        async def answer(request: Request) -> Response:
            body, raw = await read_body(request)
            call = wire.read_request(body)  # what cannot be read is refused whoever asks
            opened, single = self._opened(request)
            try:
                if body.get("previous_response_id") is not None:
                    call = responses_wire.behind(call, body["previous_response_id"], opened.dialogues)
                replies = await self._answered(opened, call, raw, request)
                number = len(opened.episode.turns)
                if wire is responses_wire:
                    responses_wire.keep_history(opened.dialogues, number, call, replies)
            finally:
                if single:
                    self.sessions.close(opened.key)
                    opened.episode.session.close()
            if body.get("stream"):  # a reply is sampled whole, so its events are sent in one piece
                return Response("".join(wire.events(replies, number, body)), media_type="text/event-stream")
            return JSONResponse(wire.whole_body(replies, number, body))

        return answer

    async def _answered(self, opened: OpenEpisode, call: CallRequest, raw: bytes, request: Request) -> list[CallReply]:
        if self.waiting >= self.max_waiting:
            raise CallRefused("busy", f"{self.waiting} calls are waiting; try again later")
        self.waiting += 1
        try:
            retried = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
            return await opened.answer(call, raw, retried)
        finally:
            self.waiting -= 1

    def counting(self, wire: Wire, name: str) -> Callable[[Request], Any]:
        """The route that counts the tokens of a call and samples nothing."""

        async def count(request: Request) -> Response:
            body, _ = await read_body(request)
            call = wire.read_request(body)
            opened, single = self._opened(request)
            try:
                tokens = opened.episode.count_tokens(call)
            finally:
                if single:
                    self.sessions.close(opened.key)
            return JSONResponse({"object": name, "input_tokens": tokens})

        return count

    # ---------------------------------------------------------------- sessions
    async def take(self, request: Request) -> Response:
        """Open a session: an episode that a run offers, or a new one."""
        if not self.sessions.admits(_key(request)):
            raise CallRefused("invalid_api_key", "the token of this endpoint is missing or wrong")
        body, _ = await read_body(request, empty=True)
        wait = body.get("wait", 0)
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait <= MAX_WAIT:
            raise CallRefused("invalid_request", f"'wait' is {wait!r:.60}; write seconds from 0 to {MAX_WAIT:g}")
        opened = await self.sessions.take(body, wait)
        if opened is None:
            return JSONResponse({"state": "waiting"}, status_code=202)
        base = str(request.base_url).rstrip("/")
        path = f"{base}/s/{opened.key}"
        where = {"base_url": f"{path}/v1", "anthropic_base_url": path, "api_key": opened.key}
        more = {"step_url": f"{path}/step", "reward_url": f"{path}/reward"}
        return JSONResponse({"state": "open", **where, **more, "task": opened.description()})

    async def step(self, request: Request) -> Response:
        body, _ = await read_body(request)
        opened, _single = self._opened(request)
        messages, done = await opened.step(openai_wire.read_assistant(body.get("message")))
        return JSONResponse({"messages": messages, "done": done})

    async def reward(self, request: Request) -> Response:
        body, _ = await read_body(request)
        opened, _single = self._opened(request)
        opened.post(read_outcome(body))
        return JSONResponse({"accepted": True})

    async def abandon(self, request: Request) -> Response:
        opened, _single = self._opened(request)
        opened.abandon()
        return JSONResponse({"accepted": True})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [MODEL], "has_more": False})

    async def model(self, request: Request) -> Response:
        return JSONResponse({**MODEL, "id": request.path_params["name"]})

    def _opened(self, request: Request) -> tuple[OpenEpisode, bool]:
        """The session that a request belongs to, and whether it was made for this request alone."""
        count = len(self.sessions)
        opened = self.sessions.find(_key(request))
        return opened, len(self.sessions) > count


def make_app(sessions: Sessions, max_waiting: int = 4096) -> Starlette:
    """The application over ``sessions``."""
    api = Api(sessions, max_waiting)
    routes = [
        Route(f"{prefix}{path}", function, methods=[method])
        for prefix in ("", "/s/{key}")
        for path, function, method in (
            ("/v1/chat/completions", api.calls(openai_wire), "POST"),
            ("/v1/responses", api.calls(responses_wire), "POST"),
            ("/v1/responses/input_tokens", api.counting(responses_wire, "response.input_tokens"), "POST"),
            ("/v1/messages", api.calls(anthropic_wire), "POST"),
            ("/v1/messages/count_tokens", api.counting(anthropic_wire, "message_tokens"), "POST"),
            ("/v1/models", api.models, "GET"),
            ("/v1/models/{name}", api.model, "GET"),
            ("/step", api.step, "POST"),
            ("/reward", api.reward, "POST"),
        )
    ]
    routes += [Route("/s/{key}", api.abandon, methods=["DELETE"]), Route("/sessions", api.take, methods=["POST"])]
    handlers: Mapping[Any, Any] = {CallRefused: _refused, EnvironmentFault: _refused, ClientDisconnect: _gone}
    return Starlette(routes=routes, exception_handlers={**handlers, 404: _unknown_path, 405: _unknown_path})


def _key(request: Request) -> str:
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    return str(request.path_params.get("key") or request.headers.get("x-api-key") or bearer)


async def read_body(request: Request, empty: bool = False) -> tuple[dict[str, Any], bytes]:
    """The JSON object of a request, of bounded size, and its bytes. ``empty``: a missing body is an empty object."""
    length = request.headers.get("content-length", "0")
    if not length.isdigit() or int(length) > MAX_BODY:
        raise CallRefused("body_too_large", f"the body has {length} bytes; at most {MAX_BODY} are read")
    received = bytearray()
    async for part in request.stream():
        received += part
        if len(received) > MAX_BODY:
            raise CallRefused("body_too_large", f"the body has more than {MAX_BODY} bytes")
    if empty and not received:
        return {}, b""
    try:
        value = json.loads(received)
    except (ValueError, RecursionError) as fault:
        raise CallRefused("invalid_json", f"the body is not JSON: {str(fault)[:100]}") from fault
    if not isinstance(value, dict):
        raise CallRefused("invalid_request", f"the body is {str(value)[:60]!r}; write a JSON object")
    return value, bytes(received)


def _wire_of(request: Request) -> Any:
    return anthropic_wire if "/v1/messages" in request.url.path else openai_wire


async def _refused(request: Request, fault: Exception) -> Response:
    code = getattr(fault, "code", "invalid_request")
    return JSONResponse(_wire_of(request).error_body(code, str(fault)), status_code=openai_wire.status_of(code))


async def _unknown_path(request: Request, fault: Any) -> Response:
    known = "known: /v1/chat/completions, /v1/responses, /v1/messages, /v1/models, /sessions, /step, /reward"
    body = _wire_of(request).error_body("not_found", f"no {request.method} {request.url.path[:80]}; {known}")
    return JSONResponse(body, status_code=fault.status_code)


async def _gone(request: Request, fault: Exception) -> Response:
    return Response(status_code=499)


# ------------------------------------------------------------------- generator


def make_generate_app(host: PolicyHost, token: str = "") -> Starlette:
    """A generator server over ``host``. All but ``/health`` needs the token, if there is one."""
    api = GenerateApi(host)

    async def answer(request: Request) -> Response:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        admitted = not token or hmac.compare_digest(bearer.encode(), token.encode())
        if not admitted and request.url.path != "/health":
            raise CallRefused("invalid_api_key", "the token of this server is missing or wrong")
        body, _ = await read_body(
            request, empty=True
        )  # of a GET, too: what comes behind it says that the client is gone
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

    async def refused(request: Request, fault: Any) -> Response:
        return JSONResponse(openai_wire.error_body(fault.code, str(fault)), status_code=STATUS.get(fault.code, 400))

    routes = [Route("/{path:path}", answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])]
    handlers: Mapping[Any, Any] = {CallRefused: refused, ClientDisconnect: _gone}
    return Starlette(routes=routes, exception_handlers=handlers)
