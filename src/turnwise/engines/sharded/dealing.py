"""Deal the trajectories of a batch to ranks by cost, and cut each rank's part into micro-batches.

Every rank must run as many forward passes as the others, because a pass is a sequence of collective operations. A rank that
has less to do repeats the cheapest trajectory, and its result is not used.

The cost of a trajectory is the number of ids that the model reads for it. Every rank deals alike. Knows batches; does not know
what is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Level

UNEVEN = 1.1  # load of the fullest rank over the mean above which groups are dealt apart


@dataclass(frozen=True, eq=False)
class Share:
    """One micro-batch of one rank. ``used``: false for work that only keeps the ranks in step."""

    batch: Batch
    used: bool = True

    def rows(self, level: Level) -> Tensor:
        """Where its items are in the dealt batch."""
        return self.batch[Column.ROW, level].x


Round = list[Share]
"""One micro-batch for each rank."""


def stripped(batch: Batch) -> Batch:
    """What a model reads of the step: the candidates that every update scores, and whether the policy is frozen."""
    read = lambda key: key == Column.FREEZE_POLICY or (isinstance(key, tuple) and key[0] == Column.CANDIDATE)  # noqa: E731
    columns = {key: f for key, f in batch.columns.items() if read(key)}
    return replace(batch, columns=columns, facts={}, reward_components={})


def deal(batch: Batch, ranks: int, positions: int, padded: bool) -> list[Round]:
    """Rounds of micro-batches of at most ``positions`` ids. An empty batch has no rounds."""
    if not len(batch):
        return []
    sizes = {level: batch.tree.count(level) for level in (TOKEN, TURN, TRAJECTORY)}
    batch = batch.put({(Column.ROW, level): batch.tree.field(level, torch.arange(n)) for level, n in sizes.items()})
    parts = [
        [Share(micro) for micro in batch.select(rows).split(positions, padded)] if rows else []
        for rows in rows_of_ranks(batch, ranks)
    ]
    # the shortest trajectory with a sampled token, so that its gradient reaches every weight that others reach
    cost = batch.positions_per_trajectory()
    cheapest = int(torch.where(batch.tree.size(TOKEN, TRAJECTORY).x > 0, cost, cost.max() + 1).argmin())
    spare = Share(batch.select([cheapest]), used=False)
    return [[part[n] if n < len(part) else spare for part in parts] for n in range(max(map(len, parts)))]


def rows_of_ranks(batch: Batch, ranks: int) -> list[list[int]]:
    """The trajectories of each rank, in the order of the batch. Groups stay together, because their prompts are read once; they
    are dealt apart where that would leave a rank idle."""
    cost = batch.positions_per_trajectory().cpu().tolist()
    members: dict[int, list[int]] = {}
    for row, group in enumerate(batch.tree.ancestor(TRAJECTORY, GROUP).tolist()):
        members.setdefault(group, []).append(row)
    together = _balance([(sum(cost[k] for k in rows), rows) for rows in members.values()], ranks)
    loads = [sum(cost[k] for k in rows) for rows in together]
    if max(loads) * ranks <= UNEVEN * sum(loads):
        return together
    return _balance([(c, [row]) for row, c in enumerate(cost)], ranks)


def _balance(units: Iterable[tuple[int, list[int]]], ranks: int) -> list[list[int]]:
    """Give the next largest unit to the rank with the least load."""
    loads, rows = [0] * ranks, [list[int]() for _ in range(ranks)]
    for cost, unit in sorted(units, key=lambda u: (-u[0], u[1])):
        rank = loads.index(min(loads))
        loads[rank] += cost
        rows[rank] += unit
    return [sorted(dealt) for dealt in rows]
