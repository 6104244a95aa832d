"""Peers: which items are compared with each other, where they are not simply those of a level."""

from __future__ import annotations

from turnwise.algebra.piece import Piece
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, Level, Partition


class Peers(Piece):
    """Interface: a partition of the items of one level of a batch."""

    def __call__(self, batch: Batch) -> Partition:
        raise NotImplementedError


class Same(Peers):
    """Turns of one group agreeing in ``state``, ``agent`` or turn ``index``: ``Same("state")``, ``Same("agent+index")``."""

    what: str

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"state"} & set(self.what.split("+")))

    def __call__(self, batch: Batch) -> Partition:
        return batch.same(*self.what.split("+"))


PeerSpec = Level | Peers


def resolve_peers(peers: PeerSpec, batch: Batch) -> Level | Partition:
    """The level or partition that peers stand for in a batch."""
    return peers if isinstance(peers, Level) else peers(batch)


class SameTokenIndex(Peers):
    """The t-th sampled tokens of a task's trajectories; ``apart`` False: all sampled tokens of the task."""

    apart: bool = True

    def __call__(self, batch: Batch) -> Partition:
        index = batch.tree.index(TOKEN, TRAJECTORY)
        return Partition.by(batch.tree, TOKEN, batch.group, index if self.apart else index * 0)
