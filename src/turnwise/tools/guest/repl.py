"""One session's interpreter: reads frames of source, answers frames of text, keeps names in between.

Knows nothing of how it is confined or who asks. A frame is four bytes of length and a JSON object; the channel is a
descriptor of its own, so whatever the code prints can never be taken for an answer.
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

# bound now, because the code may replace what the modules hold
_dumps, _loads, _pack, _unpack = json.dumps, json.loads, struct.pack, struct.unpack
_parse, _compile, _Expression, _Expr = ast.parse, compile, ast.Expression, ast.Expr
_format, _read, _fstat, _truncate, _exec, _eval = (
    traceback.format_exception_only, os.pread, os.fstat, os.ftruncate, exec, eval,
)  # fmt: skip
NAME = "<python>"


class Capture(io.TextIOBase):
    """Standard output: keeps the beginning, counts the rest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[str] = []
        self._kept = 0
        self.lost = False

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        room = self._limit - self._kept
        if text:
            self._parts.append(text[:room])
            self._kept += min(len(text), room)
            self.lost = self.lost or len(text) > room
        return len(text)

    def take(self) -> tuple[str, bool]:
        text, lost = "".join(self._parts), self.lost
        self._parts, self._kept, self.lost = [], 0, False
        return text, lost


def run(code: str, names: dict[str, Any], out: Capture) -> bool:
    """Execute like a REPL: the value of a last bare expression is shown. True when nothing was raised."""
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
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the code's too
        out.write(_last_line(error) + "\n")
        return False


def _last_line(error: BaseException) -> str:
    """Just ``NameError: name 'x' is not defined``: small models read this."""
    try:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        lines = _format(type(error), error)
        line = (lines[-1] if isinstance(error, SyntaxError) else lines[0]).strip()
        return f"{line} (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else line
    except BaseException:  # an exception whose own __str__ raises
        return type(error).__name__


def clip(text: str, limit: int, lost: bool) -> str:
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit and not lost:
        return data.decode()
    return data[:limit].decode("utf-8", "ignore") + f"\n[output cut at {limit} bytes]"


def _raw_output(spool: int, limit: int) -> tuple[str, bool]:
    """What was written to descriptors 1 and 2 directly, by child processes for instance."""
    try:
        size = _fstat(spool).st_size
        if not size:
            return "", False
        data = _read(spool, limit, 0)
        _truncate(spool, 0)
        return data.decode("utf-8", "replace"), size > limit
    except OSError:  # the code closed it: its own loss
        return "", False


def _receive(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = channel.recv(size - len(data))
        if not part:
            os._exit(0)  # the host is gone or done with us
        data += part
    return data


def send(channel: socket.socket, answer: dict[str, Any]) -> None:
    data = _dumps(answer).encode()
    channel.sendall(_pack(">I", len(data)) + data)


def serve(channel: socket.socket, spool: int, limit: int) -> None:
    """Answer until the host hangs up."""
    out = Capture(limit)
    sys.stdout = sys.stderr = out
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    names = main.__dict__
    send(channel, {"ready": True})
    while True:
        request = _loads(_receive(channel, _unpack(">I", _receive(channel, 4))[0]))
        ok = run(request["code"], names, out)
        text, lost = out.take()
        raw, raw_lost = _raw_output(spool, limit)
        text = clip(text + raw, limit, lost or raw_lost)
        send(channel, {"id": request["id"], "ok": ok, "output": text.rstrip("\n")})
