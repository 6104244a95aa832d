"""Weights from the learner's GPU to that of a vLLM server, without files: over NCCL, or over CUDA IPC within one GPU.

vLLM's own trainer side does both; this module gives it the weights and the server's routes. Each server has an NCCL group of
its own: a group breaks with its first lost member, and a server that comes back joins alone. Written against the sources of
vLLM 0.32, and **not run on GPUs**. Imports vLLM when it is called; knows no files.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import pickle
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from turnwise.engines.remote.http import expect, in_daemon_thread
from turnwise.engines.remote.replica import IPC, NCCL, UPDATE_SECONDS, Replica
from turnwise.errors import ServerFault, SettingError

if TYPE_CHECKING:
    import torch  # imported late: refusals need not wait for it
    from torch import Tensor


class DeviceWeights:
    """The way of weights to one server. ``turn`` is shared by the servers of a run: vLLM packs weights into buffers of one GiB,
    and sending to one server after the other needs them once."""

    def __init__(self, backend: str, device: torch.device, turn: asyncio.Lock) -> None:
        assert backend in (NCCL, IPC)
        self.backend, self.device, self._turn = backend, device, turn
        self._weights: Mapping[str, Tensor] = {}
        self._routes: _Routes | None = None
        self._engine: Any = None

    async def open(self, replica: Replica) -> None:
        """Agree with the server on the way. Raises ``ServerFault`` with its words where it refuses."""
        self.close()
        reply = await replica.pool.call("/get_world_size", None, replica.seconds)
        value = reply.json()
        size: Any = value.get("world_size") if isinstance(value, dict) else None  # workers, each with a GPU
        says = reply.status == 200 and isinstance(size, int) and size >= 1
        expect(says, "it does not say how many GPUs it has (GET /get_world_size answers {})", reply.status)
        if self.backend == IPC and size != 1:
            far = f"--generator {replica.url} computes on {size} GPUs, and CUDA IPC reaches the learner's alone"
            raise SettingError(f"{far}; write --generator-weights {NCCL}")
        with contextlib.suppress(ServerFault):  # what an earlier run left there
            await replica.pool.call("/shutdown_weight_transfer_engine", {}, replica.seconds)
        address = own_address(replica.url) if self.backend == NCCL else ""
        routes = _Routes(replica)

        def rendezvous() -> Any:
            factory, source, info = self._vllm(address, size)
            return factory.trainer_init(info, client=routes, source=source)

        self._engine, self._routes = await self._run(routes, rendezvous), routes

    def carries(self, weights: Mapping[str, Tensor]) -> bool:
        return True

    async def send(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Start an update of the server, send the weights and finish it under the name of ``version``."""
        engine, routes = self._engine, self._routes
        assert engine is not None and routes is not None, "a server is attached before it gets weights"
        async with self._turn:
            self._weights, routes.version = weights, version
            try:
                await self._run(routes, engine.send_weights)
            except BaseException:
                self.close()  # a thread that waits inside NCCL for a server that is gone returns
                raise
            finally:
                self._weights = {}

    def close(self) -> None:
        """Leave the group. vLLM aborts what is still under way in it, which may take seconds: nobody waits for that."""
        engine, self._engine = self._engine, None
        if engine is not None:
            threading.Thread(target=engine.shutdown, daemon=True, name="turnwise-weights").start()

    async def _run(self, routes: _Routes, work: Callable[[], Any]) -> Any:
        # the result of `work`, or the first refusal of the server. vLLM's trainer side would wait on: five minutes for a server
        # that does not join a group, and for ever for one that does not take part in a broadcast
        refused = routes.begin()

        def with_device() -> Any:
            if self.device.type != "cuda":
                return work()
            import torch

            with torch.cuda.device(self.device):  # the device of a thread; this one is new
                torch.cuda.synchronize()  # vLLM copies on streams of its own, which do not wait for the learner's
                return work()

        working = asyncio.ensure_future(in_daemon_thread(with_device))
        await asyncio.wait({working, refused}, return_when=asyncio.FIRST_COMPLETED)
        if refused.done():
            working.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody waits for it now
            raise refused.result()
        refused.cancel()
        try:
            return working.result()
        except (SettingError, ServerFault):
            raise
        except Exception as fault:
            words = " ".join(str(fault).split()) or type(fault).__name__
            raise ServerFault(f"vLLM's trainer side cannot send weights by {self.backend}: {words[:300]}") from fault

    def _vllm(self, address: str, size: int) -> tuple[Any, Any, Any]:
        """vLLM's factory of trainer engines, the weights as its source, and what the engine is told."""
        try:
            from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        except ImportError as fault:
            raise SettingError(f"--generator-weights {self.backend}: {needs_vllm(str(fault))}") from fault
        owner = self

        class LearnerWeights(WeightSource):
            """What is being sent. A copy of the learner's weights in host memory (``--ranks``) goes to the GPU one by one."""

            def metadata(self) -> list[Any]:
                return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in owner._weights.items()]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                for name, tensor in owner._weights.items():
                    yield name, tensor.detach().to(owner.device)

        if self.backend == IPC:
            return WeightTransferTrainerFactory, LearnerWeights(), IPCTrainerInitInfo(rank=0)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free:
            free.bind((address, 0))
            port = int(free.getsockname()[1])
        info = NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=size + 1, rank=0)
        return WeightTransferTrainerFactory, LearnerWeights(), info


class _Routes:
    """vLLM's ``VLLMWeightSyncClient``: called from its threads, sent by the event loop, so that a server that dies is noticed as
    during any other request. Keeps the first refusal."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.version = replica, -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._refused: asyncio.Future[Exception] | None = None

    def begin(self) -> asyncio.Future[Exception]:
        """Send from this event loop. The result is a refusal, if one comes."""
        self._loop = asyncio.get_running_loop()
        self._refused = self._loop.create_future()
        return self._refused

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", {"update_info": _as_json(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        # vLLM's engines name no version; ours is the one that is published
        self._post("/finish_weight_update", {"weight_version": weight_version or str(self.version)})

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        loop, refused = self._loop, self._refused
        assert loop is not None and refused is not None
        reply = asyncio.run_coroutine_threadsafe(self.replica.post(path, body, UPDATE_SECONDS), loop)
        try:
            reply.result()
        except Exception as fault:
            keep = partial(refused.set_result, fault)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(lambda: refused.done() or keep())
            raise


def _as_json(update_info: Any) -> Any:
    # CUDA IPC handles as vLLM reads them from JSON, if it was started with VLLM_ALLOW_INSECURE_SERIALIZATION=1
    if not isinstance(update_info, Mapping) or update_info.get("ipc_handles") is None:
        return update_info
    rest = {name: value for name, value in update_info.items() if name != "ipc_handles"}
    return {**rest, "ipc_handles_pickled": base64.b64encode(pickle.dumps(update_info["ipc_handles"])).decode()}


# ------------------------------------------------------------------ refusals


def check_device_weights(backend: str, urls: Sequence[str], ranks: int, on_gpu: bool) -> None:
    """Refuse at once what cannot work. ``on_gpu``: where the learner computes, as far as is known without torch."""
    flag, by_nccl = f"--generator-weights {backend}", f"write --generator-weights {NCCL}"
    far = next((url for url in urls if backend == IPC and not is_this_machine(url)), "")
    wrong = {
        f"{flag} reaches servers of vLLM; write --generator http://HOST:PORT, or --generator-weights ./{backend} for a folder of "
        "that name": not urls,
        needs_gpu(backend): not on_gpu,
        f"{flag}: {needs_vllm('no package vllm')}": importlib.util.find_spec("vllm") is None,
        f"{flag} needs one learner process, and --ranks is {ranks}; {by_nccl}": backend == IPC and ranks > 1,
        f"{flag} stays within one GPU, and {far} is on another machine; {by_nccl}, or a folder that both machines see": far,
    }
    if text := next((text for text, holds in wrong.items() if holds), ""):
        raise SettingError(text)


def needs_gpu(backend: str) -> str:
    sends = f"--generator-weights {backend} sends weights from GPU to GPU, and this run learns on a CPU"
    return f"{sends}; write --generator-weights FOLDER, or leave it out"


def needs_vllm(seen: str) -> str:
    runs = f"it runs vLLM's trainer side, which cannot be imported here ({seen})"
    return f"{runs}; install vllm 0.32 in this environment, too, or write --generator-weights FOLDER"


def cuda_device(backend: str, name: str) -> torch.device:
    """The learner's GPU. ``name``: as in ``--device``."""
    import torch

    device = torch.device("cuda" if name == "auto" else name)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise SettingError(needs_gpu(backend))
    return device


# ------------------------------------------------------------------ addresses


def own_address(url: str) -> str:
    """The IPv4 address of this machine under which the server at ``url`` finds it: vLLM's rendezvous listens on IPv4 alone."""
    parts = urllib.parse.urlsplit(url)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname, parts.port or 80))  # sends nothing: it chooses a route
            return str(probe.getsockname()[0])
    except OSError as fault:
        raise ServerFault(f"there is no IPv4 route to {parts.hostname} for NCCL ({fault.strerror or fault})") from None


def is_this_machine(url: str) -> bool:
    """Whether the server's address is one of this machine: those of others cannot be bound."""
    host = urllib.parse.urlsplit(url).hostname
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(place)
                return True
    return False
