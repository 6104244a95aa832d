"""Static input buffers of captured prefill graphs, padded to bucketed shapes: a replayed graph reads the same addresses.

Knows prefill layouts; neither weights nor what is computed from the buffers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turnwise.core.transfer import to_device
from turnwise.engines.generator.attention_layouts import PrefillLayout
from turnwise.maths.numbers import first_at_least

TOKEN_BUCKETS = [
    2**k * quarters // 4 for k in range(8, 24) for quarters in range(4, 8)
]  # padding here costs compute ...
CHUNK_BUCKETS = [4**k for k in range(2, 12)]  # ... padding in these two costs next to nothing
LENGTH_BUCKETS = [2**k for k in range(6, 24)]
MAX_CAPTURED_TOKENS = 8192  # larger prefills run without a graph: their launches hide behind the matrix products


class GraphShape(NamedTuple):
    """The bucket of a prefill: tokens, chunks, tokens of the longest chunk."""

    tokens: int
    chunks: int
    longest: int

    @classmethod
    def of(cls, layout: PrefillLayout) -> GraphShape:
        tokens, chunks = len(layout.host.tokens), len(layout.host.chunk_rows)
        return cls(
            first_at_least(TOKEN_BUCKETS, tokens),
            first_at_least(CHUNK_BUCKETS, chunks),
            first_at_least(LENGTH_BUCKETS, layout.longest_chunk),
        )


class GraphInputs:
    """The inputs of a prefill of one shape in one device buffer. Padding tokens have position −1."""

    def __init__(self, shape: GraphShape, device: torch.device) -> None:
        self.shape = shape
        self.buffer = self._padding().to(device)
        self.tokens, self.position, self.block, self.chunk_rows, self.start, self.boundaries = self._views(self.buffer)

    def _padding(self) -> Tensor:
        padding = torch.zeros(3 * self.shape.tokens + 3 * self.shape.chunks + 1, dtype=torch.int64)
        self._views(padding)[1].fill_(-1)
        return padding

    def _views(self, buffer: Tensor) -> list[Tensor]:
        n, chunks, _ = self.shape
        return list(buffer.split([n, n, n, chunks, chunks, chunks + 1]))

    def fill(self, layout: PrefillLayout) -> None:
        """Stage all inputs in one host-to-device copy."""
        staged, host = self._padding(), layout.host
        views = self._views(staged)
        for view, value in zip(
            views, (host.tokens, host.position, host.block, host.chunk_rows, host.start, host.boundaries)
        ):
            view[: len(value)] = value
        views[-1][len(host.boundaries) :] = len(host.tokens)
        self.buffer.copy_(to_device(staged, self.buffer.device))
