"""A model behind HTTP for trainers: what ``turnwise serve`` calls. Trains nothing; the trainer sends the weights.

The generator is the one that a run has in its own process. Knows settings, models and the server; no loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shlex
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.config.named_object import GIVEN_OBJECT
from turnwise.config.settings import Settings
from turnwise.config.values import ModelName
from turnwise.environments import prompts
from turnwise.errors import SettingError, TurnwiseError
from turnwise.serve.policy_host import HostLimits, PolicyHost
from turnwise.serve.server import listen_on, read_address, require_packages, serve_app, url_of
from turnwise.store.rundir import RunDir
from turnwise.training.env_spec import EnvSpec, resolve_settings
from turnwise.training.refusals import check_device, check_model_name
from turnwise.training.remote_generators import COMPARED, OF_TINY, vocabulary_digest
from turnwise.workers.sockets import allow_many_files

SHARED = ("env", "difficulty", "max_turns", "context", "template", "tool_syntax")  # with the runs it samples for
EVERY_ADDRESS = ("0.0.0.0", "::")
CONTEXT = 4096  # ids of a dialogue that a server offers where the user names no limit; fewer if the model reads fewer


def serve_model(
    model: str, address: str, token: str, values: Mapping[str, Any], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Serve ``model`` (a folder, a Hub id, a run directory or ``tiny``) until interrupted; returns what happened. ``values`` are
    settings of a run."""
    require_packages()
    host, port = read_address(address)
    listen_on(host, port, token).close()  # refuses an address that cannot be used, before the model is loaded
    settings, folder = _select(model, values)
    check_device(settings.device)
    if folder is None:
        check_model_name(settings.model)
    policy_host = make_policy_host(settings, folder, model, "context" in values)
    return asyncio.run(_serve(policy_host, train_command(settings, folder), host, port, token, tell))


def _select(model: str, values: Mapping[str, Any]) -> tuple[Settings, Path | None]:
    """The settings, and the folder of the model where it belongs to a run."""
    named = ModelName.parse(model)
    if not (Path(named.name) / "run.json").is_file():
        return resolve_settings({**values, "model": named}), None
    run = RunDir.open(named.name)
    folder = next((path for path in (run.model, run.path / "initial") if path.is_dir()), None)
    if folder is None:
        raise SettingError(
            f"the run {named.name} has no model yet; serve the model it begins with, or tiny --env ENVIRONMENT"
        )
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
    words = [word for name, value in differing.items() for word in (f"--{name.replace('_', '-')}", _flag_value(value))]
    return shlex.join(["turnwise", "train", "--model", str(model), *words])


def _flag_value(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def make_policy_host(settings: Settings, folder: Path | None, name: str, own_context: bool) -> PolicyHost:
    """The host of the model's generator. ``own_context``: the user named the longest dialogue."""
    import torch

    from turnwise.engines.adapters import adapted_weights
    from turnwise.engines.remote.weight_files import read_weights
    from turnwise.training import build, engines, memory

    s = settings
    env_spec = EnvSpec.from_settings(s) if s.model.tiny and folder is None else EnvSpec(s, object)
    tokenizer = build.load_tokenizer(s, env_spec, folder)
    model = build.load_model(s, len(tokenizer), folder)
    renderer = build.make_renderer(s, tokenizer)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or CONTEXT
    context = min(s.context if own_context else CONTEXT, int(positions))
    threads = engines.select_threads(s)
    most = HostLimits(s.slots, context, tuple(renderer.stop_ids), True, threads)

    cache = memory.sampling_cache(s, model)

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


async def _serve(
    policy_host: PolicyHost, command: str, host: str, port: int, token: str, tell: Callable[[str], None]
) -> dict[str, Any]:
    from turnwise.serve.generate_app import make_generate_app

    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(number, stopped.set)
    allow_many_files()
    listener = listen_on(host, port, token)
    url = url_of(listener)
    task = asyncio.create_task(serve_app(listener, make_generate_app(policy_host, token)))
    tell(f"{policy_host.facts['model']} at {url} ({policy_host.generator.describe()})")
    reach = " --generator-key-env TURNWISE_ENDPOINT_TOKEN" if token else ""
    port = listener.getsockname()[1]
    reached = f"http://{socket.gethostname()}:{port}" if host in EVERY_ADDRESS else url
    tell(f"train with it: {command} --generator {reached}{reach}")
    tell("Ctrl-C stops the server")
    try:
        await asyncio.wait([task, asyncio.ensure_future(stopped.wait())], return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return {"url": url, "answered": policy_host.answered, "weights": policy_host.label}
