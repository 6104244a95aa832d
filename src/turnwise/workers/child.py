"""The other end of ``workers.process``: what a worker does with its socket. Knows frames; not what they mean."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection

from turnwise.workers.process import pack, unpack

PARENT_DEATH_SIGNAL = 1  # prctl(PR_SET_PDEATHSIG)


def end_with_parent() -> None:
    # Linux: do not outlive the thread that started this process, even in a call that never lets Python run
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def serve(connection: Connection, answer: Callable[[bytes], bytes]) -> None:
    """Answer one request after the other, in this thread, until the socket closes."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            for number, payload in unpack(connection.recv_bytes()):
                if payload:  # otherwise a request was given up, which has its answer already
                    connection.send_bytes(pack([(number, answer(payload))]))


def serve_concurrently(
    connection: Connection, answer: Callable[[bytes], Awaitable[bytes]], gather_seconds: float = 0.0
) -> None:
    """Answer all requests at the same time, in an event loop of this thread. A request that its asker gives up is cancelled.
    ``gather_seconds``: for which an answer may wait for others that are not ready yet, because the asker has more to do than
    this process. Never returns: when the socket closes, the process ends, whatever its threads do."""
    loop, tasks, replies = asyncio.new_event_loop(), dict[int, asyncio.Task[None]](), list[tuple[int, bytes]]()
    unanswered = set[int]()

    async def respond(number: int, payload: bytes) -> None:
        try:
            replies.append((number, await answer(payload)))
        finally:
            unanswered.discard(number)
        if not unanswered:
            loop.call_soon(send)
        elif len(replies) == 1:  # those that are ready in the same moment go with it
            loop.call_later(gather_seconds, send)

    def send() -> None:
        if replies:
            with contextlib.suppress(OSError):  # the asker has ended, and the reader ends this process
                connection.send_bytes(pack(replies))
            replies.clear()

    def take(records: list[tuple[int, bytes]]) -> None:
        for number, payload in records:
            if payload:
                unanswered.add(number)
                tasks[number] = loop.create_task(respond(number, payload))
                tasks[number].add_done_callback(partial(tasks.pop, number))
            elif number in tasks:
                tasks[number].cancel()
                unanswered.discard(number)  # a task that never began has no end, either

    def read() -> None:
        # in a thread: whoever asks never waits because this process computes
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(take, unpack(connection.recv_bytes()))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    loop.run_forever()
