"""Routes of a generator server: vLLM's names for token ids in and out, pauses and weights, and some of our own.

A route takes and returns plain values: HTTP carries them (``serve.app``), or the socket of a process that a run started
(``training.serve``). ``session`` of a request and ``turnwise`` of a reply are ours: other servers ignore the one, and other
clients the other. Knows the host of a generator; neither HTTP nor an engine.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from turnwise.core.records import Completion, Sampling, Stop
from turnwise.errors import RecordError
from turnwise.rollout.agent_episode import CallRefused
from turnwise.serve.policy_host import GenerateCall, HostLimits, PolicyHost
from turnwise.serve.wires import STATUS, Body, check, error_body

FINISH = {Stop.TOKEN: "stop", Stop.STRING: "stop", Stop.LENGTH: "length", Stop.CANCELLED: "abort"}
READ = {
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed", "stop_token_ids", "entropy", "sampling_mask",
    "grammar", "begun",
}  # fmt: skip
NO_EFFECT = {"logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"}
ONLY = {  # parameters that would change the distribution: accepted with the value that does nothing
    "n": 1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0, "ignore_eos": False,
    "include_stop_str_in_output": False, "prompt_logprobs": None, "logit_bias": None, "bad_words": None,
    "structured_outputs": None, "allowed_token_ids": None,
}  # fmt: skip
KNOWN = (
    "/inference/v1/generate, /abort_requests, /pause, /resume, /is_paused, /init_weight_transfer_engine, "
    "/start_weight_update, /update_weights, /finish_weight_update, /weight_info, /get_world_size, /v1/models, /health, "
    "/turnwise/v1/ info, attach, sessions, alive and release"
)
# calls that change what the server samples with: a run that names itself must be its owner; vLLM's clients name nobody
OF_OWNER = ("/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update")
MAX_THREADS = 1024


class GenerateApi:
    def __init__(self, host: PolicyHost) -> None:
        self.host, self.requests = host, 0

    async def answer(self, method: str, path: str, body: Body) -> tuple[int, Body]:
        """The status of a call, and its reply. ``body`` holds what stood behind the question mark, too. A fault of the server is
        told in its own words: the run that asked shows them."""
        try:
            if path in OF_OWNER and "client" in body:
                self.host.check_owner(body["client"])
            return 200, await self._reply(f"{method} {path}", body)
        except CallRefused as refusal:
            return STATUS.get(refusal.code, 400), error_body(refusal.code, str(refusal))
        except Exception as fault:
            return 500, error_body("server_error", f"{type(fault).__name__}: {fault}")

    async def _reply(self, route: str, body: Body) -> Body:
        host = self.host
        match route:
            case "POST /inference/v1/generate":
                return await self.generate(body)
            case "POST /abort_requests" | "POST /inference/v1/abort_requests":
                ids = body.get("request_ids") or []
                texts = isinstance(ids, list) and all(isinstance(name, str) for name in ids)
                check(texts, "'request_ids' is {!r:.60}; write a list of texts", ids)
                return {"status": "aborted", "aborted": await host.abort(ids)}
            case "POST /pause":
                await host.pause(body.get("mode", "abort"))
                return {"status": "paused"}
            case "POST /resume":
                host.resume()
                return {"status": "resumed"}
            case "GET /is_paused":
                return {"is_paused": host.paused}
            case "POST /init_weight_transfer_engine":
                info = body.get("init_info")
                check(isinstance(info, dict), "'init_info' is {!r:.60}; write an object", info)
                return {"message": "Weight transfer initialized"}
            case "POST /start_weight_update":
                host.start_update()
                return {"message": "Weight update started"}
            case "POST /update_weights":
                await host.receive(body.get("update_info"))
                return {"message": "Weights updated"}
            case "POST /finish_weight_update":
                label = body.get("weight_version")
                usable = label is None or (isinstance(label, str) and 0 < len(label) <= 100)
                check(usable, "'weight_version' is {!r:.60}; write a text of at most 100 characters", label)
                await host.finish_update(label or "")
                return {"message": "Weight update finished"}
            case "GET /weight_info":
                return {"weight_version": host.label, "sha256": host.digest, **host.weight_needs()}
            case "GET /get_world_size":
                return {"world_size": 1}
            case "GET /v1/models":
                name = host.facts["model"]
                model = {"id": name, "object": "model", "created": 0, "owned_by": "turnwise", "root": name}
                return {"object": "list", "data": [{**model, "max_model_len": host.limits.context}]}
            case "GET /health":
                reason = host.stuck()
                check(not reason, "{}", reason, code="stuck")
                return {"status": "ok"}
            case "GET /turnwise/v1/info":
                return self.info()
            # a trainer takes the server; opens and closes its dialogues; is still there, though it asks for nothing; leaves
            case "POST /turnwise/v1/attach":
                return await self.attach(body)
            case "POST /turnwise/v1/sessions":
                host.apply(body.get("client"), body.get("number"), body.get("changes"))
                return {"open": len(host.sessions)}
            case "POST /turnwise/v1/alive":
                host.check_owner(body.get("client"))
                return {"status": "ok"}
            case "POST /turnwise/v1/release":
                host.release(body.get("client"))
                return {"status": "released"}
        raise CallRefused("not_found", f"no {route[:90]}; known: {KNOWN}")

    async def generate(self, body: Body) -> Body:
        # cancelled, where nobody waits for the reply any longer: the request ends with it
        self.requests += 1
        call = read_call(body, self.requests, self.host.facts["vocabulary"], self.host.limits.stop_ids)
        if call.session:
            self.host.check_owner(body.get("client"))
        # seconds in which the generator had requests, but waited for dialogues without one
        before = self.host.generator.stats().get("seconds_held", 0.0)
        done = await self.host.generate(call)
        held = self.host.generator.stats().get("seconds_held", 0.0) - before
        # less than before where a trainer got another generator meanwhile
        return reply_body(call.request_id, done, self.host.labels, call.sampling_mask, max(0.0, held))

    def info(self) -> Body:
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

    async def attach(self, body: Body) -> Body:
        client, stop_ids = body.get("client"), body.get("stop_ids")
        check(isinstance(client, str) and client, "'client' is missing; write a text that names the run")
        ids = isinstance(stop_ids, list) and all(type(token) is int for token in stop_ids)
        check(ids, "'stop_ids' is {!r:.60}; write a list of token ids", stop_ids)
        slots, context = _integer(body, "slots", None, low=1), _integer(body, "context", None, low=1)
        threads, deterministic = _integer(body, "threads", 0, low=0, high=MAX_THREADS), body.get("deterministic", True)
        check(isinstance(deterministic, bool), "'deterministic' is {!r:.60}; write true or false", deterministic)
        limits = HostLimits(slots, context, tuple(stop_ids or ()), deterministic, threads)
        granted = await self.host.attach(str(client), limits, str(body.get("run") or ""))
        engine = self.host.generator.describe()
        return {"slots": granted.slots, "context": granted.context, "engine": engine, **self.host.weight_needs()}


# ------------------------------------------------------------ token ids in and out


def read_call(body: Mapping[str, Any], number: int, vocabulary: int, stop_ids: Sequence[int]) -> GenerateCall:
    """A request; refuses what this server cannot do, with what to write instead."""
    unsupported, params = "unsupported_parameter", body.get("sampling_params")
    check(not body.get("stream"), "'stream' is true; replies are sent whole, write false", code=unsupported)
    for name in ("features", "content_parts"):
        check(not body.get(name), "'{}' is given; this server reads token ids alone", name, code=unsupported)
    check(isinstance(params, Mapping), "'sampling_params' is {!r:.60}; write an object", params)
    assert isinstance(params, Mapping)
    for name, value in params.items():
        if name not in READ and name not in NO_EFFECT and value is not None:
            check(name in ONLY, "sampling_params has {!r:.60}, which this server does not know", name, code=unsupported)
            harmless, wrong = ONLY.get(name), "sampling_params.{} is {!r:.60}; write {!r}"
            check(value == harmless, wrong, name, value, harmless, code=unsupported)
    ends = params.get("stop_token_ids") or []
    usual = isinstance(ends, list) and set(map(str, ends)) <= set(map(str, stop_ids))
    wrong = "sampling_params.stop_token_ids is {!r:.60}; this server ends a turn at {}"
    check(usual, wrong, ends, sorted(stop_ids), code=unsupported)
    session, request_id = body.get("session", ""), body.get("request_id") or f"generate-{number}"
    texts = isinstance(session, str) and isinstance(request_id, str)
    check(texts, "'session' or 'request_id' is no text")
    seed = _integer(params, "seed", number, low=-(1 << 63), high=(1 << 63) - 1)
    ids, with_mask = read_ids(body.get("token_ids"), vocabulary), params.get("sampling_mask") is True
    return GenerateCall(request_id, ids, _sampling(params), seed, session, with_mask)


def read_ids(value: Any, vocabulary: int) -> tuple[int, ...]:
    usable = isinstance(value, list) and value
    check(usable, "'token_ids' is {!r:.60}; write a list of at least one token id", value)
    # ``type``: to Python, true is an integer
    wrong = next((n for n, token in enumerate(value) if type(token) is not int or not 0 <= token < vocabulary), None)
    text = "'token_ids' holds {!r:.40} at position {}; this model has the ids 0 to {}"
    check(wrong is None, text, value[wrong or 0], wrong, vocabulary - 1)
    return tuple(value)


def _sampling(params: Mapping[str, Any]) -> Sampling:
    stop = params.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else (None,)
    grammar = params.get("grammar") or ""
    check(isinstance(grammar, str), "sampling_params.grammar is {!r:.60}; write a text", grammar)
    texts = all(isinstance(text, str) and text for text in stop)
    check(texts, "sampling_params.stop is {!r:.60}; write a list of texts", params.get("stop"))
    try:
        return Sampling(
            temperature=_number(params, "temperature", 1.0),
            top_p=_number(params, "top_p", 1.0),
            top_k=max(_integer(params, "top_k", 0, low=-1), 0),
            min_p=_number(params, "min_p", 0.0),
            max_tokens=_integer(params, "max_tokens", 16, low=1),
            stop=stop,
            entropy=params.get("entropy") is True,
            grammar=grammar,
            begun=_integer(params, "begun", 0, low=0),
        )
    except RecordError as fault:
        raise CallRefused("invalid_request", f"sampling_params: {fault}") from None


def _number(params: Mapping[str, Any], name: str, default: float) -> float:
    value = default if params.get(name) is None else params[name]
    usable = type(value) in (int, float) and math.isfinite(value)
    check(usable, "sampling_params.{} is {!r:.60}; write a number", name, value)
    return float(value)


def _integer(fields: Mapping[str, Any], name: str, default: int | None, low: int, high: int = 1 << 31) -> int:
    value: Any = default if fields.get(name) is None else fields[name]
    check(type(value) is int and low <= value <= high, "{} is {!r:.60}; write a whole number from {}", name, value, low)
    return int(value)


def reply_body(
    request_id: str, done: Completion, labels: Mapping[int, str], sampling_mask: bool = False, held: float = 0.0
) -> Body:
    """The reply to a request. Numbers travel as the shortest text that reads back as the same float, so log-probabilities are
    exact. ``labels``: what the trainer calls each version of the weights. ``sampling_mask``: with the ids
    that the filters kept, as vLLM's option ``--return-sampling-mask`` names them; an empty list: not recorded. ``held``: seconds
    in which the generator waited for other dialogues."""
    tokens = list(done.tokens)
    content: list[Body] = [
        {"token_id": token, "logprob": logp, "rank": None, "top_logprobs": []} for token, logp in zip(tokens, done.logp)
    ]
    ours: Body = {"stop": str(done.stop), "seconds": done.seconds}
    measured = {"mass": done.mass if any(done.mass) else (), "entropy": done.entropy, "confidence": done.confidence}
    ours |= {name: list(values) for name, values in measured.items() if values}
    if held:
        ours["seconds_held"] = held
    if done.routes:
        ours["routes"] = {"rows": len(done.routes), "data": base64.b64encode(b"".join(done.routes)).decode()}
    choice: Body = {
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


def version_spans(versions: Sequence[int], labels: Mapping[int, str]) -> list[Body]:
    """Which weights sampled which tokens, as spans [start, end)."""
    spans, start = list[Body](), 0
    for version, members in groupby(versions):
        end = start + len(list(members))
        spans.append({"version": labels.get(version, str(version)), "start": start, "end": end})
        start = end
    return spans
