"""Stand-ins for both sides of vLLM's weight transfer: its trainer engines, as a package ``vllm`` with the names and signatures of
0.32, and a server that takes what they send. Tensors go from thread to thread of this process; no NCCL, no CUDA IPC."""

from __future__ import annotations

import base64
import json
import pickle
import queue
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from starlette.responses import JSONResponse

from turnwise.engines.remote.weight_files import WeightFolder

GPU = "GPU-0"
SECONDS = 20.0  # after which a side that waits for the other fails the test


class Wire:
    """What both sides share: the members of each group by its port, and memory that handles name."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.memory: dict[str, Any] = {}
        self.released = threading.Event()  # ends what waits for a server that never comes
        self.closed: list[str] = []

    def group(self, port: int) -> Group:
        return self.groups.setdefault(port, Group())


@dataclass
class Group:
    joined: threading.Event = field(default_factory=threading.Event)
    sent: queue.Queue = field(default_factory=queue.Queue)


# ------------------------------------------------------------------ trainer side


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: Any
    shape: tuple[int, ...]


class WeightSource:
    def metadata(self):
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError


@dataclass
class TrainerInitInfo:
    rank: int = field(kw_only=True)


@dataclass
class NCCLTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "nccl"

    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = 2**30
    packed_num_buffers: int = 2


@dataclass
class IPCTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "ipc"
    packed: bool = False
    packed_buffer_size_bytes: int = 2**30


class NcclEngine:
    """Blocks where vLLM's does: until the server has joined, and until it has received."""

    def __init__(self, wire, info, client, source):
        self.wire, self.client, self.source, self.group = wire, client, source, wire.group(info.master_port)
        told = {name: value for name, value in asdict(info).items() if name != "rank"}
        with ThreadPoolExecutor(max_workers=1) as threads:
            joining = threads.submit(client.init_weight_transfer_engine, {**told, "rank_offset": 1})
            while not self.group.joined.wait(0.01):
                if wire.released.is_set():
                    raise TimeoutError("nobody joined the group")
            joining.result()

    def send_weights(self):
        meta = self.source.metadata()
        update = {
            "names": [m.name for m in meta],
            "dtype_names": [str(m.dtype).split(".")[-1] for m in meta],
            "shapes": [list(m.shape) for m in meta],
        }
        self.client.start_weight_update()
        threads = ThreadPoolExecutor(max_workers=1)
        receiving = threads.submit(self.client.update_weights, update)
        for name, tensor in self.source:
            self.group.sent.put((name, tensor.clone()))
        while not self.group.sent.empty():  # a broadcast returns when the other side took part
            if self.wire.released.wait(0.01):
                raise RuntimeError("the group was aborted")
        receiving.result()
        threads.shutdown(wait=False)
        self.client.finish_weight_update()

    def shutdown(self):
        self.wire.closed.append("nccl")


class IpcEngine:
    def __init__(self, wire, info, client, source):
        self.wire, self.client, self.source = wire, client, source
        client.init_weight_transfer_engine({"packed": info.packed})

    def send_weights(self):
        self.client.start_weight_update()
        update: dict[str, list] = {"names": [], "dtype_names": [], "shapes": [], "ipc_handles": []}
        for name, tensor in self.source:
            self.wire.memory[name] = tensor.clone()
            update["names"].append(name)
            update["dtype_names"].append(str(tensor.dtype).split(".")[-1])
            update["shapes"].append(list(tensor.shape))
            update["ipc_handles"].append({GPU: (name, b"\x00no text")})
        self.client.update_weights(update)
        self.client.finish_weight_update()

    def shutdown(self):
        self.wire.closed.append("ipc")


def install(monkeypatch, wire):
    """Put the package in place of vLLM."""
    engines = {"nccl": NcclEngine, "ipc": IpcEngine}

    class WeightTransferTrainerFactory:
        @classmethod
        def trainer_init(cls, init_info, *, client, source=None):
            return engines[init_info.backend](wire, init_info, client, source)

    root = "vllm.distributed.weight_transfer"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        root: {
            "ParamMeta": ParamMeta,
            "WeightSource": WeightSource,
            "WeightTransferTrainerFactory": WeightTransferTrainerFactory,
        },
        f"{root}.nccl_engine": {"NCCLTrainerInitInfo": NCCLTrainerInitInfo},
        f"{root}.ipc_engine": {"IPCTrainerInitInfo": IPCTrainerInitInfo},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


# ------------------------------------------------------------------- server side


def failed(message, status=500):
    return JSONResponse(
        {"error": {"message": message, "type": "InternalServerError", "code": status}}, status_code=status
    )


class FakeVllmServer:
    """Stands in front of a server of ours: hides what vLLM does not have, and takes weights from the wire."""

    FIELDS: ClassVar[dict[str, set[str]]] = {
        "nccl": {"master_address", "master_port", "rank_offset", "world_size"},
        "ipc": {"packed"},
    }

    def __init__(self, wire, backend, workers=1):
        self.wire, self.backend, self.workers, self.port = wire, backend, workers, 0
        self.folder, self.calls, self.told, self.refuses = WeightFolder(), [], [], ""
        self.app: Any = None

    def wrap(self, app):
        self.app = app
        return self

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, body = scope["path"], b""
        while scope["method"] == "POST":
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["method"] == "POST" and "generate" not in path:
            self.calls.append(path.strip("/"))
        reply, body = self.answer(path, body)
        if reply is not None:
            await reply(scope, receive, send)
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay():
            return messages.pop() if messages else await receive()

        headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
        await self.app({**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}, replay, send)

    def answer(self, path, body):
        """A reply, or what the server behind is asked instead."""
        if path.startswith("/turnwise/") or path == "/v1/load_lora_adapter":
            return failed("Not Found", 404), body
        if path == "/get_world_size":
            return JSONResponse({"world_size": self.workers}), body
        if path == "/shutdown_weight_transfer_engine":
            return JSONResponse({"message": "Weight transfer shut down"}), body
        if path == self.refuses:
            return failed("the worker ran out of memory"), body
        if path == "/init_weight_transfer_engine":
            return self.init(json.loads(body)["init_info"]), body
        if path == "/update_weights":
            tensors = dict(self.received(json.loads(body)["update_info"]))
            file = self.folder.write(tensors, len(self.told))
            self.told.append(tensors)
            return None, json.dumps({"update_info": file.as_dict()}).encode()
        return None, body

    def init(self, told):
        missing = self.FIELDS[self.backend] - told.keys()
        if missing or (self.backend == "ipc" and told.keys() - {"packed"}):
            return failed(f"Invalid init_info for the engine of {self.backend}: {sorted(missing or told)}")
        if self.backend == "nccl":
            assert (told["rank_offset"], told["world_size"]) == (1, self.workers + 1)
            self.port = told["master_port"]
            self.wire.group(self.port).joined.set()
        return JSONResponse({"message": "Weight transfer initialized"})

    def received(self, update):
        rows = zip(update["names"], update["dtype_names"], update["shapes"], strict=True)
        handles = iter(())
        if self.backend == "ipc":
            assert "ipc_handles" not in update
            handles = iter(pickle.loads(base64.b64decode(update["ipc_handles_pickled"])))
        for name, dtype, shape in rows:
            if self.backend == "ipc":
                tensor = self.wire.memory[next(handles)[GPU][0]]
            else:
                sent, tensor = self.wire.group(self.port).sent.get(timeout=SECONDS)
                assert sent == name
            assert (str(tensor.dtype), list(tensor.shape)) == (f"torch.{dtype}", shape)
            yield name, tensor
