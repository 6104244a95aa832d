"""A generator server in a process of this run (``--generator local``): client, routes and exactness are those of any server.

Frames of a worker carry the calls instead of HTTP, which would take a third of a step of the tiny model and two more packages.
Weights are files in shared memory, as for any server; on a GPU the process copies them out of the learner's memory.
"""

from __future__ import annotations

import asyncio
import io
import pickle
import time
import urllib.parse
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # registers how tensors on a GPU are pickled
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.engines.adapters import AdaptedWeights
from turnwise.engines.capture import using_gpu
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.generator.kv_cache import CacheChoice
from turnwise.engines.grammar import Grammars
from turnwise.engines.remote.http import ServerAddress
from turnwise.engines.remote.remote_generator import RemoteGenerator
from turnwise.engines.remote.replica import UPDATE_SECONDS, RemoteLimits, Replica
from turnwise.engines.remote.weight_files import WeightFolder, read_weights, shared_objects
from turnwise.errors import ServerFault, SettingError
from turnwise.workers.process import Worker, WorkerLost

START_SECONDS = 300.0  # until the process has imported torch and built its generator


@dataclass(frozen=True)
class GeneratorSpec:
    """What a generator is made of, besides the model and its tokenizer."""

    slots: int
    context: int
    stop_ids: tuple[int, ...]
    deterministic: bool
    device: str
    dtype: torch.dtype | None
    threads: int
    cache: CacheChoice | None = None

    def make(self, model: Any, tokenizer: Any) -> LocalGenerator:
        torch.set_num_threads(self.threads)
        decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        grammars = Grammars(tokenizer, self.stop_ids)
        return LocalGenerator(model, decode, share_weights=self.device == "cpu", grammars=grammars, **vars(self))


@dataclass(frozen=True)
class ProcessReply:
    """What ``HttpReply`` is for a server elsewhere."""

    status: int
    value: Any

    def json(self) -> Any:
        return self.value

    def text(self, limit: int = 300) -> str:
        return str(self.value)[:limit]


class ProcessLink:
    """Calls to the server in a process of this run: what ``HttpPool`` is for a server elsewhere."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.address = worker, ServerAddress("local")

    async def call(self, path: str, body: Mapping[str, Any] | None = None, seconds: float | None = 30) -> ProcessReply:
        """Raises ``ServerFault`` where the process ends first, or is silent for ``seconds``. A call that nobody waits for any
        longer ends there."""
        route, _, query = path.partition("?")
        call = ("GET" if body is None else "POST", route, {**(body or {}), **dict(urllib.parse.parse_qsl(query))})
        answer, waited = self.worker.exchange(pickle.dumps(call, protocol=5)), 0.0
        try:
            # by the second, because time in which this event loop stood still (a large checkpoint, a suspended machine) is not
            # the process's: its answer may wait to be read
            while seconds is not None and not answer.done():
                if waited >= seconds:
                    raise ServerFault(f"no reply within {seconds:g} s")
                part, began = min(1.0, seconds - waited), time.monotonic()
                await asyncio.wait([answer], timeout=part)
                if time.monotonic() - began < 1.25 * part:
                    waited += part
            return ProcessReply(*pickle.loads(await answer))
        except WorkerLost as lost:
            raise ServerFault(f"the generator process {lost}") from None
        finally:
            answer.cancel()

    def interrupt(self) -> None:
        # the server is lost, and with it its process
        self.worker.close()


class DeviceHandles:
    """Weights on a GPU, by their addresses: the process copies them on that GPU before it answers, so that the learner may change
    them afterwards."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def carries(self, weights: Mapping[str, Tensor]) -> bool:
        # adapters, and copies in host memory (`--ranks`), go as files
        if isinstance(weights, AdaptedWeights) and weights.mergeless:
            return False
        return all(tensor.is_cuda for tensor in weights.values())

    async def works(self, device: str) -> bool:
        # whether the process can read this one's tensors: a container may keep them apart
        await self.replica.post("/pause?mode=abort", {}, UPDATE_SECONDS)
        await self.replica.post("/start_weight_update", {}, UPDATE_SECONDS)
        try:
            return await self._put({"": torch.zeros(1, device=device)}) == 200
        except RuntimeError:
            return False
        finally:
            await self.replica.post("/resume", {}, UPDATE_SECONDS)  # what was put is not loaded

    async def send(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self.replica.post("/start_weight_update", {}, UPDATE_SECONDS)
        if await self._put(weights) != 200:
            raise self.replica.lose("it cannot read the learner's weights on the GPU any longer")
        await self.replica.post("/finish_weight_update", {"weight_version": str(version)}, UPDATE_SECONDS)

    async def _put(self, weights: Mapping[str, Tensor]) -> int:
        def pickled() -> bytes:
            torch.cuda.synchronize()  # the other process does not wait for kernels of this one
            buffer = io.BytesIO()
            ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump({n: t.detach() for n, t in weights.items()})
            return buffer.getvalue()

        handles = await asyncio.to_thread(using_gpu()(pickled))
        reply = await self.replica.pool.call("/update_weights", {"update_info": {"handles": handles}}, UPDATE_SECONDS)
        return reply.status


class ReceivedWeights:
    """``read_weights`` of the host in the process: files, or what ``DeviceHandles`` sends."""

    from_device = False

    def __call__(self, part: Mapping[str, Any]) -> tuple[Mapping[str, Tensor], str]:
        self.from_device = "handles" in part
        if not self.from_device:
            return read_weights(part)
        return using_gpu()(pickle.loads)(part["handles"]), ""  # not while the generator captures a graph

    def finish(self) -> None:
        # the weights are loaded: let go of the run's tensors, once they are copied
        if self.from_device:
            using_gpu()(torch.cuda.synchronize)()
            torch.cuda.ipc_collect()


async def start_generator(
    program: str,
    spec: GeneratorSpec,
    model: PreTrainedModel,
    tokenizer: Any,
    decode: Callable[[list[int]], str],
    seconds: float = 30.0,
) -> RemoteGenerator:
    """A generator over one server, which ``program`` runs in a process of its own, until the generator is closed or gone.
    ``seconds``: a process that says nothing for so long is given up."""
    with shared_objects((spec, model.cpu(), tokenizer)) as file:
        worker = Worker(program, str(file), seconds=seconds, quiet=True)
        link = ProcessLink(worker)
        try:
            started = await link.call("/health", None, START_SECONDS)
            if started.status != 200:
                raise SettingError(started.json()["error"]["message"])
        except BaseException:
            worker.close()
            raise
    replica = Replica(link.address, "run", seconds, pool=link)
    limits = RemoteLimits(spec.slots, spec.context, spec.stop_ids, spec.deterministic, spec.threads)
    generator = RemoteGenerator([replica], limits, WeightFolder(), None, decode, lambda text: None)
    weakref.finalize(generator, worker.close)
    await replica.identify()
    await generator.attach()
    if spec.device != "cpu" and await (handles := DeviceHandles(replica)).works(spec.device):
        replica.device_weights = handles
    return generator
