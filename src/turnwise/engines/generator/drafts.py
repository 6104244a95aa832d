"""Two generators of one policy: a low-precision one samples drafts, the exact one everything else. Both use the same random
numbers, so a draft that is sampled again with the exact one comes out nearly the same."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from torch import Tensor

from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.generator.session import LocalSession


class DraftingGenerator:
    """Implements ``core.protocols.Generator``."""

    def __init__(self, exact: LocalGenerator, cheap: LocalGenerator) -> None:
        self.exact, self.cheap = exact, cheap
        self.model_runner, self.scheduler = exact.model_runner, exact.scheduler  # the profiler times these

    @property
    def version(self) -> int:
        return self.exact.version

    @version.setter
    def version(self, value: int) -> None:
        self.exact.version = self.cheap.version = value

    def open(self, seed: int, draft: bool = False) -> LocalSession:
        return (self.cheap if draft else self.exact).open(seed)

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        await asyncio.gather(self.exact.publish(weights, version), self.cheap.publish(weights, version))

    def stats(self) -> dict[str, float]:
        return self.exact.stats() | {f"drafts/{name}": value for name, value in self.cheap.stats().items()}

    def describe(self) -> str:
        return f"{self.exact.describe()}; drafts: {self.cheap.describe()}"
