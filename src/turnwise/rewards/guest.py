"""The program of a reward process: loads one function, then scores groups until its socket closes.

What arrives is pickled, by our own process; what is sent is JSON, because this process reads text that a model wrote. Standard
output goes to standard error, so that a function may print. Knows no pool and no time limit except the processor time after which
it ends by itself, in case nobody is left to kill it.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from turnwise.config.named_object import import_from_current_folder, load_object
from turnwise.errors import TurnwiseError, scarcity
from turnwise.rewards import builtin
from turnwise.rewards.conventions import RewardCall, RewardFailure, Signature
from turnwise.workers.child import serve

CPU_GRACE = 30  # seconds of processor time beyond the limit of a call


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
    _limit("RLIMIT_CPU", int(time.process_time() + request["seconds"] + CPU_GRACE))
    try:
        if "group" in request:
            call = RewardCall(function, options, request["columns"], Signature.of(function))
            return {"outcomes": [asdict(outcome) for outcome in call.score(request["group"])]}
        if "prepare" in request:
            function.prepare(*request["prepare"])
            return {}
        return {"value": function(*request["args"])}
    except RewardFailure as fault:
        return {"fault": str(fault)}
    except Exception as fault:
        words = scarcity(fault, of_call=True)
        return {"host": words} if words else {"fault": f"{type(fault).__name__}: {fault}"[:400]}


def _limit(name: str, value: int) -> None:
    try:
        import resource

        kind = getattr(resource, name)
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
    except (ImportError, AttributeError, ValueError, OSError):
        pass  # no such limit on this system; the time limit remains


class Guest:
    """Answers requests; the first one names the function."""

    def __init__(self) -> None:
        self.function: Any = None
        self.options: dict[str, Any] = {}

    def answer(self, data: bytes) -> bytes:
        try:
            request = pickle.loads(data)
        except Exception as fault:
            text = f"a column cannot be sent to the reward process: {type(fault).__name__}: {fault}"
            return json.dumps({"fault": text}).encode()
        reply = self._begin(request) if self.function is None else answer(self.function, self.options, request)
        sys.stdout.flush()
        return json.dumps(reply).encode()

    def _begin(self, request: dict[str, Any]) -> dict[str, Any]:
        # the memory this process may write to; a limit of address space would also count what libraries only reserve
        _limit("RLIMIT_DATA", request["memory_bytes"])
        _limit("RLIMIT_CORE", 0)
        try:
            self.function, self.options = load(request), request["options"]
            signature = Signature.of(self.function)
        except BaseException as fault:
            if words := scarcity(fault, of_call=True):
                return {"host": words}
            if isinstance(fault, TurnwiseError):
                return {"refused": str(fault)}
            return {"refused": f"{request['what']}: {type(fault).__name__}: {fault}"[:400]}
        return {"signature": {n: getattr(signature, n) for n in ("parameters", "required", "takes_any", "is_async")}}


def main(descriptor: int) -> None:
    import_from_current_folder()
    serve(Connection(descriptor), Guest().answer)
