"""Events of a run: stages, steps and messages for listeners, and the seconds of each stage. Does not know what a stage does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.core.protocols import Listener


def silent(event: str, facts: Mapping[str, Any]) -> None:
    """A listener that shows nothing."""


@dataclass
class RunEvents:
    """Sends events to ``listen`` and measures stages."""

    listen: Listener = silent
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str, total: int = 0, of: str = "steps") -> Iterator[None]:
        self.listen("stage", {"name": name, "total": total, "of": of})
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def step(self, name: str, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        self.listen("step", {"stage": name, "step": step, "total": total, **metrics})

    def message(self, text: str, level: str = "info", **facts: Any) -> None:
        self.listen("message", {"level": level, "text": text, **facts})
