"""Routes of a generator server: vLLM's names for token ids in and out, pauses and weights, and some of our own.

    POST /inference/v1/generate          token ids in, token ids with log-probabilities and weight versions out
    POST /abort_requests                 end requests with the tokens they have
    POST /pause?mode=abort, /resume      GET /is_paused
    POST /init_weight_transfer_engine, /start_weight_update, /update_weights, /finish_weight_update
    GET  /weight_info, /health, /v1/models, /get_world_size
    GET  /turnwise/v1/info               model, vocabulary, limits
    POST /turnwise/v1/attach, /turnwise/v1/sessions     a trainer takes the server, opens and closes its dialogues
    POST /turnwise/v1/alive, /turnwise/v1/release       it is still there, though it asks for nothing; it leaves

A route takes and returns plain values: HTTP carries them (``serve.app``), or the socket of a process that a run started
(``training.serve``). ``session`` of a request and ``turnwise`` of a reply are ours: other servers ignore the one, and other
clients the other. Knows the host of a generator; neither HTTP nor an engine.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from turnwise.core.records import Completion, Sampling, Stop
from turnwise.errors import RecordError
from turnwise.rollout.agent_episode import CallRefused
from turnwise.serve.openai_wire import error_body
from turnwise.serve.policy_host import GenerateCall, HostLimits, PolicyHost

FINISH = {Stop.TOKEN: "stop", Stop.STRING: "stop", Stop.LENGTH: "length", Stop.CANCELLED: "abort"}
READ = {
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed", "stop_token_ids", "entropy", "sampling_mask",
}  # fmt: skip
NO_EFFECT = {"logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"}
ONLY = {  # parameters that would change the distribution: accepted with the value that does nothing
    "n": 1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0, "ignore_eos": False,
    "include_stop_str_in_output": False, "prompt_logprobs": None, "logit_bias": None, "bad_words": None,
    "structured_outputs": None, "allowed_token_ids": None,
}  # fmt: skip


STATUS = {  # of a refusal, by its code
    "invalid_api_key": 401, "not_found": 404, "body_too_large": 413, "busy": 429, "not_owner": 409, "out_of_order": 409,
    "not_paused": 409, "no_update": 409, "no_base": 409, "in_use": 409, "stuck": 503,
}  # fmt: skip
MAX_THREADS = 1024
Body = dict[str, Any]


class GenerateApi:
    """The routes over one host, by method and path."""

    def __init__(self, host: PolicyHost) -> None:
        self.host, self.asked = host, 0
        self.routes: Mapping[tuple[str, str], Callable[[Body], Awaitable[Body]]] = {
            ("POST", "/inference/v1/generate"): self.generate,
            ("POST", "/inference/v1/abort_requests"): self.abort,
            ("POST", "/abort_requests"): self.abort,
            ("POST", "/pause"): self.pause,
            ("POST", "/resume"): self.resume,
            ("GET", "/is_paused"): self.is_paused,
            ("POST", "/init_weight_transfer_engine"): self.init_transfer,
            ("POST", "/start_weight_update"): self.start_update,
            ("POST", "/update_weights"): self.update_weights,
            ("POST", "/finish_weight_update"): self.finish_update,
            ("GET", "/weight_info"): self.weight_info,
            ("GET", "/get_world_size"): self.world_size,
            ("GET", "/v1/models"): self.models,
            ("GET", "/health"): self.health,
            ("GET", "/turnwise/v1/info"): self.info,
            ("POST", "/turnwise/v1/attach"): self.attach,
            ("POST", "/turnwise/v1/sessions"): self.sessions,
            ("POST", "/turnwise/v1/alive"): self.alive,
            ("POST", "/turnwise/v1/release"): self.release,
        }

    async def answer(self, method: str, path: str, body: Body) -> tuple[int, Body]:
        """The status of a call, and its reply. ``body`` holds what stood behind the question mark, too. A fault of the server is
        told in its own words: the run that asked shows them."""
        try:
            if (method, path) not in self.routes:
                known = ", ".join(path for _, path in self.routes)
                raise CallRefused("not_found", f"no {method} {path[:80]}; known: {known}")
            return 200, await self.routes[method, path](body)
        except CallRefused as refusal:
            return STATUS.get(refusal.code, 400), error_body(refusal.code, str(refusal))
        except Exception as fault:
            return 500, error_body("server_error", f"{type(fault).__name__}: {fault}")

    # ---------------------------------------------------------------- requests
    async def generate(self, body: Body) -> Body:
        """Cancelled, where nobody waits for the reply any longer: the request ends with it."""
        self.asked += 1
        call = read_call(body, self.asked, self.host.facts["vocabulary"], self.host.limits.stop_ids)
        if call.session:
            self.host.check_owner(body.get("client"))
        # seconds in which the generator had requests, but waited for dialogues without one
        before = self.host.generator.stats().get("seconds_held", 0.0)
        done = await self.host.generate(call)
        held = self.host.generator.stats().get("seconds_held", 0.0) - before
        # less than before where a trainer got another generator meanwhile
        return reply_body(call.request_id, done, self.host.labels, call.sampling_mask, max(0.0, held))

    async def abort(self, body: Body) -> Body:
        ids = body.get("request_ids") or []
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise CallRefused("invalid_request", f"'request_ids' is {ids!r:.60}; write a list of texts")
        return {"status": "aborted", "aborted": await self.host.abort(ids)}

    # ------------------------------------------------------- pauses and weights
    def _check_owner(self, body: Body) -> None:
        """In calls that change what the server samples with, a run that names itself must be its owner; vLLM's name nobody."""
        if "client" in body:
            self.host.check_owner(body["client"])

    async def pause(self, body: Body) -> Body:
        self._check_owner(body)
        await self.host.pause(body.get("mode", "abort"))
        return {"status": "paused"}

    async def resume(self, body: Body) -> Body:
        self._check_owner(body)
        self.host.resume()
        return {"status": "resumed"}

    async def is_paused(self, body: Body) -> Body:
        return {"is_paused": self.host.paused}

    async def init_transfer(self, body: Body) -> Body:
        if not isinstance(body.get("init_info"), dict):
            raise CallRefused("invalid_request", f"'init_info' is {body.get('init_info')!r:.60}; write an object")
        return {"message": "Weight transfer initialized"}

    async def start_update(self, body: Body) -> Body:
        self._check_owner(body)
        self.host.start_update()
        return {"message": "Weight update started"}

    async def update_weights(self, body: Body) -> Body:
        self._check_owner(body)
        await self.host.receive(body.get("update_info"))
        return {"message": "Weights updated"}

    async def finish_update(self, body: Body) -> Body:
        self._check_owner(body)
        label = body.get("weight_version")
        if label is not None and (not isinstance(label, str) or not 0 < len(label) <= 100):
            raise CallRefused(
                "invalid_request", f"'weight_version' is {label!r:.60}; write a text of at most 100 characters"
            )
        await self.host.finish_update(label or "")
        return {"message": "Weight update finished"}

    async def weight_info(self, body: Body) -> Body:
        return {"weight_version": self.host.label, "sha256": self.host.digest, **self.host.weight_needs()}

    async def world_size(self, body: Body) -> Body:
        return {"world_size": 1}

    # ------------------------------------------------------------------- state
    async def health(self, body: Body) -> Body:
        if reason := self.host.stuck():
            raise CallRefused("stuck", reason)
        return {"status": "ok"}

    async def models(self, body: Body) -> Body:
        name = self.host.facts["model"]
        model = {"id": name, "object": "model", "created": 0, "owned_by": "turnwise", "root": name}
        return {"object": "list", "data": [{**model, "max_model_len": self.host.limits.context}]}

    async def info(self, body: Body) -> Body:
        host, limits = self.host, self.host.limits
        return {
            "server": "turnwise",
            **host.facts,
            "offered": {"slots": host.most.slots, "context": host.most.context},
            "limits": {"slots": limits.slots, "context": limits.context, "stop_ids": list(limits.stop_ids)},
            "weight_version": host.label,
            "sessions": len(host.sessions),
            "in_flight": len(host.in_flight),
            "owner": host.owner(),
            "answered": host.answered,
            "stats": host.generator.stats(),
            "engine": host.generator.describe(),
        }

    # ---------------------------------------------------------------- sessions
    async def attach(self, body: Body) -> Body:
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
        limits = HostLimits(sizes[0], sizes[1], tuple(stop_ids), deterministic, threads)
        granted = await self.host.attach(client, limits, str(body.get("run") or ""))
        engine = self.host.generator.describe()
        return {"slots": granted.slots, "context": granted.context, "engine": engine, **self.host.weight_needs()}

    async def sessions(self, body: Body) -> Body:
        self.host.apply(body.get("client"), body.get("number"), body.get("changes"))
        return {"open": len(self.host.sessions)}

    async def alive(self, body: Body) -> Body:
        self.host.check_owner(body.get("client"))
        return {"status": "ok"}

    async def release(self, body: Body) -> Body:
        self.host.release(body.get("client"))
        return {"status": "released"}


# ------------------------------------------------------------ token ids in and out


def read_call(body: Mapping[str, Any], number: int, vocabulary: int, stop_ids: Sequence[int]) -> GenerateCall:
    """A request; refuses what this server cannot do, with what to write instead."""
    if body.get("stream"):
        raise CallRefused("unsupported_parameter", "'stream' is true; replies are sent whole, write false")
    for name in ("features", "content_parts"):
        if body.get(name):
            raise CallRefused("unsupported_parameter", f"'{name}' is given; this server reads token ids alone")
    params = body.get("sampling_params")
    if not isinstance(params, Mapping):
        raise CallRefused("invalid_request", f"'sampling_params' is {params!r:.60}; write an object")
    _refuse_parameters(params, stop_ids)
    session, request_id = body.get("session", ""), body.get("request_id") or f"generate-{number}"
    if not isinstance(session, str) or not isinstance(request_id, str):
        raise CallRefused("invalid_request", "'session' or 'request_id' is no text")
    seed = _integer(params, "seed", number, low=-(1 << 63), high=(1 << 63) - 1)
    ids, with_mask = read_ids(body.get("token_ids"), vocabulary), params.get("sampling_mask") is True
    return GenerateCall(request_id, ids, _sampling(params), seed, session, with_mask)


def read_ids(value: Any, vocabulary: int) -> tuple[int, ...]:
    """Token ids of the vocabulary."""
    if not isinstance(value, list) or not value:
        raise CallRefused("invalid_request", f"'token_ids' is {value!r:.60}; write a list of at least one token id")
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise CallRefused(
                "invalid_request",
                f"'token_ids' holds {token!r:.40} at position {position}; this model has the ids 0 to {vocabulary - 1}",
            )
    return tuple(value)


def _refuse_parameters(params: Mapping[str, Any], stop_ids: Sequence[int]) -> None:
    for name, value in params.items():
        if name in READ or name in NO_EFFECT or value is None:
            continue
        if name not in ONLY:
            raise CallRefused(
                "unsupported_parameter", f"sampling_params has {name!r:.60}, which this server does not know"
            )
        if value != ONLY[name]:
            raise CallRefused("unsupported_parameter", f"sampling_params.{name} is {value!r:.60}; write {ONLY[name]!r}")
    ends = params.get("stop_token_ids")
    if ends and (not isinstance(ends, list) or not set(map(str, ends)) <= set(map(str, stop_ids))):
        raise CallRefused(
            "unsupported_parameter",
            f"sampling_params.stop_token_ids is {ends!r:.60}; this server ends a turn at {sorted(stop_ids)}",
        )


def _sampling(params: Mapping[str, Any]) -> Sampling:
    stop = params.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else (None,)
    if not all(isinstance(text, str) and text for text in stop):
        raise CallRefused("invalid_request", f"sampling_params.stop is {params['stop']!r:.60}; write a list of texts")
    try:
        return Sampling(
            temperature=_number(params, "temperature", 1.0),
            top_p=_number(params, "top_p", 1.0),
            top_k=max(_integer(params, "top_k", 0, low=-1), 0),
            min_p=_number(params, "min_p", 0.0),
            max_tokens=_integer(params, "max_tokens", 16, low=1),
            stop=stop,
            entropy=params.get("entropy") is True,
        )
    except RecordError as fault:
        raise CallRefused("invalid_request", f"sampling_params: {fault}") from None


def _number(params: Mapping[str, Any], name: str, default: float) -> float:
    value = default if params.get(name) is None else params[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CallRefused("invalid_request", f"sampling_params.{name} is {value!r:.60}; write a number")
    return float(value)


def _integer(params: Mapping[str, Any], name: str, default: int, low: int, high: int = 1 << 31) -> int:
    value = default if params.get(name) is None else params[name]
    if type(value) is not int or not low <= value <= high:
        raise CallRefused(
            "invalid_request", f"sampling_params.{name} is {value!r:.60}; write a whole number from {low}"
        )
    return int(value)


def reply_body(
    request_id: str, done: Completion, labels: Mapping[int, str], sampling_mask: bool = False, held: float = 0.0
) -> dict[str, Any]:
    """The reply to a request. Numbers travel as the shortest text that reads back as the same float, so log-probabilities are
    exact. ``labels``: what the trainer calls each version of the weights. ``sampling_mask``: with the ids
    that the filters kept, as vLLM's option ``--return-sampling-mask`` names them; an empty list: not recorded. ``held``: seconds
    in which the generator waited for other dialogues."""
    tokens = list(done.tokens)
    content: list[dict[str, Any]] = [
        {"token_id": token, "logprob": logp, "rank": None, "top_logprobs": []} for token, logp in zip(tokens, done.logp)
    ]
    ours: dict[str, Any] = {"stop": str(done.stop), "seconds": done.seconds}
    if held:
        ours["seconds_held"] = held
    if any(done.mass):
        ours["mass"] = list(done.mass)
    if done.entropy:
        ours["entropy"] = list(done.entropy)
    if done.confidence:
        ours["confidence"] = list(done.confidence)
    if done.routes:
        ours["routes"] = {"rows": len(done.routes), "data": base64.b64encode(b"".join(done.routes)).decode()}
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": FINISH[done.stop],
        "stop_reason": None,
        "token_ids": tokens,
        "logprobs": {"content": content},
        "weight_versions": version_spans(done.version, labels),
        "turnwise": ours,
    }
    if sampling_mask and done.kept:
        choice["sampling_mask"] = [array("i", row).tolist() for row in done.kept]
    return {"request_id": request_id, "choices": [choice], "prompt_logprobs": None, "kv_transfer_params": None}


def version_spans(versions: Sequence[int], labels: Mapping[int, str]) -> list[dict[str, Any]]:
    """Which weights sampled which tokens, as spans [start, end)."""
    spans: list[dict[str, Any]] = []
    start = 0
    for version, members in groupby(versions):
        end = start + len(list(members))
        spans.append({"version": labels.get(version, str(version)), "start": start, "end": end})
        start = end
    return spans
