"""Games of TextWorld: a game file, or games made by the package's generator.

    load("textworld:games/kitchen.z8")                          every task is this game
    load("textworld:custom,rooms=2,objects=4,quest=2,games=20") twenty generated games, sixteen of them for training

Generated games are kept in a cache folder, since making one takes seconds. The policy that the package knows to win is the
oracle. The reward of a turn is the rise of the score, in [0, 1] over an episode; an episode succeeds when the game is won.
"""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import SPLITS, LimitedEpisode, listed_task, text_action, user_message
from turnwise.environments.families.adapter import import_package, member_class, split_options
from turnwise.errors import SettingError

CUSTOM = "custom"
OPTIONS = {"rooms": 1, "objects": 3, "quest": 1, "games": 10}
HELD_OUT_SHARE = 5  # one generated game in five
TURNS = 30
ONE_CALL = threading.Lock()  # all games of a process share the package's parser, which holds its state in one object
STATUS_LINE = re.compile(r"\n>\s.*?$", re.DOTALL)  # the prompt of the interpreter and its status line


class TextWorldEnvironment(LimitedEpisode):
    """One game. ``environment`` makes a subclass for each file or generator."""

    max_turns = TURNS
    deterministic = True
    suggests: ClassVar[Mapping[str, Any]] = {"context": 1024, "max_tokens": 16, "history": 3}
    files: ClassVar[Mapping[str, Sequence[Callable[[], Path]]]]  # by split
    game: Any = None

    def begin(self, seed: int) -> Sequence[Message]:
        textworld = import_package("textworld", "textworld")
        file = listed_task(self.files, self.split, seed)
        infos = textworld.EnvInfos(admissible_commands=True, policy_commands=True, won=True, lost=True, max_score=True)
        with ONE_CALL:
            self.game = textworld.start(str(file()), infos)
            self.state = self.game.reset()
        self.score = 0.0
        return [user_message(_readable(self.state.feedback))]

    def act(self, action: Action) -> Step:
        command = " ".join(action.text.split())[:200] or "look"
        with ONE_CALL:
            self.state, score, over = self.game.step(command)
        before, self.score = self.score, score / (self.state.max_score or 1)
        info = {"success": bool(self.state.won)} if over else {}
        return Step([user_message(_readable(self.state.feedback))], self.score - before, bool(over), info=info)

    def close(self) -> None:
        if self.game is not None:
            with ONE_CALL:
                self.game.close()

    # ---- scripted policies
    def oracle(self) -> Action:
        commands = self.state.policy_commands or self.state.admissible_commands or ["look"]
        return text_action(commands[0])

    def random_action(self, rng: random.Random) -> Action:
        return text_action(rng.choice(self.state.admissible_commands or ["look"]))


def _readable(feedback: str) -> str:
    """The text of a reply without the interpreter's banner and status line."""
    lines = [line.strip() for line in STATUS_LINE.sub("", feedback).splitlines()]
    texts = [line for line in lines if line and not set(line) <= set("$\\/|_ .'`")]
    return "\n".join(line for line in texts if "\\" not in line and "$$" not in line)


def generated(number: int, rooms: int, objects: int, quest: int) -> Path:
    """The file of a generated game, made at its first use."""
    textworld = import_package("textworld", "textworld")
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "turnwise" / "textworld"
    path = folder / f"rooms{rooms}-objects{objects}-quest{quest}-{number}.z8"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        options = textworld.GameOptions()
        options.seeds, options.nb_rooms, options.nb_objects, options.quest_length = number, rooms, objects, quest
        # under a name of this process first: two may make the same game at once
        options.path, options.force_recompile = str(folder / f".{os.getpid()}-{path.name}"), True
        made, _ = textworld.make(options)
        source = Path(made)
        for suffix in (".json", ".ni"):  # the game's own description lies beside it
            if source.with_suffix(suffix).is_file():
                source.with_suffix(suffix).replace(path.with_suffix(suffix))
        # last: whoever finds the game finds its description beside it
        source.replace(path)
    return path


@cache
def environment(spec: str) -> type[TextWorldEnvironment]:
    """The class of a game file, or of ``custom`` with options of the generator."""
    name, options = split_options("textworld", spec, OPTIONS)
    import_package("textworld", "textworld")
    path = Path(name)
    if name == CUSTOM:
        for key, value in options.items():
            if not isinstance(value, int) or value < 1 + (key == "games"):  # one of the games is held out
                least = "2: one of them is held out" if key == "games" else "1"
                raise SettingError(f"textworld:custom: {key} is {value!r}; write a whole number of at least {least}")
        values = {**OPTIONS, **options}
        count = values.pop("games")
        makers: list[Callable[[], Path]] = [partial(generated, number, **values) for number in range(1, count + 1)]
        held_out = max(1, count // HELD_OUT_SHARE)
        files = {"train": makers[held_out:], "held_out": makers[:held_out]}
    elif not path.is_file():
        raise SettingError(f"there is no game file {name}; write textworld:FILE.z8, or textworld:custom for new games")
    elif options:
        raise SettingError(f"textworld:{name} takes no options; only textworld:custom does")
    else:
        files = {split: [lambda: path] for split in SPLITS}
    return member_class("textworld", spec, TextWorldEnvironment, f"TextWorld, {name}.", files=files)
