"""The ids that top-p, top-k, min-p or a grammar kept when a token was sampled, of many tokens, packed end to end.

Legend: N sampled tokens, M ids of all their sets. Knows tensors and turns; not how sets are found or what is computed over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnwise.core.transfer import to_device_packed
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.core.records import Turn


@dataclass(frozen=True, eq=False)
class KeptSets:
    """The sets of N tokens. A size of 0: not recorded, and log-probabilities are those of the whole vocabulary."""

    ids: Tensor  # [M] int32
    size: Tensor  # [N] ids of each token's set

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> KeptSets | None:
        """The sets of all sampled tokens; None where no turn has any. One without log-probabilities has no sampler to follow."""
        if not any(turn.kept and turn.logp for turn in turns):
            return None
        rows = [row for t in turns for row in (t.kept if t.kept and t.logp else [b""] * len(t.tokens))]
        return cls(
            torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int32), torch.tensor([len(r) // 4 for r in rows])
        )

    def select(self, tokens: slice | Tensor) -> KeptSets:
        size, begin = self.size[tokens], (self.size.cumsum(0) - self.size)[tokens]
        inside = torch.arange(int(size.sum()), device=size.device) - (size.cumsum(0) - size).repeat_interleave(size)
        return KeptSets(self.ids[begin.repeat_interleave(size) + inside], size)

    def to(self, device: torch.device | str) -> KeptSets:
        return KeptSets(*to_device_packed([self.ids, self.size], device))
