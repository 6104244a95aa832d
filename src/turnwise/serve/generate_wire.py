"""Token ids in, token ids out: requests and replies of ``/inference/v1/generate``, as a server sees them. Pure functions.

The names are vLLM's. ``session`` of a request and ``turnwise`` of a reply are ours: other servers ignore the one, and other
clients the other. Numbers travel as the shortest text that reads back as the same float, so log-probabilities are exact.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from turnwise.core.records import Completion, Sampling, Stop
from turnwise.errors import RecordError
from turnwise.rollout.agent_episode import CallRefused

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


@dataclass(frozen=True)
class GenerateCall:
    """One request to continue ``ids``. ``session``: the dialogue it belongs to; empty: none, the request stands alone.
    ``sampling_mask``: whether the reply names the ids that the filters kept."""

    request_id: str
    ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    session: str
    sampling_mask: bool = False


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
    asked = params.get("stop_token_ids")
    if asked and (not isinstance(asked, list) or not set(map(str, asked)) <= set(map(str, stop_ids))):
        raise CallRefused(
            "unsupported_parameter",
            f"sampling_params.stop_token_ids is {asked!r:.60}; this server ends a turn at {sorted(stop_ids)}",
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
    """The reply to a request. ``labels``: what the trainer calls each version of the weights. ``sampling_mask``: with the ids
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
