"""A timer of nested spans: the self time of each, without the spans inside it.

Does not know what the timed calls do, nor who reads the times.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

SpanPath = tuple[str, ...]
"""The names of a span and of the spans around it, outermost first."""


@dataclass
class SpanTimer:
    """Self time and number of calls of nested spans, by path. Each thread has its own stack."""

    seconds: dict[SpanPath, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[SpanPath] = field(default_factory=Counter)
    running: bool = False
    synchronize: Callable[[], None] = lambda: None  # waits for the device at the end of a span
    annotate: Callable[[str], Any] = lambda name: contextlib.nullcontext()  # names the span in a trace
    _local: threading.local = field(default_factory=threading.local)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        if not self.running:
            yield
            return
        stack: list[list[Any]] = self._local.__dict__.setdefault("stack", [])
        path = (*(stack[-1][0] if stack else ()), name)
        frame: list[Any] = [path, 0.0]  # path, and seconds in the spans inside it
        stack.append(frame)
        start = time.perf_counter()
        try:
            with self.annotate(name):
                yield
                self.synchronize()
        finally:
            seconds = time.perf_counter() - start
            stack.pop()
            self.seconds[path] += seconds - frame[1]
            self.calls[path] += 1
            if stack:
                stack[-1][1] += seconds

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, coroutine function or generator function, timed."""
        if inspect.iscoroutinefunction(call):

            @functools.wraps(call)
            async def timed_coroutine(*args: Any, **kwargs: Any) -> Any:
                with self.span(name):
                    return await call(*args, **kwargs)

            return timed_coroutine
        if inspect.isgeneratorfunction(call):

            @functools.wraps(call)
            def timed_generator(*args: Any, **kwargs: Any) -> Iterator[Any]:
                inner, exhausted = call(*args, **kwargs), object()
                while True:
                    with self.span(name):
                        item = next(inner, exhausted)
                    if item is exhausted:
                        return
                    yield item

            return timed_generator

        @functools.wraps(call)
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return call(*args, **kwargs)

        return timed_call
