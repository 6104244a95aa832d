"""Environments of an OpenEnv server, by its address: the server plays, this side speaks its wire.

    load("openenv:http://127.0.0.1:8000,turns=12,success=1")

Each episode is one WebSocket session of the server. Its JSON schema of an action is the policy's tool ``act``; where an action is
one text and nothing else, a turn without a call is that text. Observations are told as text: the only field of text, or all
fields by name. Rewards are the server's; an episode succeeds if they add up to ``success`` (more than 0 where it is left out).
``goal`` is said before the first observation. Environments that offer MCP tools in place of actions are not supported.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import LimitedEpisode, text_action, tool_action, user_message
from turnwise.environments.contract import is_finite
from turnwise.environments.families.adapter import import_package, member_class, split_options, world_seed
from turnwise.errors import EnvironmentFault, SettingError

OPTIONS = ("turns", "success", "goal", "seconds")
OWN_FIELDS = ("metadata",)  # of the package's base classes: no part of an action or of what is told
MAX_TEXT = 4000  # characters of an observation
TURNS, SECONDS = 16, 30.0


class OpenEnvEnvironment(LimitedEpisode):
    """One session of a server. ``environment`` makes a subclass for each address."""

    deterministic = False  # the server may act on the world
    suggests: ClassVar[Mapping[str, Any]] = {"context": 1024, "max_tokens": 64}
    url: ClassVar[str]
    action_schema: ClassVar[Mapping[str, Any]]
    goal: ClassVar[str] = ""
    success_at: ClassVar[float | None] = None
    seconds: ClassVar[float] = SECONDS
    socket: Any = None
    total: float  # of the rewards so far

    def begin(self, seed: int) -> Sequence[Message]:
        client = import_package("websockets.sync.client", "openenv")
        # https becomes wss
        address = "ws" + self.url.removeprefix("http") + "/ws"
        try:
            self.socket = client.connect(address, open_timeout=self.seconds, proxy=None)
        except Exception as fault:  # refused, timed out, no such host, or the server is full
            raise EnvironmentFault(f"no session of {self.url}: {fault}") from fault
        self.total = 0.0
        answer = self._ask("reset", {"seed": world_seed(seed, self.split)})
        if isinstance(answer, str):
            raise EnvironmentFault(f"{self.url} cannot reset: {answer}")
        text = tell(answer["observation"])
        return [user_message(f"{self.goal}\n{text}" if self.goal else text)]

    def act(self, action: Action) -> Step:
        field = text_field(self.action_schema)
        call = action.calls[0] if action.calls else None
        if action.faults:
            answer: dict[str, Any] | str = action.faults[0]
        elif call and call.name != "act":
            answer = f"there is no tool {call.name[:40]!r}; call act"
        elif call or field:
            answer = self._ask("step", dict(call.arguments) if call else {field: action.text})
        else:
            answer = "call the tool act"
        if isinstance(answer, str):
            return Step([user_message(f"error: {answer[:400]}")], info={"tool_errors": 1})
        reward = float(answer.get("reward") or 0.0)
        if not is_finite(reward):
            raise EnvironmentFault(f"{self.url} pays {reward!r}; a reward is a finite number")
        self.total += reward
        done = bool(answer.get("done"))
        info = {"tool_calls": len(action.calls), **({"success": self.succeeded()} if done else {})}
        return Step([user_message(tell(answer["observation"]))], reward, terminated=done, info=info)

    def succeeded(self) -> bool:
        return self.total > 0 if self.success_at is None else self.total >= self.success_at

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any] | str:
        """The data of the server's answer; the words of an error that the policy can mend."""
        try:
            self.socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self.socket.recv(timeout=self.seconds))
        except Exception as fault:  # closed, timed out, or no JSON
            raise EnvironmentFault(f"{self.url} does not answer: {fault or type(fault).__name__}") from fault
        content = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(content, dict):
            raise EnvironmentFault(f"{self.url} answers {str(answer)[:120]!r}; an OpenEnv server sends type and data")
        if answer.get("type") == "error":
            return str(content.get("message", content))
        if not isinstance(content.get("observation"), dict):
            raise EnvironmentFault(f"{self.url} sends no observation: {str(content)[:120]}")
        return content

    def random_action(self, rng: random.Random) -> Action:
        def sample(rule: Mapping[str, Any]) -> Any:
            if "enum" in rule:
                return rng.choice(list(rule["enum"]))
            low = int(rule.get("minimum", 0))
            kinds: dict[str, Callable[[], Any]] = {
                "integer": lambda: rng.randint(low, int(rule.get("maximum", low + 9))),
                "number": lambda: low + rng.random(),
                "boolean": lambda: rng.random() < 0.5,
                "array": list,
                "object": dict,
            }
            return kinds.get(str(rule.get("type")), lambda: rng.choice(["hello", "1", "look"]))()

        values = {name: sample(rule) for name, rule in fields(self.action_schema).items()}
        field = text_field(self.action_schema)
        return text_action(str(values[field])) if field else tool_action("act", **values)

    def close(self) -> None:
        socket, self.socket = self.socket, None
        if socket is not None:
            socket.send(json.dumps({"type": "close"}))
            socket.close()


def fields(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The fields of an action that the policy fills in."""
    return {name: rule for name, rule in schema.get("properties", {}).items() if name not in OWN_FIELDS}


def text_field(schema: Mapping[str, Any]) -> str:
    """The field of actions that are one text; empty where they are more."""
    names = fields(schema)
    only = next(iter(names), "")
    return only if len(names) == 1 and names[only].get("type") == "string" and "enum" not in names[only] else ""


def tell(observation: Mapping[str, Any]) -> str:
    """An observation as text."""
    values = {name: value for name, value in observation.items() if name not in OWN_FIELDS}
    texts = [value for value in values.values() if isinstance(value, str)]
    if len(values) == len(texts) == 1:
        return str(texts[0])[:MAX_TEXT]
    words = (f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items())
    return "\n".join(words)[:MAX_TEXT]


@cache
def environment(spec: str) -> type[OpenEnvEnvironment]:
    """The class of a server's address."""
    import_package("websockets", "openenv")
    url, options = split_options("openenv", spec, OPTIONS)
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise SettingError(f"openenv:{url} is no address; write openenv:http://HOST:PORT")
    seconds, success = float(options.get("seconds", SECONDS)), options.get("success")
    schema = action_schema(url, seconds)
    parameters = {
        "type": "object",
        "properties": fields(schema),
        "required": [name for name in schema.get("required", ()) if name not in OWN_FIELDS],
        **({"$defs": schema["$defs"]} if "$defs" in schema else {}),  # what the fields refer to
    }
    description = str(schema.get("description", "act in the world")).strip().splitlines()[0]
    tool = {"type": "function", "function": {"name": "act", "description": description, "parameters": parameters}}
    return member_class(
        "openenv", spec, OpenEnvEnvironment, f"The environment of the OpenEnv server {url}.",
        url=url, action_schema=schema, tools=() if text_field(schema) else (tool,),
        max_turns=int(options.get("turns", TURNS)), seconds=seconds, goal=str(options.get("goal", "")),
        success_at=None if success is None else float(success),
    )  # fmt: skip


def action_schema(url: str, seconds: float) -> Mapping[str, Any]:
    """What the server says an action is."""
    # a server of this machine must not be looked for through a proxy
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/schema", timeout=seconds) as answer:
            schema = json.loads(answer.read())["action"]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise SettingError(f"no OpenEnv server answers at {url}/schema ({fault}); start it, or mend {url}") from fault
    if not isinstance(schema, dict) or not fields(schema):
        raise SettingError(f"{url} names no field of an action; servers that offer MCP tools alone are not supported")
    return schema
