"""The ids that a sampler could draw when it drew a token, of many tokens: those that top-p, top-k or min-p kept, listed and
packed end to end, or those that a grammar allowed, as bits.

Legend: N sampled tokens, M ids of all listed sets, R distinct masks of W bytes. Knows tensors and turns; not how sets are found
or what is computed over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from turnwise.core.transfer import to_device_packed
from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.core.records import Turn

MaskReplay = Callable[[str, Sequence[int], Sequence[int]], list[bytes]]
"""(grammar, ids that it has read, tokens) -> what it allowed before each token: a bit for every id, the lowest one first."""


@dataclass(frozen=True, eq=False)
class KeptSets:
    """The sets of N tokens. A size of 0: not listed. Log-probabilities of a token with neither list nor mask are those of the
    whole vocabulary."""

    ids: Tensor  # [M] int32
    size: Tensor  # [N] ids of each token's set
    masks: Tensor | None = None  # [R, W] uint8; ids beyond the last bit are not allowed
    mask_of: Tensor | None = None  # [N] row of ``masks``, −1: none. A listed set stands for its mask, in which it lies

    @classmethod
    def of(
        cls, turns: Sequence[Turn], begun: Sequence[Sequence[int]] = (), replay: MaskReplay | None = None
    ) -> KeptSets | None:
        """The sets of all sampled tokens; None where no turn has any. One without log-probabilities has no sampler to follow.
        ``begun``: what the grammar of each turn had read before."""
        recorded = [bool(turn.logp and turn.kept) for turn in turns]
        masked = [bool(replay and turn.logp and turn.grammar) for turn in turns]
        if not any(recorded) and not any(masked):
            return None
        rows = [row for t, lists in zip(turns, recorded) for row in (t.kept if lists else [b""] * len(t.tokens))]
        ids = torch.tensor([], dtype=torch.int32)
        if any(rows):
            ids = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int32)
        size = torch.tensor([len(row) // 4 for row in rows])
        if not any(masked):
            return cls(ids, size)
        numbers: dict[bytes, int] = {}  # few are distinct: a text is mostly inside strings
        mask_of: list[int] = []
        for turn, before, has_mask in zip(turns, begun, masked):
            if has_mask and replay is not None:
                seen = replay(turn.grammar, before, turn.tokens)
                mask_of += [numbers.setdefault(mask, len(numbers)) for mask in seen]
            else:
                mask_of += [-1] * len(turn.tokens)
        masks = torch.frombuffer(bytearray(b"".join(numbers)), dtype=torch.uint8).view(len(numbers), -1)
        return cls(ids, size, masks, torch.tensor(mask_of).masked_fill(size > 0, -1))

    def select(self, tokens: slice | Tensor) -> KeptSets:
        size, begin = self.size[tokens], (self.size.cumsum(0) - self.size)[tokens]
        inside = torch.arange(int(size.sum()), device=size.device) - (size.cumsum(0) - size).repeat_interleave(size)
        mask_of = None if self.mask_of is None else self.mask_of[tokens]
        return KeptSets(self.ids[begin.repeat_interleave(size) + inside], size, self.masks, mask_of)

    def to(self, device: torch.device | str) -> KeptSets:
        lists = KeptSets(*to_device_packed([self.ids, self.size], device))
        if self.masks is None or self.mask_of is None:
            return lists
        masks, mask_of = to_device_packed([self.masks, self.mask_of], device)
        return replace(lists, masks=masks, mask_of=mask_of)

    def allowed(self, rows: slice, vocabulary: int) -> Tensor | None:
        """Which ids the masks of some tokens allow [n, V]: all, for a token without one. None where no token has a mask."""
        if self.masks is None or self.mask_of is None or not len(self.masks):
            return None
        index = self.mask_of[rows]
        bits = torch.arange(8, device=index.device, dtype=torch.uint8)
        rows_of_bits = ((self.masks[index.clamp(min=0)][:, :, None] >> bits) & 1).flatten(1).bool()[:, :vocabulary]
        missing = vocabulary - rows_of_bits.shape[1]
        return torch.nn.functional.pad(rows_of_bits, (0, missing)) | (index < 0)[:, None]
