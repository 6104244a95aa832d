"""Two generators as one: the second samples drafts in low precision, follows the weights to judge, or plays older policies.

The two share no cache and no batch, so what the second samples cannot change what the first does. Knows neither judges, games nor
seats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from turnwise.core.protocols import Generator, Session
from turnwise.core.seeds import stable_seed
from turnwise.engines.generator.generator import LocalGenerator, LocalSession


class PairedGenerator:
    """Implements ``core.protocols.Generator`` by ``main``; ``second`` gets every published weight as well. As it is: a run's
    policy and its own judge."""

    prefix = ""  # of the second one's counts

    def __init__(self, main: Generator, second: Generator) -> None:
        self.main, self.second = main, second
        for name in ("model_runner", "scheduler"):  # the profiler times these
            if hasattr(main, name):
                setattr(self, name, getattr(main, name))

    @property
    def version(self) -> int:
        return self.main.version

    @version.setter
    def version(self, value: int) -> None:
        self.main.version = self.second.version = value

    def open(self, seed: int, draft: bool = False) -> Session:
        return self.main.open(seed, draft)

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self.main.publish(weights, version)
        await self.second.publish(weights, version)

    @property
    def fatal(self) -> Exception | None:
        return getattr(self.main, "fatal", None)

    def stats(self) -> dict[str, float]:
        second = self.second.stats() if self.prefix else {}
        return self.main.stats() | {f"{self.prefix}/{name}": value for name, value in second.items()}

    def describe(self) -> str:
        return self.main.describe()


class DraftingGenerator(PairedGenerator):
    """The second samples drafts, cheaply. Both use the same random numbers, so a draft that is sampled again with the exact one
    comes out nearly the same."""

    prefix = "drafts"

    def open(self, seed: int, draft: bool = False) -> Session:
        return (self.second if draft else self.main).open(seed)

    def describe(self) -> str:
        return f"{self.main.describe()}; drafts: {self.second.describe()}"


# ---------------------------------------------------------------------- older policies as opponents


@dataclass
class OpponentPool:
    """At most ``keep`` older policies by version, one added every ``every`` versions. ``latest`` keeps the newest ones; otherwise
    they are spread over the whole run. ``choose`` draws one uniformly, by seed and version alone."""

    keep: int = 8
    every: int = 5
    latest: bool = False
    seed: int = 0
    policies: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    newest: int = -1  # version that was offered last

    def offer(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Add a policy if its turn has come. A version that was offered before is not added again."""
        if version > self.newest and version % self.every == 0:
            self.policies[version] = {name: w.detach().to("cpu", copy=True) for name, w in weights.items()}
        self.newest = max(self.newest, version)
        while len(self.policies) > self.keep:
            versions = sorted(self.policies)
            gaps = {b: c - a for a, b, c in zip(versions, versions[1:], versions[2:])}
            # drop the oldest, or the one whose neighbours are nearest to each other: first and last stay
            oldest = self.latest or not gaps
            self.policies.pop(versions[0] if oldest else min(gaps, key=lambda v: (gaps[v], v)))

    def choose(self, version: int) -> int:
        """The version of the opponent while the policy of ``version`` samples."""
        versions = sorted(self.policies)
        return versions[stable_seed(self.seed, "opponent", version) % len(versions)]

    def state_dict(self) -> dict[str, Any]:
        policies = [{"version": v, "weights": dict(self.policies[v])} for v in sorted(self.policies)]
        return {"policies": policies, "newest": self.newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policies = {int(entry["version"]): entry["weights"] for entry in state["policies"]}
        self.newest = int(state["newest"])


class OpponentGenerator(LocalGenerator):
    """Samples the opponents' side of dialogues with ``main``. When deterministic, it computes only while ``main`` does not and
    every dialogue of ``main`` waits for one of the two."""

    main: LocalGenerator
    beside: WeakKeyDictionary[LocalSession, LocalSession]  # the opponent's side of sessions of ``main``

    def _missing(self) -> list[LocalSession]:
        missing = []
        for session in self.main.sessions.values():
            beside = self.beside.get(session)
            waits_for_policy = session.pending and not self.main.computing
            if not (session.parked or waits_for_policy or (beside is not None and beside.pending)):
                missing.append(session)
        return missing


class SelfPlayGenerator(PairedGenerator):
    """``opponents`` samples for the other seats. One pooled policy plays at a time, so that the cost is one more copy of the
    weights and of the cache. It changes when new weights are published.

    Both are deterministic together: the policy's generator waits for every dialogue whose opponent is to move, because its own
    session there is neither queued nor parked, and the opponents' generator waits until the policy's batch has ended. So the
    batches of both, and every float, are independent of how long environments take."""

    prefix = "opponents"

    def __init__(self, main: LocalGenerator, opponents: OpponentGenerator, pool: OpponentPool) -> None:
        super().__init__(main, opponents)
        self.opponents, self.pool = opponents, pool
        opponents.main, opponents.beside = main, WeakKeyDictionary()
        opponents.version = -1  # no policy of the pool yet
        main.on_change = opponents.wake

    @property
    def version(self) -> int:
        return self.main.version

    @version.setter
    def version(self, value: int) -> None:
        self.main.version = value  # opponents have that of the policy that plays

    def open_opponent(self, session: Session) -> LocalSession:
        """The opponent's side of a session that ``open`` returned."""
        assert isinstance(session, LocalSession)
        opponent = self.opponents.beside[session] = self.opponents.open(stable_seed(session.seed, "opponent"))
        return opponent

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self.main.publish(weights, version)
        self.pool.offer(weights, version)
        chosen = self.pool.choose(version)
        if self.opponents.version != chosen:
            await self.opponents.publish(self.pool.policies[chosen], chosen)

    def describe(self) -> str:
        theirs = self.opponents.model_runner.kv_cache.describe()
        return f"{self.main.describe()}; other seats: older policies of this run, {theirs}"

    def state_dict(self) -> dict[str, Any]:
        return self.pool.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.pool.load_state_dict(state)
