"""Actions sampled again: at every recorded state the present policy takes the turn once more, and no environment answers.

The piece says how many; ``data/resampling.py`` samples them. Knows no tokens and no losses.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.data.replay.base import FindDemonstration, LiveReplay, ReadTrajectory, Replay, require

FRESH = "fresh"  # fact of a trajectory that holds one turn sampled again


@dataclass(frozen=True)
class FreshActions:
    """``count`` turns of the present policy at the state of each turn of a step, replayed ones included. Each is a trajectory of
    one turn without a reward, a fork of the recorded one with the fact ``fresh``. ``replay``: the buffer underneath."""

    replay: Replay
    count: int = 1

    def __post_init__(self) -> None:
        require(self.count >= 0, f"{self.count} fresh actions of each state; write 0 for none, or a positive number")

    @property
    def requires(self) -> frozenset[str]:
        return self.replay.requires

    def open(self, read: ReadTrajectory, find_demonstration: FindDemonstration, seed: int) -> LiveReplay:
        return self.replay.open(read, find_demonstration, seed)
