"""One generator server as its trainer sees it: ours, or ``vllm serve``. Requests, dialogues, updates of the weights, health.

A server that dies, is silent, was restarted or answers with other weights is *lost*, with the reason in words: whoever waits for
it gets ``ReplicaLost`` and asks another one. Knows HTTP and names of routes; neither tensors nor sessions of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from turnwise.core.records import Sampling
from turnwise.engines.remote.http import HttpPool, HttpReply, ServerAddress, error_code, error_text, expect, is_overflow
from turnwise.engines.remote.token_wire import Reported, SampledPart, read_part, sampling_params, what_is_reported
from turnwise.errors import ContextOverflow, GrammarError, RequestRefused, ServerFault, SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.engines.remote.generator_process import ProcessLink, ProcessReply
    from turnwise.engines.remote.weight_files import WeightFile  # imports torch, which a refusal need not wait for

log = logging.getLogger(__name__)

OURS, VLLM = "turnwise", "vllm"
FILES, NCCL, IPC = "turnwise_file", "nccl", "ipc"  # vLLM's names of the ways on which weights reach it
NOT_CONNECTED = "it was not connected yet"
BEAT_SECONDS = 5.0  # between two messages of a run that is alive
OWNER_SECONDS = 1.0  # between two looks at who has a server
HEALTH_SECONDS = 5.0  # between two looks at a server that owes a reply
ASK_SECONDS = 10.0  # for a reply to a question that needs no work; one that another run keeps busy is slow
UPDATE_SECONDS = 600.0  # for one call of a weight update; a server that is silent is lost earlier, by its health
BUSY_SECONDS = 0.2
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"  # of vLLM
NARROW = ("bfloat16", "float16")  # dtypes in which a server may ask for weights
MASK_OPTIONS = "--return-sampling-mask --logprobs-mode processed_logprobs"  # of vLLM
LOOP_ROUNDS = 8  # of the event loop in which changes of dialogues are gathered; as many as a local generator allows


class ReplicaLost(ServerFault):
    """A generator server that is not used any longer."""


@dataclass(frozen=True)
class RemoteLimits:
    """What a run asks of a server: cache rows, ids of a dialogue, ids that end a turn, and how batches are composed."""

    slots: int
    context: int
    stop_ids: tuple[int, ...]
    deterministic: bool
    threads: int


def start_options(backend: str) -> str:
    """With what vLLM must be started to take weights."""
    trusting = "VLLM_ALLOW_INSECURE_SERIALIZATION=1, " if backend == IPC else ""
    return f'VLLM_SERVER_DEV_MODE=1, {trusting}--enable-scale-out and --weight-transfer-config \'{{"backend": "{backend}"}}\''


class Replica:
    """``client`` names the run to the server. ``seconds``: a server that says nothing for so long is lost. ``backend``: how
    weights reach it, if it is vLLM."""

    def __init__(self, address: ServerAddress, client: str, seconds: float, backend: str = FILES, pool: Any = None):
        self.address, self.client, self.seconds, self.backend = address, client, seconds, backend
        self.url = address.url
        self.pool: HttpPool | ProcessLink = pool or HttpPool(address)
        self.device_weights: Any = None  # DeviceWeights or DeviceHandles: weights go this way, and not as files
        self.kind, self.facts, self.model = OURS, dict[str, Any](), ""
        self._owner, self._named = dict[str, str](), dict[str, str]()
        self.lost = NOT_CONNECTED
        self.sessions = 0  # dialogues that are open there
        self.joined = 0  # how often it was attached: dialogues of an earlier time no longer exist there
        self.taken_over = False  # by another run, for good: two runs would take it from each other by turns
        self.answered, self.version = 0, -1
        self.takes_weights, self.loads_adapters = True, False  # by the calls of an update; by vLLM's runtime LoRA
        self.takes_adapters = False  # instead of merged weights
        self.adapters_beside = False  # it adds them to each product, and does not merge them
        self.base = ""  # the checksum of the frozen weights that it has
        self.dtypes = dict[str, str]()  # of weights that it does not keep in float32
        self.runtime_adapters: RuntimeAdapters | None = None  # of vLLM, where it was started with them
        self.reported = Reported.PROCESSED  # log-probabilities; ``examine_sampling`` asks vLLM
        self.stop_ids, self._salt = tuple[int, ...](), uuid.uuid4().hex[:12]
        self.run = ""  # the same when the run is resumed, and comes back as another client
        self.presence: Presence | None = None
        self._changes: list[list[Any]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._numbers, self._asked = 0, itertools.count()
        self.owed = 0  # replies that the server has not sent yet
        self._watch: asyncio.Task[None] | None = None
        self._updating = False  # this run has paused the server
        self.paused = False  # somebody else has

    @property
    def process(self) -> int:
        """The id of the server's process, where it is one of this run; 0: it is elsewhere."""
        return 0 if isinstance(self.pool, HttpPool) else self.pool.worker.process.pid

    # ----------------------------------------------------------------- connect

    async def identify(self) -> None:
        """Find out what answers at the address. Raises ``SettingError`` in words where nothing useful does."""
        flag = f"--generator {self.url}"

        async def look(path: str) -> tuple[int, Any]:
            reply = await self.pool.call(path, None, ASK_SECONDS)
            if reply.status in (401, 403):
                what = "refuses the token" if self.address.token else "wants a token"
                key = "write --generator-key-env VARIABLE, the environment variable that holds the token it was started with"
                raise SettingError(f"{flag}: the server {what}; {key}")
            if reply.status == 421:  # a server of ours that does not go by this name; it says what to do
                raise SettingError(f"{flag}: {error_text(reply.json(), reply.text())}")
            return reply.status, reply.json()

        try:
            status, value = await look("/turnwise/v1/info")
            if status == 200 and isinstance(value, dict) and value.get("server") == OURS:
                self.kind, self.facts, self.model = OURS, value, str(value.get("model"))
                self._named = {}
                return
            status, value = await look("/v1/models")
            rows = value.get("data") if isinstance(value, dict) else None
            if status != 200 or not isinstance(rows, list) or not rows:
                cure = "write the address of `turnwise serve` or `vllm serve`, without /v1"
                raise SettingError(f"{flag}: this is no generator server (GET /v1/models answers {status}); {cure}")
            status, _ = await look("/weight_info")
            # a server that has this call refuses a nameless adapter; one that does not, the route
            offered = await self.pool.call(LOAD, {"lora_name": "", "lora_path": ""}, ASK_SECONDS)
            self.takes_weights, self.loads_adapters = status == 200, offered.status in (400, 422)
            if not self.takes_weights and not self.loads_adapters:
                lacks = f"this server cannot take weights (GET /weight_info answers {status})"
                raise SettingError(f"{flag}: {lacks}; start vLLM with {start_options(self.backend)}")
            self.kind, self.facts, self.model = VLLM, dict(rows[0]), str(rows[0].get("id"))
            self._named = {"model": self.model}
        except ServerFault as fault:
            start = "start a server there: turnwise serve MODEL --address HOST:PORT"
            raise SettingError(f"{flag}: {fault}; {start}") from None

    def refuse_backend(self) -> None:
        """A server of ours takes files alone."""
        if self.kind == OURS and self.backend != FILES:
            flag = f"--generator-weights {self.backend} is for `vllm serve`; leave it out, or write a folder"
            raise SettingError(f"--generator {self.url} is `turnwise serve`, which takes weights as files, and {flag}")

    async def examine_sampling(self) -> bool:
        """Find out which log-probabilities vLLM reports. False: it is paused, and answers no request."""
        paused = (await self.pool.call("/is_paused", None, ASK_SECONDS)).json()
        if isinstance(paused, dict) and paused.get("is_paused"):
            return False
        params = sampling_params(Sampling(top_k=1, max_tokens=4), 0, ())
        body = {"token_ids": [0], "sampling_params": params, **self._named}
        self.reported = what_is_reported((await self.pool.call("/inference/v1/generate", body, self.seconds)).json())
        return True

    async def attach(self, limits: RemoteLimits) -> None:
        self._changes, self._numbers, self.sessions, self.stop_ids = [], 0, 0, limits.stop_ids
        # makes a server of ours refuse a run that lost it to another
        self._owner = {"client": self.client} if self.kind == OURS else {}
        self.joined += 1
        self.lost = NOT_CONNECTED  # and no longer the reason of an earlier loss
        if self.kind == OURS:
            self.refuse_backend()
            body = {**asdict(limits), "stop_ids": list(limits.stop_ids), "client": self.client, "run": self.run}
            if isinstance(self.pool, HttpPool):
                await until_free(self.pool, self.client, self.run)
            granted = await self.post("/turnwise/v1/attach", body, UPDATE_SECONDS)
            if (read := int(granted["context"])) < (needed := limits.context):
                cure = f"write --context {read}, or start the server with --context {needed}"
                raise SettingError(f"--generator {self.url}: it reads {read} ids, and the run needs {needed}; {cure}")
            self.facts["engine"] = str(granted.get("engine", ""))
            # how the server wants its weights; one that says nothing gets all of them, merged, in float32
            adapters, dtypes = granted.get("adapters"), granted.get("dtypes") or {}
            self.takes_adapters, self.adapters_beside = adapters in ("merged", "beside"), adapters == "beside"
            self.base = str(granted.get("base") or "")
            self.dtypes = {name: dtype for name, dtype in dtypes.items() if dtype in NARROW}
            if isinstance(self.pool, HttpPool):  # a process of this run is nobody else's
                self.presence = Presence(self.pool, self.client, self)
        elif self.takes_weights:
            # agree with vLLM on how weights reach it. One that was started for another way refuses
            try:
                if self.device_weights is None:
                    await self.post("/init_weight_transfer_engine", {"init_info": {}}, UPDATE_SECONDS)
                else:
                    await self.device_weights.open(self)
            except ServerFault as fault:
                text = str(fault).removeprefix(f"{self.url}: ").rstrip(".")
                self.lost = f"{text}; start vLLM with {start_options(self.backend)}"
                raise ReplicaLost(f"{self.url}: {self.lost}") from None
        self.runtime_adapters = None
        watch, self._watch, self.lost = self._watch, None, ""
        if watch is not None:
            watch.cancel()  # it would keep this object, and with it the presence

    def lose(self, reason: str) -> ReplicaLost:
        """Use the server no longer; everyone who waits for it gets the error."""
        if self.lost in ("", NOT_CONNECTED):
            self.lost = reason
            self.pool.interrupt()
            if self.presence is not None:
                self.presence.end()
        return ReplicaLost(f"{self.url}: {self.lost}")

    def leave(self) -> None:
        """The run has ended: another one may take the server."""
        if not isinstance(self.pool, HttpPool):
            self.pool.interrupt()
        elif self.presence is not None and not self.lost:
            self.presence.end(leave=True)

    # --------------------------------------------------------------- dialogues

    def change(self, kind: str, *values: Any) -> None:
        """Tell the server about a dialogue, together with all that happens in the same moment."""
        if self.kind != OURS or self.lost:
            return
        self._changes.append([kind, *values])
        with contextlib.suppress(RuntimeError):  # no event loop: the run has ended, and so have its dialogues
            loop = asyncio.get_running_loop()
            if self._flushing is None or self._flushing.done() or self._flushing.get_loop() is not loop:
                self._flushing = loop.create_task(self._flush())

    async def _flush(self) -> None:
        # send changes, in order. What happens while callbacks run is one message: the server applies it at once
        while self._changes and not self.lost:
            for _ in range(LOOP_ROUNDS):
                await asyncio.sleep(0)
            changes, self._changes = self._changes, []
            self._numbers += 1
            body = {"client": self.client, "number": self._numbers, "changes": changes}
            with contextlib.suppress(ReplicaLost):
                await self.post("/turnwise/v1/sessions", body, None)

    async def flushed(self) -> None:
        while self._flushing is not None and not self._flushing.done():
            await asyncio.shield(self._flushing)
        if self.lost:
            raise self.lose(self.lost)

    # ---------------------------------------------------------------- requests

    async def sample(
        self, session: str, ids: Sequence[int], sampling: Sampling, seed: int, version: int
    ) -> SampledPart:
        """Continue ``ids`` in a dialogue, or in none where ``session`` is empty, with the weights of ``version``."""
        await self.flushed()
        params = sampling_params(sampling, seed, self.stop_ids, self.reported is Reported.WITH_MASK)
        body = {"request_id": f"{self.client}-{next(self._asked)}", "token_ids": list(ids), "sampling_params": params}
        # a prefix that older weights computed, or those of another run, is never used again
        body["cache_salt"] = f"{self._salt}-{version}"
        if sampling.grammar and self.kind != OURS:
            raise GrammarError(
                f"{self.url} is a vLLM server, which does not say what its grammars allowed, so ratios would not be exact; "
                "sample grammars with the generator of this process, --generator local or turnwise serve"
            )
        if sampling.grammar:
            params |= {"grammar": sampling.grammar, "begun": sampling.begun}
        if self.kind == OURS:
            params["entropy"] = sampling.entropy
            params["sampling_mask"] = not (sampling.whole or sampling.greedy)
            body |= {"client": self.client, "session": session}
        adapters = self.runtime_adapters
        if adapters is None:
            value = await self.post("/inference/v1/generate", body | self._named, None)
        else:
            with adapters.using(version) as adapter:
                value = await self.post("/inference/v1/generate", {**body, "model": adapter}, None)
        self.answered += 1
        part = read_part(value, frozenset(self.stop_ids))
        done = replace(part.completion, grammar=sampling.grammar, begun=sampling.begun)
        part = replace(part, completion=done)
        if (sampling.whole or sampling.greedy) and done.kept:
            part = replace(part, completion=replace(done, kept=()))
        elif self.kind == VLLM and not (sampling.whole or sampling.greedy):
            # nothing else says what the log-probabilities of a filtered reply are over
            if len(done.kept) != len(done.tokens) or not all(done.kept):
                raise self.lose(f"it does not return the ids that its filters kept; start it with {MASK_OPTIONS}")
        # labels of a server with adapters name its base; the adapter was named by the request
        return part if adapters is None else replace(part, versions=())

    async def post(self, path: str, body: Mapping[str, Any], seconds: float | None) -> dict[str, Any]:
        """A reply as JSON. Refusals of one request are ``RequestRefused``; what says that the server is gone, ``ReplicaLost``."""
        while (reply := await self._call(path, body, seconds)).status == 429:
            await asyncio.sleep(BUSY_SECONDS)
        value = reply.json()
        if reply.status == 200 and isinstance(value, dict):
            return value
        text = self.address.hide(error_text(value, reply.text()))
        if is_overflow(reply.status, value, text):
            raise ContextOverflow(text)
        if error_code(value) == "invalid_grammar":
            raise GrammarError(text)
        if reply.status in (400, 422) or "no open session" in text:
            raise RequestRefused(f"{self.url} refuses a request: {text}")
        reason = f"it answers {path} with {reply.status}: {text}"
        if reply.status == 409:  # a server of ours, in the words of ``PolicyHost.check_owner``
            self.taken_over = self.taken_over or "another run" in text
            reason = "it was restarted" if "no run is attached" in text else reason
            reason = "another run took it over" if "another run" in text else reason
        raise self.lose(reason)

    async def _call(self, path: str, body: Mapping[str, Any] | None, seconds: float | None) -> HttpReply | ProcessReply:
        """A reply, which the server owes until it is here. Without one the server is lost."""
        with self._owes():
            try:
                return await self.pool.call(path, body, seconds)
            except ServerFault as fault:
                raise self.lose(str(fault)) from None

    @contextlib.contextmanager
    def _owes(self) -> Iterator[None]:
        # while the server owes a reply, look whether it is alive
        self.owed += 1
        loop = asyncio.get_running_loop()
        if self._watch is None or self._watch.done() or self._watch.get_loop() is not loop:
            self._watch = loop.create_task(self._watch_health())
        try:
            yield
        finally:
            self.owed -= 1

    async def _watch_health(self) -> None:
        pause, since, self.paused = min(HEALTH_SECONDS, self.seconds / 2), 0.0, False
        while self.lost in ("", NOT_CONNECTED):
            await asyncio.sleep(pause)
            if not self.owed:
                return
            try:
                reply = await self.pool.call("/health", None, self.seconds)
                stopped = self._serves and await self._is_paused() and self._serves
                since = (since or time.monotonic()) if stopped else 0.0
                self._name_pause(time.monotonic() - since if since else 0.0, pause)
            except ServerFault as fault:
                self.lose(f"it is dead or hangs: /health: {fault}")
                return
            if reply.status != 200:
                text = error_text(reply.json(), reply.text())
                self.lose(f"its engine hangs: /health answers {reply.status}: {text}")

    @property
    def _serves(self) -> bool:
        """Whether this run expects answers: it stops the server itself while it takes it or publishes."""
        return not self._updating and not self.lost

    async def _is_paused(self) -> bool:
        value = (await self.pool.call("/is_paused", None, self.seconds)).json()
        return isinstance(value, dict) and value.get("is_paused") is True

    def _name_pause(self, seconds: float, least: float) -> None:
        """Say that somebody else has paused the server, for ``seconds`` by now, and give it up in the end. Less than ``least``
        was seen once alone, and may have been this run's publication."""
        before, self.paused = self.paused, seconds >= least
        if self.paused and not before:
            again = f"it is given up after {self.seconds:g} s (--generator-seconds) unless it goes on: POST {self.url}/resume"
            log.warning(f"the generator {self.url} was paused, and not by this run; {again}")
        if seconds >= self.seconds:
            self.lose(f"it was paused, and not by this run, for {seconds:.0f} s; let it go on: POST {self.url}/resume")

    # ----------------------------------------------------------------- weights

    async def update(self, files: Sequence[WeightFile], version: int, weights: Mapping[str, Tensor]) -> None:
        """Pause, load the weights of ``version``, and go on. Requests in flight return the tokens they have. Adapters that vLLM
        loads by name need no pause: requests in flight keep the adapter they named. No files: ``weights`` go from GPU to GPU."""
        if files and files[-1].kind == "folder":
            self.runtime_adapters = self.runtime_adapters or RuntimeAdapters(self.pool, self.client)
            try:
                with self._owes():
                    await self.runtime_adapters.load(files[-1], version)
            except ServerFault as fault:
                raise self.lose(str(fault)) from None
            self.version = version
            return
        if not self.takes_weights:
            lacks = "it takes adapters alone, and this run publishes all weights"
            raise self.lose(f"{lacks}; start it with {start_options(self.backend)}")
        self._updating = True
        try:
            await self._load(files, version, weights)
        finally:
            self._updating = False
        # a server may accept each call and still not have the weights: it says itself which ones it has
        value = (await self._call("/weight_info", None, self.seconds)).json()
        label = value.get("weight_version") if isinstance(value, dict) else None
        if label != str(version):
            raise self.lose(f"it has the weights {label!r:.40} after version {version} was published")
        self.version, self.base = version, files[-1].base if files else ""

    async def _load(self, files: Sequence[WeightFile], version: int, weights: Mapping[str, Tensor]) -> None:
        await self.post("/pause?mode=abort", self._owner, UPDATE_SECONDS)
        if files:
            await self.post("/start_weight_update", self._owner, UPDATE_SECONDS)
            for file in files:
                await self.post("/update_weights", {**self._owner, "update_info": file.as_dict()}, UPDATE_SECONDS)
            await self.post("/finish_weight_update", {**self._owner, "weight_version": str(version)}, UPDATE_SECONDS)
        else:
            assert self.device_weights is not None
            await self.device_weights.send(weights, version)
        await self.post("/resume", self._owner, UPDATE_SECONDS)


# --------------------------------------------------------------------- adapters of vLLM


class RuntimeAdapters:
    """The adapters that a running vLLM has loaded by name, a PEFT folder per version, so that nothing is merged. Requests name
    the adapter of their version: several sample side by side, and none is interrupted. ``client`` begins the names."""

    def __init__(self, pool: HttpPool | ProcessLink, client: str) -> None:
        self.pool, self.client = pool, client
        self.loaded: set[int] = set()  # versions
        self._in_use: Counter[int] = Counter()

    async def load(self, file: WeightFile, version: int) -> None:
        """Load a version, and unload those that no request uses any longer."""
        await self._call(LOAD, version, lora_path=file.path)
        self.loaded.add(version)
        for old in [v for v in self.loaded if v != version and not self._in_use[v]]:
            self.loaded.discard(old)
            await self._call(UNLOAD, old)

    async def _call(self, path: str, version: int, **more: str) -> None:
        reply = await self.pool.call(path, {"lora_name": f"{self.client}-{version}", **more}, UPDATE_SECONDS)
        refused = "it answers {} with {}: {}; start it with "
        options = "--enable-lora, --max-lora-rank of the run's rank and --max-loras of its staleness plus 2"
        text = error_text(reply.json(), reply.text()).rstrip(".")
        expect(reply.status == 200, refused + options, path, reply.status, text)

    @contextlib.contextmanager
    def using(self, version: int) -> Iterator[str]:
        """The adapter of ``version``, which stays loaded meanwhile."""
        self._in_use[version] += 1
        try:
            yield f"{self.client}-{version}"
        finally:
            self._in_use[version] -= 1


# --------------------------------------------------------------- a run at one of our servers


async def until_free(pool: HttpPool, client: str, run: str) -> None:
    """Wait while a run has the server that says nothing: it has probably died, and the server gives it up after a while. Returns
    at once where nobody has the server or the same run had it, and when the owner is heard again: then the server refuses."""
    before = -1.0
    while True:
        value = (await pool.call("/turnwise/v1/info", None, ASK_SECONDS)).json()
        owner = value.get("owner") if isinstance(value, dict) else None
        if not isinstance(owner, dict) or owner.get("client") == client or (run and owner.get("run") == run):
            return
        silent = float(owner.get("silent") or 0.0)
        if silent <= before:  # heard meanwhile, or waiting for replies: then it is 0 each time
            return
        if before < 0:
            busy = (
                f"--generator {pool.address.url} serves the run {owner.get('client')!r:.60}, silent for {silent:.0f} s"
            )
            log.warning(f"{busy}: waiting until the server gives that run up, or hears it")
        before = silent
        await asyncio.sleep(OWNER_SECONDS)


class Presence:
    """Says regularly that ``client`` is alive, from a daemon thread: a server hears nothing while a run learns. Ends with
    ``owner``."""

    def __init__(self, pool: HttpPool, client: str, owner: object) -> None:
        self.pool, self.client = pool, client
        self._ended = threading.Event()
        weakref.finalize(owner, self._ended.set)
        threading.Thread(target=self._beat, name="presence", daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._tell("alive")

    def end(self, leave: bool = False) -> None:
        """Say nothing more: the server is lost. ``leave``: give it back."""
        self._ended.set()
        if leave:
            self._tell("release")

    def _tell(self, what: str) -> None:
        with contextlib.suppress(ServerFault):  # whoever waits for a reply finds out
            self.pool.exchange(f"/turnwise/v1/{what}", {"client": self.client}, ASK_SECONDS)
