"""A small server that speaks the wire of OpenEnv, for tests where the package is not installed: written here, not its code.

Its world: guess a number from 0 to 9 that the seed decides; ``warmer`` or ``colder`` is no help, ``higher`` and ``lower`` are.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from websockets.sync.server import ServerConnection, serve

NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMA = {
    "action": {
        "type": "object", "description": "A guess.", "required": ["number"],
        "properties": {"metadata": {"type": "object"}, "number": NUMBER},
    },
    "observation": {}, "state": {},
}  # fmt: skip
TEXT_SCHEMA = {"action": {"type": "object", "properties": {"message": {"type": "string"}}}}


def _play(socket: ServerConnection) -> None:
    secret = 0
    for raw in socket:
        message = json.loads(raw)
        kind, data = message["type"], message.get("data", {})
        if kind == "close":
            return
        if kind == "reset":
            secret = data["seed"] // 2 % 10
            answer: dict[str, Any] = {"observation": {"hint": "guess", "left": 3}, "reward": None, "done": False}
        elif "message" in data:
            answer = {"observation": {"echo": data["message"]}, "reward": 0.5, "done": False}
        elif not isinstance(data.get("number"), int):
            socket.send(
                json.dumps({"type": "error", "data": {"message": "number is no integer", "code": "VALIDATION"}})
            )
            continue
        else:
            hint = "higher" if data["number"] < secret else "lower" if data["number"] > secret else "yes"
            answer = {"observation": {"hint": hint, "left": 2}, "reward": float(hint == "yes"), "done": hint == "yes"}
        socket.send(json.dumps({"type": "observation", "data": answer}))


@contextmanager
def openenv_server(schema: dict[str, Any] = SCHEMA) -> Iterator[str]:
    """The address of a running server."""

    def route(connection: ServerConnection, request: Any) -> Any:
        if request.path == "/schema":
            return connection.respond(HTTPStatus.OK, json.dumps(schema))
        return None

    with serve(_play, "127.0.0.1", 0, process_request=route) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()
