"""One dialogue with the local generator: ids in, ids out.

Stores no ids itself: the KV cache knows which ids have been processed. Knows nothing of text, environments or other dialogues.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from turnwise.core.records import Completion, Sampling, Stop
from turnwise.engines.generator.kv_cache import CacheSlot
from turnwise.engines.generator.logit_shift import LogitShift, Steering
from turnwise.engines.generator.scheduler import Request
from turnwise.engines.kernels.sampling import signed
from turnwise.errors import SettingError


class _SessionOwner(Protocol):
    """What a session needs from its generator."""

    @property
    def seconds_held(self) -> float: ...

    def open(self, seed: int) -> LocalSession: ...

    def make_request(self, session: LocalSession, ids: Sequence[int], sampling: Sampling) -> Request: ...

    def detach(self, session: LocalSession) -> None: ...

    def wake(self) -> None: ...


class LocalSession:
    """Implements ``core.protocols.Session``. Random numbers depend only on (seed, position) and on how often the dialogue was
    restarted: without the latter, a policy that rewrites its history would draw the same numbers at the same positions and
    repeat every mistake."""

    def __init__(self, owner: _SessionOwner, seed: int, order: int) -> None:
        self.seed = signed(seed)
        self.cache_slot = CacheSlot(order)
        self.parked = False
        self.closed = False
        self.request: Request | None = None
        self.shift: LogitShift | Steering | None = None  # what is added to the log-probabilities of its tokens
        self._owner = owner
        self._sampled_until = 0  # positions for which a random number was drawn

    @property
    def pending(self) -> bool:
        """A request of this session is waiting or running."""
        return self.request is not None and self.request.stop is None

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue ``ids``, the whole sequence so far. A prefix that the cache holds is not prefilled again."""
        if self.closed:
            raise SettingError("this session was closed; open a new one")
        if self.request is not None:
            raise SettingError("this session is already generating; await it, or fork the session")
        if len(ids) < self._sampled_until:  # the history was rewritten or shortened
            self.seed, self._sampled_until = signed(self.seed + 1), 0
        request = self._owner.make_request(self, ids, sampling)
        if request.budget < 1:  # the context is full before the first token
            request.stop = Stop.LENGTH
            return completion(request, self._owner.seconds_held)
        self.request, self.parked, request.shift = request, False, self.shift
        self._owner.wake()
        try:
            await request.future
        finally:
            request.cancelled = True  # if the caller was cancelled, nobody needs the remaining tokens
            self.request, self._sampled_until = None, len(request.sequence)
        return completion(request, self._owner.seconds_held)

    def fork(self, seed: int) -> LocalSession:
        """Open another dialogue with the same history; its first request copies the cached prefix from this one's row."""
        return self._owner.open(seed)

    def park(self) -> None:
        """Tell a deterministic generator not to wait for this session. The next ``generate`` unparks it."""
        self.parked = True
        self._owner.wake()

    def unpark(self) -> None:
        """Make a deterministic generator wait for this session before its next request is known."""
        self.parked = False

    def cancel(self) -> None:
        """Make an unfinished ``generate`` return the tokens it has. Its KV stays cached."""
        if self.request is not None:
            self.request.cancelled = True
            self._owner.wake()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.cancel()
            self._owner.detach(self)


def completion(request: Request, held: float) -> Completion:
    """``held``: seconds so far in which the generator waited for other sessions; they are not this request's."""
    assert request.stop is not None
    tokens = request.sequence[request.prompt_length :]
    seconds = time.perf_counter() - request.started - (held - request.held_before)
    known = len(request.entropy) == len(tokens)
    entropy, confidence = (request.entropy, request.confidence) if known else ((), ())
    routes = request.routes if len(request.routes) == len(request.sequence) - 1 else ()
    sampled = (tokens, request.logp, request.mass, request.version)
    return Completion(*sampled, request.stop, seconds, entropy, confidence, routes, request.kept)
