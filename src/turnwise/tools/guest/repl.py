"""One session's REPL: reads frames of source, replies with frames of text, keeps names between calls.

Does not know how it is confined or who the client is. A frame is a 4-byte length and a JSON object; the channel is a
separate descriptor, so nothing the code prints can be mistaken for a reply.
"""

from __future__ import annotations

import ast
import io
import json
import os
import socket
import struct
import sys
import traceback
from typing import Any

# bound at import, because the untrusted code may replace attributes of these modules
_dumps, _loads, _pack, _unpack = json.dumps, json.loads, struct.pack, struct.unpack
_parse, _compile, _Expression, _Expr = ast.parse, compile, ast.Expression, ast.Expr
_format, _read, _fstat, _truncate, _exec, _eval = (
    traceback.format_exception_only, os.pread, os.fstat, os.ftruncate, exec, eval,
)  # fmt: skip
NAME = "<python>"


class Capture(io.TextIOBase):
    """Standard output: keeps the first ``limit`` characters and notes whether more was written."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[str] = []
        self._kept = 0
        self.truncated = False

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        room = self._limit - self._kept
        if text:
            self._parts.append(text[:room])
            self._kept += min(len(text), room)
            self.truncated = self.truncated or len(text) > room
        return len(text)

    def take(self) -> tuple[str, bool]:
        text, truncated = "".join(self._parts), self.truncated
        self._parts, self._kept, self.truncated = [], 0, False
        return text, truncated


def run(code: str, names: dict[str, Any], out: Capture) -> bool:
    """Execute like a REPL: write the value of a final expression statement. True when nothing was raised."""
    try:
        tree = _parse(code, NAME)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, _Expr):
            tree.body.pop()
        _exec(_compile(tree, NAME, "exec"), names)
        if isinstance(last, _Expr):
            value = _eval(_compile(_Expression(last.value), NAME, "eval"), names)
            if value is not None:
                names["_"] = value
                out.write(repr(value) + "\n")
        return True
    except BaseException as error:  # including the code's own SystemExit and KeyboardInterrupt
        out.write(_last_line(error) + "\n")
        return False


def _last_line(error: BaseException) -> str:
    """Only ``NameError: name 'x' is not defined``, without a traceback: small models read this."""
    try:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        lines = _format(type(error), error)
        line = (lines[-1] if isinstance(error, SyntaxError) else lines[0]).strip()
        return f"{line} (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else line
    except BaseException:  # an exception whose own __str__ raises
        return type(error).__name__


def clip(text: str, limit: int, truncated: bool) -> str:
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit and not truncated:
        return data.decode()
    return data[:limit].decode("utf-8", "ignore") + f"\n[output cut at {limit} bytes]"


def _raw_output(spool: int, limit: int) -> tuple[str, bool]:
    """What was written to descriptors 1 and 2 directly, for instance by child processes."""
    try:
        size = _fstat(spool).st_size
        if not size:
            return "", False
        data = _read(spool, limit, 0)
        _truncate(spool, 0)
        return data.decode("utf-8", "replace"), size > limit
    except OSError:  # the code closed the descriptor
        return "", False


def _receive(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = channel.recv(size - len(data))
        if not part:
            os._exit(0)  # the host closed the channel
        data += part
    return data


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    data = _dumps(message).encode()
    channel.sendall(_pack(">I", len(data)) + data)


def serve(channel: socket.socket, spool: int, limit: int) -> None:
    """Serve requests until the host closes the channel."""
    out = Capture(limit)
    sys.stdout = sys.stderr = out
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    names = main.__dict__
    send(channel, {"ready": True})
    while True:
        request = _loads(_receive(channel, _unpack(">I", _receive(channel, 4))[0]))
        ok = run(request["code"], names, out)
        text, truncated = out.take()
        raw, raw_truncated = _raw_output(spool, limit)
        text = clip(text + raw, limit, truncated or raw_truncated)
        send(channel, {"id": request["id"], "ok": ok, "output": text.rstrip("\n")})
