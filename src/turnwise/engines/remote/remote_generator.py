"""The generator of a run behind HTTP: one or several servers that share its dialogues.

A publication is exact: requests in flight are aborted and keep the tokens they have, every server loads the weights and proves
by a probe that it answers with them, and the requests go on from their ids. Every token carries the version that its server
names. A server that is lost gives its unfinished requests to another; one that comes back takes part again from the next
publication on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from turnwise.core.records import Completion, Sampling, Stop
from turnwise.engines.kernels.sampling import signed
from turnwise.engines.remote.policy_probe import KEPT, SAMPLED, PolicyProbe, mean_difference
from turnwise.engines.remote.publisher import WeightPublisher
from turnwise.engines.remote.replica import VLLM, RemoteLimits, Replica, ReplicaLost
from turnwise.engines.remote.token_wire import Reported, SampledPart
from turnwise.engines.remote.transport import in_daemon_thread
from turnwise.engines.remote.weight_files import WeightFolder
from turnwise.errors import GeneratorLost, ServerFault, SettingError
from turnwise.workers.sockets import allow_many_files

REJOIN_SECONDS = 1.0  # for which a publication waits for lost servers that may be back
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class ProbeRule:
    """How answers of a server are compared with the published weights."""

    probe: PolicyProbe
    tolerance: float  # of the mean difference of log-probabilities


class RemoteGenerator:
    """Implements ``core.protocols.Generator``. ``tell`` hears what happens to servers."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        limits: RemoteLimits,
        folder: WeightFolder,
        rule: ProbeRule | None,
        decode: Decode,
        tell: Callable[[str], None],
    ) -> None:
        self.replicas, self.limits, self.publisher = list(replicas), limits, WeightPublisher(folder)
        self.rule, self.decode, self.tell = rule, decode, tell
        allow_many_files()
        self.version = self._newest = 0  # in use everywhere; being published
        self.fatal: GeneratorLost | None = None  # why nothing can be sampled any longer
        self._opened, self._tokens, self._reissued, self._aborted = 0, 0, 0, 0
        self._told: set[Replica] = set()
        self._asking: asyncio.Future[list[Replica]] | None = None
        self._ready = asyncio.Event()
        self._ready.set()

    async def attach(self, gone: Mapping[Replica, str] | None = None) -> None:
        """Take every server, after it was identified, but those that are ``gone``. ``SettingError`` where none is left."""
        for replica in self.replicas:
            try:
                if reason := (gone or {}).get(replica, ""):
                    raise ServerFault(reason)
                await replica.attach(self.limits)
            except ServerFault as fault:
                replica.lost = str(fault)
        if not self.alive():
            raise SettingError(f"--generator {self.replicas[0].url} cannot be used: {self.replicas[0].lost}")
        self.tell_lost()

    # ------------------------------------------------------------------ generator protocol

    def open(self, seed: int, draft: bool = False) -> RemoteSession:
        """Open a dialogue on the server with the fewest. ``draft`` is ignored."""
        self._opened += 1
        return RemoteSession(self, seed, f"s{self._opened}")

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load new weights on every server. With no server left the next request raises, not this call: the step that was
        trained is complete."""
        self.publisher.begin(weights, version)
        back, _ = await asyncio.gather(self._came_back(), self._write())  # while the others still sample
        self._ready.clear()
        self._newest = version
        try:
            await self._rejoin(back)
            await self._publish_to_all(weights, version)
        finally:
            self.version = version
            self._ready.set()
        self.check()

    async def _write(self) -> None:
        servers = self.alive()
        await in_daemon_thread(lambda: self.publisher.write_for(servers))

    async def _publish_to_all(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self._write()  # for servers that came back
        await asyncio.gather(*(self._publish_to(replica, weights, version) for replica in self.alive()))
        self.publisher.forget_base()

    @property
    def published_bytes(self) -> int:
        """What the last publication wrote."""
        return self.publisher.written

    def close(self) -> None:
        """Give the servers back."""
        for replica in self.replicas:
            replica.leave()

    def stats(self) -> dict[str, float]:
        return {
            "tokens": float(self._tokens),
            "replicas": float(len(self.alive())),
            "reissued": float(self._reissued),
            "aborted": float(self._aborted),
            "open": float(sum(replica.sessions for replica in self.replicas)),
        }

    def describe(self) -> str:
        """Which servers sample, and how."""
        return "; ".join(
            f"{replica.url} ({replica.kind}, {replica.facts.get('engine') or replica.model})"
            for replica in self.replicas
        )

    # ------------------------------------------------------------------ servers

    @property
    def lists_kept_ids(self) -> bool:
        """Whether a server names all ids that a token was sampled from: without a filter, the whole vocabulary."""
        return any(replica.reported is Reported.WITH_MASK for replica in self.replicas)

    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.lost]

    def check(self) -> None:
        """Tell about servers that were lost; note if none is left."""
        self.tell_lost()
        if not self.alive() and self.fatal is None:
            lost = "; ".join(f"{replica.url}: {replica.lost}" for replica in self.replicas)
            self.fatal = GeneratorLost(
                f"no generator server is left ({lost}); start one again, there or elsewhere (resume --generator URL)"
            )

    def tell_lost(self) -> None:
        for replica in self.replicas:
            if replica.lost and replica not in self._told:
                self._told.add(replica)
                rest = len(self.alive())
                others = (
                    f"its requests go to {'the other' if rest == 1 else f'the other {rest}'}"
                    if rest
                    else "none is left"
                )
                self.tell(f"lost the generator {replica.url}: {replica.lost}; {others}")

    async def ready(self) -> None:
        """Wait while weights are published; raise if no server is left."""
        await self._ready.wait()
        self.check()
        if self.fatal is not None:
            raise self.fatal

    def choose(self) -> Replica:
        """The server with the fewest open dialogues, the first of several."""
        return min(self.alive(), key=lambda replica: replica.sessions)

    async def _came_back(self) -> list[Replica]:
        """Those of ``_answering``; one that connects and does not answer does not hold up a publication, and is asked on."""
        if self._asking is None or self._asking.get_loop() is not asyncio.get_running_loop():
            self._asking = asyncio.ensure_future(self._answering())
        await asyncio.wait([self._asking], timeout=REJOIN_SECONDS)
        if not self._asking.done():
            return []
        asked, self._asking = self._asking, None
        return [replica for replica in asked.result() if replica.lost]

    async def _answering(self) -> list[Replica]:
        """The lost servers that answer again, but none that another run has now."""

        async def answers(replica: Replica) -> bool:
            try:
                await replica.identify()
            except (ServerFault, SettingError) as fault:
                self._refuse(replica, fault)
                return False
            return True

        lost = [replica for replica in self.replicas if replica.lost and not replica.taken_over]
        return [r for r, found in zip(lost, await asyncio.gather(*map(answers, lost))) if found]

    def _refuse(self, replica: Replica, fault: Exception) -> None:
        """A server cannot be taken, or not yet."""

    async def _rejoin(self, replicas: Sequence[Replica]) -> None:
        """Take servers back that were lost."""
        for replica in replicas:
            try:
                await replica.attach(self.limits)
            except (ServerFault, SettingError):
                continue
            self._told.discard(replica)
            self.tell(f"the generator {replica.url} is back")

    async def _publish_to(self, replica: Replica, weights: Mapping[str, Tensor], version: int) -> None:
        try:
            await replica.update(self.publisher.files_for(replica), version, weights)
            if self.rule is not None:
                await self._probe(replica, self.rule, weights, version)
        except ReplicaLost:
            return
        except ServerFault as fault:
            replica.lose(str(fault))

    async def _probe(self, replica: Replica, rule: ProbeRule, weights: Mapping[str, Tensor], version: int) -> None:
        """Refuse a server whose answer does not come from the weights of ``version``."""
        prompt = rule.probe.prompt(version)
        top_k = KEPT if replica.reported is Reported.WITH_MASK else 0
        sampling = Sampling(max_tokens=min(SAMPLED, self.limits.context - len(prompt)), top_k=top_k)
        part = await replica.sample("", prompt, sampling, version, self.limits.stop_ids, self.salt(version), version)
        tokens = part.completion.tokens
        ours = rule.probe.logp(weights, prompt, tokens, part.completion.kept)
        difference = mean_difference(ours, part.completion.logp)
        labels = set(part.versions) - {str(version)}
        if labels or difference > rule.tolerance or not tokens:
            what = f"is {difference:.3g} away on average (allowed: {rule.tolerance:g}); if the weights are right, its precision "
            what += "differs: write --mismatch-tolerance"
            if labels:  # the server itself names other weights: no tolerance mends that
                what = f"says that weights {sorted(labels)} sampled"
            raise replica.lose(f"it answers with other weights than version {version}: a probe {what}")

    def salt(self, version: int) -> str:
        """What separates prefix caches of different weights."""
        return f"{self.replicas[0].client}-{version}"

    # ------------------------------------------------------------------ called by sessions

    def record(self, part: SampledPart, submitted: int, replica: Replica) -> Completion:
        """The part with the versions of its tokens. Refuses tokens of weights that were not in use."""
        allowed = {str(known): known for known in (submitted, self.version, self._newest)}
        unknown = sorted(set(part.versions) - set(allowed))
        if unknown:
            raise replica.lose(f"it answers with the weights {unknown[0]!r:.40}, not with version {self.version}")
        done = part.completion
        self._tokens += len(done.tokens)
        self._aborted += done.stop is Stop.CANCELLED
        versions = [allowed[label] for label in part.versions] or [submitted] * len(done.tokens)
        return replace(done, version=versions)

    def count_reissue(self) -> None:
        self._reissued += 1


class RemoteSession:
    """Implements ``core.protocols.Session``. Random numbers depend on (seed, position) and on how often the dialogue was
    restarted, as in a local session, so a request that is issued again to another server draws the same ones."""

    def __init__(self, owner: RemoteGenerator, seed: int, name: str) -> None:
        self.seed, self.name, self.closed = signed(seed), name, False
        self._owner, self._cancelled, self._generating = owner, False, False
        self._sampled_until = 0
        self._replica: Replica | None = None
        self._joined, self._parked = 0, False
        if owner.alive():
            self._place()

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue ``ids``, the whole sequence so far."""
        if self.closed:
            raise SettingError("this session was closed; open a new one")
        if self._generating:
            raise SettingError("this session is already generating; await it, or fork the session")
        if len(ids) < self._sampled_until:  # the history was rewritten or shortened
            self.seed, self._sampled_until = signed(self.seed + 1), 0
        budget = min(sampling.max_tokens, self._owner.limits.context - len(ids))
        if budget < 1:
            return Completion([], [], [], [], Stop.LENGTH)
        started, held, done = time.perf_counter(), 0.0, Completion([], [], [], [], Stop.CANCELLED)
        self._generating, self._cancelled, finished = True, False, False
        try:
            while done.stop is Stop.CANCELLED and not self._cancelled:
                rest = replace(sampling, max_tokens=budget - len(done.tokens))
                part, waited = await self._sample([*ids, *done.tokens], rest)
                done, held = self._join(done, part, sampling), held + waited
            finished = True
        finally:
            self._generating, self._sampled_until = False, len(ids) + len(done.tokens)
            if not finished:
                self._change("cancel")  # nobody needs the remaining tokens
        return replace(done, seconds=max(0.0, time.perf_counter() - started - held))

    async def _sample(self, ids: list[int], sampling: Sampling) -> tuple[Completion, float]:
        """What one request samples, and the seconds in which the server waited for other dialogues; a lost server's request is
        issued again to another."""
        owner = self._owner
        while True:
            await owner.ready()
            if self._cancelled:  # or closed, while weights were published
                return Completion([], [], [], [], Stop.CANCELLED), 0.0
            if not self._placed:
                self._place()
                owner.count_reissue()
            replica, version = self._replica, owner.version
            assert replica is not None
            try:
                if self._parked:
                    replica.change("unpark", self.name)
                    self._parked = False
                salt = owner.salt(version)
                part = await replica.sample(self.name, ids, sampling, self.seed, owner.limits.stop_ids, salt, version)
                return owner.record(part, version, replica), part.held
            except ReplicaLost:
                owner.check()

    @property
    def _placed(self) -> bool:
        """Whether the dialogue is open on a server that is in use."""
        return self._replica is not None and not self._replica.lost and self._joined == self._replica.joined

    def _place(self) -> None:
        """Open the dialogue on a server."""
        self._leave()
        self._replica = self._owner.choose()
        self._joined = self._replica.joined
        self._replica.sessions += 1
        self._replica.change("open", self.name, self.seed)
        if self._parked:
            self._replica.change("park", self.name)

    def _leave(self) -> None:
        if self._replica is not None and self._joined == self._replica.joined:
            self._replica.sessions -= 1

    def _join(self, done: Completion, part: Completion, sampling: Sampling) -> Completion:
        """What was sampled before an abort and after it. A stop string may begin before and end after."""
        entropy, confidence = [*done.entropy, *part.entropy], [*done.confidence, *part.confidence]
        tokens = [*done.tokens, *part.tokens]
        joined = Completion(
            tokens,
            [*done.logp, *part.logp],
            [*done.mass, *part.mass],
            [*done.version, *part.version],
            part.stop,
            entropy=entropy if len(entropy) == len(tokens) else (),
            confidence=confidence if len(confidence) == len(tokens) else (),
            kept=[*done.kept, *part.kept],
            routes=part.routes,  # of all positions, those before this part too
        )
        if not (sampling.stop and done.tokens):
            return joined
        for size in range(len(done.tokens) + 1, len(tokens)):
            text = self._owner.decode(tokens[:size])
            if any(string in text for string in sampling.stop):
                return _cut(joined, size)
        return joined

    def fork(self, seed: int) -> RemoteSession:
        """Open another dialogue with the same history."""
        return self._owner.open(seed)

    def park(self) -> None:
        """Tell the server not to wait for this dialogue. The next ``generate`` unparks it."""
        self._parked = True
        self._change("park")

    def cancel(self) -> None:
        """Make an unfinished ``generate`` return the tokens it has."""
        self._cancelled = True
        self._change("cancel")

    def close(self) -> None:
        if not self.closed:
            self.closed = self._cancelled = True
            self._change("close")
            self._leave()

    def _change(self, kind: str) -> None:
        if self._placed and self._replica is not None:
            self._replica.change(kind, self.name)


def _cut(done: Completion, size: int) -> Completion:
    """The first ``size`` tokens, which end with a stop string."""
    names = ("tokens", "logp", "mass", "version", "entropy", "confidence", "kept")
    lists: Any = {name: list(getattr(done, name))[:size] for name in names}
    routes = done.routes[: max(0, len(done.routes) - len(done.tokens) + size)]
    return replace(done, stop=Stop.STRING, routes=routes, **lists)


def has_vllm(replicas: Sequence[Replica]) -> bool:
    return any(replica.kind == VLLM for replica in replicas)
