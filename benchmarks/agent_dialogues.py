"""Random dialogues of agents, played twice: white-box, by code that knows which turn each call continues and keeps the ids; and
over HTTP, by the stock clients of the openai and anthropic packages, where only messages travel. Both must give equal ids,
log-probabilities, restarts, advantages, loss and gradient.

    python benchmarks/agent_dialogues.py --dialogues 1000

The dialogues have odd chat templates, parallel calls, thinking, truncated turns, sub-agents, branches, second answers, compaction
and rewritten history. The policy is a hash of the ids it reads, so any difference in ids changes everything behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from turnwise import recipes
from turnwise.checks.synthetic import gradient, planned
from turnwise.core.batch import pack
from turnwise.core.records import Completion, Group, Message, Sampling, Status, Stop, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from turnwise.rollout.agent_episode import AgentEpisode, AgentOutcome
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.lineage import copied
from turnwise.rollout.renderer import Dialogue, Renderer

LAST = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "numbered": "{% for m in messages %}<|{{ m.role }}|>{{ loop.index }}: {{ m.content }}<|end|>{% endfor %}" + LAST,
    "trimmed": "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}" + LAST,
    "without old thinking": "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and '</think>' in m.content "
    "and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    + LAST,
    "marks the last user": "{% set ns = namespace(at=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.at = "
    "loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ '!' if loop.index0 == ns.at }}"
    "{{ m.content }}<|end|>{% endfor %}" + LAST,
}
CALL = '<tool_call>{"name": "python", "arguments": {"code": "t=%d*3;t"}}</tool_call>'
TEXTS = (
    "yes", "answer: 7", CALL % 2, 'two ' + CALL % 3 + CALL % 4, "", "<tool_call>{broken", "guess 5 · ü 日本",
    "<think>hm, let me see</think>answer: 3", "<think>a call</think>" + CALL % 5, "<think>never closed",
    '<tool_call>{"arguments": {"b": [1, {"x": null}], "a": "é"}, "name": "f"}</tool_call>', "  spaces around  \n",
    "a long answer that goes on and on and on and is likely to be cut in the middle of a word",
)  # fmt: skip
PROTOCOLS = ("chat", "chat streamed", "responses", "responses streamed", "anthropic", "anthropic streamed")
SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "a tool", "parameters": SCHEMA}}
    for name in ("python", "f")
)
LIMITS = EpisodeLimits(turns=10**6, context=10**6)
SAMPLING = Sampling(max_tokens=400)
GROUP = 4


@cache
def renderer(template: str) -> Renderer:
    tokenizer = tiny_tokenizer([], 300)
    tokenizer.chat_template = TEMPLATES[template]
    return Renderer(tokenizer)


class HashPolicy:
    """Says a text that depends only on the ids it reads."""

    def __init__(self, rendering: Renderer, seed: int) -> None:
        self.rendering, self.seed = rendering, seed

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        number = int(hashlib.sha256(f"{self.seed} {list(ids)}".encode()).hexdigest(), 16)
        whole = self.rendering.encode_turn(TEXTS[number % len(TEXTS)])
        tokens = whole[: sampling.max_tokens]
        logp = [-((number >> n) % 97) / 50 for n in range(len(tokens))]
        stop = Stop.TOKEN if len(tokens) == len(whole) else Stop.LENGTH
        return Completion(tokens, logp, [0.0] * len(tokens), [3] * len(tokens), stop)

    def park(self) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


# ---------------------------------------------------------------- what agents do


@dataclass
class Place:
    """A dialogue up to one answer: as messages, and as the white-box player knows it."""

    messages: list[Message]
    calls: list[str] = field(default_factory=list)  # ids of the calls of its last message
    dialogue: Dialogue | None = None
    number: int = -1  # of the turn


@dataclass(frozen=True)
class Ask:
    """One call of the agent. ``behind``: the place it continues; None: a new sequence begins."""

    messages: list[Message]
    behind: Place | None
    tail: list[Message]
    max_tokens: int


class RandomAgent:
    """Decides what to ask next, from a seed. Texts are numbered, so that no two calls ask the same by accident."""

    def __init__(self, seed: int) -> None:
        self.rng, self.places, self.count = random.Random(seed), list[Place](), 0
        self.first: list[list[Message]] = []
        self.kinds: Counter[str] = Counter()

    def _user(self, text: str) -> Message:
        self.count += 1
        return {"role": "user", "content": f"{text} {self.count}"}

    def next(self) -> Ask:
        kind = self.rng.choices(
            ("continue", "branch", "sub-agent", "compaction", "rewritten"),
            (12, 2, 2, 2, 2) if self.places else (0, 0, 1, 0, 0),
        )[0]
        self.kinds[kind if self.places else "opening"] += 1
        limit = self.rng.choice((400, 400, 400, 7))
        if kind in ("continue", "branch"):
            place = self.places[-1] if kind == "continue" else self.rng.choice(self.places)
            tail = self._tail(place)
            return Ask([*place.messages, *tail], place, tail, limit)
        messages = getattr(self, f"_{kind.replace('-', '_')}")()
        return Ask(messages, None, messages, limit)

    def _tail(self, place: Place) -> list[Message]:
        replies: list[Message] = [
            {"role": "tool", "tool_call_id": i, "content": f"reply {self.rng.randint(0, 99)}"} for i in place.calls
        ]
        if not replies or self.rng.random() < 0.2:
            replies.append(self._user("go on"))
        return replies

    def _sub_agent(self) -> list[Message]:
        system = [{"role": "system", "content": f"be brief {self.count}"}] if self.rng.random() < 0.4 else []
        self.first.append([*system, self._user("task")])
        return list(self.first[-1])

    def _compaction(self) -> list[Message]:
        return [*self.rng.choice(self.first), self._user("so far: nothing")]

    def _rewritten(self) -> list[Message]:
        self.count += 1
        said = {"role": "assistant", "content": f"I said something else {self.count}"}
        return [*self.rng.choice(self.first), said, self._user("and then")]

    def answered(self, ask: Ask, message: Message, dialogue: Dialogue | None = None) -> None:
        calls = [call["id"] for call in message.get("tool_calls", ())]
        self.places.append(Place([*ask.messages, message], calls, dialogue, len(self.places)))


# --------------------------------------------------------------------- white-box


async def white_box(seed: int, template: str, calls: int) -> tuple[list[Turn], Counter[str]]:
    """The turns of a dialogue by code that knows where each call stands."""
    rendering, agent, turns = renderer(template), RandomAgent(seed), list[Turn]()
    policy, continued = HashPolicy(rendering, seed), set[int]()
    for number in range(calls):
        ask = agent.next()
        if ask.behind is None:
            dialogue = rendering.open(ask.tail, TOOLS)
            context, restart = tuple(dialogue.ids), number > 0
        else:
            assert ask.behind.dialogue is not None
            dialogue = copied(ask.behind.dialogue)
            rendering.append_observation(dialogue, ask.tail)
            exact = not dialogue.restarted and ask.behind.number == number - 1 and ask.behind.number not in continued
            context, restart = tuple(dialogue.new_ids if exact else dialogue.ids), not exact
            continued.add(ask.behind.number)
        done = await policy.generate(dialogue.ids, replace(SAMPLING, max_tokens=ask.max_tokens))
        action = rendering.append_sampled(dialogue, done.tokens)
        kept = (
            rendering.syntax.parse(action.text, TOOLS).text.strip() if action.calls or action.thinking else action.text
        )
        named = [{"id": f"call_{number}_{n}", "function": {"name": c.name}} for n, c in enumerate(action.calls)]
        message = {"role": "assistant", "content": kept, **({"tool_calls": named} if named else {})}
        agent.answered(ask, message, copied(dialogue))
        sampled = tuple(done.tokens), tuple(done.logp), (), tuple(done.version)
        turns.append(Turn(context, *sampled, restart=restart, stop=done.stop))
    turns[-1] = replace(turns[-1], reward=float(seed % 3))
    return turns, agent.kinds


# -------------------------------------------------------------------- over HTTP


async def over_http(seed: int, template: str, calls: int, protocol: str, http: Any, sessions: Any) -> list[Turn]:
    """The turns of the same dialogue, asked for by a stock client."""
    rendering = renderer(template)
    episode = AgentEpisode("g.0", Task("dialogue", seed), HashPolicy(rendering, seed), rendering, SAMPLING, LIMITS)  # type: ignore[arg-type]
    opened, agent = sessions.open(episode), RandomAgent(seed)
    ask_with = {"chat": chat, "responses": responses, "anthropic": anthropic}[protocol.split()[0]]
    for _ in range(calls):
        ask = agent.next()
        message = await ask_with(http, opened.key, ask, "streamed" in protocol)
        agent.answered(ask, message)
    sessions.close(opened.key)
    episode.finish(AgentOutcome(float(seed % 3)))
    return episode.turns


async def chat(http: Any, key: str, ask: Ask, streamed: bool) -> Message:
    import openai

    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=http, max_retries=0)
    body: dict[str, Any] = {
        "model": "policy",
        "messages": ask.messages,
        "tools": list(TOOLS),
        "max_tokens": ask.max_tokens,
    }
    if not streamed:
        return dict((await client.chat.completions.create(**body)).choices[0].message.model_dump(exclude_none=True))
    text, calls = "", list[dict[str, Any]]()
    async for chunk in await client.chat.completions.create(stream=True, **body):
        text += chunk.choices[0].delta.content or ""
        calls += [call.model_dump(exclude={"index"}) for call in chunk.choices[0].delta.tool_calls or ()]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def as_items(message: Message) -> list[dict[str, Any]]:
    """A message as items of the Responses protocol."""
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    if "items" in message:
        return list(message["items"])
    return [{"role": message["role"], "content": message["content"]}]


async def responses(http: Any, key: str, ask: Ask, streamed: bool) -> Message:
    import openai

    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=http, max_retries=0)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    items = [item for message in ask.messages for item in as_items(message)]
    body: dict[str, Any] = {"model": "policy", "input": items, "tools": tools, "max_output_tokens": ask.max_tokens}
    if streamed:
        done = [e async for e in await client.responses.create(stream=True, **body)][-1].response
    else:
        done = await client.responses.create(**body)
    output = [item.model_dump(exclude_none=True) for item in done.output]
    calls = [{"id": item["call_id"]} for item in output if item["type"] == "function_call"]
    return {
        "role": "assistant",
        "content": done.output_text,
        "items": output,
        **({"tool_calls": calls} if calls else {}),
    }


def as_blocks(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages of the Anthropic protocol: replies of tools stand in a user message, which may go on with text."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            if out and out[-1]["role"] == "user" and isinstance(out[-1]["content"], list):
                out[-1]["content"].append(block)
            else:
                out.append({"role": "user", "content": [block]})
        else:
            out.append({"role": message["role"], "content": message.get("blocks", message["content"])})
    return out


async def anthropic(http: Any, key: str, ask: Ask, streamed: bool) -> Message:
    import anthropic as library

    client = library.AsyncAnthropic(base_url="http://test", api_key=key, http_client=http, max_retries=0)
    functions = [tool["function"] for tool in TOOLS]
    tools = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions]  # type: ignore[index]
    system = [m["content"] for m in ask.messages if m["role"] == "system"]
    messages = as_blocks([m for m in ask.messages if m["role"] != "system"])
    body: dict[str, Any] = {"model": "policy", "max_tokens": ask.max_tokens, "messages": messages, "tools": tools}
    body |= {"system": system[0]} if system else {}
    if streamed:
        async with client.messages.stream(**body) as stream:
            reply = await stream.get_final_message()
    else:
        reply = await client.messages.create(**body)
    blocks = [block.model_dump(exclude_none=True) for block in reply.content]
    calls = [{"id": block["id"]} for block in blocks if block["type"] == "tool_use"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return {"role": "assistant", "content": text, "blocks": blocks, **({"tool_calls": calls} if calls else {})}


# -------------------------------------------------------------------- comparison


def learned(dialogues: Sequence[Sequence[Turn]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advantages, loss and gradient of these dialogues, in groups, under a policy near the one that sampled."""
    task = Task("dialogue", 0)
    members = [
        Trajectory(f"{n // GROUP}.{n}", task, tuple(turns), status=Status.FINISHED) for n, turns in enumerate(dialogues)
    ]
    groups = [Group(str(n // GROUP), task, tuple(members[n : n + GROUP])) for n in range(0, len(members), GROUP)]
    batch, objective = pack(groups), recipes.build("dr_grpo").objective
    noise = torch.randn(batch.behaviour.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaf = (batch.behaviour.x.double() + 0.1 * noise).requires_grad_()
    found = gradient(objective, batch, {Signal.LOGP: leaf})
    return planned(objective, batch)["advantage"].x, found.loss, found.of[Signal.LOGP]


async def compare(dialogues: int, calls: int = 8, first: int = 0) -> dict[str, Any]:
    """Play dialogues both ways and compare them. Raises ``AssertionError`` at the first difference."""
    from turnwise.serve.app import make_app
    from turnwise.serve.sessions import Sessions

    sessions, kinds, causes = Sessions(), Counter[str](), Counter[str]()
    expected, received = list[list[Turn]](), list[list[Turn]]()
    clients = {name: http_client(name, make_app(sessions)) for name in ("openai", "anthropic")}
    for seed in range(first, first + dialogues):
        template, protocol = list(TEMPLATES)[seed % len(TEMPLATES)], PROTOCOLS[seed // len(TEMPLATES) % len(PROTOCOLS)]
        turns, done = await white_box(seed, template, calls)
        http = clients["anthropic" if "anthropic" in protocol else "openai"]
        got = await over_http(seed, template, calls, protocol, http, sessions)
        for n, (ours, theirs) in enumerate(zip(turns, got, strict=True)):
            for name in ("restart", "context", "tokens", "logp", "stop", "reward"):
                a, b = getattr(ours, name), getattr(theirs, name)
                assert a == b, (
                    f"dialogue {seed} ({template}, {protocol}), turn {n}: {name} is {b!r:.200}, expected {a!r:.200}"
                )
        kinds += done
        causes[protocol] += 1
        expected.append(turns)
        received.append(list(got))
    same = [bool(torch.equal(a, b)) for a, b in zip(learned(expected), learned(received))]
    assert all(same), f"advantages, loss, gradient equal: {same}"
    turns_in_all = sum(map(len, expected))
    restarts = sum(turn.restart for one in expected for turn in one)
    return {
        "dialogues": dialogues,
        "calls": turns_in_all,
        "restarts": restarts,
        "kinds": dict(kinds),
        "protocols": dict(causes),
    }


def http_client(package: str, app: Any) -> Any:
    """A client of the HTTP library that this package uses, with the application behind it instead of a socket."""
    library = __import__(package)
    modules = {getattr(library.AsyncClient, "__mro__", (object,))[0].__module__, *sys.modules}
    name = next(n for n in ("httpx2", "httpx") if n in modules and _uses(library, n))
    http = __import__(name)
    return http.AsyncClient(transport=http.ASGITransport(app), base_url="http://test")


def _uses(library: Any, name: str) -> bool:
    default = getattr(library, "DefaultAsyncHttpxClient", None)
    return any(base.__module__.split(".")[0] == name for base in getattr(default, "__mro__", ()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare agents over HTTP with white-box play.")
    parser.add_argument("--dialogues", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=8, help="per dialogue")
    namespace = parser.parse_args()
    began = time.perf_counter()
    found = asyncio.run(compare(namespace.dialogues, namespace.calls))
    print(json.dumps({**found, "seconds": round(time.perf_counter() - began, 1)}, indent=1))
    print("equal: ids, log-probabilities, restarts, rewards, advantages, loss, gradient")
    return 0


if __name__ == "__main__":
    sys.exit(main())
