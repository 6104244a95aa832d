"""KV slots: one row of keys and values per dialogue, kept across turns; and who sits where.

Rows [0, n) are the running ones, so that a decode step reads ``K[:n, :, :T]`` as a view and never gathers. Rows behind
them keep the KV of dialogues that wait for their environment, until the place is needed. Knows ids and rows; neither
models nor sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Shape = tuple[int, int]
"""(kv heads, head size) of a key or value."""


@dataclass(eq=False, slots=True)
class Seat:
    """One dialogue's claim on a row. ``order`` is its place among all dialogues ever opened."""

    order: int
    row: int | None = None
    used: int = 0  # clock of its last admission


@dataclass(frozen=True, slots=True)
class Move:
    source: int
    target: int
    length: int


@dataclass(eq=False)
class Slots:
    shapes: Sequence[tuple[Shape, Shape]]  # per layer: key, value
    rows: int
    context: int
    dtype: torch.dtype
    device: torch.device
    width: int = 0  # columns allocated so far
    keys: list[Tensor] = field(default_factory=list)  # per layer [rows, Hkv, width, D]
    values: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.owner: list[Seat | None] = [None] * self.rows
        self.held: list[list[int]] = [[] for _ in range(self.rows)]  # ids whose KV each row holds
        self.uniform = len({shape for pair in self.shapes for shape in pair}) == 1
        self._blocks: list[Tensor] = []
        self.reserve(min(128, self.context))

    # ------------------------------------------------------------------ memory

    def reserve(self, width: int) -> None:
        """At least this many columns. Grown by doubling, so that a long context costs memory only when it is used."""
        if width <= self.width:
            return
        width = min(self.context, max(width, 2 * self.width))
        old, flat = self._blocks, [shape for pair in self.shapes for shape in pair]
        plan = [(len(flat), flat[0])] if self.uniform else [(1, shape) for shape in flat]
        # zeros, not empty: a masked column still meets 0 * value, and 0 * NaN is NaN
        self._blocks = [
            torch.zeros(count, self.rows, heads, width, size, dtype=self.dtype, device=self.device)
            for count, (heads, size) in plan
        ]
        for new, block in zip(self._blocks, old):
            new[:, :, :, : self.width] = block
        self.width = width
        tensors = [tensor for block in self._blocks for tensor in block.unbind(0)]
        self.keys, self.values = tensors[0::2], tensors[1::2]

    def move(self, moves: Sequence[Move]) -> None:
        """Copy rows; every source is read before any target is written."""
        moves = [m for m in moves if m.length and m.source != m.target]
        if not moves:
            return
        length = max(m.length for m in moves)
        source = torch.tensor([m.source for m in moves], device=self.device)
        target = torch.tensor([m.target for m in moves], device=self.device)
        for block in self._blocks:
            part = block[:, :, :, :length]
            part.index_copy_(1, target, part.index_select(1, source))

    # ------------------------------------------------------------------ seats

    def arrange(self, active: Sequence[Seat], donors: Mapping[Seat, tuple[int, int]] | None = None) -> None:
        """Seat ``active`` in rows [0, n). Who sits there already stays; idle dialogues give way and keep their KV if
        there is room, the longest unused lose it. A newcomer with a donor (row, length) starts from a copy of it."""
        n, donors = len(active), donors or {}
        seated = {s.row for s in active if s.row is not None and s.row < n}
        places = [row for row in range(n) if row not in seated]
        coming = [s for s in active if s.row is None or s.row >= n]
        if not coming:
            return
        leaving = self._make_room(active, n, {s.row for s in coming})
        moves, contents = [], []
        for seat, place in [*zip(coming, places), *leaving]:
            source, length = (seat.row, None) if seat.row is not None else donors.get(seat, (place, 0))
            ids = self.held[source] if length is None else self.held[source][:length]
            moves.append(Move(source, place, len(ids)))
            contents.append((seat, place, ids))
        for seat, _, _ in contents:  # rows left behind are free; their ids stay readable as donors
            if seat.row is not None:
                self.owner[seat.row] = None
        for seat, place, ids in contents:
            seat.row, self.owner[place], self.held[place] = place, seat, ids
        self.move(moves)

    def _make_room(self, active: Sequence[Seat], n: int, vacated: set[int | None]) -> list[tuple[Seat, int]]:
        """Where idle dialogues sitting in [0, n) go; the longest unused of all idle ones lose their row if need be."""
        running = set(active)
        idle = [s for s in self.owner if s is not None and s not in running]
        idle.sort(key=lambda s: (-s.used, s.order))
        for seat in idle[self.rows - n :]:
            self.release(seat)
        spare = [row for row in range(n, self.rows) if self.owner[row] is None or row in vacated]
        displaced = [s for s in idle[: self.rows - n] if s.row is not None and s.row < n]
        return list(zip(displaced, spare))

    def release(self, seat: Seat) -> None:
        """Give up a row. Its ids stay readable as a donor until someone else sits there."""
        if seat.row is not None:
            self.owner[seat.row] = None
            seat.row = None

    def forget(self) -> None:
        """The weights changed: what the rows hold belongs to an older policy."""
        self.held = [[] for _ in range(self.rows)]
