"""A generator whose weights a second one follows, which serves other requests: a run's policy as its own judge.

The two share no cache and no batch, so what the second samples cannot change what the first does."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from turnwise.core.protocols import Generator, Session


class MirroredGenerator:
    """Implements ``core.protocols.Generator`` by ``main``; ``mirror`` gets every published weight as well."""

    def __init__(self, main: Generator, mirror: Generator) -> None:
        self.main, self.mirror = main, mirror
        for name in ("model_runner", "scheduler"):  # the profiler times these
            if hasattr(main, name):
                setattr(self, name, getattr(main, name))

    @property
    def version(self) -> int:
        return self.main.version

    @version.setter
    def version(self, value: int) -> None:
        self.main.version = self.mirror.version = value

    def open(self, seed: int, draft: bool = False) -> Session:
        return self.main.open(seed, draft)

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self.main.publish(weights, version)
        await self.mirror.publish(weights, version)

    @property
    def fatal(self) -> Exception | None:
        return getattr(self.main, "fatal", None)

    def stats(self) -> dict[str, float]:
        return self.main.stats()

    def describe(self) -> str:
        return self.main.describe()
