"""How tokens attend to KV slots: many tokens of few rows (``Reading``), or one of every running row (``Stepping``).

Both write their keys and values into the slots first and attend to them from there. Know nothing of ids or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from turnwise.core.levels import send_all
from turnwise.engines.generator.kv_cache import Slots
from turnwise.maths.numbers import tensor_of

BUCKET = 16  # attended widths are multiples of this: few shapes, little waste


def _width(longest: int, slots: Slots) -> int:
    return min(slots.width, -(-longest // BUCKET) * BUCKET)


@dataclass(frozen=True, slots=True)
class Job:
    """Read ``ids`` into ``row``, starting at column ``start``."""

    row: int
    start: int
    ids: list[int]


class Packed(NamedTuple):
    """N tokens of J jobs, one job behind the other."""

    tokens: Tensor  # [N] ids
    position: Tensor  # [N] the column of its row that each is to have
    row: Tensor  # [N]
    job: Tensor  # [N]
    offset: Tensor  # [N] from the beginning of its job
    rows: Tensor  # [J]
    start: Tensor  # [J] columns that the row holds already
    ends: Tensor  # [J + 1] where jobs begin and end


class Reading:
    """Packed tokens of some rows, each behind what its row already holds."""

    def __init__(self, slots: Slots, jobs: Sequence[Job]) -> None:
        sizes = [len(job.ids) for job in jobs]
        longest = max(job.start + size for job, size in zip(jobs, sizes))
        slots.reserve(longest)
        self.slots, self.width, self.depth = slots, _width(longest, slots), max(sizes)
        rows, start = torch.tensor([j.row for j in jobs]), torch.tensor([j.start for j in jobs])
        ends = torch.tensor([0, *sizes]).cumsum(0)
        tokens = tensor_of([t for job in jobs for t in job.ids], torch.int64)
        job = torch.repeat_interleave(torch.arange(len(jobs)), ends.diff())
        offset = torch.arange(len(tokens)) - ends[job]
        self.host = Packed(tokens, start[job] + offset, rows[job], job, offset, rows, start, ends)
        self.masks: dict[int | None, Tensor] = {}

    @cached_property
    def there(self) -> Packed:
        """The same where the slots are."""
        return Packed(*send_all(self.host, self.slots.device))

    def mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            start = self.there.start
            query = start[:, None] + torch.arange(self.depth, device=start.device)  # [J, depth]
            age = query[:, :, None] - torch.arange(
                self.width, device=query.device
            )  # [J, depth, width]; negative = future
            self.masks[window] = (age >= 0 if window is None else (age >= 0) & (age < window))[:, None]
        return self.masks[window]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k and v [1, Hkv, N, D] into their rows."""
        row, position = self.there.row, self.there.position
        self.slots.keys[layer][row, :, position] = k[0].transpose(0, 1)
        self.slots.values[layer][row, :, position] = v[0].transpose(0, 1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        self.write(layer, k, v)
        keys, values, there = self.slots.keys[layer], self.slots.values[layer], self.there
        padded = q.new_zeros(len(there.rows), self.depth, q.shape[1], q.shape[3])
        padded[there.job, there.offset] = q[0].transpose(0, 1)
        out = F.scaled_dot_product_attention(
            padded.transpose(1, 2),
            keys[there.rows, :, : self.width],
            values[there.rows, :, : self.width],
            attn_mask=self.mask(window),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2)[there.job, there.offset][None]  # [1, N, H, D]


class Stepping:
    """One token of each row [0, n), again and again; ``advance`` between two steps."""

    def __init__(self, slots: Slots, lengths: Sequence[int], steps: int) -> None:
        """``lengths``: columns each row holds. Room is made for ``steps`` more."""
        self.longest = max(lengths)
        slots.reserve(min(slots.context, self.longest + steps))
        self.slots, self.n = slots, len(lengths)
        self.position = torch.tensor(lengths, device=slots.device)
        self.column = torch.arange(slots.width, device=slots.device)
        self.row = torch.arange(self.n, device=slots.device)
        self._prepare()

    def _prepare(self) -> None:
        self.width = _width(min(self.longest + 1, self.slots.context), self.slots)
        self.indices: dict[int, Tensor] = {}
        self.masks: dict[int | None, Tensor] = {}

    def advance(self) -> None:
        """Finished rows ride along until the next regrouping: clamped, they overwrite their own last column."""
        self.position = (self.position + 1).clamp_(max=self.slots.context - 1)
        self.longest += 1
        self._prepare()

    def index(self, heads: int) -> Tensor:
        """Flat places in [rows * heads * width] where this step's keys go."""
        if heads not in self.indices:
            head = torch.arange(heads, device=self.position.device)
            base = (self.row[:, None] * heads + head) * self.slots.width
            self.indices[heads] = (base + self.position[:, None]).flatten()
        return self.indices[heads]

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive [n, 1, 1, width]."""
        if window not in self.masks:
            age = self.position[:, None] - self.column[: self.width]
            seen = age >= 0 if window is None else (age >= 0) & (age < window)
            zero = torch.zeros((), dtype=dtype, device=age.device)
            self.masks[window] = torch.where(seen, zero, float("-inf"))[:, None, None]
        return self.masks[window]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """q [n, H, 1, D] -> [n, 1, H, D]."""
        self.write(layer, k[:, :, 0], v[:, :, 0])
        return self.look(layer, q, scale, window)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k and v [n, Hkv, D] into this step's column of every row."""
        index = self.index(k.shape[1])
        self.slots.keys[layer].view(-1, k.shape[2]).index_copy_(0, index, k.reshape(-1, k.shape[2]))
        self.slots.values[layer].view(-1, v.shape[2]).index_copy_(0, index, v.reshape(-1, v.shape[2]))

    def look(self, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention of q [n, H, 1, D] to what the slots hold. The heads that share a key are queries of that key:
        nothing is repeated and K stays a view."""
        n, H, _, D = q.shape
        keys = self.slots.keys[layer][:n, :, : self.width]
        values = self.slots.values[layer][:n, :, : self.width]
        grouped = q.reshape(n, keys.shape[1], -1, D)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask(window, q.dtype), scale=scale)
        return out.reshape(n, 1, H, values.shape[-1])
