"""A clock of nested spans: what each took by itself, without the spans inside it.

Knows calls; neither what they do nor who wants to know.
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

Route = tuple[str, ...]
"""The names of a span and of those around it, the outermost first."""


@dataclass
class Clock:
    """Own time and calls of nested spans, by path; each thread has a stack of its own."""

    seconds: dict[Route, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[Route] = field(default_factory=Counter)
    running: bool = False
    settle: Callable[[], None] = lambda: None  # waits for the device
    mark: Callable[[str], Any] = lambda name: contextlib.nullcontext()  # names the span in a trace
    _local: threading.local = field(default_factory=threading.local)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        if not self.running:
            yield
            return
        stack: list[list[Any]] = self._local.__dict__.setdefault("stack", [])
        path = (*(stack[-1][0] if stack else ()), name)
        frame: list[Any] = [path, 0.0]  # and what the spans inside it took
        stack.append(frame)
        began = time.perf_counter()
        try:
            with self.mark(name):
                yield
                self.settle()
        finally:
            took = time.perf_counter() - began
            stack.pop()
            self.seconds[path] += took - frame[1]
            self.calls[path] += 1
            if stack:
                stack[-1][1] += took

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, coroutine or generator, with its time noted."""
        if inspect.iscoroutinefunction(call):

            @functools.wraps(call)
            async def wait(*args: Any, **kwargs: Any) -> Any:
                with self.span(name):
                    return await call(*args, **kwargs)

            return wait
        if inspect.isgeneratorfunction(call):

            @functools.wraps(call)
            def turn(*args: Any, **kwargs: Any) -> Iterator[Any]:
                inner, over = call(*args, **kwargs), object()
                while True:
                    with self.span(name):
                        found = next(inner, over)
                    if found is over:
                        return
                    yield found

            return turn

        @functools.wraps(call)
        def ask(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return call(*args, **kwargs)

        return ask
