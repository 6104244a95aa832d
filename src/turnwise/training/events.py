"""Events of a run: stages, steps and messages for listeners, the seconds of each stage, and the parts for whoever watches it.
Does not know what a stage does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from turnwise.core.protocols import Listener

if TYPE_CHECKING:
    from turnwise.training.watch import RunWatch


def silent(event: str, facts: Mapping[str, Any]) -> None:
    """A listener that shows nothing."""


@dataclass
class RunEvents:
    """Sends events to ``listen`` and measures stages. A stage inside another counts for itself alone: ``seconds`` add up."""

    listen: Listener = silent
    seconds: dict[str, float] = field(default_factory=dict)
    watch: RunWatch | None = None
    _inside: float = 0.0  # seconds of the stages that have ended inside the present one

    @contextlib.contextmanager
    def stage(self, name: str, total: int = 0, of: str = "steps") -> Iterator[None]:
        self.listen("stage", {"name": name, "total": total, "of": of})
        began, inside, self._inside = time.perf_counter(), self._inside, 0.0
        try:
            yield
        finally:
            whole = time.perf_counter() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + whole - self._inside
            self._inside = inside + whole

    @contextlib.contextmanager
    def loop_stage(self, loop: Any) -> Iterator[None]:
        """The stage of the training loop, whose parts are watched."""
        watching = self.watch.over(loop) if self.watch is not None else contextlib.nullcontext()
        with self.stage("learn", loop.steps), watching:
            yield

    def uses(self, **parts: Any) -> None:
        """Make parts of the run known to the watch."""
        if self.watch is not None:
            for name, part in parts.items():
                setattr(self.watch.parts, name, part)

    def step(self, name: str, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        self.listen("step", {"stage": name, "step": step, "total": total, **metrics})

    def message(self, text: str, level: str = "info", **facts: Any) -> None:
        self.listen("message", {"level": level, "text": text, **facts})
