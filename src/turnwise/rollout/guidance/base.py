"""Guidance: what help the episodes of a group get besides their task. A piece is frozen; ``open`` returns its live state.

    begin · observe · state_dict · load_state_dict · metrics

Guidance decides around a strategy: it may let the strategy grow the plain group first, and play guided episodes after it.
Knows trajectories and tiers of help; no token, no environment, no loss.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnwise.core.records import Group, Trajectory
from turnwise.rollout.strategies.base import GroupRequest, Strategy, succeeded


class LiveGuidance(Protocol):
    """Interface: guidance in a run."""

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        """Grow a group. Opens every session synchronously, before anything is awaited."""
        ...

    def observe(self, group: Group) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Guidance(Protocol):
    """Interface: the frozen description. ``requirements``: what the environment must provide. ``reads_rewards``: rewards are
    read while a group grows, so each trajectory is scored alone."""

    @property
    def requirements(self) -> frozenset[str]: ...

    @property
    def reads_rewards(self) -> bool: ...

    def open(self, seed: int) -> LiveGuidance: ...


@dataclass(frozen=True)
class NoGuidance:
    """No help: the strategy alone grows the group."""

    requirements = frozenset[str]()
    reads_rewards = False

    def open(self, seed: int) -> LiveGuidance:
        return PlainGroups()


@dataclass
class PlainGroups:
    """Lets the strategy grow every group; also the base of other live guidance, with its counters."""

    counts: dict[str, int] = field(default_factory=dict)  # groups, groups with help, successes with and without it

    def begin(self, request: GroupRequest, strategy: Strategy) -> Coroutine[Any, Any, Group]:
        return strategy.begin(request)

    def observe(self, group: Group) -> None:
        pass

    def count(self, name: str, by: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + by

    def count_results(self, trajectories: list[Trajectory] | tuple[Trajectory, ...]) -> None:
        """Count episodes and successes, with and without help."""
        for t in trajectories:
            kind = "guided" if t.guidance else "plain"
            self.count(f"{kind}_episodes")
            self.count(f"{kind}_successes", int(succeeded(t)))

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = {name: int(n) for name, n in state["counts"].items()}

    def metrics(self) -> dict[str, float]:
        return {f"guidance/{name}": float(n) for name, n in sorted(self.counts.items())}
