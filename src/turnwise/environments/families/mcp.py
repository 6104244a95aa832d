"""Tools of any MCP server (Model Context Protocol), with tasks and a reward function of your own.

    load("mcp:python shop_server.py,tasks=tasks.jsonl,reward=shop.py:score")
    load("mcp:shop-server --in-memory,tasks=tasks.jsonl,reset=reset")      one process for many episodes

A row of ``tasks`` has a ``prompt``; ``calls`` (a list of ``{"name", "arguments"}``) and ``answer`` are what the oracle
plays. The policy calls tools until a turn has no call: that is its answer. ``reward`` is a function ``score(task, answer, call)``
of the row, the answer and a function ``call(name, **arguments)`` that asks the episode's server; it returns a number, and an
episode succeeds at 1 or more. Without it, the answer is compared with the row's. Every episode has a server process of its own,
unless ``reset`` names a tool that makes it new. A tenth of the rows, by a hash of their content, is held out.
"""

from __future__ import annotations

import hashlib
import json
import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from turnwise.config.named_object import load_object
from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.environments.base import Environment, text_action, user_message
from turnwise.environments.contract import is_finite
from turnwise.environments.families.adapter import import_package, split_options
from turnwise.environments.families.bfcl import action_of
from turnwise.environments.families.mcp_server import McpServer
from turnwise.errors import EnvironmentFault, SettingError, nearest

OPTIONS = ("tasks", "reward", "reset", "turns")
HELD_OUT_SHARE = 10
MAX_CALLS = 8  # in one turn
MAX_REPLY = 4000  # characters of a tool's reply
TURNS = 8
Row = Mapping[str, Any]
Score = Callable[..., Any]


class McpEnvironment(Environment):
    """One task. ``environment`` makes a subclass for each server."""

    suggests: ClassVar[Mapping[str, Any]] = {"context": 1024, "max_tokens": 64}
    command: ClassVar[str]
    rows: ClassVar[Mapping[str, Sequence[Row]]]  # by split
    score: ClassVar[Score]
    reset_tool: ClassVar[str] = ""
    idle: ClassVar[list[McpServer]]  # servers that no episode uses
    server: McpServer | None = None
    row: Row
    planned: list[ToolCall]  # what the oracle has left to call
    done: bool

    def reset(self, seed: int) -> Sequence[Message]:
        rows = self.rows["train" if self.split == "train" else "held_out"]
        self.row, self.turns, self.done = rows[seed % len(rows)], 0, False
        self.planned = [ToolCall(call["name"], dict(call.get("arguments", {}))) for call in self.row.get("calls", [])]
        self.server = take_server(self.idle, self.command)
        if self.reset_tool:
            _, failed = self.server.call(self.reset_tool, {})
            if failed:
                raise EnvironmentFault(f"the tool {self.reset_tool!r} of `{self.command}` reports an error")
        return [user_message(str(self.row["prompt"]))]

    def step(self, action: Action) -> Step:
        if self.done:
            return Step([user_message("it is over.")], 0.0, terminated=True)
        self.turns += 1
        wrong = [_reply("", f"error: {fault[:200]}") for fault in action.faults[:MAX_CALLS]]
        if not action.calls and not wrong:
            return self._end(action.text.strip(), terminated=True)
        replies = [self._call(call) for call in action.calls[:MAX_CALLS]]
        counts = {"tool_calls": len(action.calls), "tool_errors": len(wrong) + sum(failed for _, failed in replies)}
        messages = [message for message, _ in replies] + wrong
        return (
            self._end("", terminated=False, **counts) if self.turns >= self.max_turns else Step(messages, info=counts)
        )

    def _call(self, call: ToolCall) -> tuple[Message, bool]:
        assert self.server is not None, "reset starts the server"
        if self.planned and self.planned[0].name == call.name:
            self.planned.pop(0)
        text, failed = self.server.call(call.name, call.arguments)
        return _reply(call.name, text[:MAX_REPLY], call.id), failed

    def _end(self, answer: str, terminated: bool, **counts: int) -> Step:
        self.done = True
        value = type(self).score(self.row, answer, self._ask)
        value = float(value) if isinstance(value, bool) else value
        if not is_finite(value):
            raise EnvironmentFault(f"the reward function of `{self.command}` returned {value!r}; return a number")
        info = {"success": value >= 1, **counts}
        return Step([], float(value), terminated, not terminated, info)

    def _ask(self, name: str, **arguments: Any) -> str:
        """For the reward function: the text of a tool's reply."""
        assert self.server is not None
        return self.server.call(name, arguments)[0]

    def close(self) -> None:
        server, self.server = self.server, None
        if server is not None and self.reset_tool:
            self.idle.append(server)
        elif server is not None:
            server.close()

    # ---- scripted policies
    def oracle(self) -> Action:
        """The row's calls, then its answer."""
        return action_of(self.planned[:1]) if self.planned else text_action(str(self.row.get("answer", "done")))

    def random_action(self, rng: random.Random) -> Action:
        """A tool without arguments, or an answer."""
        names = [tool["function"]["name"] for tool in self.tools]
        return text_action("done") if rng.random() < 0.5 else action_of([ToolCall(rng.choice(names), {})])


def take_server(idle: list[McpServer], command: str) -> McpServer:
    """A server that no episode uses, or a new one."""
    try:
        return idle.pop()  # atomic
    except IndexError:
        return McpServer(command)


def _reply(name: str, text: str, id: str = "") -> Message:
    message: Message = {"role": "tool", "name": name, "content": text}
    return message | ({"tool_call_id": id} if id else {})


def compare_answer(task: Row, answer: str, call: Any) -> float:
    """1 where the answer is the row's, whatever its case and spaces."""
    return float(" ".join(answer.lower().split()) == " ".join(str(task["answer"]).lower().split()))


# ------------------------------------------------------------------ the class of a command


@cache
def environment(spec: str) -> type[McpEnvironment]:
    """The class of a server's command with its options. Starts the server once, for its list of tools."""
    import_package("mcp", "mcp", "mcp")
    command, options = split_options("mcp", spec)
    for key in options:
        if key not in OPTIONS:
            raise SettingError(f"mcp:... has no option {key!r}; {nearest(key, OPTIONS)}; a comma ends the command")
    rows = read_rows(str(options.get("tasks", "")))
    score = _score(str(options.get("reward", "")), rows)
    turns, reset_tool = options.get("turns", TURNS), str(options.get("reset", ""))
    if not isinstance(turns, int) or turns < 1:
        raise SettingError(f"mcp:...: turns is {turns!r}; write a whole number of at least 1")
    tools, server = _tools(command)
    if reset_tool and reset_tool not in tools:
        server.close()
        raise SettingError(f"mcp:...: reset names no tool of the server; {nearest(reset_tool, tools)}")
    idle = [server] if reset_tool else []
    if not reset_tool:
        server.close()
    has_reference = all("calls" in row or "answer" in row for row in rows)
    body = {
        "command": command,
        "tools": [schema for name, schema in tools.items() if name != reset_tool],
        "rows": split_rows(rows),
        "score": staticmethod(score),
        "reset_tool": reset_tool,
        "idle": idle,
        "max_turns": turns,
        "__doc__": f"Tools of the MCP server {command}.",
        "__module__": __name__,
        **({} if has_reference else {"oracle": Environment.oracle}),
    }
    return type(f"mcp:{spec}", (McpEnvironment,), body)


def _tools(command: str) -> tuple[dict[str, dict[str, Any]], McpServer]:
    """The schemas of a server's tools by name, and the server."""
    try:
        if not shlex.split(command):
            raise ValueError("it is empty")
        server = McpServer(command)
    except (ValueError, EnvironmentFault) as fault:
        raise SettingError(f"mcp:{command} cannot be used: {fault}") from fault
    tools = {tool["name"]: tool_schema(tool) for tool in server.tools}
    if not tools:
        server.close()
        raise SettingError(f"the MCP server `{command}` lists no tools")
    return tools, server


def tool_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of an MCP server in the OpenAI form."""
    parameters = {"properties": {}, **tool["inputSchema"], "type": "object"}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


def read_rows(path: str) -> list[Row]:
    """The rows of a JSON Lines file, each with a prompt."""
    if not path or not Path(path).is_file():
        raise SettingError(f"mcp:... needs tasks=FILE.jsonl with one prompt per line; {path or 'it'} is no file")
    rows: list[Row] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as fault:
            raise SettingError(f"{path} line {number} is not JSON: {fault}") from fault
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise SettingError(f'{path} line {number} has no prompt; write {{"prompt": "..."}}')
        rows.append(row)
    if len(rows) < 2:
        raise SettingError(f"{path} holds {len(rows)} tasks; write at least 2: a share of them is held out")
    return rows


def split_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by split: a tenth, at least one, is held out, whatever the order of the file."""
    ordered = sorted(rows, key=lambda row: hashlib.sha256(json.dumps(row, sort_keys=True).encode()).digest())
    count = max(1, len(rows) // HELD_OUT_SHARE)
    return {"train": ordered[count:], "held_out": ordered[:count]}


def _score(name: str, rows: Sequence[Row]) -> Score:
    if name:
        score: Score = load_object(name, f"reward {name!r} of mcp:...", callable, "function")
        return score
    if all("answer" in row for row in rows):
        return compare_answer
    raise SettingError("mcp:... needs reward=file.py:function, or an answer in every row of its tasks")
