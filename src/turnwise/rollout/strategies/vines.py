"""Vines: several continuations of evenly spaced states of finished trajectories. Knows sessions and trajectories; no loss."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from turnwise.core.records import Group, Status
from turnwise.errors import RecipeError
from turnwise.rollout.episode_start import ForkPoint
from turnwise.rollout.strategies.base import GroupRequest
from turnwise.rollout.strategies.tree import GrownEpisode, TreeGrowth


@dataclass(frozen=True)
class Vines:
    """``trunks`` trajectories from the prompt. ``states`` evenly spaced turns of each are rollout states: from each of them
    ``vines`` continuations are sampled to the end. A trunk too short for so many states has fewer; sessions that are left start
    at the prompt."""

    trunks: int = 1
    states: int = 2
    vines: int = 8

    requirements = frozenset({"forks"})

    def __post_init__(self) -> None:
        if self.trunks < 1 or self.states < 0 or self.vines < 1:
            raise RecipeError(f"need trunks, vines >= 1 and states >= 0, got {self}")

    @property
    def needed(self) -> int:
        """Trajectories of a full group."""
        return self.trunks * (1 + self.states * self.vines)

    def check_group_size(self, size: int) -> None:
        """Raise if a group has no place for every vine."""
        if self.needed > size:
            raise RecipeError(
                f"{self.trunks} trunks with {self.states} states of {self.vines} vines are more than a group of {size}; write "
                f"--group-size {self.needed} or more, or fewer vines"
            )

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        self.check_group_size(request.size)
        return self._grow(TreeGrowth(request))

    async def _grow(self, tree: TreeGrowth) -> Group:
        tree.begin()
        trunks = await tree.play([None] * self.trunks)
        await tree.play([point for trunk in trunks for point in self.rollout_states(trunk) for _ in range(self.vines)])
        while tree.free:
            await tree.play([None] * len(tree.free))
        return tree.group()

    def rollout_states(self, trunk: GrownEpisode) -> list[ForkPoint]:
        """Evenly spaced turns of a trunk; never the first, where a vine would be another trunk."""
        turns = 0 if trunk.trajectory.status == Status.FAILED else len(trunk.trajectory.turns)
        at = sorted({k * turns // (self.states + 1) for k in range(1, self.states + 1)} - {0})
        return [trunk.points[turn] for turn in at]
