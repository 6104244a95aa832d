"""One dialogue with the local generator: ids in, ids out.

Keeps no ids itself: the KV slots know what has been read. Knows nothing of text, environments or other dialogues.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from turnwise.core.records import Completion, Sampling, Stop
from turnwise.engines.generator.kv_cache import Seat
from turnwise.engines.generator.scheduler import Request
from turnwise.engines.kernels.sampling import signed
from turnwise.errors import SettingError


class _House(Protocol):
    """What a session asks of its generator."""

    def open(self, seed: int) -> LocalSession: ...

    def request(self, session: LocalSession, ids: Sequence[int], sampling: Sampling) -> Request: ...

    def leave(self, session: LocalSession) -> None: ...

    def poke(self) -> None: ...


class LocalSession:
    """Implements ``ports.Session``. Random numbers depend on (seed, position) alone, and on how often the dialogue began
    afresh: drawn again at the same places, the same numbers would make a policy repeat its every slip for ever."""

    def __init__(self, house: _House, seed: int, order: int) -> None:
        self.seed = signed(seed)
        self.seat = Seat(order)
        self.parked = False
        self.closed = False
        self.request: Request | None = None
        self._house = house
        self._drawn = 0  # positions for which a number was drawn

    @property
    def asking(self) -> bool:
        """A request of this session waits or runs."""
        return self.request is not None and self.request.stop is None

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue ``ids``, the whole sequence so far. The prefix its slot holds is not read again."""
        if self.closed:
            raise SettingError("this session was closed; open a new one")
        if self.request is not None:
            raise SettingError("this session is already generating; await it, or fork the session")
        if len(ids) < self._drawn:  # history was rewritten or left out
            self.seed, self._drawn = signed(self.seed + 1), 0
        request = self._house.request(self, ids, sampling)
        if request.budget < 1:  # the context is full before the first token
            request.stop = Stop.LENGTH
            return completion(request)
        self.request, self.parked = request, False
        self._house.poke()
        try:
            await request.future
        finally:
            request.cancelled = True  # if the caller was cancelled, the engine must not go on for nobody
            self.request, self._drawn = None, len(request.sequence)
        return completion(request)

    def fork(self, seed: int) -> LocalSession:
        """Another dialogue that starts from the same past: what this one's row holds is copied when it first asks."""
        return self._house.open(seed)

    def park(self) -> None:
        """This session will rest: a deterministic generator need not wait for it. Asking again ends the rest."""
        self.parked = True
        self._house.poke()

    def cancel(self) -> None:
        """An unfinished ``generate`` returns what it has. Its KV stays."""
        if self.request is not None:
            self.request.cancelled = True
            self._house.poke()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.cancel()
            self._house.leave(self)


def completion(request: Request) -> Completion:
    assert request.stop is not None
    tokens = request.sequence[request.given :]
    seconds = time.perf_counter() - request.since
    return Completion(tokens, request.logp, request.mass, request.version, request.stop, seconds)
