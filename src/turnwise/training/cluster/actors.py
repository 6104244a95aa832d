"""The actors of a run: one that learns, some that sample, some that play environments. Ray restarts them when they die.

A generator actor is the server of ``turnwise serve`` on a free port. The learner is the ordinary run: a restarted one continues
the run directory from its last checkpoint, with or without a driver that watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import socket
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from turnwise import environments
from turnwise.config.named_object import import_from_current_folder
from turnwise.config.settings import Settings
from turnwise.environments.isolated import EpisodeWorker
from turnwise.errors import RankFault, TurnwiseError
from turnwise.serve.policy_host import PolicyHost
from turnwise.serve.server import LOOPBACK, listen_on, serve_app, url_of
from turnwise.store.atomic import write_json
from turnwise.store.rundir import RunDir
from turnwise.training.cluster import ENVIRONMENT, GENERATOR
from turnwise.training.cluster.directory import find_actors
from turnwise.training.interrupt import RunStopped, StopSignals
from turnwise.workers.tokens import new_token

NEWS_SECONDS = 0.5  # for which a question for news waits for some
KEPT_EVENTS = 1000  # for a driver that attaches later
TOLD_SECONDS = 5.0  # in which a driver may fetch why the learner starts again
RANK_DEATH = "rank_death.json"
UNWATCHED_SECONDS = 30.0  # after its end, in which a driver may fetch the outcome


def enter(folder: str) -> None:
    """Work in the folder of the command, where relative paths and modules of the user are."""
    with contextlib.suppress(OSError):  # a machine that does not have it
        os.chdir(folder)
    import_from_current_folder()


class GeneratorActor:
    """Serves the model of a run. ``learner_node``: where loopback reaches the server."""

    def __init__(self, folder: str, path: str, settings: Mapping[str, Any], learner_node: str) -> None:
        enter(folder)
        from turnwise.training.serve import make_policy_host

        here = ray.get_runtime_context().get_node_id() == learner_node
        made = Settings.of(settings)
        initial = Path(path) / "initial"  # the model the run began with, once the learner has made it
        policy_host = make_policy_host(made, initial if initial.is_dir() else None, str(made.model), own_context=True)
        self._token = new_token()
        listener = listen_on(LOOPBACK if here else ray.util.get_node_ip_address(), 0, self._token)
        self._url = url_of(listener)
        threading.Thread(target=self._serve, args=(listener, policy_host), daemon=True).start()

    def _serve(self, listener: socket.socket, policy_host: PolicyHost) -> None:
        from turnwise.serve.app import generate_front

        try:
            asyncio.run(serve_app(listener, generate_front(policy_host, self._token), LOOPBACK, self._token))
        finally:
            os._exit(1)  # an actor without its server is of no use: Ray starts another

    def address(self) -> tuple[str, str]:
        """The URL of the server, and its token."""
        return self._url, self._token

    def process(self) -> int:
        return os.getpid()


class EnvironmentActor:
    """Plays episodes of the environment that ``name`` means: requests and replies are those of a worker process."""

    def __init__(self, folder: str, name: str) -> None:
        enter(folder)
        with contextlib.suppress(Exception):  # the first episode reports a fault
            environments.load(name)  # now, because an import may take long and would count for a call
        self.worker = EpisodeWorker()

    async def answer(self, request: str) -> str:
        return await self.worker.answer(request)

    async def forget(self) -> None:
        """Drop all episodes: the learner that played them is gone."""
        self.worker = EpisodeWorker()

    async def process(self) -> int:
        return os.getpid()


@dataclass(frozen=True)
class LearnerNews:
    """What happened since the driver last asked. ``life`` changes when the learner is restarted."""

    life: str
    events: Sequence[tuple[str, Mapping[str, Any]]]
    happened: int  # events of this life so far
    ended: bool = False
    summary: Mapping[str, Any] | None = None
    fault: bytes = b""  # the pickled error that ended the run


class LearnerActor:
    """Runs ``learn(path, notes, listen, stop)`` in a thread, from the moment it is started or restarted."""

    def __init__(self, folder: str, path: str, notes: Sequence[str], learn: Callable[..., dict[str, Any]]) -> None:
        enter(folder)
        self.life, self._events, self._happened = uuid.uuid4().hex, deque[Any](maxlen=KEPT_EVENTS), 0
        self._summary: Mapping[str, Any] | None = None
        self._fault, self._ended, self._asked = b"", False, time.monotonic()
        self._changed, self._stop = threading.Condition(), StopSignals()
        again = ray.get_runtime_context().was_current_actor_reconstructed
        self._path, self._fetched = Path(path), 0
        self._work = lambda: learn(self._path, () if again else tuple(notes), self._listen, self._stop)
        threading.Thread(target=self._run, daemon=True, name="turnwise-learner").start()

    def _listen(self, event: str, facts: Mapping[str, Any]) -> None:
        with self._changed:
            self._events.append((event, dict(facts)))
            self._happened += 1
            self._changed.notify_all()

    def _learn(self) -> Mapping[str, Any]:
        """The summary of the run. A rank that dies ends this process, because torch cannot form its ranks anew in it: Ray starts
        it again, and the run continues from its checkpoint. A second death before the next checkpoint ends the run."""
        try:
            return self._stop.run_in_thread(self._work)
        except RankFault as fault:
            saved = RunDir(self._path).step
            if saved <= _step_of_death(self._path):
                raise
            write_json(self._path / RANK_DEATH, {"step": saved})
            text = f"{str(fault).partition(';')[0]}; the learner starts again from the checkpoint of step {saved}"
            self._listen("message", {"text": text, "level": "warning"})
            with self._changed:
                self._changed.wait_for(lambda: self._fetched >= self._happened, TOLD_SECONDS)
            time.sleep(NEWS_SECONDS)  # for the reply to leave
            os._exit(1)

    def _run(self) -> None:
        try:
            self._summary = self._learn()
        except BaseException as fault:
            self._fault = _pickled(fault)
        with self._changed:
            self._ended, self._asked = True, time.monotonic()
            self._changed.notify_all()
        while time.monotonic() - self._asked < UNWATCHED_SECONDS:
            time.sleep(1.0)
        name = ray.get_runtime_context().get_actor_name() or ""
        remove_helpers(name.partition("@")[2])  # no driver is left to do it
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def news(self, life: str, heard: int) -> LearnerNews:
        """The events after the first ``heard`` ones of this life, as far as they are kept."""
        with self._changed:
            heard = heard if life == self.life else 0
            if self._happened <= heard and not self._ended:
                self._changed.wait(NEWS_SECONDS)
            self._asked, self._fetched = time.monotonic(), self._happened
            self._changed.notify_all()
            new = list(self._events)[max(0, len(self._events) - (self._happened - heard)) :]
            return LearnerNews(self.life, new, self._happened, self._ended, self._summary, self._fault)

    def stop(self, number: int) -> None:
        """As if the signal of this number had come: stop after the current step, with a checkpoint."""
        self._stop.request(number)

    def process(self) -> int:
        return os.getpid()


def _step_of_death(path: Path) -> int:
    """The checkpoint from which the run was continued when a rank had died; -1: none has."""
    try:
        return int(json.loads((path / RANK_DEATH).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def _pickled(fault: BaseException) -> bytes:
    """The error for another process, with the text of where it was raised; one that cannot travel as its text."""
    where = "".join(traceback.format_exception(fault))
    fault.__traceback__ = fault.__cause__ = fault.__context__ = None
    if not isinstance(fault, TurnwiseError | RunStopped):
        fault.add_note(where)
    try:
        data = pickle.dumps(fault)
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(fault).__name__}: {fault}\n{where}"))


def remove_helpers(key: str) -> None:
    """End the generators and environments of a run, and give back their places."""
    for kind in (GENERATOR, ENVIRONMENT):
        for actor in find_actors(kind, key).values():
            ray.kill(actor, no_restart=True)
    with contextlib.suppress(ValueError):  # there is none
        ray.util.remove_placement_group(ray.util.get_placement_group(key))
