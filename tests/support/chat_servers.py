"""A server that speaks OpenAI's chat protocol, in a thread of the test: what it replies is a function of the request."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = dict[str, Any] | tuple[int, dict[str, Any]] | str | None
"""A message; a status with its body; a raw body; None: the connection is dropped."""


class ChatStub:
    """``respond(request)`` replies to a chat request; ``seen`` holds them all, and their headers."""

    def __init__(self, respond: Callable[[dict[str, Any]], Reply], models: tuple[str, ...] = ("m",)) -> None:
        self.respond, self.models = respond, models
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.url = ""

    def chat(self, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        with self.lock:
            self.seen.append(body)
            self.headers.append(headers)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return self.respond(body)
        finally:
            with self.lock:
                self.at_once -= 1


def text(content: str | None, *calls: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """An assistant message, with calls by name and arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": content, **more}
    if calls:
        message["tool_calls"] = [
            {"id": f"id-{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for n, (name, arguments) in enumerate(calls)
        ]
    return message


def completion(message: dict[str, Any], finish: str = "stop", tokens: int = 7) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}


@contextlib.contextmanager
def serving(stub: ChatStub) -> Iterator[str]:
    """The address of the server, which stops afterwards."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.answer(200, {"object": "list", "data": [{"id": name} for name in stub.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/chat/completions":
                return self.answer(404, {"error": {"message": "no such path"}})
            reply = stub.chat(body, {name.lower(): value for name, value in self.headers.items()})
            if reply is None:
                self.close_connection = True
                return self.connection.close()
            if isinstance(reply, str):
                return self.answer(200, reply)
            if isinstance(reply, tuple):
                return self.answer(*reply)
            return self.answer(200, completion(reply))

        def answer(self, status: int, body: Any) -> None:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            with contextlib.suppress(OSError):  # the client has gone
                self.send_response(status)
                for name, value in (body.get("headers", {}) if isinstance(body, dict) else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield stub.url
    finally:
        server.shutdown()
        server.server_close()


def free_address() -> str:
    """An address on which nobody listens."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


def slowly(seconds: float, reply: Reply) -> Callable[[dict[str, Any]], Reply]:
    def respond(body: dict[str, Any]) -> Reply:
        time.sleep(seconds)
        return reply

    return respond
