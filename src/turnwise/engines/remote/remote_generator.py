"""The generator of a run in other processes: one or several servers that share its dialogues, and may come and go.

A publication is exact: requests in flight are aborted and keep the tokens they have, every server loads the weights and proves
by a probe that it answers with them, and the requests go on from their ids. Every token carries the version that its server
names. A server that is lost gives its unfinished requests to another; one that comes back takes part again from the next
publication on.

Where servers come and go (``Directory``), a publication takes the new ones and leaves those that are gone. With none left,
requests wait until one is found, which first gets the weights that were published last. Knows no cluster.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from turnwise.core.records import Completion, Sampling, Stop
from turnwise.core.seeds import stable_seed
from turnwise.engines.kernels.sampling import signed
from turnwise.engines.remote.http import ServerAddress, in_daemon_thread
from turnwise.engines.remote.replica import RemoteLimits, Replica, ReplicaLost
from turnwise.engines.remote.token_wire import Reported, SampledPart
from turnwise.engines.remote.weight_files import WeightFolder, WeightPublisher
from turnwise.errors import GeneratorLost, ServerFault, SettingError
from turnwise.workers.sockets import allow_many_files

LOOK_SECONDS = 0.2  # between two looks for a server where none is left
OTHERS_SECONDS = 10.0  # in which a run that begins with some servers waits for the others
REJOIN_SECONDS = 1.0  # for which a publication waits for lost servers that may be back
PROMPT, SAMPLED = 12, 12  # token ids of a probe
KEPT = 20  # by top-k, where a server returns what it kept
LISTS = ("tokens", "logp", "mass", "version", "entropy", "confidence", "kept")  # of a completion, token by token


class PolicyProbe:
    """Log-probabilities of a few tokens under the weights that were published, to compare with what a server says of them: it may
    load weights and still answer with others (a tied head that kept its old values, a cache, a second copy), which no version and
    no checksum shows. Keeps the model's structure and buffers, none of its weights.

    ``vocabulary``: ids below it occur in probes. ``tolerance``: of the mean difference."""

    def __init__(self, model: PreTrainedModel, vocabulary: int, tolerance: float = 0.0) -> None:
        buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
        parameters = {id(p): torch.nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
        self.model = copy.deepcopy(model, {**parameters}).eval()  # the memo stands in for every weight
        self.buffers, self.vocabulary, self.tolerance = buffers, vocabulary, tolerance

    def prompt(self, version: int) -> list[int]:
        """Token ids to continue, others for every version."""
        random = torch.Generator().manual_seed(stable_seed(0, "probe", version) % 2**31)
        return torch.randint(0, self.vocabulary, (PROMPT,), generator=random).tolist()

    @torch.no_grad()
    def logp(
        self, weights: Mapping[str, Tensor], prompt: Sequence[int], tokens: Sequence[int], masks: Sequence[bytes] = ()
    ) -> list[float]:
        """Log-probabilities of ``tokens`` after ``prompt``, at temperature 1, each over the ids of its mask if there are some."""
        wide = lambda t: t.to(torch.promote_types(t.dtype, torch.float32))  # noqa: E731  (a frozen base may be in half precision)
        tensors = {name: wide(value) for name, value in weights.items()}
        device = next(iter(tensors.values())).device
        buffers = {name: value.to(device) for name, value in self.buffers.items()}
        ids = torch.tensor([[*prompt, *tokens]], device=device)
        out = functional_call(self.model, {**tensors, **buffers}, (), {"input_ids": ids, "use_cache": False})
        rows = out.logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        for row, mask in zip(rows, masks):
            row -= row[torch.frombuffer(bytearray(mask), dtype=torch.int32).long()].logsumexp(0)
        return rows.gather(1, ids[0, len(prompt) :, None]).squeeze(1).tolist()


def mean_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(len(ours), 1)


@dataclass(frozen=True)
class Directory:
    """``find`` says where servers are now, ``make`` turns an address into a server of this run. ``patience``: seconds that
    requests wait for a server where none is left; then the run stops."""

    find: Callable[[], Sequence[ServerAddress]]
    make: Callable[[ServerAddress], Replica]
    patience: float


class RemoteGenerator:
    """Implements ``core.protocols.Generator``. ``tell`` hears what happens to servers. ``directory``: where they come and go."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        limits: RemoteLimits,
        folder: WeightFolder,
        probe: PolicyProbe | None,
        decode: Callable[[list[int]], str],
        tell: Callable[[str], None],
        directory: Directory | None = None,
    ) -> None:
        self.replicas, self.limits, self.publisher = list(replicas), limits, WeightPublisher(folder)
        self.probe, self.decode, self.tell = probe, decode, tell
        allow_many_files()
        self.version = self._newest = 0  # in use everywhere; being published
        self.fatal: GeneratorLost | None = None  # why nothing can be sampled any longer
        self._opened, self._tokens, self.reissued, self._aborted = 0, 0, 0, 0
        self._told: set[Replica] = set()
        self._asking: asyncio.Future[list[Replica]] | None = None
        self._ready = asyncio.Event()
        self._ready.set()
        self.directory, self._joined = directory, 0
        self._changing = asyncio.Lock()  # who attaches servers and loads weights

    async def attach(self, gone: Mapping[Replica, str] = {}) -> None:
        """Take every server, after it was identified, but those that are ``gone``. ``SettingError`` where none is left."""
        for replica in self.replicas:
            if replica in gone:
                replica.lost = gone[replica]
                continue
            try:
                await replica.attach(self.limits)
            except ServerFault as fault:
                replica.lost = str(fault)
        if not self.alive():
            raise SettingError(f"--generator {self.replicas[0].url} cannot be used: {self.replicas[0].lost}")
        self.tell_lost()

    async def join(self, wanted: int) -> None:
        """Take the servers that the directory names. Waits for one with patience, and a while for ``wanted``."""
        assert self.directory is not None
        began, patience = time.monotonic(), self.directory.patience
        while (here := len(self.alive())) < wanted:
            if time.monotonic() - began >= (min(OTHERS_SECONDS, patience) if here else patience):
                break
            await self._rejoin(await self._answering())
            await asyncio.sleep(LOOK_SECONDS if len(self.alive()) < wanted else 0)
        if not self.alive():
            raise SettingError(f"no generator came up within {patience:g} s{self._reasons()}")

    # ------------------------------------------------------------------ generator protocol

    def open(self, seed: int, draft: bool = False) -> RemoteSession:
        """Open a dialogue on the server with the fewest. ``draft`` is ignored."""
        self._opened += 1
        return RemoteSession(self, seed, f"s{self._opened}")

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load new weights on every server. With no server left the next request raises, not this call: the step that was
        trained is complete."""
        async with self._changing:
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
        await in_daemon_thread(partial(self.publisher.write_for, self.alive()))

    async def _publish_to_all(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self._write()  # for servers that came back
        await asyncio.gather(*(self._publish_to(replica, weights, version) for replica in self.alive()))
        self.publisher.forget_base()

    def close(self) -> None:
        for replica in self.replicas:
            replica.leave()

    def stats(self) -> dict[str, float]:
        counts = {
            "tokens": self._tokens,
            "replicas": len(self.alive()),
            "reissued": self.reissued,
            "aborted": self._aborted,
        }
        counts["open"] = sum(replica.sessions for replica in self.replicas)
        return {name: float(n) for name, n in (counts | ({"joined": self._joined} if self.directory else {})).items()}

    def describe(self) -> str:
        if self.directory is not None:
            engines = sorted({str(replica.facts.get("engine") or replica.model) for replica in self.replicas})
            return f"generator actors: {len(self.alive())} ({'; '.join(engines)})"
        texts = []
        for replica in self.replicas:
            engine = replica.facts.get("engine") or replica.model
            elsewhere = f"{replica.url} ({replica.kind}, {engine})"
            texts.append(f"{engine}; in a process of its own ({replica.process})" if replica.process else elsewhere)
        return "; ".join(texts)

    # ------------------------------------------------------------------ servers

    @property
    def lists_kept_ids(self) -> bool:
        """Whether a server names all ids that a token was sampled from: without a filter, the whole vocabulary."""
        return any(replica.reported is Reported.WITH_MASK for replica in self.replicas)

    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.lost]

    def check(self) -> None:
        """Tell about servers that were lost; note if none is left, and none can be found."""
        self.tell_lost()
        if not self.alive() and self.fatal is None and self.directory is None:
            lost = "; ".join(f"{replica.url}: {replica.lost}" for replica in self.replicas)
            text = f"no generator server is left ({lost}); start one again, there or elsewhere (resume --generator URL)"
            own_process = next((replica.lost for replica in self.replicas if replica.process), "")
            self.fatal = GeneratorLost(own_process or text)

    def tell_lost(self) -> None:
        for replica in self.replicas:
            if replica.lost and replica not in self._told:
                self._told.add(replica)
                rest = {0: "none is left", 1: "its requests go to the other"}
                others = rest.get(n := len(self.alive()), f"its requests go to the other {n}")
                self.tell(f"lost the generator {replica.url}: {replica.lost}; {others}")

    async def ready(self) -> None:
        """Wait while weights are published, and for a server where none is left; raise if none comes."""
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
        assert self.directory is not None
        async with self._changing:
            until = time.monotonic() + self.directory.patience
            self._ready.clear()  # a server that was taken has no weights yet
            try:
                while not self.alive() and self.fatal is None:
                    if time.monotonic() > until:
                        text = f"no generator came back within {self.directory.patience:g} s{self._reasons()}"
                        self.fatal = GeneratorLost(text)
                        return
                    await self._rejoin(await self._answering())
                    if self.alive():
                        weights = await in_daemon_thread(self.publisher.read_again)
                        await self._publish_to_all(weights, self.version)
                    else:
                        await asyncio.sleep(LOOK_SECONDS)
            finally:
                self._ready.set()

    def _reasons(self) -> str:
        return "".join(f"; {replica.url}: {replica.lost}" for replica in self.replicas)

    async def _came_back(self) -> list[Replica]:
        # those of `_answering`; one that connects and does not answer does not hold up a publication, and is asked on
        if self._asking is None or self._asking.get_loop() is not asyncio.get_running_loop():
            self._asking = asyncio.ensure_future(self._answering())
        await asyncio.wait([self._asking], timeout=REJOIN_SECONDS)
        if not self._asking.done():
            return []
        answering, self._asking = self._asking, None
        return [replica for replica in answering.result() if replica.lost]

    async def _answering(self) -> list[Replica]:
        """The servers that are new or lost and answer, but none that another run has now. Leaves those that are gone."""
        if self.directory is not None:
            here = {address.url: address for address in await in_daemon_thread(self.directory.find)}
            for gone in [replica for replica in self.replicas if replica.url not in here]:
                gone.lose("it was removed")
                self.tell_lost()
                self.replicas.remove(gone)
            urls = {replica.url for replica in self.replicas}
            self.replicas += [self.directory.make(address) for url, address in here.items() if url not in urls]
        lost = [replica for replica in self.replicas if replica.lost and not replica.taken_over]
        answers = await asyncio.gather(*(replica.identify() for replica in lost), return_exceptions=True)
        for replica, fault in zip(lost, answers):
            if isinstance(fault, ServerFault | SettingError):
                self._refuse(replica, fault)
            elif fault is not None:
                raise fault
        return [replica for replica, fault in zip(lost, answers) if fault is None]

    def _refuse(self, replica: Replica, fault: Exception) -> None:
        # A server cannot be taken, or not yet. One of a directory says why, if it is the last hope; it was never in use
        if self.directory is not None:
            replica.lost = str(fault)
            self._told.add(replica)

    async def _rejoin(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            try:
                await replica.attach(self.limits)
            except (ServerFault, SettingError) as fault:
                if isinstance(fault, SettingError) and self.directory is not None:
                    raise  # the servers of a cluster are made for the run: what one refuses, all do
                self._refuse(replica, fault)
                continue
            self._told.discard(replica)
            self._joined += 1
            if self.directory is None:
                self.tell(f"the generator {replica.url} is back")
            elif self.publisher.version >= 0:
                self.tell(f"the generator {replica.url} samples from now on")

    async def _publish_to(self, replica: Replica, weights: Mapping[str, Tensor], version: int) -> None:
        try:
            await replica.update(self.publisher.files_for(replica), version, weights)
            if self.probe is not None:
                await self._probe(replica, self.probe, weights, version)
        except ReplicaLost:
            return
        except ServerFault as fault:
            replica.lose(str(fault))

    async def _probe(self, replica: Replica, probe: PolicyProbe, weights: Mapping[str, Tensor], version: int) -> None:
        """Refuse a server whose answer does not come from the weights of ``version``."""
        prompt = probe.prompt(version)
        top_k = KEPT if replica.reported is Reported.WITH_MASK else 0
        sampling = Sampling(max_tokens=min(SAMPLED, self.limits.context - len(prompt)), top_k=top_k)
        part = await replica.sample("", prompt, sampling, version, version)
        tokens = part.completion.tokens
        ours = probe.logp(weights, prompt, tokens, part.completion.kept)
        difference = mean_difference(ours, part.completion.logp)
        labels = set(part.versions) - {str(version)}
        if labels or difference > probe.tolerance or not tokens:
            away = f"is {difference:.3g} away on average (allowed: {probe.tolerance:g}); if the weights are right, its precision"
            # where the server itself names other weights, no tolerance mends that
            named = f"says that weights {sorted(labels)} sampled"
            what = named if labels else f"{away} differs: write --mismatch-tolerance"
            raise replica.lose(f"it answers with other weights than version {version}: a probe {what}")

    # ------------------------------------------------------------------ called by sessions

    def record(self, part: SampledPart, submitted: int, replica: Replica) -> Completion:
        """The part with the versions of its tokens. Refuses tokens of weights that were not in use."""
        allowed = {str(version): version for version in (submitted, self.version, self._newest)}
        unknown = sorted(set(part.versions) - set(allowed))
        if unknown:
            raise replica.lose(f"it answers with the weights {unknown[0]!r:.40}, not with version {self.version}")
        done = part.completion
        self._tokens += len(done.tokens)
        self._aborted += done.stop is Stop.CANCELLED
        versions = [allowed[label] for label in part.versions] or [submitted] * len(done.tokens)
        return replace(done, version=versions)


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
        if self.closed or self._generating:
            busy = "this session is already generating; await it, or fork the session"
            raise SettingError("this session was closed; open a new one" if self.closed else busy)
        if len(ids) < self._sampled_until:  # the history was rewritten or shortened
            self.seed, self._sampled_until = signed(self.seed + 1), 0
        budget = min(sampling.max_tokens, self._owner.limits.context - len(ids))
        if budget < 1:
            return Completion([], [], [], [], Stop.LENGTH)
        started, held, done = time.perf_counter(), 0.0, Completion([], [], [], [], Stop.CANCELLED)
        self._generating, self._cancelled, finished = True, False, False
        try:
            while done.stop is Stop.CANCELLED and not self._cancelled:
                left = budget - len(done.tokens)
                begun = sampling.begun + len(done.tokens)
                rest = sampling if left == sampling.max_tokens else replace(sampling, max_tokens=left, begun=begun)
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
                owner.reissued += 1
            replica, version = self._replica, owner.version
            assert replica is not None
            try:
                if self._parked:
                    replica.change("unpark", self.name)
                    self._parked = False
                part = await replica.sample(self.name, ids, sampling, self.seed, version)
                return owner.record(part, version, replica), part.held
            except ReplicaLost:
                owner.check()

    @property
    def _placed(self) -> bool:
        return self._replica is not None and not self._replica.lost and self._joined == self._replica.joined

    def _place(self) -> None:
        self._leave()
        # the server with the fewest open dialogues, the first of several
        self._replica = min(self._owner.alive(), key=lambda replica: replica.sessions)
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
        if not done.tokens:
            return part
        joined: Any = {name: [*getattr(done, name), *getattr(part, name)] for name in LISTS}
        tokens = joined["tokens"]
        for name in ("entropy", "confidence"):  # measured for all tokens, or for none
            joined[name] = joined[name] if len(joined[name]) == len(tokens) else ()
        joined |= {"grammar": sampling.grammar, "begun": sampling.begun}
        whole = Completion(**joined, stop=part.stop, routes=part.routes)  # routes: of all positions, those before too
        for size in range(len(done.tokens) + 1, len(tokens)) if sampling.stop else ():
            text = self._owner.decode(tokens[:size])
            if any(string in text for string in sampling.stop):
                return _cut(whole, size)
        return whole

    def fork(self, seed: int) -> RemoteSession:
        return self._owner.open(seed)

    def park(self) -> None:
        """Tell the server not to wait for this dialogue. The next ``generate`` unparks it."""
        self._parked = True
        self._change("park")

    def unpark(self) -> None:
        """Let the server wait for this dialogue from now on."""
        self._parked = False
        self._change("unpark")

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
    lists: Any = {name: list(getattr(done, name))[:size] for name in LISTS}
    routes = done.routes[: max(0, len(done.routes) - len(done.tokens) + size)]
    return replace(done, stop=Stop.STRING, routes=routes, **lists)
