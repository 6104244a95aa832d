"""What a reading is told, in sizes that come again: a graph finds it always in the same place.

Knows layouts; neither weights nor what is done with them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turnwise.core.levels import send
from turnwise.engines.generator.attention_layouts import Reading
from turnwise.maths.numbers import at_least

TOKENS = [2**k * quarters // 4 for k in range(8, 24) for quarters in range(4, 8)]  # buckets of what is read at once ...
JOBS = [4**k for k in range(2, 12)]  # ... of which these two cost next to nothing
DEPTHS = [2**k for k in range(6, 24)]
CAPTURED = 8192  # tokens up to which reading is captured: from there on launches hide behind products


class Size(NamedTuple):
    """A bucket of readings: tokens, jobs, tokens of the longest job."""

    tokens: int
    jobs: int
    depth: int

    @classmethod
    def of(cls, layout: Reading) -> Size:
        tokens, jobs = len(layout.host.tokens), len(layout.host.rows)
        return cls(at_least(TOKENS, tokens), at_least(JOBS, jobs), at_least(DEPTHS, layout.depth))


class Page:
    """What a reading of some size is told, where a graph finds it; beyond what is given, tokens that are none."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size = size
        self.flat = self._blank().to(device)
        self.tokens, self.position, self.row, self.rows, self.start, self.ends = self._parts(self.flat)

    def _blank(self) -> Tensor:
        blank = torch.zeros(3 * self.size.tokens + 3 * self.size.jobs + 1, dtype=torch.int64)
        self._parts(blank)[1].fill_(-1)
        return blank

    def _parts(self, flat: Tensor) -> list[Tensor]:
        n, jobs, _ = self.size
        return list(flat.split([n, n, n, jobs, jobs, jobs + 1]))

    def fill(self, layout: Reading) -> None:
        given = self._blank()
        host, parts = layout.host, self._parts(given)
        for into, value in zip(parts, (host.tokens, host.position, host.row, host.rows, host.start, host.ends)):
            into[: len(value)] = value
        parts[-1][len(host.ends) :] = len(host.tokens)
        self.flat.copy_(send(given, self.flat.device))
