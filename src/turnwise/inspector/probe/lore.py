"""What adversaries know of an environment before they attack it: how its oracle and its random policy act on other tasks."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from turnwise.core.protocols import Action, ToolCall
from turnwise.environments.base import tool_action
from turnwise.inspector.probe.play import Moment, ProbeEpisode, ProbePlayer, ProbeTask

LORE_TASKS = 16
WORD = re.compile(r"[\w.+-]+")
ODD_VALUES = ("", "nan", "inf", "-1", "0", "none", "true", "*", ".", "?")
ODD_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "integer": (-1, 0, -1000, 10**6),
    "number": (-1.0, 0.0, -1e3, 1e6),
    "boolean": (True, False),
    "array": ((), ("",)),
    "object": ({},),
}
DIVERSE = 40  # at most so many different actions, words or calls are kept


@dataclass(frozen=True)
class Lore:
    """``prefix``: what all final texts of the oracle begin with, such as ``answer: ``; ``values``: what follows it."""

    oracle_episodes: tuple[ProbeEpisode, ...]
    oracle_actions: tuple[Action, ...]
    random_actions: tuple[Action, ...]
    prefix: str
    values: tuple[str, ...]
    words: tuple[str, ...]
    tools: tuple[dict[str, Any], ...]

    @property
    def has_oracle(self) -> bool:
        return bool(self.oracle_episodes)

    @property
    def actions(self) -> tuple[Action, ...]:
        return (*self.oracle_actions, *self.random_actions)

    def calls(self, rng: random.Random, words: Sequence[str], count: int = DIVERSE) -> list[Action]:
        """Calls of every tool, with arguments of the right type: odd ones, and words of the dialogue."""
        found = [
            _odd_call(rng, tool, words) for tool in self.tools for _ in range(1 + count // max(1, len(self.tools)))
        ]
        return _distinct(found)


def follow_oracle(moment: Moment) -> Action:
    return moment.oracle() or Action("")


def gather_lore(player: ProbePlayer, tasks: Sequence[ProbeTask]) -> Lore:
    """Plays the oracle on ``tasks``, none of which is attacked later."""
    played = [player.play(task, follow_oracle) for task in tasks]
    has_oracle = any(action.text or action.calls for episode in played for action in episode.actions)
    episodes = tuple(e for e in played if not e.fault) if has_oracle else ()
    oracle_actions = _distinct([action for episode in episodes for action in episode.actions])
    drawn = [action for task in tasks[:4] for action in player.random_actions(task, 12)]
    finals = list(dict.fromkeys(e.actions[-1].text for e in episodes if e.actions and not e.actions[-1].calls))
    prefix = _common_prefix(finals)
    texts = " ".join(str(m["content"]) for e in played for m in e.messages)
    words = tuple(dict.fromkeys(WORD.findall(texts)))[:200]
    tools = tuple(getattr(player.cls, "tools", ()) or ())
    values = tuple(dict.fromkeys(text[len(prefix) :].strip() for text in finals))
    return Lore(episodes, tuple(oracle_actions), tuple(_distinct(drawn)), prefix, values, words, tools)


def _common_prefix(texts: Sequence[str]) -> str:
    """What several texts begin with, up to the last blank; empty where it would be a whole text."""
    first, last = (min(texts), max(texts)) if len(texts) > 1 else ("", "")
    common = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last)))
    return common[: common.rfind(" ") + 1]


def _odd_call(rng: random.Random, tool: dict[str, Any], words: Sequence[str]) -> Action:
    function = tool["function"]
    properties = function.get("parameters", {}).get("properties", {})
    arguments = {key: _argument(rng, schema, words) for key, schema in properties.items()}
    return tool_action(function["name"], **arguments)


def _argument(rng: random.Random, schema: Any, words: Sequence[str]) -> Any:
    if isinstance(schema, dict) and schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    odd = ODD_ARGUMENTS.get(str(schema.get("type")) if isinstance(schema, dict) else "")
    return rng.choice(odd if odd is not None else ("", *words))


def _distinct(actions: Sequence[Action]) -> list[Action]:
    by_text = {f"{action.text} {action.calls}": action for action in actions}
    return list(by_text.values())[:DIVERSE]


def changed_call(action: Action, **changes: Any) -> Action:
    """The action with other arguments in its first call."""
    call: ToolCall = action.calls[0]
    return tool_action(call.name, **{**call.arguments, **changes})
