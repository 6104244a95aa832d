"""Where an episode may start besides its prompt: a fork of another trajectory, a recorded prefix, a hint; and who plays the seats
that are not the policy's. Records only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.core.protocols import Action, Session
from turnwise.core.records import Facts, Message
from turnwise.rollout.renderer import Dialogue


@dataclass(frozen=True)
class ForkPoint:
    """The state of trajectory ``key`` at its turn ``turn``, after ``token`` sampled tokens of that turn: enough to continue from
    there in another way. ``snapshot`` None: the environment has none, and ``actions`` are played again."""

    key: str
    turn: int
    snapshot: Any
    dialogue: Dialogue  # just before the turn
    rewards: dict[str, float]
    taken: int = 0  # turns since the start of the episode, those of its ancestors included
    start: tuple[int, ...] = ()  # ids of the turn so far, sampled by the trajectory or its ancestors
    token: int = 0  # how many of them the trajectory itself sampled
    added: tuple[int, ...] = ()  # ids that the continuation begins with, recorded as its context
    actions: tuple[Action, ...] = ()
    remaining: float | None = None  # turns that the scripted solution needs from here, where the environment knows it


def inside_turn(point: ForkPoint, tokens: Sequence[int], count: int) -> ForkPoint:
    """The fork point after the first ``count`` of the ``tokens`` that the trajectory sampled in this turn."""
    assert point.token == 0, "count from the start of the turn"
    return replace(point, start=(*point.start, *tokens[:count]), token=count)


@dataclass(frozen=True)
class EpisodeSupport:
    """Help for one episode. ``hint`` is appended to the first message; with ``recorded`` the record contains it, otherwise only
    the log-probabilities depend on it. ``turns`` are played before the policy's first turn, ``start`` begins that turn: ids that
    the policy did not sample, recorded as context. ``label`` is recorded as guidance."""

    label: str
    hint: str = ""
    recorded: bool = True
    turns: tuple[tuple[int, ...], ...] = ()
    start: tuple[int, ...] = ()


@dataclass(frozen=True)
class OtherSeats:
    """Who plays with the policy: its seat is ``own``, all others are answered by ``session``, whose tokens are context. ``facts``
    are recorded on the trajectory."""

    own: str
    session: Session
    facts: Facts = field(default_factory=dict)


def with_hint_text(messages: list[Message], hint: str) -> list[Message]:
    """The messages with ``hint`` at the end of the first one, which always stays visible."""
    if not hint or not messages:
        return messages
    return [{**messages[0], "content": f"{messages[0]['content']}\n{hint}"}, *messages[1:]]
