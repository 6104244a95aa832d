"""When a checkpoint is written: every N steps, at the end, and in between as often as its own cost allows, so that a killed run
loses about ten seconds of work. Reads a clock; knows neither what a checkpoint holds nor what a step does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

LOST_SECONDS = 9.0  # of work since the last checkpoint; writing one comes on top
COST_SHARE = 0.05  # of the time since the last checkpoint that writing one may take


@dataclass
class CheckpointSchedule:
    """``every``: steps between checkpoints that are kept. Those in between replace each other."""

    every: int
    clock: Callable[[], float] = time.perf_counter
    seconds: list[float] = field(default_factory=list)  # what each checkpoint took
    between: int | None = None  # step of the last checkpoint, if it was one in between

    def begin(self) -> None:
        """The first step begins now."""
        self._saved = self._checked = self.clock()

    def due(self, done: int) -> bool:
        """Whether to write one after ``done`` steps. Asked once after each step: the next one is expected to take as long."""
        now = self.clock()
        age, step, self._checked = now - self._saved, now - self._checked, now
        cost = self.seconds[-1] if self.seconds else 0.0  # the first one is written to know it
        return done % self.every == 0 or (age + step > LOST_SECONDS and cost <= COST_SHARE * age)

    def write(self, done: int, save: Callable[[int], object]) -> None:
        """Call ``save``, which writes the checkpoint of ``done`` in place of ``between``, and measure it."""
        began = self.clock()
        save(done)
        self.begin()
        self.seconds.append(self._saved - began)
        self.between = None if done % self.every == 0 else done

    def pause(self) -> None:
        """Time until now belongs to no step: an evaluation has ended."""
        self._checked = self.clock()

    def facts(self) -> dict[str, float]:
        """How many were written, and the mean seconds of one, for the summary."""
        count = len(self.seconds)
        return {"written": count, "seconds_each": round(sum(self.seconds) / count, 3) if count else 0.0}
