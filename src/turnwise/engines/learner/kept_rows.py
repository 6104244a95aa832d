"""Log-probabilities over the ids that were kept when a token was sampled, for the rows of one chunk of logits at a time.

Legend: N rows, M ids of all their sets. A row's sum runs over its own ids in order, whatever rows share its chunk. Knows logits
and ids; not why they were kept.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.core.batch import Batch
from turnwise.core.kept_sets import KeptSets

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class KeptChunk:
    """The sets of n rows, with m ids."""

    given: Tensor  # [n] whether a row has a set
    size: Tensor  # [n]
    row: Tensor  # [m] inside the chunk
    ids: Tensor  # [m]
    span: slice  # where its ids are among all M

    def log_sums(self, values: Tensor) -> Tensor:
        """log Σ exp of the values [m] of each row's ids, [n]; 0 for a row without a set. Differentiable."""
        if not self.ids.numel():
            return values.new_zeros(len(self.given))
        over = lambda x, how, empty: torch.segment_reduce(x, how, lengths=self.size, unsafe=True, initial=empty)  # noqa: E731
        top = over(values.detach(), "max", -torch.inf).where(self.given, 0.0)
        return top + over((values - top[self.row]).exp(), "sum", 0.0).where(self.given, 1.0).log()

    def log_probs(self, z: Tensor, targets: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, V] before temperature -> log p of the targets over their sets [n], meaningless for a row without one, and p
        of every id [m]."""
        values = z[self.row, self.ids] * inverse[self.row]
        sums = self.log_sums(values)
        return z.gather(1, targets[:, None]).squeeze(1) * inverse - sums, (values - sums[self.row]).exp()

    def add_gradient(self, d: Tensor, p: Tensor, targets: Tensor, factor: Tensor) -> None:
        """d(logits) [n, V] += factor · (onehot − p over the set) for rows with a set. No id is twice in a row, so the sum does
        not depend on an order."""
        d[self.row, self.ids] += (((self.ids == targets[self.row]).to(p) - p) * factor[self.row]).to(d.dtype)


class KeptRows:
    """The sets of all rows, in chunks of ``rows`` of them. Reads where they begin from the device once."""

    def __init__(self, sets: KeptSets, rows: int) -> None:
        self.given, self.rows = sets.size > 0, rows
        self._size, self._ids = sets.size, sets.ids.long()
        self._row = torch.repeat_interleave(sets.size, output_size=len(sets.ids))
        ends = sets.size.cumsum(0)
        self._ends = [0, *ends[rows - 1 :: rows].tolist(), len(sets.ids)]

    def of_chunk(self, index: int) -> KeptChunk:
        rows, span = slice(index * self.rows, (index + 1) * self.rows), slice(self._ends[index], self._ends[index + 1])
        row = self._row[span] - rows.start
        return KeptChunk(self.given[rows], self._size[rows], row, self._ids[span], span)


def tell_missing_sets(batch: Batch) -> None:
    """Say once that some tokens were sampled under a filter and their kept sets are not recorded."""
    if bool((batch.mass.x != 0).any()):
        _say_missing()


@functools.cache
def _say_missing() -> None:
    log.warning(
        "some tokens were sampled under top-p, top-k or min-p without a record of the ids that were kept (the set was too large, "
        "or the server does not return it): only its mass is known, so their ratios are exact only until the policy moves"
    )
