"""What a run serves, until it is interrupted: a model for trainers, or a policy for agents. Nothing is trained here.

``turnwise serve`` (``serve_model``): a generator behind HTTP, the one that a run has in its own process; the trainer sends the
weights. ``main`` is the same server in a process of a run, for ``--generator local``. ``turnwise endpoint`` (``serve_run``): the
policy of a finished run at an address. An agent opens a session, talks, and posts what the episode was worth; each finished
session becomes a row of a file. A client that opens no session is answered too, one call at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import pickle
import shlex
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from turnwise.config.named_object import GIVEN_OBJECT
from turnwise.config.settings import Settings
from turnwise.config.values import ModelName
from turnwise.core.protocols import Generator
from turnwise.core.records import Sampling, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.environments import prompts
from turnwise.errors import SettingError, TurnwiseError
from turnwise.rollout.agent_episode import AgentEpisode, AgentOutcome, within
from turnwise.rollout.certificate import certificate
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.renderer import Renderer
from turnwise.serve.generate_api import GenerateApi
from turnwise.serve.policy_host import HostLimits, PolicyHost
from turnwise.serve.server import Endpoint, listen_on, read_address, serve_app, serving, url_of
from turnwise.serve.sessions import OpenEpisode, Sessions
from turnwise.serve.wires import error_body
from turnwise.store.database import EpisodeFacts
from turnwise.store.rundir import RunDir
from turnwise.training.evaluation import select_policy
from turnwise.training.plan import EnvSpec, resolve_settings
from turnwise.training.refusals import check_device, check_model_name
from turnwise.training.remote_generators import COMPARED, OF_TINY, vocabulary_digest
from turnwise.workers.child import serve_concurrently
from turnwise.workers.sockets import allow_many_files
from turnwise.workers.tokens import new_token, write_token

CALLS = 10_000  # of a session
MAX_SESSIONS = 4096  # open at the same time
FILE = "endpoint.jsonl"  # in the run directory
SHARED = ("env", "difficulty", "max_turns", "context", "template", "tool_syntax")  # with the runs it samples for
EVERY_ADDRESS = ("0.0.0.0", "::")
CONTEXT = 4096  # ids of a dialogue that a server offers where the user names no limit; fewer if the model reads fewer


# ------------------------------------------------------------ a model for trainers


def serve_model(
    model: str, address: str, token: str, values: Mapping[str, Any], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Serve ``model`` (a folder, a Hub id, a run directory or ``tiny``) until interrupted; returns what happened. ``values`` are
    settings of a run."""
    host, port = read_address(address)
    listen_on(host, port, token).close()  # refuses an address that cannot be used, before the model is loaded
    settings, folder = _select(model, values)
    check_device(settings.device)
    if folder is None:
        check_model_name(settings.model)
    policy_host = make_policy_host(settings, folder, model, "context" in values)
    return asyncio.run(_serve_model(policy_host, train_command(settings, folder), host, port, token, tell))


def _select(model: str, values: Mapping[str, Any]) -> tuple[Settings, Path | None]:
    """The settings, and the folder of the model where it belongs to a run."""
    named = ModelName.parse(model)
    if not (Path(named.name) / "run.json").is_file():
        return resolve_settings({**values, "model": named}), None
    run = RunDir.open(named.name)
    folder = next((path for path in (run.model, run.path / "initial") if path.is_dir()), None)
    if folder is None:
        instead = "serve the model it begins with, or tiny --env ENVIRONMENT"
        raise SettingError(f"the run {named.name} has no model yet; {instead}")
    settings = Settings.of({**run.metadata()["settings"], **values})
    return replace(settings, model=settings.model.with_options(named)), folder


def train_command(settings: Settings, folder: Path | None) -> str:
    """A command whose run this server accepts: the model, and the settings that differ from what that command would choose."""
    model = replace(settings.model, name=str(folder)) if folder else settings.model
    names = (*SHARED, *(OF_TINY if model.tiny else ()))
    values = {name: getattr(settings, name) for name in dict.fromkeys(names)}
    if settings.env == prompts.NAME or settings.env.startswith(GIVEN_OBJECT):
        del values["env"]  # the user's own data or object: no flag of this command names it
    try:
        chosen = resolve_settings({"model": model, **{k: v for k, v in values.items() if k == "env"}})
    except TurnwiseError:  # an environment that cannot be imported here: the server samples without it
        chosen = Settings(model=model)
    chosen = replace(chosen, env=Settings().env)
    differing = {name: value for name, value in values.items() if value != getattr(chosen, name)}
    texts = {name: ",".join(map(str, v)) if isinstance(v, tuple) else str(v) for name, v in differing.items()}
    words = [word for name, text in texts.items() for word in (f"--{name.replace('_', '-')}", text)]
    return shlex.join(["turnwise", "train", "--model", str(model), *words])


def make_policy_host(settings: Settings, folder: Path | None, name: str, own_context: bool) -> PolicyHost:
    """The host of the model's generator. ``own_context``: the user named the longest dialogue."""
    import torch

    from turnwise.engines.adapters import adapted_weights
    from turnwise.engines.remote.weight_files import read_weights
    from turnwise.training import build, engines

    s = settings
    env_spec = EnvSpec.from_settings(s) if s.model.tiny and folder is None else EnvSpec(s, object)
    tokenizer = build.load_tokenizer(s, env_spec, folder)
    model = build.load_model(s, len(tokenizer), folder)
    renderer = build.make_renderer(s, tokenizer)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or CONTEXT
    context = min(s.context if own_context else CONTEXT, int(positions))
    most = HostLimits(s.slots, context, tuple(renderer.stop_ids), True, engines.select_threads(s))
    cache = engines.sampling_cache(s, model)

    def make(limits: HostLimits) -> Any:
        gc.collect()  # what a generator before held
        torch.cuda.empty_cache()
        return engines.make_served_generator(s, model, renderer, limits, cache)

    return PolicyHost(make, read_weights, _facts(s, name, tokenizer, model, folder), most, adapted_weights)


def _facts(settings: Settings, name: str, tokenizer: Any, model: Any, folder: Path | None) -> dict[str, Any]:
    """What a trainer compares with its own model."""
    config = model.config.get_text_config()
    made = {key: getattr(settings, key) for key in OF_TINY} if settings.model.tiny and folder is None else None
    return {
        "model": name,
        "vocabulary": int(config.vocab_size),
        "tokenizer": vocabulary_digest(tokenizer.get_vocab()),
        "config": {key: getattr(config, key) for key in COMPARED if hasattr(config, key)},
        "weights": {key: list(p.shape) for key, p in model.named_parameters()},
        "tiny": made,
        "cache": settings.model.cache,
    }


async def _serve_model(
    policy_host: PolicyHost, command: str, host: str, port: int, token: str, tell: Callable[[str], None]
) -> dict[str, Any]:
    from turnwise.serve.app import generate_front  # late: imports starlette

    stopped, secret = until_stopped(), token or new_token()
    listener = listen_on(host, port, token)
    url, port = url_of(listener), listener.getsockname()[1]
    file = None if token else write_token(port, secret)
    task = asyncio.create_task(serve_app(listener, generate_front(policy_host, secret), host, secret))
    tell(f"{policy_host.facts['model']} at {url} ({policy_host.generator.describe()})")
    reach = " --generator-key-env TURNWISE_ENDPOINT_TOKEN" if token else ""
    reached = f"http://{socket.gethostname()}:{port}" if host in EVERY_ADDRESS else url
    tell(f"train with it: {command} --generator {reached}{reach}")
    if not token:
        where = (
            f"is in {file}, where runs of this user find it" if file else f"is {secret}; its file could not be written"
        )
        tell(f"its token {where}; other clients send it: Authorization: Bearer TOKEN")
    tell("Ctrl-C stops the server")
    try:
        await asyncio.wait([task, asyncio.ensure_future(stopped.wait())], return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return {"url": url, "answered": policy_host.answered, "weights": policy_host.label}


def main(descriptor: int, file: str) -> None:
    """The program of the generator process: a server whose calls come as frames of a worker. ``file`` holds what
    ``start_generator`` wrote."""
    import torch

    from turnwise.engines.adapters import adapted_weights
    from turnwise.engines.remote.generator_process import ReceivedWeights

    received, refusal = ReceivedWeights(), ""
    try:
        spec, model, tokenizer = torch.load(file, weights_only=False)
        limits = HostLimits(spec.slots, spec.context, spec.stop_ids, spec.deterministic, spec.threads)
        facts = {"model": "local", "vocabulary": int(model.config.get_text_config().vocab_size)}
        facts["weights"] = {name: list(p.shape) for name, p in model.named_parameters()}
        host = PolicyHost(lambda _: spec.make(model, tokenizer), received, facts, limits, adapted_weights)
        host.labels = {0: "0"}  # the weights that it starts with are the run's
        api = GenerateApi(host)
    except Exception as fault:
        refusal = str(fault) if isinstance(fault, TurnwiseError) else f"{type(fault).__name__}: {fault}"

    async def answer(payload: bytes) -> bytes:
        method, path, body = pickle.loads(payload)
        if refusal:
            return pickle.dumps((400, error_body("refused", refusal)))
        reply = await api.answer(method, path, body)
        if path == "/finish_weight_update":
            await asyncio.to_thread(received.finish)
        return pickle.dumps(reply, protocol=5)

    serve_concurrently(Connection(descriptor), answer)


def until_stopped() -> asyncio.Event:
    """Set by Ctrl-C, or when the process is asked to end."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(number, stopped.set)
    allow_many_files()
    return stopped


# ------------------------------------------------------------- a policy for agents


@dataclass
class PolicyServer:
    """Makes the episodes of sessions. ``seconds``: how long one may stay open. ``file``: where finished ones are written."""

    generator: Generator
    renderer: Renderer
    sampling: Sampling
    limits: EpisodeLimits
    seed: int
    file: Path
    finished: list[EpisodeFacts] = field(default_factory=list)
    _numbers: Any = field(default_factory=count)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def sessions(self, token: str) -> Sessions:
        return Sessions(token, self._open, self._single)

    def _episode(self, number: int) -> AgentEpisode:
        session = self.generator.open(stable_seed(self.seed, "endpoint", number))
        session.park()
        task = Task("endpoint", number)
        return AgentEpisode(f"endpoint.{number}", task, session, self.renderer, self.sampling, self.limits)

    def _single(self, sessions: Sessions) -> OpenEpisode:
        return sessions.open(self._episode(next(self._numbers)))

    def _open(self, sessions: Sessions, body: Mapping[str, Any]) -> OpenEpisode:
        if len(sessions) >= MAX_SESSIONS:
            raise SettingError(f"{len(sessions)} sessions are open")
        opened = sessions.open(self._episode(next(self._numbers)), awaits_reward=True)
        task = asyncio.ensure_future(self._play(sessions, opened, body.get("name")))
        self._tasks.add(task)  # the event loop alone would let go of it
        task.add_done_callback(self._tasks.discard)
        return opened

    async def _play(self, sessions: Sessions, opened: OpenEpisode, name: Any) -> None:
        async def agent(episode: AgentEpisode) -> AgentOutcome:
            assert opened.outcome is not None
            return await within(episode.limits.seconds, opened.outcome)

        try:
            self._keep(await opened.episode.run(agent), name)
        finally:
            sessions.close(opened.key)

    def _keep(self, t: Trajectory, name: Any) -> None:
        """Write a finished session as a row."""
        self.finished.append(EpisodeFacts(t.status, t.reason, t.sampled, False, t.facts))
        row = {"session": t.id, "name": name, "messages": t.messages, "reward": t.reward, "rewards": dict(t.rewards)}
        row |= {"success": t.success, "status": t.status, "reason": t.reason}
        row |= {"calls": len(t.turns), "tokens": t.sampled}
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({**row, "facts": dict(t.facts)}, default=str) + "\n")


def serve_run(
    run: str,
    address: str,
    token: str,
    seconds: float,
    tell: Callable[[str], None],
    ready: Callable[[Endpoint], None] | None = None,
) -> dict[str, Any]:
    """Serve the policy of ``run`` until interrupted; returns what happened. ``ready`` is called when the endpoint is up."""
    host, port = read_address(address)
    listen_on(host, 0, token).close()  # refuses an address that cannot be used, before the model is loaded
    settings, folder = select_policy(run, {})
    from turnwise.training import build, engines  # late: import torch

    assert folder is not None
    # its agent and environment are not needed
    tokenizer = build.load_tokenizer(settings, EnvSpec(settings, object), folder)
    renderer = build.make_renderer(settings, tokenizer)
    model = build.load_model(settings, len(tokenizer), folder)
    cache = engines.sampling_cache(settings, model)
    generator = engines.make_local_generator(settings, model, renderer, deterministic=False, cache=cache)
    sampling = build.sampling_settings(settings, settings.eval_temperature)
    limits = EpisodeLimits(context=settings.context, calls=CALLS, seconds=seconds)
    server = PolicyServer(generator, renderer, sampling, limits, settings.seed, Path(run) / FILE)

    async def serve() -> None:
        loop, stopped = asyncio.get_running_loop(), until_stopped()
        async with serving(server.sessions(token), host, port, token) as endpoint:
            key = endpoint.announce_key(token)
            tell(f"OPENAI_BASE_URL={endpoint.url}/v1   ANTHROPIC_BASE_URL={endpoint.url}   {key}")
            post = f"POST {endpoint.url}/sessions, then POST a reward"
            tell(f"sessions: {post}; finished ones are written to {server.file}")
            tell("Ctrl-C stops the endpoint")
            if ready is not None:
                ready(replace(endpoint, stop=lambda: loop.call_soon_threadsafe(stopped.set)))
            await stopped.wait()

    asyncio.run(serve())
    facts = {"run": run, "file": str(server.file), "sessions": len(server.finished)}
    return {**facts, "exactness": certificate(server.finished)}
