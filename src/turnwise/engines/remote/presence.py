"""A run at one of our servers: it takes the server when no living run has it, says that it is alive while it asks for nothing,
and leaves. Knows three routes; nothing of what is sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref

from turnwise.engines.remote.http_pool import HttpPool
from turnwise.errors import ServerFault

log = logging.getLogger(__name__)

BEAT_SECONDS = 5.0  # between two messages of a run that is alive
LOOK_SECONDS = 1.0
ASK_SECONDS = 10.0  # for a reply to a question that needs no work


async def until_free(pool: HttpPool, client: str, run: str) -> None:
    """Wait while a run has the server that says nothing: it has probably died, and the server gives it up after a while. Returns
    at once where nobody has the server or the same run had it, and when the owner is heard again: then the server refuses."""
    before = -1.0
    while True:
        value = (await pool.call("/turnwise/v1/info", None, ASK_SECONDS)).json()
        owner = value.get("owner") if isinstance(value, dict) else None
        if not isinstance(owner, dict) or owner.get("client") == client or (run and owner.get("run") == run):
            return
        silent = float(owner.get("silent") or 0.0)
        if silent <= before:  # heard meanwhile, or waiting for replies: then it is 0 each time
            return
        if before < 0:
            log.warning(
                f"--generator {pool.address.url} serves the run {owner.get('client')!r:.60}, silent for {silent:.0f} s: waiting "
                "until the server gives that run up, or hears it"
            )
        before = silent
        await asyncio.sleep(LOOK_SECONDS)


class Presence:
    """Says regularly that ``client`` is alive, from a daemon thread: a server hears nothing while a run learns."""

    def __init__(self, pool: HttpPool, client: str, owner: object) -> None:
        """``owner``: with it, the presence ends."""
        self.pool, self.client = pool, client
        self._ended = threading.Event()
        weakref.finalize(owner, self._ended.set)
        threading.Thread(target=self._beat, name="presence", daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._tell("alive")

    def end(self) -> None:
        """Say nothing more: the server is lost."""
        self._ended.set()

    def leave(self) -> None:
        """Give the server back."""
        self._ended.set()
        self._tell("release")

    def _tell(self, what: str) -> None:
        with contextlib.suppress(ServerFault):  # whoever waits for a reply finds out
            self.pool.exchange(f"/turnwise/v1/{what}", {"client": self.client}, ASK_SECONDS)
