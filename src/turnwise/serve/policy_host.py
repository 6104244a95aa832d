"""A generator behind HTTP: who uses it, its dialogues, pauses, and updates of its weights. Knows no HTTP and no engine.

One trainer at a time owns the server; a second one is refused until the first leaves or is silent. Its dialogues stay open
between turns, so that the generator can wait for all of them before it composes a batch: then a run through this server computes
the same floats as one with the generator in its own process. Requests without a dialogue are answered too, beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from turnwise.core.protocols import Generator, Session
from turnwise.core.records import Completion, Sampling
from turnwise.errors import GrammarError, SettingError, StoreError
from turnwise.rollout.agent_episode import CallRefused
from turnwise.serve.wires import check

MAX_SESSIONS = 65_536
MAX_IN_FLIGHT = MAX_SESSIONS  # a deterministic generator waits for all of them
IDLE_SECONDS = 0.05  # until a generator has noticed that its last dialogue was closed
SILENT_SECONDS = 60.0  # after which an owner that says nothing may be replaced
STUCK_SECONDS = 60.0  # without a prefill or decode step while requests could be decoded
CHANGES = ("open", "park", "unpark", "cancel", "close")
RESTARTS = "the server starts again for another run; try again later"


@dataclass(frozen=True)
class HostLimits:
    """What a trainer asks for: cache rows, ids of a dialogue, the ids that end a turn, whether batches must not depend on time,
    and CPU threads (0: as the server likes; sums of floats depend on their number in the last bits)."""

    slots: int
    context: int
    stop_ids: tuple[int, ...]
    deterministic: bool = True
    threads: int = 0


@dataclass(frozen=True)
class GenerateCall:
    """One request to continue ``ids``. ``session``: the dialogue it belongs to; empty: none, the request stands alone.
    ``sampling_mask``: whether the reply names the ids that the filters kept."""

    request_id: str
    ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    session: str
    sampling_mask: bool = False


class ReceivedBase(NamedTuple):
    """The frozen weights that adapters belong to, and the checksum of their file."""

    weights: Mapping[str, Any]
    digest: str


@dataclass
class WeightUpdate:
    """An update under way: the tensors received so far. Weights, or factors of the adapters that ``manifest`` describes."""

    tensors: dict[str, Any] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    base: ReceivedBase | None = None
    manifest: Mapping[str, Any] | None = None


class _NoGenerator:
    """Stands in while the generator is made again."""

    version = 0

    def stats(self) -> dict[str, float]:
        return {}

    def describe(self) -> str:
        return "starting again for another run"

    def open(self, seed: int, draft: bool = False) -> Session:
        raise CallRefused("busy", RESTARTS)

    async def publish(self, weights: Mapping[str, Any], version: int) -> None:
        raise CallRefused("busy", RESTARTS)


class PolicyHost:
    """``make`` builds the generator for what a trainer asks; ``read_weights`` reads the tensors that an update names; ``facts``
    describe the model. ``most``: what this server offers at most. ``adapt`` makes weights of a base, factors and their
    description; without it, adapters are refused."""

    def __init__(
        self,
        make: Callable[[HostLimits], Generator],
        read_weights: Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], str]],
        facts: Mapping[str, Any],
        most: HostLimits,
        adapt: Callable[[Mapping[str, Any], Mapping[str, Any], Any], Mapping[str, Any]] | None = None,
    ) -> None:
        self._make, self._read_weights, self.facts, self.most = make, read_weights, facts, most
        self._adapt = adapt
        self.limits = most
        self.generator: Generator = make(most)
        self.client, self.run, self.heard = "", "", 0.0  # the owner, its run, and when it last said something
        self.sessions: dict[str, Any] = {}  # each can also be unparked: made active before its request arrives
        self.parked: set[str] = set()
        self.in_flight: dict[str, Session] = {}
        self.labels: dict[int, str] = {self.generator.version: "initial"}
        self.digest = ""  # of the weights last loaded from a file
        self.base: ReceivedBase | None = None  # of the adapters last loaded
        self.update: WeightUpdate | None = None
        self.answered = 0
        self._applied, self._progress = 0, (-1.0, time.monotonic())
        self._running = asyncio.Event()
        self._running.set()

    # ------------------------------------------------------------------- owner

    async def attach(self, client: str, wanted: HostLimits, run: str = "") -> HostLimits:
        """Give the server to ``client``, also to another of the same ``run``, which was resumed: dialogues of an earlier one are
        closed. Returns what it gets of what it asks for."""
        owner = self.owner() or {"silent": 0.0}
        free = "client" not in owner or client == self.client or (run and run == self.run)
        wrong = (
            "it serves the run {!r:.60}, heard {:.0f} s ago; one run at a time uses a server: start one more (turnwise serve), "
            "or end that run (one that is silent for {:.0f} s is replaced)"
        )
        check(free, wrong, self.client, owner["silent"], SILENT_SECONDS, code="in_use")
        slots, context = min(wanted.slots, self.most.slots), min(wanted.context, self.most.context)
        granted = replace(wanted, slots=slots, context=context, threads=wanted.threads or self.most.threads)
        await self.abort(())
        self._close_sessions()
        self.client, self.run, self.parked, self._applied, self.update = client, run, set(), 0, None
        self.heard = time.monotonic()
        if granted != self.limits or isinstance(self.generator, _NoGenerator):
            self._running.clear()
            # give the generator up and make another one: the memory need not hold two. Where that fails the old one comes back
            self.generator = _NoGenerator()
            await asyncio.sleep(IDLE_SECONDS)
            failure: Exception | None = None
            try:
                self.generator = await asyncio.to_thread(self._make, granted)
                self.limits = granted
            except Exception as fault:
                failure = fault.with_traceback(None)  # whose frames hold what was made so far
            if failure is not None:
                self.generator = await asyncio.to_thread(self._make, self.limits)
            self._running.set()
            self.labels, self.digest, self.base = {self.generator.version: "initial"}, "", None
            if failure is not None:
                raise failure
        self._running.set()
        return granted

    def owner(self) -> dict[str, Any] | None:
        """The run that has the server, and for how long it said nothing; None: whoever comes gets the server."""
        mine = {id(session) for session in self.sessions.values()}
        waits = any(id(session) in mine for session in self.in_flight.values())
        silent = 0.0 if waits else time.monotonic() - self.heard
        there = self.client and silent < SILENT_SECONDS
        return {"client": self.client, "run": self.run, "silent": silent} if there else None

    def release(self, client: Any) -> None:
        """The owner leaves; whoever comes next gets the server."""
        self.check_owner(client)
        self._close_sessions()
        self.client, self.run, self.parked = "", "", set()

    def _close_sessions(self) -> None:
        for session in self.sessions.values():
            session.close()
        self.sessions = {}

    def check_owner(self, client: Any) -> None:
        # refuse anyone but the run that has the server. A trainer reads these words: they tell it what became of its server
        none = "no run is attached: this server was started, or started again, since"
        check(self.client, none, code="not_owner")
        another = "another run took this server over; it answers one trainer at a time"
        check(client == self.client, another, code="not_owner")
        self.heard = time.monotonic()

    # --------------------------------------------------------------- dialogues

    def apply(self, client: Any, number: Any, changes: Any) -> None:
        """Open, park, unpark, cancel and close dialogues, in order. A number that was applied already is ignored: a client that
        heard no reply sends it again."""
        self.check_owner(client)
        usable = isinstance(changes, list) and type(number) is int
        check(usable, "write 'number', a whole number, and 'changes', a list")
        if number == self._applied:
            return
        following = self._applied + 1
        check(number == following, "'number' is {}; the next is {}", number, following, code="out_of_order")
        for change in changes:
            kind, name, seed = (*change, None, None, None)[:3] if isinstance(change, list) else (None, None, None)
            usable = isinstance(name, str) and kind in CHANGES
            check(usable, "a change is {!r:.80}; write [kind, session] or [open, session, seed]", change)
            if kind == "open":
                free = type(seed) is int and name not in self.sessions and len(self.sessions) < MAX_SESSIONS
                check(free, "the session {!r:.40} cannot be opened with the seed {!r:.40}", name, seed)
                self.sessions[name] = self.generator.open(seed)
            elif name in self.sessions:  # otherwise it was closed meanwhile
                getattr(self.sessions[name], kind)()
                self.parked.discard(name)
                if kind == "park":
                    self.parked.add(name)
                if kind == "close":
                    del self.sessions[name]
        self._applied = number

    # ---------------------------------------------------------------- requests

    async def generate(self, call: GenerateCall) -> Completion:
        """Answer a request, after a pause if there is one."""
        many, size, most = len(self.in_flight), len(call.ids), self.limits.context
        check(many < MAX_IN_FLIGHT, "{} requests are being answered; try again later", many, code="busy")
        twice = call.request_id in self.in_flight
        check(not twice, "the request {!r:.60} is being answered already", call.request_id)
        check(size < most, "'token_ids' has {} ids; the context of this server is {}", size, most)
        await self._running.wait()
        with self._session_of(call) as session:
            self.in_flight[call.request_id] = session
            self.parked.discard(call.session)
            try:
                done = await session.generate(call.ids, call.sampling)
            except GrammarError as fault:
                raise CallRefused("invalid_grammar", str(fault)) from fault
            except SettingError as fault:  # it was closed, or answers another request
                raise CallRefused("invalid_request", str(fault)) from fault
            finally:
                del self.in_flight[call.request_id]
        self.answered += 1
        return done

    @contextlib.contextmanager
    def _session_of(self, call: GenerateCall) -> Iterator[Session]:
        if call.session:
            check(call.session in self.sessions, "no open session {!r:.60}", call.session, code="not_found")
            yield self.sessions[call.session]
            return
        session = self.generator.open(call.seed)
        try:
            yield session
        finally:
            session.close()

    async def abort(self, request_ids: Sequence[str]) -> int:
        """End requests with the tokens they have; without ids, all. Returns how many."""
        names = [name for name in (request_ids or list(self.in_flight)) if name in self.in_flight]
        for name in names:
            self.in_flight[name].cancel()
        while any(name in self.in_flight for name in names):
            await asyncio.sleep(0.001)
        return len(names)

    # ------------------------------------------------------------------- pause

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    async def pause(self, mode: str) -> None:
        """Answer nothing until ``resume``. ``abort``: requests in flight end with the tokens they have; ``wait``: they finish."""
        check(mode in ("abort", "wait"), "'mode' is {!r:.40}; write abort or wait", mode, code="unsupported_parameter")
        self._running.clear()
        if mode == "abort":
            await self.abort(())
        while mode == "wait" and self.in_flight:
            await asyncio.sleep(0.001)

    def resume(self) -> None:
        self._running.set()

    # ----------------------------------------------------------------- weights

    def start_update(self) -> None:
        check(self.paused, "weights are updated while the server is paused; POST /pause first", code="not_paused")
        self.update = WeightUpdate()

    def _under_way(self) -> WeightUpdate:
        check(self.update, "no update is under way; POST /start_weight_update first", code="no_update")
        assert self.update is not None
        return self.update

    async def receive(self, described: Any) -> None:
        """Read tensors that the trainer wrote. May be called several times in an update."""
        update = self._under_way()
        for part in described if isinstance(described, list) else [described]:
            wrong = "'update_info' is {!r:.60}; write an object with path and sha256"
            check(isinstance(part, Mapping), wrong, part)
            try:
                tensors, digest = await asyncio.to_thread(self._read_weights, part)
            except (SettingError, StoreError) as fault:
                raise CallRefused("invalid_weights", str(fault)) from fault
            if part.get("kind") == "base":
                update.base = ReceivedBase(tensors, digest)
                continue
            if part.get("kind") == "adapters":
                update.manifest = part
            update.tensors.update(tensors)
            update.digests.append(digest)

    async def finish_update(self, label: str) -> None:
        """Load what was received; every later token carries ``label``. On a refusal the weights stay as they were."""
        update, self.update = self._under_way(), None
        weights: Mapping[str, Any] = update.tensors
        whole, base = weights, None  # the base of adapters; None: all weights were received
        if update.manifest is not None:
            base, wanted = update.base or self.base, update.manifest.get("base")
            here = self._adapt is not None and base is not None and base.digest == wanted
            wrong = "these adapters belong to the base {!r:.20}, which is not here; send its file before them"
            check(here, wrong, wanted, code="no_base")
            assert self._adapt is not None and base is not None
            whole, weights = base.weights, self._adapt(base.weights, weights, update.manifest.get("adapters"))
        missing = sorted(set(self.facts["weights"]) - set(whole))
        # a base that was loaded before may have been released: the generator has its weights
        complete = not missing or (base is not None and base is self.base)
        wrong = "{} weights of the model were not sent, the first is {!r}"
        check(complete, wrong, len(missing), next(iter(missing), ""), code="invalid_weights")
        version = int(label) if label.isdecimal() else self.generator.version + 1
        try:
            await self.generator.publish(weights, version)
        except SettingError as fault:
            raise CallRefused("invalid_weights", str(fault)) from fault
        self.labels[version], self.digest, self.base = label or str(version), ",".join(update.digests), base
        if base is not None and getattr(self.generator, "applies_adapters", False):
            base.weights.release()  # type: ignore[attr-defined]

    def weight_needs(self) -> dict[str, Any]:
        """How weights should be sent: whether adapters are merged here or applied beside the weights, the base that is here, and
        the dtypes of weights that are not kept in float32."""
        dtypes: Mapping[str, Any] = getattr(self.generator, "weight_dtypes", dict)()
        names = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
        needs: dict[str, Any] = {"dtypes": {name: dtype for name, dtype in names.items() if dtype != "float32"}}
        if self._adapt is not None:
            beside = getattr(self.generator, "applies_adapters", False)
            needs |= {"adapters": "beside" if beside else "merged", "base": self.base.digest if self.base else ""}
        return needs

    @property
    def label(self) -> str:
        """What the trainer calls the weights in use."""
        return self.labels.get(self.generator.version, str(self.generator.version))

    # ------------------------------------------------------------------ health

    def stuck(self) -> str:
        """Why requests are not decoded although they could be; empty if they are."""
        passes, now = self.generator.stats().get("forward_passes", 0.0), time.monotonic()
        active = {id(session) for session in self.in_flight.values()}
        silent = {name for name, session in self.sessions.items() if id(session) not in active}
        waits_for_client = silent - self.parked
        if passes != self._progress[0] or not self.in_flight or waits_for_client or self.paused:
            self._progress = (passes, now)
        seconds = now - self._progress[1]
        return f"no forward pass for {seconds:.0f} s" if seconds > STUCK_SECONDS else ""
