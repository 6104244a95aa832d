"""Where the actors of a run are: looked up by name, because the cluster starts, restarts and removes them; and those that play
episodes as the learner uses them, by the same joint as the processes of ``--isolate-env``.

An actor plays any number of episodes and takes ``CALLS`` calls at once; more wait in the learner, and their limits begin when
they are sent. An actor that does not answer within the limit is killed, and Ray starts it again. Episodes of an actor that died
go on in another one. Knows Ray and requests; no environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import ray
from ray.exceptions import ActorDiedError, RayError

from turnwise.engines.remote.http import ServerAddress
from turnwise.environments.isolated import HostLost, plain
from turnwise.errors import EnvironmentFault
from turnwise.training.cluster import ENVIRONMENT, GENERATOR, LEARNER, NAMESPACE, number_of

LOOK_SECONDS = 0.5  # between two looks for generators
ANSWER_SECONDS = 2.0  # in which an actor that is not being restarted says where it is
CALLS = 8  # of an environment actor at once
ADDED_SECONDS = 5.0  # between two looks for environment actors that were added
WAIT_SECONDS = 0.2  # between two looks where none answers
PATIENCE = 240.0  # seconds in which the cluster must start one


def find_actors(kind: str, key: str) -> dict[int, Any]:
    """The actors of a run that live or are being restarted, by number."""
    rows: Any = ray.util.list_named_actors(all_namespaces=True)
    names = [row["name"] for row in rows if row["namespace"] == NAMESPACE]
    numbers = {name: number for name in names if (number := number_of(name, kind, key)) is not None}
    actors: dict[int, Any] = {}
    for name, number in sorted(numbers.items(), key=lambda item: item[1]):
        with contextlib.suppress(ValueError):  # it ended meanwhile
            actors[number] = ray.get_actor(name, namespace=NAMESPACE)
    return actors


class GeneratorDirectory:
    """Addresses of the generator actors of a run. A thread asks them, so that nobody waits for one that is being restarted."""

    def __init__(self, key: str) -> None:
        self.key, self._addresses = key, list[ServerAddress]()
        self._looked = threading.Event()
        threading.Thread(target=self._look, daemon=True, name="turnwise-directory").start()

    @classmethod
    def of_this_actor(cls) -> GeneratorDirectory:
        """That of the run whose learner this process is."""
        name = ray.get_runtime_context().get_actor_name()
        assert name is not None, "the learner of a cluster is an actor"
        return cls(name.partition("@")[2])

    def addresses(self) -> list[ServerAddress]:
        self._looked.wait(10 * ANSWER_SECONDS)
        return list(self._addresses)

    def _look(self) -> None:
        while True:
            addresses: list[ServerAddress] = []
            with contextlib.suppress(Exception):  # the cluster is busy with its own repair
                questions = [actor.address.remote() for actor in find_actors(GENERATOR, self.key).values()]
                # ray refuses to wait for nothing
                answered = (
                    ray.wait(questions, num_returns=len(questions), timeout=ANSWER_SECONDS)[0] if questions else []
                )
                for reply in sorted(answered, key=questions.index):
                    with contextlib.suppress(RayError):  # it died, and is restarted or not
                        addresses.append(ServerAddress(*ray.get(reply)))
            self._addresses = addresses
            self._looked.set()
            time.sleep(LOOK_SECONDS)


# -------------------------------------------------------------- actors that play


class ActorHost:
    """One actor, as its learner sees it."""

    def __init__(self, number: int, actor: Any) -> None:
        self.number, self.actor = number, actor
        self.episodes, self.ended = 0, "it was not started yet"
        self._answer = actor.process.remote()  # resolves when it is up
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def turn(self) -> asyncio.Semaphore:
        """Entered when the actor takes another call."""
        return self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(CALLS))

    async def request(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a call. Raises ``HostLost`` where the actor dies first."""
        if self.ended:
            raise HostLost(self.ended)
        try:
            line = await asyncio.wrap_future(self.actor.answer.remote(json.dumps(request, default=plain)).future())
        except asyncio.CancelledError:  # the limit has passed, or the run stops
            self.lose(f"{request['method']} neither answered nor could be interrupted, so its process was killed")
            ray.kill(self.actor, no_restart=False)
            raise
        except RayError as fault:
            killed, cause = bool(self.ended), " ".join(str(fault).split())[:160]
            self.lose(f"the process of the environment actor {self.number} died during {request['method']} ({cause})")
            raise HostLost(self.ended, suspect=not killed) from None
        reply: dict[str, Any] = json.loads(line)
        if "lost" in reply:
            raise HostLost(f"environment actor {self.number}: {reply['lost']}")
        return reply

    def lose(self, reason: str) -> None:
        """Use the actor no longer, until it answers again."""
        if not self.ended:
            self.ended, self._answer = reason, self.actor.process.remote()

    def look(self) -> bool:
        """Whether the actor can be used. Raises ``ActorDiedError`` where it is not started again."""
        if not self.ended:
            return True
        answered, _ = ray.wait([self._answer], timeout=0)
        if answered:
            try:
                ray.get(self._answer)
                self.ended = ""
            except ActorDiedError:
                raise
            except RayError:  # it is being started again
                self._answer = self.actor.process.remote()
        return not self.ended


class ActorPool:
    """The environment actors of a run. Each episode goes to the one with the fewest."""

    moves = 5  # of an episode: others share its actor and may be to blame

    def __init__(self, key: str) -> None:
        self.key, self.hosts = key, dict[int, ActorHost]()
        self._looked = 0.0

    async def place(self, name: str, alone: bool) -> ActorHost:
        """An actor that answers; waits for one. A place ``alone`` is the one with the fewest other episodes."""
        until = time.monotonic() + PATIENCE
        while True:
            self._find()
            if usable := [host for host in self.hosts.values() if self._usable(host)]:
                host = min(usable, key=lambda host: (host.episodes, host.number))
                host.episodes += 1
                return host
            if time.monotonic() > until:
                reasons = "; ".join(host.ended for host in self.hosts.values()) or "there is none"
                raise EnvironmentFault(f"no environment actor answered within {PATIENCE:g} s ({reasons})")
            await asyncio.sleep(WAIT_SECONDS)

    def leave(self, host: ActorHost) -> None:
        host.episodes -= 1

    def _usable(self, host: ActorHost) -> bool:
        try:
            return host.look()
        except ActorDiedError as death:
            host.ended = f"environment actor {host.number} is not started again: {' '.join(str(death).split())[:160]}"
            return False

    def _find(self) -> None:
        """Take actors that are new; leave those that were removed."""
        if self.hosts and time.monotonic() - self._looked < ADDED_SECONDS:
            return
        self._looked = time.monotonic()
        actors = find_actors(ENVIRONMENT, self.key)
        for number in [number for number in self.hosts if number not in actors]:
            self.hosts.pop(number).lose("it was removed")
        for number, actor in actors.items():
            if number not in self.hosts:
                self.hosts[number] = ActorHost(number, actor)


def pool_of_learner() -> ActorPool | None:
    """The pool of the run whose learner this process is; None in any other process."""
    name = (ray.get_runtime_context().get_actor_name() or "") if ray.is_initialized() else ""
    return _pool(name.partition("@")[2]) if name.startswith(f"{LEARNER}-") else None


@lru_cache
def _pool(key: str) -> ActorPool:
    for actor in find_actors(ENVIRONMENT, key).values():
        actor.forget.remote()  # episodes of a learner that died
    return ActorPool(key)
