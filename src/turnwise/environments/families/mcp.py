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

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shlex
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from turnwise.config.named_object import load_object
from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.environments import base
from turnwise.environments.base import LimitedEpisode
from turnwise.environments.contract import is_finite
from turnwise.environments.families import adapter
from turnwise.errors import EnvironmentFault, SettingError

OPTIONS = ("tasks", "reward", "reset", "turns")
MAX_CALLS = 8  # in one turn
MAX_REPLY = 4000  # characters of a tool's reply
TURNS = 8
SECONDS = 60.0  # for the start of a server, and for one call
LAST_WORDS = 300  # characters of a server's standard error that a message quotes
Row = Mapping[str, Any]
Score = Callable[..., Any]


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of this process; a forked child has none of its parent's threads, so it makes its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="mcp").start()
    return loop


class McpServer:
    """A server process over standard input and output, for callers that block: ``tools`` as it lists them, ``call`` until
    ``close``.

    The client of the package ``mcp`` is asynchronous, and a connection must be closed by the task that opened it. So one event
    loop in a thread holds all connections, each in a task of its own."""

    def __init__(self, command: str) -> None:
        self.command, (self.program, *self.arguments) = command, shlex.split(command)
        self.loop = _loop(os.getpid())
        # standard error goes to a file: a pipe that nobody reads would fill and stop the server
        self.words = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed in close()
        self.session: Any = None
        self.closing = asyncio.Event()
        self.started: asyncio.Future[list[dict[str, Any]]] = self.loop.create_future()
        self.connection = asyncio.run_coroutine_threadsafe(self._connect(), self.loop)
        self.tools = self._wait(asyncio.wait_for(self.started, None), "did not start")

    async def _connect(self) -> None:
        """Hold the connection until ``close``. The task that opens it closes it."""
        mcp = adapter.import_package("mcp", "mcp")
        stdio = adapter.import_package("mcp.client.stdio", "mcp")
        parameters = mcp.StdioServerParameters(command=self.program, args=self.arguments)
        try:
            connected = stdio.stdio_client(parameters, errlog=self.words)
            async with connected as streams, mcp.ClientSession(*streams) as self.session:
                await self.session.initialize()
                listed = await self.session.list_tools()
                self.started.set_result([tool.model_dump(by_alias=True) for tool in listed.tools])
                await self.closing.wait()
        except BaseException as fault:
            if self.started.done():
                raise
            self.started.set_exception(EnvironmentFault(str(_innermost(fault))))

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """The text of a tool's reply, and whether it reports an error. A refusal of the server is such a reply, too."""
        return self._wait(self._call(name, dict(arguments)), f"did not answer {name}")

    async def _call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        error_type = adapter.import_package("mcp.shared.exceptions", "mcp").MCPError
        try:
            result = (await self.session.call_tool(name, arguments)).model_dump(by_alias=True)
        except error_type as refusal:
            if self.connection.done():  # the process is gone
                raise
            return str(refusal), True
        texts = [block.get("text") or f"({block.get('type')})" for block in result["content"]]
        return "\n".join(texts), bool(result.get("isError"))

    def _wait(self, work: Coroutine[Any, Any, Any], what: str) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS)
        except FutureTimeout:
            fault: Any = f"no reply within {SECONDS:g} s"
        except Exception as caught:
            fault = _innermost(caught)
        self.words.seek(0)
        words = " ".join(self.words.read().split())
        quoted = f" (it wrote: ...{words[-LAST_WORDS:]})" if words else ""
        raise EnvironmentFault(f"the MCP server `{self.command}` {what}: {fault}{quoted}")

    def close(self) -> None:
        """End the process."""
        self.loop.call_soon_threadsafe(self.closing.set)
        with contextlib.suppress(Exception):  # a server that dies badly is gone as well
            self.connection.result(SECONDS)
        self.words.close()


def _innermost(fault: BaseException) -> BaseException:
    """The first real cause in the groups that the package's task groups raise."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return fault


class McpEnvironment(LimitedEpisode):
    """One task. ``environment`` makes a subclass for each server."""

    deterministic = False  # a tool may act on the world
    suggests: ClassVar[Mapping[str, Any]] = {"context": 1024, "max_tokens": 64}
    command: ClassVar[str]
    rows: ClassVar[Mapping[str, Sequence[Row]]]  # by split
    score: ClassVar[Score]
    reset_tool: ClassVar[str] = ""
    idle: ClassVar[list[McpServer]]  # servers that no episode uses
    server: McpServer | None = None
    planned: list[ToolCall]  # what the oracle has left to call

    def begin(self, seed: int) -> Sequence[Message]:
        self.row = base.listed_task(self.rows, self.split, seed)
        self.planned = [ToolCall(call["name"], dict(call.get("arguments", {}))) for call in self.row.get("calls", [])]
        try:
            self.server = self.idle.pop()  # atomic
        except IndexError:
            self.server = McpServer(self.command)
        if self.reset_tool and self.server.call(self.reset_tool, {})[1]:
            raise EnvironmentFault(f"the tool {self.reset_tool!r} of `{self.command}` reports an error")
        return [base.user_message(str(self.row["prompt"]))]

    def act(self, action: Action) -> Step:
        assert self.server is not None, "reset starts the server"
        if not action.calls and not action.faults:
            return self._end(action.text.strip(), terminated=True)
        messages, errors = [], len(action.faults[:MAX_CALLS])
        for call in action.calls[:MAX_CALLS]:
            if self.planned and self.planned[0].name == call.name:
                self.planned.pop(0)
            text, failed = self.server.call(call.name, call.arguments)
            messages.append(base.tool_message(call.name, text[:MAX_REPLY], call.id))
            errors += failed
        messages += [base.tool_message("", f"error: {fault[:200]}") for fault in action.faults[:MAX_CALLS]]
        counts = {"tool_calls": len(action.calls), "tool_errors": errors}
        # an episode that is cut off is scored, too: its server may be in the right state
        return self._end("", False, **counts) if self.turns >= self.max_turns else Step(messages, info=counts)

    def _end(self, answer: str, terminated: bool, **counts: int) -> Step:
        server = self.server
        assert server is not None
        value = type(self).score(self.row, answer, lambda name, **arguments: server.call(name, arguments)[0])
        value = float(value) if isinstance(value, bool) else value
        if not is_finite(value):
            raise EnvironmentFault(f"the reward function of `{self.command}` returned {value!r}; return a number")
        return Step([], float(value), terminated, not terminated, {"success": value >= 1, **counts})

    def close(self) -> None:
        server, self.server = self.server, None
        if server is not None and self.reset_tool:
            self.idle.append(server)
        elif server is not None:
            server.close()

    # ---- scripted policies
    def oracle(self) -> Action:
        """The row's calls, then its answer."""
        return (
            base.call_action(self.planned[0]) if self.planned else base.text_action(str(self.row.get("answer", "done")))
        )

    def random_action(self, rng: random.Random) -> Action:
        """A tool without arguments, or an answer."""
        names = [tool["function"]["name"] for tool in self.tools]
        return base.text_action("done") if rng.random() < 0.5 else base.tool_action(rng.choice(names))


@cache
def environment(spec: str) -> type[McpEnvironment]:
    """The class of a server's command with its options. Starts the server once, for its list of tools."""
    adapter.import_package("mcp", "mcp")
    command, options = adapter.split_options("mcp", spec, OPTIONS)  # a comma ends the command
    path, reward, reset_tool = (str(options.get(key, "")) for key in ("tasks", "reward", "reset"))
    if not path or not Path(path).is_file():
        raise SettingError(f"mcp:... needs tasks=FILE.jsonl with one prompt per line; {path or 'it'} is no file")
    rows: list[Row] = []
    for where, row in base.read_json_lines(path, '{"prompt": "..."}'):
        if not isinstance(row.get("prompt"), str):
            raise SettingError(f'{where} has no prompt; write {{"prompt": "..."}}')
        rows.append(row)
    if len(rows) < 2:
        raise SettingError(f"{path} holds {len(rows)} tasks; write at least 2: a share of them is held out")
    if not reward and not all("answer" in row for row in rows):
        raise SettingError("mcp:... needs reward=file.py:function, or an answer in every row of its tasks")

    def same_answer(task: Row, answer: str, call: Any) -> float:
        return float(" ".join(answer.lower().split()) == " ".join(str(task["answer"]).lower().split()))

    score = load_object(reward, f"reward {reward!r} of mcp:...", callable, "function") if reward else same_answer
    turns = options.get("turns", TURNS)
    if not isinstance(turns, int) or turns < 1:
        raise SettingError(f"mcp:...: turns is {turns!r}; write a whole number of at least 1")
    # no shell reads the command, or the server does not start
    with adapter.refusing(f"mcp:{command}", (ValueError, EnvironmentFault)):
        if not shlex.split(command):
            raise ValueError("it is empty")
        server = McpServer(command)
    tools = {}
    for tool in server.tools:
        parameters = {"properties": {}, **tool["inputSchema"], "type": "object"}
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
        tools[tool["name"]] = {"type": "function", "function": function}
    # the first server plays on where a tool can make it new
    idle = [server] if reset_tool in tools else []
    if not idle:
        server.close()
    if not tools:
        raise SettingError(f"the MCP server `{command}` lists no tools")
    if reset_tool:
        adapter.require_offered(reset_tool, tools, "mcp:...: the server has no tool")
    has_reference = all("calls" in row or "answer" in row for row in rows)
    return adapter.member_class(
        "mcp", spec, McpEnvironment, f"Tools of the MCP server {command}.",
        command=command, rows=split_rows(rows), score=staticmethod(score), reset_tool=reset_tool, idle=idle,
        tools=[schema for name, schema in tools.items() if name != reset_tool], max_turns=turns,
        **({} if has_reference else {"oracle": LimitedEpisode.oracle}),
    )  # fmt: skip


def split_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by split: a tenth, at least one, is held out, whatever the order of the file."""
    # not split_by_content: of few rows it may hold out none
    ordered = sorted(rows, key=lambda row: hashlib.sha256(json.dumps(row, sort_keys=True).encode()).digest())
    count = max(1, len(rows) // base.HELD_OUT_SHARE)
    return {"train": ordered[count:], "held_out": ordered[:count]}
