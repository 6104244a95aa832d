"""What the parts of a run are doing at this moment: calls in progress, and how many have ended. Knows no part.

Written by the threads of the run, read by another one. Every change is one operation on a dict, so nobody waits for a lock.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from turnwise.observe.profile import patched_attribute


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A call that has not ended."""

    name: str
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


@dataclass
class Activity:
    """``with activity.attached(learner, "update", "update"): ...`` counts and times calls of ``learner.update``."""

    running: dict[int, RunningCall] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)  # seconds, by name
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def oldest(self, *names: str) -> RunningCall | None:
        """Of the calls with one of these names, the one that has run longest."""
        calls = [call for call in tuple(self.running.values()) if call.name in names]
        return min(calls, key=lambda call: call.began, default=None)

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        number, call = next(self._numbers), RunningCall(name)
        self.running[number] = call
        try:
            yield
        finally:
            self.running.pop(number, None)
            self.longest[name] = max(self.longest.get(name, 0.0), call.seconds)
            self.ended[name] += 1

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function or coroutine function, listed while it runs."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def listed_coroutine(*args: Any, **kwargs: Any) -> Any:
                with self.call(name):
                    return await function(*args, **kwargs)

            return listed_coroutine

        @functools.wraps(function)
        def listed(*args: Any, **kwargs: Any) -> Any:
            with self.call(name):
                return function(*args, **kwargs)

        return listed

    @contextlib.contextmanager
    def attached(self, owner: Any, method: str, name: str) -> Iterator[None]:
        """List the calls of one method of an object. Another engine may lack the method: nothing happens then."""
        function = getattr(owner, method, None)
        if not callable(function) or not hasattr(owner, "__dict__"):
            yield
            return
        with patched_attribute(owner, method, self.wrap(name, function)):
            yield
