"""What colours the sampled tokens of a transcript: one scale for all views.

Green is up and red is down, and the largest number of the step has the full colour, so transcripts of one step can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from turnwise.inspector.factors.movement import movements, pushes
from turnwise.inspector.page.blocks import Choice
from turnwise.inspector.page.step_cache import update_of, updates_of
from turnwise.inspector.queries import RunReader, TokenColumns

COLOURS: dict[str, tuple[str, Callable[[TokenColumns], np.ndarray]]] = {
    "movement": (
        "how far the step moved the token: its log-probability after the step less that before, measured",
        movements,
    ),
    "push": ("the push on the token: ∂ objective / ∂ log π, as the step applied it", pushes),
    "advantage": ("the token's advantage", lambda update: update.columns.get("advantage", np.zeros(sum(update.sizes)))),
}


class TokenColours:
    """The numbers that colour the tokens of one step: those asked for, else the first kind that the step has."""

    def __init__(self, run: RunReader, step: int, wanted: str, default: str = "movement") -> None:
        self.run, self.step = run, step
        self.tops = {kind: self._top(kind) for kind in COLOURS}
        order = [wanted, default, *COLOURS]
        self.kind = next((kind for kind in order if self.tops.get(kind)), default)
        self.full = self.tops[self.kind]

    def _top(self, kind: str) -> float:
        values = [np.abs(COLOURS[kind][1](update)) for update in updates_of(self.run, self.step)]
        return max((float(x.max()) for v in values if (x := v[np.isfinite(v)]).size), default=0.0)

    @property
    def about(self) -> str:
        return f"Green: up, red: down. The colour shows {COLOURS[self.kind][0]}." if self.full else ""

    def of(self, trajectory: str) -> list[float]:
        """One number for each token of a trajectory; none where the step did not read it."""
        update = update_of(self.run, self.step, trajectory)
        if update is None:
            return []
        index = update.trajectories.index(trajectory)
        start = sum(update.sizes[:index])
        return COLOURS[self.kind][1](update)[start : start + update.sizes[index]].tolist()

    def choice(self, keep: dict[str, Any]) -> Choice:
        missing = {kind: "this step has no such numbers" for kind, top in self.tops.items() if not top}
        return Choice("colour", "colour by", self.kind, list(COLOURS), {**keep, "step": self.step}, missing)
