"""Routes of a generator server: vLLM's names for token ids in and out, pauses and weights, and two of our own.

    POST /inference/v1/generate          token ids in, token ids with log-probabilities and weight versions out
    POST /abort_requests                 end requests with the tokens they have
    POST /pause?mode=abort, /resume      GET /is_paused
    POST /init_weight_transfer_engine, /start_weight_update, /update_weights, /finish_weight_update
    GET  /weight_info, /health, /v1/models, /get_world_size
    GET  /turnwise/v1/info               model, vocabulary, limits
    POST /turnwise/v1/attach, /turnwise/v1/sessions     a trainer takes the server, opens and closes its dialogues
    POST /turnwise/v1/alive, /turnwise/v1/release       it is still there, though it asks for nothing; it leaves

Knows the host of a generator; no engine.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnwise.core.records import Completion
from turnwise.rollout.agent_episode import CallRefused
from turnwise.serve.app import read_body
from turnwise.serve.generate_wire import GenerateCall, read_call, reply_body
from turnwise.serve.openai_wire import error_body
from turnwise.serve.policy_host import HostLimits, PolicyHost

STATUS = {
    "invalid_api_key": 401, "not_found": 404, "body_too_large": 413, "busy": 429, "not_owner": 409, "out_of_order": 409,
    "not_paused": 409, "no_update": 409, "no_base": 409, "in_use": 409,
}  # fmt: skip
MAX_THREADS = 1024
Handler = Callable[[Request], Awaitable[Response]]


class GenerateApi:
    """The routes over one host."""

    def __init__(self, host: PolicyHost, token: str = "") -> None:
        self.host, self.token, self.asked = host, token, 0

    # ---------------------------------------------------------------- requests
    async def generate(self, request: Request) -> Response:
        body, _ = await read_body(request)
        self.asked += 1
        facts, limits = self.host.facts, self.host.limits
        call = read_call(body, self.asked, facts["vocabulary"], limits.stop_ids)
        if call.session:
            self.host.check_owner(body.get("client"))
        before = self._seconds_held
        done = await self._while_connected(request, call)
        held = max(0.0, self._seconds_held - before)  # less than before where a trainer got another generator meanwhile
        return JSONResponse(reply_body(call.request_id, done, self.host.labels, call.sampling_mask, held))

    @property
    def _seconds_held(self) -> float:
        """Seconds in which the generator had requests, but waited for dialogues without one."""
        return self.host.generator.stats().get("seconds_held", 0.0)

    async def _while_connected(self, request: Request, call: GenerateCall) -> Completion:
        """The completion; ends the request when nobody waits for it any longer."""
        answer = asyncio.ensure_future(self.host.generate(call))
        gone = asyncio.ensure_future(request.receive())  # the next message after the body: the client hung up
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientDisconnect
            return answer.result()
        finally:
            for task in (answer, gone):
                task.cancel()

    async def abort(self, request: Request) -> Response:
        body, _ = await read_body(request, empty=True)
        ids = body.get("request_ids") or []
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise CallRefused("invalid_request", f"'request_ids' is {ids!r:.60}; write a list of texts")
        return JSONResponse({"status": "aborted", "aborted": await self.host.abort(ids)})

    # ------------------------------------------------------------------- pause
    async def _checked(self, request: Request) -> dict[str, Any]:
        """The body of a call that changes what the server samples with. A run that names itself must be its owner; vLLM's calls
        name nobody."""
        body, _ = await read_body(request, empty=True)
        if "client" in body:
            self.host.check_owner(body["client"])
        return body

    async def pause(self, request: Request) -> Response:
        await self._checked(request)
        await self.host.pause(request.query_params.get("mode", "abort"))
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._checked(request)
        self.host.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self.host.paused})

    # ----------------------------------------------------------------- weights
    async def init_transfer(self, request: Request) -> Response:
        body, _ = await read_body(request)
        if not isinstance(body.get("init_info"), dict):
            raise CallRefused("invalid_request", f"'init_info' is {body.get('init_info')!r:.60}; write an object")
        return JSONResponse({"message": "Weight transfer initialized"})

    async def start_update(self, request: Request) -> Response:
        await self._checked(request)
        self.host.start_update()
        return JSONResponse({"message": "Weight update started"})

    async def update_weights(self, request: Request) -> Response:
        body = await self._checked(request)
        await self.host.receive(body.get("update_info"))
        return JSONResponse({"message": "Weights updated"})

    async def finish_update(self, request: Request) -> Response:
        body = await self._checked(request)
        label = body.get("weight_version")
        if label is not None and (not isinstance(label, str) or not 0 < len(label) <= 100):
            raise CallRefused(
                "invalid_request", f"'weight_version' is {label!r:.60}; write a text of at most 100 characters"
            )
        await self.host.finish_update(label or "")
        return JSONResponse({"message": "Weight update finished"})

    async def weight_info(self, request: Request) -> Response:
        told = {"weight_version": self.host.label, "sha256": self.host.digest}
        return JSONResponse({**told, **self.host.weight_needs()})

    async def world_size(self, request: Request) -> Response:
        return JSONResponse({"world_size": 1})

    # ------------------------------------------------------------------- state
    async def health(self, request: Request) -> Response:
        if reason := self.host.stuck():
            return JSONResponse({"error": reason}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        facts = self.host.facts
        model = {"id": facts["model"], "object": "model", "created": 0, "owned_by": "turnwise", "root": facts["model"]}
        return JSONResponse({"object": "list", "data": [{**model, "max_model_len": self.host.limits.context}]})

    async def info(self, request: Request) -> Response:
        host, limits = self.host, self.host.limits
        state = {"weight_version": host.label, "sessions": len(host.sessions), "in_flight": len(host.in_flight)}
        state["owner"] = host.owner()
        offered = {"slots": host.most.slots, "context": host.most.context}
        now = {"slots": limits.slots, "context": limits.context, "stop_ids": list(limits.stop_ids)}
        counts = {"answered": host.answered, "stats": host.generator.stats(), "engine": host.generator.describe()}
        return JSONResponse({"server": "turnwise", **host.facts, "offered": offered, "limits": now, **state, **counts})

    # ---------------------------------------------------------------- sessions
    async def attach(self, request: Request) -> Response:
        body, _ = await read_body(request)
        client, stop_ids = body.get("client"), body.get("stop_ids")
        if not isinstance(client, str) or not client:
            raise CallRefused("invalid_request", "'client' is missing; write a text that names the run")
        if not isinstance(stop_ids, list) or not all(type(token) is int for token in stop_ids):
            raise CallRefused("invalid_request", f"'stop_ids' is {stop_ids!r:.60}; write a list of token ids")
        sizes: list[Any] = [body.get("slots"), body.get("context")]
        if not all(type(size) is int for size in sizes):
            raise CallRefused("invalid_request", f"'slots' and 'context' are {sizes!r:.60}; write whole numbers")
        threads, deterministic = body.get("threads", 0), body.get("deterministic", True)
        if type(threads) is not int or not 0 <= threads <= MAX_THREADS or not isinstance(deterministic, bool):
            raise CallRefused(
                "invalid_request", "'threads' is no small whole number, or 'deterministic' is not true or false"
            )
        asked = HostLimits(sizes[0], sizes[1], tuple(stop_ids), deterministic, threads)
        granted = await self.host.attach(client, asked, str(body.get("run") or ""))
        told = {"slots": granted.slots, "context": granted.context, "engine": self.host.generator.describe()}
        return JSONResponse({**told, **self.host.weight_needs()})

    async def sessions(self, request: Request) -> Response:
        body, _ = await read_body(request)
        self.host.apply(body.get("client"), body.get("number"), body.get("changes"))
        return JSONResponse({"open": len(self.host.sessions)})

    async def alive(self, request: Request) -> Response:
        body, _ = await read_body(request)
        self.host.check_owner(body.get("client"))
        return JSONResponse({"status": "ok"})

    async def release(self, request: Request) -> Response:
        body, _ = await read_body(request)
        self.host.release(body.get("client"))
        return JSONResponse({"status": "released"})

    # -------------------------------------------------------------------- token
    def guarded(self, handler: Handler) -> Handler:
        """The handler for those who know the token."""

        async def answer(request: Request) -> Response:
            bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
            if self.token and not hmac.compare_digest(bearer.encode(), self.token.encode()):
                raise CallRefused("invalid_api_key", "the token of this server is missing or wrong")
            return await handler(request)

        return answer


def make_generate_app(host: PolicyHost, token: str = "") -> Starlette:
    """The application over ``host``. All but ``/health`` needs the token, if there is one."""
    api = GenerateApi(host, token)
    table: Mapping[str, tuple[str, Handler]] = {
        "/inference/v1/generate": ("POST", api.generate),
        "/inference/v1/abort_requests": ("POST", api.abort),
        "/abort_requests": ("POST", api.abort),
        "/pause": ("POST", api.pause),
        "/resume": ("POST", api.resume),
        "/is_paused": ("GET", api.is_paused),
        "/init_weight_transfer_engine": ("POST", api.init_transfer),
        "/start_weight_update": ("POST", api.start_update),
        "/update_weights": ("POST", api.update_weights),
        "/finish_weight_update": ("POST", api.finish_update),
        "/weight_info": ("GET", api.weight_info),
        "/get_world_size": ("GET", api.world_size),
        "/v1/models": ("GET", api.models),
        "/turnwise/v1/info": ("GET", api.info),
        "/turnwise/v1/attach": ("POST", api.attach),
        "/turnwise/v1/sessions": ("POST", api.sessions),
        "/turnwise/v1/alive": ("POST", api.alive),
        "/turnwise/v1/release": ("POST", api.release),
    }
    routes = [Route(path, api.guarded(handler), methods=[method]) for path, (method, handler) in table.items()]
    routes.append(Route("/health", api.health, methods=["GET"]))

    async def unknown_path(request: Request, fault: Any) -> Response:
        message = f"no {request.method} {request.url.path[:80]}; known: {', '.join([*table, '/health'])}"
        return JSONResponse(error_body("not_found", message), status_code=fault.status_code)

    handlers: Mapping[Any, Any] = {
        CallRefused: _refused, ClientDisconnect: _gone, 404: unknown_path, 405: unknown_path, Exception: _failed,
    }  # fmt: skip
    return Starlette(routes=routes, exception_handlers=handlers)


async def _refused(request: Request, fault: Exception) -> Response:
    code = getattr(fault, "code", "invalid_request")
    return JSONResponse(error_body(code, str(fault)), status_code=STATUS.get(code, 400))


async def _failed(request: Request, fault: Exception) -> Response:
    """A fault of the server, in its own words: the run that asked shows them."""
    return JSONResponse(error_body("server_error", f"{type(fault).__name__}: {fault}"), status_code=500)


async def _gone(request: Request, fault: Exception) -> Response:
    return Response(status_code=499)
