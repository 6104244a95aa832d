"""Where the actors of a run are: looked up by name, because the cluster starts, restarts and removes them."""

from __future__ import annotations

import threading
from typing import Any

import ray
from ray.exceptions import RayError

from turnwise.engines.remote.http import ServerAddress
from turnwise.training.cluster.names import GENERATOR, NAMESPACE, number_of

LOOK_SECONDS = 0.5  # between two looks
ANSWER_SECONDS = 2.0  # in which an actor that is not being restarted says where it is


def find_actors(kind: str, key: str) -> dict[int, Any]:
    """The actors of a run that live or are being restarted, by number."""
    rows: Any = ray.util.list_named_actors(all_namespaces=True)
    names = [row["name"] for row in rows if row["namespace"] == NAMESPACE]
    numbers = {name: number for name in names if (number := number_of(name, kind, key)) is not None}
    actors: dict[int, Any] = {}
    for name, number in sorted(numbers.items(), key=lambda item: item[1]):
        try:
            actors[number] = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # it ended meanwhile
            continue
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
            try:
                self._addresses = self._ask()
            except Exception:  # the cluster is busy with its own repair
                self._addresses = []
            self._looked.set()
            threading.Event().wait(LOOK_SECONDS)

    def _ask(self) -> list[ServerAddress]:
        questions = [actor.address.remote() for actor in find_actors(GENERATOR, self.key).values()]
        if not questions:
            return []
        answered, _ = ray.wait(questions, num_returns=len(questions), timeout=ANSWER_SECONDS)
        addresses: list[ServerAddress] = []
        for reply in sorted(answered, key=questions.index):
            try:
                addresses.append(ServerAddress(*ray.get(reply)))
            except RayError:  # it died, and is restarted or not
                continue
        return addresses
