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
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import LimitedEpisode, listed_task, text_action, user_message
from turnwise.environments.families.adapter import import_package, member_class, require_offered, split_options
from turnwise.errors import SettingError

TURNS = 60
IDLE: list[Any] = []  # simulators that no episode uses, each a Java process; append and pop are atomic
ASIDES = ("look around", "inventory", "task", "wait1")  # what a demonstrator does beside the gold path


@atexit.register
def close_idle() -> None:
    """End the idle simulators, while the interpreter still can."""
    while IDLE:
        IDLE.pop().close()


def take_simulator() -> Any:
    """An idle simulator, or a new one."""
    try:
        return IDLE.pop()
    except IndexError:
        # our own limit of turns ends an episode, not the simulator's
        return import_package("scienceworld", "scienceworld").ScienceWorldEnv("", envStepLimit=10 * TURNS)


class ScienceWorldEnvironment(LimitedEpisode):
    """One variation of one task. ``environment`` makes a subclass for each task."""

    max_turns = TURNS
    deterministic = True
    oracle_share = 0.8  # demonstrations are the gold path with an aside in one of five turns
    suggests: ClassVar[Mapping[str, Any]] = {"context": 2048, "max_tokens": 24, "history": 4}
    task: ClassVar[str]
    simplification: ClassVar[str]
    variations: ClassVar[Mapping[str, Sequence[int]]]  # by split
    simulator: Any = None
    path: list[str]  # what is left of the gold path

    def begin(self, seed: int) -> Sequence[Message]:
        self.simulator, variation = take_simulator(), listed_task(self.variations, self.split, seed)
        self.simulator.load(self.task, variation, self.simplification, generateGoldPath=True)
        observation, info = self.simulator.reset()
        self.score, self.path = 0.0, list(self.simulator.get_gold_action_sequence())
        return [user_message(f"{info['taskDesc'].strip()}\n{observation.strip()}")]

    def act(self, action: Action) -> Step:
        text = " ".join(action.text.split())[:200]
        observation, _, over, info = self.simulator.step(text or "look around")
        if self.path and text == self.path[0]:
            self.path.pop(0)
        before, self.score = self.score, max(0, int(info["score"])) / 100
        facts = {"success": self.succeeded()} if over else {}
        return Step([user_message(observation.strip())], self.score - before, bool(over), info=facts)

    def succeeded(self) -> bool:
        return self.score >= 1

    def close(self) -> None:
        if self.simulator is not None:
            IDLE.append(self.simulator)
            self.simulator = None

    # ---- scripted policies
    def oracle(self) -> Action:
        return text_action(self.path[0] if self.path else "look around")

    def random_action(self, rng: random.Random) -> Action:
        return text_action(rng.choice(ASIDES))


@cache
def environment(spec: str) -> type[ScienceWorldEnvironment]:
    """The class of a task's name; ``simplification`` as in the package ("easy", or a list of its names)."""
    name, options = split_options("scienceworld", spec, ["simplification"])
    simplification = str(options.get("simplification", "easy"))
    if shutil.which("java") is None:
        raise SettingError("scienceworld:... needs Java (a program `java`); install a Java runtime, version 8 or later")
    simulator = take_simulator()
    try:
        require_offered(name, list(simulator.get_task_names()), "ScienceWorld has no task")
        simulator.load(name, 0, simplification, generateGoldPath=False)
        variations = {"train": simulator.get_variations_train(), "held_out": simulator.get_variations_test()}
    finally:
        IDLE.append(simulator)
    about, task = f"{name} of ScienceWorld.", {"task": name, "simplification": simplification, "variations": variations}
    return member_class("scienceworld", spec, ScienceWorldEnvironment, about, **task)
