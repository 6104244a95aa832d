"""Who plays the seats of an episode, by the setting ``opponents``.

The policy's seat follows from the task, so all episodes of a group have the same one. In evaluations the policy plays every seat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.protocols import Session
from turnwise.core.records import Facts, Task
from turnwise.core.seeds import stable_seed
from turnwise.engines.generator.paired_generators import SelfPlayGenerator
from turnwise.rollout.episode_start import OtherSeats
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import ScriptedSession, scripted_policy

SeatPlan = Callable[[str, Task, Any, Session], OtherSeats]
"""(key, task, environment, session of the policy) -> who plays the other seats."""


def own_seat(env_class: type, task: Task) -> str:
    """The policy's seat in the episodes of a task."""
    seats: tuple[str, ...] = tuple(getattr(env_class, "agents", ()))
    return seats[stable_seed("seat", task.key) % len(seats)]


def seat_plan(settings: Settings, env_class: type, renderer: Renderer, generator: Any) -> SeatPlan | None:
    """Who plays the other seats of an episode; None: the policy plays all of them."""
    opponents = settings.opponents

    def past(key: str, task: Task, environment: Any, session: Session) -> OtherSeats:
        assert isinstance(generator, SelfPlayGenerator)
        seat = own_seat(env_class, task)
        facts: Facts = {"seat": seat, "opponent": float(generator.opponents.version)}
        return OtherSeats(seat, generator.open_opponent(session), facts)

    def scripted(key: str, task: Task, environment: Any, session: Session) -> OtherSeats:
        act = scripted_policy(opponents.scripted, environment, stable_seed("opponent", task.key, key))
        plays = ScriptedSession(act, renderer, tuple(getattr(environment, "tools", ())))
        seat = own_seat(env_class, task)
        return OtherSeats(seat, plays, {"seat": seat, "opponent": opponents.scripted})

    return {"self": None, "past": past, "scripted": scripted}[opponents.kind]
