"""Stored steps and their factors, kept for a moment: a reader clicks through the tokens of one step.

Factors are computed for a whole update, which takes a moment for a large one: ``warm`` begins when a transcript is opened, so
that they are there when a token of it is clicked. A finished step does not change. A resumed run may take a step again, so
nothing is kept longer than a few entries.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from functools import lru_cache

from turnwise.errors import StoreError, TurnwiseError
from turnwise.inspector.factors.stored_step import MethodFactors, StoredStep
from turnwise.inspector.queries import RunReader, TokenColumns

SIZE = 16
_COMPUTING = threading.Lock()  # a click waits for what `warm` computes, instead of computing it twice


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


def warm(run: RunReader, step: int, trajectory: str) -> threading.Thread:
    """Compute the factors of the update that read a trajectory, in the background. What fails here fails again on the click."""

    def work() -> None:
        # nobody waits for this thread; the click reports the same failure
        with contextlib.suppress(TurnwiseError):
            factors_of(run, step, trajectory=trajectory)

    # in this context, which says what code may be imported
    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="turnwise-factors", daemon=True)
    thread.start()
    return thread
