"""Tasks of ScienceWorld: a text world of rooms, instruments and substances, with the gold path as oracle.

    load("scienceworld:boil")                 a task by name; its variations are the worlds
    load("scienceworld:find-plant,simplification=easy")

Training and held-out tasks are the package's own training and test variations. The reward of a turn is the rise of the score, in
[0, 1] over an episode; an episode succeeds at a score of 100. Needs Java. A simulator takes seconds to start, so finished
episodes hand theirs to new ones.
"""

from __future__ import annotations

import atexit
import random
import shutil
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, text_action, user_message
from turnwise.environments.families.adapter import import_package, split_options
from turnwise.errors import SettingError, nearest

TURNS = 60
ASIDES = ("look around", "inventory", "task", "wait1")  # what a demonstrator does beside the gold path


class Simulators:
    """Simulators that no episode uses. Each is a Java process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[Any] = []
        atexit.register(self.close)

    def take(self) -> Any:
        with self.lock:
            if self.idle:
                return self.idle.pop()
        return import_package("scienceworld", "scienceworld", "scienceworld").ScienceWorldEnv(
            "", envStepLimit=10 * TURNS
        )

    def give_back(self, simulator: Any) -> None:
        with self.lock:
            self.idle.append(simulator)

    def close(self) -> None:
        """End the idle processes, while the interpreter still can."""
        while self.idle:
            self.idle.pop().close()


SIMULATORS = Simulators()


class ScienceWorldEnvironment(Environment):
    """One variation of one task. ``environment`` makes a subclass for each task."""

    max_turns = TURNS
    suggests: ClassVar[Mapping[str, Any]] = {"context": 2048, "max_tokens": 24, "history": 4}
    task: ClassVar[str]
    simplification: ClassVar[str]
    variations: ClassVar[Mapping[str, Sequence[int]]]  # by split
    simulator: Any = None
    score: float
    done: bool
    path: list[str]  # what is left of the gold path

    def reset(self, seed: int) -> Sequence[Message]:
        self.simulator = SIMULATORS.take()
        variations = self.variations["train" if self.split == "train" else "held_out"]
        self.simulator.load(self.task, variations[seed % len(variations)], self.simplification, generateGoldPath=True)
        observation, info = self.simulator.reset()
        self.score, self.done, self.turns = 0.0, False, 0
        self.path = list(self.simulator.get_gold_action_sequence())
        return [user_message(f"{info['taskDesc'].strip()}\n{observation.strip()}")]

    def step(self, action: Action) -> Step:
        if self.done:
            return Step([user_message("it is over.")], 0.0, terminated=True)
        text = " ".join(action.text.split())[:200]
        observation, _, over, info = self.simulator.step(text or "look around")
        self.turns += 1
        if self.path and text == self.path[0]:
            self.path.pop(0)
        score = max(0, int(info["score"])) / 100
        reward, self.score = score - self.score, score
        self.done = bool(over) or self.turns >= TURNS
        facts = {"success": score >= 1} if self.done else {}
        return Step([user_message(observation.strip())], reward, bool(over), self.done and not over, facts)

    def close(self) -> None:
        if self.simulator is not None:
            SIMULATORS.give_back(self.simulator)
            self.simulator = None

    # ---- scripted policies
    def oracle(self) -> Action:
        return text_action(self.path[0] if self.path else "look around")

    def random_action(self, rng: random.Random) -> Action:
        return text_action(rng.choice(ASIDES))

    def demonstrate(self, rng: random.Random) -> Action:
        """The gold path, with an aside in one of five turns."""
        return self.random_action(rng) if rng.random() < 0.2 else self.oracle()


@cache
def environment(spec: str) -> type[ScienceWorldEnvironment]:
    """The class of a task's name; ``simplification`` as in the package ("easy", or a list of its names)."""
    name, options = split_options("scienceworld", spec)
    simplification = str(options.pop("simplification", "easy"))
    if options:
        raise SettingError(f"scienceworld:{name} has no option {next(iter(options))!r}; write simplification=easy")
    if shutil.which("java") is None:
        raise SettingError("scienceworld:... needs Java (a program `java`); install a Java runtime, version 8 or later")
    simulator = SIMULATORS.take()
    try:
        names = list(simulator.get_task_names())
        if name not in names:
            raise SettingError(f"ScienceWorld has no task {name!r}; {nearest(name, names)}")
        simulator.load(name, 0, simplification, generateGoldPath=False)
        variations = {"train": simulator.get_variations_train(), "held_out": simulator.get_variations_test()}
    finally:
        SIMULATORS.give_back(simulator)
    body = {
        "task": name,
        "simplification": simplification,
        "variations": variations,
        "__doc__": f"{name} of ScienceWorld.",
        "__module__": __name__,
    }
    return type(f"scienceworld:{spec}", (ScienceWorldEnvironment,), body)
