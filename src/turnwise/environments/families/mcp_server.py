"""One process of an MCP server over standard input and output, for callers that block. Knows no episode and no reward.

The client of the package ``mcp`` is asynchronous, and a connection must be closed by the task that opened it. So one event loop
in a thread holds all connections, each in a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import tempfile
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from functools import cache
from typing import Any

from turnwise.environments.families.adapter import import_package
from turnwise.errors import EnvironmentFault

SECONDS = 60.0  # for the start of a server, and for one call
LAST_WORDS = 300  # characters of a server's standard error that a message quotes


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of this process; a forked child has none of its parent's threads, so it makes its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="mcp").start()
    return loop


class McpServer:
    """A running server: ``tools`` as its server lists them, ``call`` until ``close``."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.loop = _loop(os.getpid())
        self.words = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed in close()
        self.session: Any = None
        self.closing = asyncio.Event()
        self.started: asyncio.Future[list[dict[str, Any]]] = self.loop.create_future()
        self.connection = asyncio.run_coroutine_threadsafe(self._connect(), self.loop)
        self.tools = self._wait(self._start(), "did not start")

    async def _start(self) -> list[dict[str, Any]]:
        return await self.started

    async def _connect(self) -> None:
        """Hold the connection until ``close``. The task that opens it closes it."""
        mcp = import_package("mcp", "mcp", "mcp")
        stdio = import_package("mcp.client.stdio", "mcp", "mcp")
        program, *arguments = shlex.split(self.command)
        parameters = mcp.StdioServerParameters(command=program, args=arguments)
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
            self.started.set_exception(EnvironmentFault(f"{_innermost(fault)}"))

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """The text of a tool's reply, and whether it reports an error. A refusal of the server is such a reply, too."""
        return self._wait(self._call(name, dict(arguments)), f"did not answer {name}")

    async def _call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        error_type = import_package("mcp.shared.exceptions", "mcp", "mcp").MCPError
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
        raise EnvironmentFault(f"the MCP server `{self.command}` {what}: {fault}{self._last_words()}")

    def _last_words(self) -> str:
        self.words.seek(0)
        text = " ".join(self.words.read().split())
        return f" (it wrote: ...{text[-LAST_WORDS:]})" if text else ""

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
