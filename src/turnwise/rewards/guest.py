"""The program of a reward process: loads one function, then scores groups until its socket closes.

A frame is a 4-byte length and data. What arrives is pickled, by our own process; what is sent is JSON, because this process reads
text that a model wrote. Standard output goes to standard error, so that a function may print. Knows no pool and no time limit
except the processor time after which it ends by itself, in case nobody is left to kill it.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import sys
from typing import Any

from turnwise.config.named_object import import_from_current_folder, load_object
from turnwise.errors import TurnwiseError
from turnwise.rewards import builtin
from turnwise.rewards.conventions import RewardCall, RewardFailure, Signature, as_json

CPU_GRACE = 30  # seconds of processor time beyond the limit of a call


def receive(channel: socket.socket) -> bytes:
    """The next frame; empty when the other side is gone."""
    header = _exactly(channel, 4)
    return _exactly(channel, struct.unpack(">I", header)[0]) if header else b""


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:
            return b""
        data += part
    return bytes(data)


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    channel.sendall(struct.pack(">I", len(data)) + data)


def load(request: dict[str, Any]) -> Any:
    """The function a request names, or the one that a factory of this name makes. A built-in reward may have a
    ``check_NAME``, which refuses options and imports what takes long, before a time limit counts."""
    function = load_object(request["target"], request["what"], callable, "function")
    if request["is_factory"]:
        return function(**request["options"])
    check = getattr(builtin, f"check_{function.__name__}", None)
    if check is not None and function.__module__ == builtin.__name__:
        check(**request["options"])
    return function


def answer(function: Any, options: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """One request: the outcomes of a group, or the value of a plain call."""
    _limit_cpu(request["seconds"])
    try:
        if "group" in request:
            call = RewardCall(function, options, request["columns"], Signature.of(function))
            return {"outcomes": as_json(call.score(request["group"]))}
        if "prepare" in request:
            function.prepare(*request["prepare"])
            return {}
        return {"value": function(*request["args"])}
    except RewardFailure as fault:
        return {"fault": str(fault)}
    except Exception as fault:
        return {"fault": f"{type(fault).__name__}: {fault}"[:400]}


def _limit_memory(limit: int) -> None:
    """Limit the memory this process may write to. Address space would also count what libraries only reserve."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    except (ImportError, ValueError, OSError):
        pass  # no such limit on this system; the time limit remains


def _limit_cpu(seconds: float) -> None:
    try:
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime + seconds + CPU_GRACE)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    except (ImportError, ValueError, OSError):
        pass


def main() -> None:
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    import_from_current_folder()
    first = pickle.loads(receive(channel))
    _limit_memory(first["memory_bytes"])
    try:
        function = load(first)
        signature = Signature.of(function)
    except TurnwiseError as fault:
        send(channel, {"refused": str(fault)})
        return
    except BaseException as fault:
        send(channel, {"refused": f"{first['what']}: {type(fault).__name__}: {fault}"[:400]})
        return
    fields = {name: getattr(signature, name) for name in ("parameters", "required", "takes_any", "is_async")}
    send(channel, {"signature": fields})
    while data := receive(channel):
        try:
            request = pickle.loads(data)
        except Exception as fault:
            send(channel, {"fault": f"a column cannot be sent to the reward process: {type(fault).__name__}: {fault}"})
            continue
        reply = answer(function, first["options"], request)
        sys.stdout.flush()
        send(channel, reply)
