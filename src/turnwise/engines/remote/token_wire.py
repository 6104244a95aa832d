"""Token ids in, token ids out: requests and replies of ``/inference/v1/generate``, as a client sees them. Sends nothing.

The names are vLLM's. What only our server understands (``client``, ``session``) is sent to our server alone.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from turnwise.core.records import Completion, Sampling, Stop
from turnwise.engines.remote.http import expect
from turnwise.errors import ServerFault

STOPS = {"stop": Stop.TOKEN, "length": Stop.LENGTH, "abort": Stop.CANCELLED}
NUMBERS = (float, int)
EVERY_ID = 1 << 30  # a top-k that keeps all ids of any vocabulary


class Reported(Enum):
    """Which log-probabilities a server reports, by what vLLM calls ``--logprobs-mode`` and ``--return-sampling-mask``."""

    RAW = "those of temperature 1 over the whole vocabulary"
    PROCESSED = "those of the distribution that was sampled from"
    WITH_MASK = "those of the distribution that was sampled from, with the ids that were kept"


@dataclass(frozen=True)
class SampledPart:
    """What one request sampled. ``versions``: the labels of the weights, token by token; empty where the server says none.
    ``held``: seconds of the reply in which the server waited for other dialogues."""

    completion: Completion
    versions: tuple[str, ...]
    held: float = 0.0


def sampling_params(sampling: Sampling, seed: int, stop_ids: Sequence[int], bounded: bool = False) -> dict[str, Any]:
    """The sampling parameters by vLLM's names. ``logprobs`` 0: of the sampled token alone. ``bounded``: for a vLLM server that
    returns masks, which refuses a request without top-k or with temperature 0."""
    if bounded and sampling.greedy:
        sampling = replace(sampling, temperature=1.0, top_p=1.0, top_k=1, min_p=0.0)
    elif bounded:
        sampling = replace(sampling, top_k=sampling.top_k or EVERY_ID)
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
    params: dict[str, Any] = {name: getattr(sampling, name) for name in names}
    params |= {"seed": seed, "stop_token_ids": list(stop_ids), "logprobs": 0, "detokenize": bool(sampling.stop)}
    return params | ({"stop": list(sampling.stop)} if sampling.stop else {})


def read_part(value: Any, stop_ids: frozenset[int]) -> SampledPart:
    """The reply to a request. Raises ``ServerFault`` where it is not what the protocol says."""
    # ``dict`` and exact types: what JSON makes, and quicker to ask for than a Mapping, token by token
    choices = value.get("choices") if isinstance(value, dict) else None
    choice: Any = choices[0] if isinstance(choices, list) and choices else None
    tokens: Any = choice.get("token_ids") if isinstance(choice, dict) else None
    usable = isinstance(tokens, list) and all(type(t) is int for t in tokens)
    expect(usable, "the reply holds no choices[0].token_ids: {!s:.200}", value)
    size, reason, ours = len(tokens), choice.get("finish_reason"), choice.get("turnwise") or {}
    expect(reason in STOPS, "the reply has the finish_reason {!r:.60}; known: {}", reason, ", ".join(STOPS))
    stop = STOPS[reason]
    if stop is Stop.TOKEN and not (tokens and tokens[-1] in stop_ids):
        stop = Stop.STRING  # vLLM calls both endings "stop"
    content = choice["logprobs"].get("content") if isinstance(choice.get("logprobs"), dict) else None
    rows = content if isinstance(content, list) else []
    same = [row.get("token_id") if isinstance(row, dict) else None for row in rows] == tokens
    expect(same, "the log-probabilities of the reply do not belong to its tokens; ask the server for logprobs")
    logp = [row.get("logprob") for row in rows]
    finite = all(type(x) in NUMBERS and math.isfinite(x) for x in logp)
    expect(finite, "the reply holds a log-probability that is no finite number")
    mass, entropy, confidence = (_floats(ours.get(name), size, name) for name in ("mass", "entropy", "confidence"))
    routes, masks = _routes(ours.get("routes")), read_sampling_mask(choice.get("sampling_mask"), tokens)
    sampled = (tokens, list(map(float, logp)), mass or [0.0] * size, [0] * size, stop)
    done = Completion(*sampled, entropy=entropy, confidence=confidence, routes=routes, kept=masks)
    held = _floats([ours.get("seconds_held", 0.0)], 1, "seconds_held")[0]
    spans = choice.get("weight_versions")
    labels: list[str] = []
    for span in spans if isinstance(spans, list) else []:
        ordered = isinstance(span, dict) and span.get("start") == len(labels) and type(span.get("end")) is int
        expect(ordered, "the weight_versions of the reply are not in order: {!s:.200}", spans)
        labels += [str(span.get("version"))] * (span["end"] - len(labels))
    # no spans at all: a server that does not say
    whole = not labels or len(labels) == size
    expect(whole, "the weight_versions of the reply cover {} of {} tokens", len(labels), size)
    return SampledPart(done, tuple(labels), held)


def what_is_reported(value: Any) -> Reported:
    """What a vLLM server reports, from its reply to a request with top-k 1: where it filters before it takes logarithms, each
    token has probability 1."""
    try:
        done = read_part(value, frozenset()).completion
    except ServerFault:
        return Reported.RAW
    if done.kept and all(done.kept):
        return Reported.WITH_MASK
    return Reported.RAW if any(done.logp) or not done.logp else Reported.PROCESSED


def _floats(value: Any, size: int, name: str) -> list[float]:
    if value is None:
        return []
    whole = isinstance(value, list) and len(value) == size
    expect(whole, "the reply holds {} of another length than its tokens", name)
    expect(all(type(x) in NUMBERS for x in value), "the reply holds {} that are no numbers", name)
    return list(map(float, value))


def read_sampling_mask(value: Any, tokens: Sequence[int]) -> list[bytes]:
    """The ids that the server's filters kept at each token, as recorded; a token with an empty list has no record. The field and
    its form are those of vLLM's option ``--return-sampling-mask``."""
    if value is None:
        return []
    whole = isinstance(value, list) and len(value) == len(tokens)
    expect(whole, "the reply holds a sampling_mask of another length than its tokens")
    for token, row in zip(tokens, value):
        ids = isinstance(row, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in row)
        expect(ids, "the sampling_mask of the reply holds {!r:.60}; a list of token ids was expected", row)
        sound = not row or (token in row and len(set(row)) == len(row))
        expect(sound, "the sampling_mask of the reply does not hold the sampled id {}, or holds an id twice", token)
    return [array("i", sorted(row)).tobytes() for row in value]


def _routes(value: Any) -> list[bytes]:
    """The experts at every position that was read, where the server's model has routers."""
    if value is None:
        return []
    try:
        rows, data = int(value["rows"]), base64.b64decode(value["data"], validate=True)
    except (TypeError, KeyError, ValueError) as fault:
        raise ServerFault("the reply holds routes of experts that cannot be read") from fault
    # an expert is two bytes, and every position has as many of them
    whole = rows >= 1 and data and not len(data) % (2 * rows)
    expect(whole, "the reply holds {} bytes of routes for {} positions", len(data), rows)
    width = len(data) // rows
    return [data[n : n + width] for n in range(0, len(data), width)]
