"""A generator whose servers come and go while the run samples: a cluster starts, restarts and removes them.

``find`` says where servers are now. A publication takes the new ones and leaves those that are gone. With none left, requests
wait until one is found, which first gets the weights that were published last; after ``patience`` seconds the run stops. Knows
no cluster.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from turnwise.engines.remote.remote_generator import RemoteGenerator
from turnwise.engines.remote.replica import Replica
from turnwise.engines.remote.transport import ServerAddress, in_daemon_thread
from turnwise.errors import GeneratorLost, ServerFault, SettingError

LOOK_SECONDS = 0.2  # between two looks for a server where none is left
OTHERS_SECONDS = 10.0  # in which a run that begins with some servers waits for the others
Find = Callable[[], Sequence[ServerAddress]]


class ElasticGenerator(RemoteGenerator):
    """``make`` turns an address into a server of this run."""

    def __init__(self, find: Find, make: Callable[[ServerAddress], Replica], patience: float, *others: Any) -> None:
        super().__init__([], *others)
        self.find, self.make, self.patience = find, make, patience
        self._changing = asyncio.Lock()  # who attaches servers and loads weights
        self._joined, self._salt = 0, uuid.uuid4().hex[:12]

    async def join(self, wanted: int) -> None:
        """Take the servers that are there. Waits for one with patience, and a while for ``wanted``."""
        began = time.monotonic()
        while len(self.alive()) < wanted and time.monotonic() - began < (
            min(OTHERS_SECONDS, self.patience) if self.alive() else self.patience
        ):
            await self._rejoin(await self._answering())
            await asyncio.sleep(LOOK_SECONDS if len(self.alive()) < wanted else 0)
        if not self.alive():
            raise SettingError(f"no generator came up within {self.patience:g} s{self._reasons()}")

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        async with self._changing:
            await super().publish(weights, version)

    def check(self) -> None:
        """Tell about servers that were lost. None left is no end: requests wait for another."""
        self.tell_lost()

    async def ready(self) -> None:
        """Wait while weights are published, and for a server where none is left."""
        while True:
            await self._ready.wait()
            self.check()
            if self.fatal is not None:
                raise self.fatal
            if self.alive():
                return
            await self._recover()

    async def _recover(self) -> None:
        """Find a server and give it the weights that were published last."""
        async with self._changing:
            if self.alive() or self.fatal is not None:
                return
            self._ready.clear()  # a server that was taken has no weights yet
            try:
                await self._take_any(time.monotonic() + self.patience)
            finally:
                self._ready.set()

    async def _take_any(self, until: float) -> None:
        while not self.alive():
            if time.monotonic() > until:
                self.fatal = GeneratorLost(f"no generator came back within {self.patience:g} s{self._reasons()}")
                return
            await self._rejoin(await self._answering())
            if self.alive():
                weights = await in_daemon_thread(self.publisher.read_again)
                await self._publish_to_all(weights, self.version)
            else:
                await asyncio.sleep(LOOK_SECONDS)

    async def _answering(self) -> list[Replica]:
        """Leave servers that are gone; those that are new or lost, and answer."""
        here = {address.url: address for address in await in_daemon_thread(self.find)}
        for gone in [replica for replica in self.replicas if replica.url not in here]:
            gone.lose("it was removed")
            self.tell_lost()
            self.replicas.remove(gone)
        known = {replica.url for replica in self.replicas}
        self.replicas += [self.make(address) for url, address in here.items() if url not in known]
        return await super()._answering()

    async def _rejoin(self, replicas: Sequence[Replica]) -> None:
        """Take servers that are new or were lost."""
        for replica in replicas:
            try:
                await replica.attach(self.limits)
            except ServerFault as fault:
                self._refuse(replica, fault)
                continue
            self._told.discard(replica)
            self._joined += 1
            if self.publisher.version >= 0:
                self.tell(f"the generator {replica.url} samples from now on")

    def _refuse(self, replica: Replica, fault: Exception) -> None:
        replica.lost = str(fault)
        self._told.add(replica)  # it was never in use

    def _reasons(self) -> str:
        return "".join(f"; {replica.url}: {replica.lost}" for replica in self.replicas)

    def stats(self) -> dict[str, float]:
        return {**super().stats(), "joined": float(self._joined)}

    def describe(self) -> str:
        engines = sorted({str(replica.facts.get("engine") or replica.model) for replica in self.replicas})
        return f"generator actors: {len(self.alive())} ({'; '.join(engines)})"

    def salt(self, version: int) -> str:
        return f"{self._salt}-{version}"
