"""Generator servers for tests: ours, in a thread of this process; and a trainer's side of them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field

import pytest

pytest.importorskip("uvicorn")

from support.generators import make
from turnwise.core.records import Sampling
from turnwise.engines.adapters import adapted_weights
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.remote.http import ServerAddress
from turnwise.engines.remote.remote_generator import PolicyProbe, RemoteGenerator
from turnwise.engines.remote.replica import RemoteLimits, Replica
from turnwise.engines.remote.weight_files import WeightFolder, read_weights
from turnwise.serve.app import generate_front
from turnwise.serve.policy_host import HostLimits, PolicyHost
from turnwise.serve.server import listen_on, serve_app, url_of
from turnwise.workers.tokens import new_token, write_token

LIMITS = RemoteLimits(slots=4, context=128, stop_ids=(), deterministic=True, threads=1)
SAMPLING = Sampling(max_tokens=12)


def make_host(model, decode=None, slots=256, context=128, **facts):
    def generator(limits):
        return LocalGenerator(
            model, decode, slots=limits.slots, context=limits.context, stop_ids=limits.stop_ids,
            deterministic=limits.deterministic, threads=limits.threads or None,
        )  # fmt: skip

    weights = {name: list(p.shape) for name, p in model.named_parameters()}
    known = {"model": "small", "vocabulary": model.config.vocab_size, "weights": weights, **facts}
    return PolicyHost(generator, read_weights, known, HostLimits(slots, context, (), True, 1), adapted_weights)


@dataclass
class RunningServer:
    """A server in a thread. ``host`` lives in that thread's event loop."""

    url: str
    host: PolicyHost
    loop: asyncio.AbstractEventLoop
    task: asyncio.Future = field(repr=False, default=None)

    def stop(self):
        self.loop.call_soon_threadsafe(self.task.cancel)


@contextlib.contextmanager
def served(model=None, token="", decode=None, wrap=lambda app: app, port=0, own_host=None, **options):
    """A server for ``model`` until the context ends. ``wrap`` may put something in front of the application. ``own_host`` makes
    another host than that of a small model. Without ``token`` there is one that clients of this machine find."""
    listener, ready, out = listen_on("127.0.0.1", port), threading.Event(), []
    if not token:
        token = new_token()
        write_token(listener.getsockname()[1], token)

    host = own_host() if own_host else make_host(model or make(), decode, **options)

    async def serve():
        front = generate_front(host, token)
        front.app = wrap(front.app)
        task = asyncio.ensure_future(serve_app(listener, front, "", token))
        out.append(RunningServer(url_of(listener), host, asyncio.get_running_loop(), task))
        ready.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield out[0]
    finally:
        with contextlib.suppress(RuntimeError):
            out[0].stop()
        thread.join(20)


async def connected(urls, model=None, key="", limits=LIMITS, tell=None, seconds=20.0, decode=None, tolerance=1e-3):
    """A generator over servers, attached. ``model``: the one whose weights are published, for the probe."""
    replicas = [Replica(ServerAddress(url, key), "test", seconds) for url in urls]
    probe = PolicyProbe(model, model.config.vocab_size, tolerance) if model is not None else None
    heard = tell if tell is not None else []
    generator = RemoteGenerator(replicas, limits, WeightFolder(), probe, decode or str, heard.append)
    for replica in replicas:
        await replica.identify()
    await generator.attach()
    return generator


def weights_of(model):
    return {name: p.detach() for name, p in model.named_parameters()}
