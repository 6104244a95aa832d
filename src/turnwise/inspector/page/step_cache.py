"""Stored steps and their factors, kept for a moment: a reader clicks through the tokens of one step.

Factors are computed for a whole update when a transcript is opened, so they are there when another token of it is clicked. A
finished step does not change. A resumed run may take a step again, so nothing is kept longer than a few entries.
"""

from __future__ import annotations

import threading
from functools import lru_cache

from turnwise.errors import StoreError
from turnwise.inspector.factors.stored_step import MethodFactors, StoredStep
from turnwise.inspector.queries import RunReader, TokenColumns

SIZE = 16
_COMPUTING = threading.Lock()  # two requests for one update compute it once


@lru_cache(maxsize=SIZE)
def updates_of(run: RunReader, step: int) -> tuple[TokenColumns, ...]:
    return run.token_columns(step) if step > 0 else ()


def update_of(run: RunReader, step: int, trajectory: str) -> TokenColumns | None:
    """The first kept update of a step that read a trajectory."""
    return next((u for u in updates_of(run, step) if trajectory in u.trajectories), None)


@lru_cache(maxsize=SIZE)
def stored_step(run: RunReader, step: int, update: int) -> StoredStep:
    return StoredStep(run, step, update)


@lru_cache(maxsize=SIZE)
def _factors(run: RunReader, step: int, update: int, method: str) -> MethodFactors:
    return stored_step(run, step, update).factors(method)


def factors_of(
    run: RunReader, step: int, method: str = "", update: int = 0, trajectory: str = ""
) -> tuple[StoredStep, MethodFactors]:
    """The factors of one update under a method; with ``trajectory``, of the first update that read it."""
    if trajectory:
        updates = updates_of(run, step)
        update = next((i for i, u in enumerate(updates) if trajectory in u.trajectories), -1)
        if update < 0:
            raise StoreError(f"step {step} stores nothing for trajectory {trajectory}")
    with _COMPUTING:
        return stored_step(run, step, update), _factors(run, step, update, method)
