"""Rows as people write them: dialogues, prompts with completions, prompts with a better and a worse answer.

    {"messages": [...]}                                    every assistant turn is learned from
    {"prompt": ..., "completion": ...}                     text or messages; what the assistant says in the completion, which
                                                           may be called ``response``
    {"prompt": ..., "chosen": ..., "rejected": ...}        text or messages; or two dialogues with a common beginning; or,
                                                           for ``prompt``, ``prompt_chosen`` and ``prompt_rejected``

Other columns: ``task`` (a key) or ``seed`` with ``difficulty`` and ``split``; ``reward``, ``success``, ``answer``, ``tools``;
anything else that is a number or a short text becomes a fact. Of a pair, ``NAME_chosen`` and ``NAME_rejected`` are of one
side. Knows no tokens and no environment.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.core.records import Message, Task
from turnwise.data.files import Faults, number, read_table

ROLES = ("system", "developer", "user", "assistant", "tool")
KNOWN = {
    "messages", "prompt", "completion", "chosen", "rejected", "task", "seed", "difficulty", "split", "reward", "success",
    "answer", "tools",
}  # fmt: skip
LABEL = 200  # characters of a text that can still be a label


class Wrong(Exception):
    """Why one row cannot be used."""


@dataclass(frozen=True)
class Script:
    """One dialogue: what was there before, what the assistant is to learn, and what is known of it."""

    before: tuple[Message, ...]  # the prompt: context, whoever said it
    said: tuple[Message, ...]  # from the first turn to learn on; others' messages among them are context
    tools: tuple[dict[str, Any], ...] = ()
    reward: float | None = None
    success: bool | None = None
    answer: str | None = None
    facts: Mapping[str, float | str] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)  # by name

    @property
    def turns(self) -> list[str]:
        """What the assistant says, turn by turn."""
        return [m["content"] for m in self.said if m["role"] == "assistant"]


@dataclass(frozen=True)
class Row:
    """A line of a file: one script, or the better one and the worse one."""

    line: int
    scripts: tuple[Script, ...]
    task: Task | None = None
    copy: int = 0  # of one line that became several rows

    @property
    def pair(self) -> bool:
        return len(self.scripts) > 1


@dataclass(frozen=True)
class Rows:
    path: Path
    rows: tuple[Row, ...]
    unused: Mapping[str, int]  # columns that are neither known, nor numbers, nor short texts; in how many rows

    def __len__(self) -> int:
        return len(self.rows)


def read_rows(path: str | Path, environment: str = "") -> Rows:
    """The rows of a file; raises one error that names every bad line's number, the first few in words."""
    path, table = Path(path), read_table(path)
    faults, rows, unused = Faults(path), [], Counter[str]()
    for line, columns in table:
        try:
            rows.append(_row(line, columns, environment, unused))
        except Wrong as wrong:
            faults.add(line, str(wrong))
    faults.refuse(len(table))
    return Rows(path, tuple(rows), dict(unused))


def _row(line: int, columns: Mapping[str, Any], environment: str, unused: Counter[str]) -> Row:
    given = {name: value for name, value in columns.items() if value is not None}
    if "response" in given and "prompt" in given and "completion" not in given:
        given["completion"] = given.pop("response")
    if "chosen" in given or "rejected" in given:
        _all(given, "chosen", "rejected")
        scripts = _pair(given)
    elif "completion" in given:
        _all(given, "prompt", "completion")
        scripts = [_completion(given["prompt"], given["completion"])]
    elif "messages" in given:
        scripts = [_dialogue(messages(given["messages"], "messages"))]
    else:
        seen = ", ".join(map(str, list(columns)[:6])) or "none"
        raise Wrong(f"columns {seen}; write messages, or prompt and completion, or prompt, chosen and rejected")
    sides = ("chosen", "rejected") if len(scripts) == 2 else ("",)
    told = [_told(script, given, side, unused) for script, side in zip(scripts, sides)]
    return Row(line, tuple(told), _task(given, environment))


def _all(given: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name not in given:
            raise Wrong(f"no column {name}; write {' and '.join(names)}")


# -------------------------------------------------------------------- dialogues


def messages(value: Any, name: str) -> list[Message]:
    """A list of chat messages, their contents as text."""
    if not isinstance(value, list) or not value:
        raise Wrong(f'{name} is {_seen(value)}; write a list of {{"role": ..., "content": ...}}')
    return [_message(m, name) for m in value]


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, dict) or "role" not in value:
        like = ' (it looks like ShareGPT: write role and content for "from" and "value")'
        hint = like if isinstance(value, dict) and "from" in value else ""
        raise Wrong(f'{name} holds {_seen(value)}{hint}; write {{"role": ..., "content": ...}}')
    role = value["role"]
    if role not in ROLES:
        raise Wrong(f"{name} has the role {_seen(role)}; write one of {', '.join(ROLES)}")
    kept = {k: v for k, v in value.items() if k in ("name", "tool_call_id") and isinstance(v, str)}
    return {"role": role, "content": _content(value, name), **kept}


def _content(value: Mapping[str, Any], name: str) -> str:
    """The text of a message; calls given beside it are written into it, as a policy would write them."""
    content, calls = value.get("content"), value.get("tool_calls") or []
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(p["text"] for p in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise Wrong(f"a {value['role']} message of {name} has the content {_seen(content)}; write text")
    if calls and value["role"] != "assistant":
        raise Wrong(f"a {value['role']} message of {name} calls tools; only the assistant can")
    if not isinstance(calls, list):
        raise Wrong(f"tool_calls of {name} is {_seen(calls)}; write a list")
    return content + "".join(_call(call, name) for call in calls)


def _call(value: Any, name: str) -> str:
    function: Any = value.get("function", value) if isinstance(value, dict) else None
    try:
        arguments = function["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(function["name"], str) or not isinstance(arguments, dict):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise Wrong(
            f'a tool call of {name} is {_seen(value)}; write {{"function": {{"name": ..., "arguments": {{...}}}}}}'
        ) from None
    return f"<tool_call>{json.dumps({'name': function['name'], 'arguments': arguments})}</tool_call>"


def _dialogue(said: list[Message], name: str = "messages") -> Script:
    """Every assistant turn is learned from; what stands before the first is the prompt."""
    acts = [n for n, m in enumerate(said) if m["role"] == "assistant"]
    if not acts:
        raise Wrong(f"{name} holds no assistant message, so there is nothing to learn")
    if acts[0] == 0:
        raise Wrong(f"{name} begins with the assistant; write a user or system message before it")
    return Script(tuple(said[: acts[0]]), tuple(said[acts[0] :]))


def _prompt(value: Any) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return messages(value, "prompt")


def _answer(value: Any, name: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return messages(value, name)


def _completion(prompt: Any, completion: Any, name: str = "completion") -> Script:
    before, said = _prompt(prompt), _answer(completion, name)
    if said[0]["role"] != "assistant":
        raise Wrong(f"{name} begins with a {said[0]['role']} message; what comes before the assistant is the prompt")
    return Script(tuple(before), tuple(said))


def _pair(given: Mapping[str, Any]) -> list[Script]:
    chosen, rejected = given["chosen"], given["rejected"]
    whole = [isinstance(v, list) and bool(v) and _role(v[0]) != "assistant" for v in (chosen, rejected)]
    apart = [name for name in ("prompt_chosen", "prompt_rejected") if name in given]
    if apart:
        _all(given, "prompt_chosen", "prompt_rejected")
        scripts = [_completion(given[f"prompt_{name}"], given[name], name) for name in ("chosen", "rejected")]
    elif all(whole):
        scripts = _parted(messages(chosen, "chosen"), messages(rejected, "rejected"), given.get("prompt"))
    elif "prompt" not in given:
        raise Wrong("no column prompt, and chosen and rejected are not both dialogues that begin alike; write a prompt")
    elif any(whole):
        raise Wrong("one of chosen and rejected is a whole dialogue, the other an answer; write both alike")
    else:
        scripts = [_completion(given["prompt"], given[name], name) for name in ("chosen", "rejected")]
    if (scripts[0].before, scripts[0].said) == (scripts[1].before, scripts[1].said):
        raise Wrong("chosen and rejected are the same; there is nothing to prefer")
    return scripts


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _parted(chosen: list[Message], rejected: list[Message], prompt: Any) -> list[Script]:
    """Two dialogues: the common beginning is the prompt."""
    pairs = zip(chosen, rejected)
    shared = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    sides = {"chosen": chosen[shared:], "rejected": rejected[shared:]}
    if not shared:
        raise Wrong("chosen and rejected begin differently; write the common beginning in both, or a prompt")
    if not all(sides.values()):
        same = "the same" if len(chosen) == len(rejected) else "one a part of the other"
        raise Wrong(f"chosen and rejected are {same}; there is nothing to prefer")
    for name, side in sides.items():
        if side[0]["role"] != "assistant":
            raise Wrong(f"chosen and rejected part at a {side[0]['role']} message of {name}, not at an assistant's")
    before = chosen[:shared]
    if isinstance(prompt, str):
        repeats = any(m["content"] == prompt for m in before)
    else:
        repeats = prompt is None or messages(prompt, "prompt") == before
    if not repeats:
        raise Wrong("prompt is not what chosen and rejected begin with; leave it out, or write the answers alone")
    return [Script(tuple(before), tuple(side)) for side in sides.values()]


# --------------------------------------------------------------- other columns


def _told(script: Script, given: Mapping[str, Any], side: str, unused: Counter[str]) -> Script:
    """With what the other columns say of it."""
    own = _of_side(given, side)
    facts: dict[str, float | str] = {}
    for name, value in own.items():
        if name in KNOWN:
            continue
        if number(value):
            facts[name] = float(value)
        elif isinstance(value, str) and len(value) <= LABEL:
            facts[name] = value
        elif isinstance(value, float):
            raise Wrong(f"{name} is {value}; write a finite number")
        else:
            unused[name] += 1
    if side:
        facts["chosen"] = float(side == "chosen")
    reward, success, answer = own.get("reward"), own.get("success"), own.get("answer")
    if reward is not None and not number(reward):
        raise Wrong(f"reward is {_seen(reward)}; write a finite number")
    if success is not None and (not number(success) or success not in (0, 1)):
        raise Wrong(f"success is {_seen(success)}; write true or false")
    if answer is not None and not isinstance(answer, str):
        raise Wrong(f"answer is {_seen(answer)}; write text")
    return Script(
        script.before,
        script.said,
        _tools(own.get("tools")),
        None if reward is None else float(reward),
        None if success is None else bool(success),
        answer,
        facts,
    )


def _of_side(given: Mapping[str, Any], side: str) -> dict[str, Any]:
    """The columns of one side of a pair: ``score_chosen`` is its ``score``; without a side, all of them."""
    if not side:
        return dict(given)
    other = "rejected" if side == "chosen" else "chosen"
    shared = {k: v for k, v in given.items() if not k.endswith((f"_{side}", f"_{other}")) and k not in (side, other)}
    shared = {k: v for k, v in shared.items() if not k.startswith((f"{side}_", f"{other}_"))}
    mine = {k.removesuffix(f"_{side}"): v for k, v in given.items() if k.endswith(f"_{side}")}
    mine |= {k.removeprefix(f"{side}_"): v for k, v in given.items() if k.startswith(f"{side}_")}
    return shared | mine


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    value = _loads(value) if isinstance(value, str) else value
    if not isinstance(value, Sequence) or not all(isinstance(tool, dict) for tool in value):
        raise Wrong(f"tools is {_seen(value)}; write a list of tool schemas")
    return tuple(value)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _task(given: Mapping[str, Any], environment: str) -> Task | None:
    """``task``: a key, ``calculator/train/2/17``; or ``seed`` with ``difficulty`` and ``split``, of the run's environment."""
    if "task" in given:
        parts = given["task"].rsplit("/", 3) if isinstance(given["task"], str) else ()
        if len(parts) != 4 or not parts[2].isdigit() or not parts[3].isdigit():
            raise Wrong(
                f"task is {_seen(given['task'])}; write environment/split/difficulty/seed: calculator/train/2/17"
            )
        return Task(parts[0], int(parts[3]), parts[1], int(parts[2]))
    if "seed" not in given:
        return None
    seed, split, difficulty = given["seed"], given.get("split", "train"), given.get("difficulty", 1)
    for name, value, kind in (("seed", seed, int), ("difficulty", difficulty, int), ("split", split, str)):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise Wrong(f"{name} is {_seen(value)}; write {'a whole number' if kind is int else 'a name'}")
    return Task(environment, seed, split, difficulty)


def _seen(value: Any) -> str:
    """A value as an error shows it: short, on one line."""
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
