"""The environments: what an agent can be trained in, by name.

    make("keydoor", difficulty=2)               a fresh episode, not yet reset
    load("my_package.my_module:MyEnvironment")  a class of your own
    load("reasoning_gym:chain_sum")             one of a family that another package brings

Built-in classes are imported when first asked for, so that one environment's dependencies are not another's.
This file does not know what an environment needs to be good: ``environments.check`` does.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from typing import Any

from turnwise.errors import SettingError, nearest

BUILT_IN = {
    "calculator": "turnwise.environments.builtin.calculator:Calculator",
    "countdown": "turnwise.environments.builtin.countdown:Countdown",
    "guess": "turnwise.environments.builtin.guess:Guess",
    "keydoor": "turnwise.environments.builtin.keydoor:KeyDoor",
    "nim": "turnwise.environments.builtin.nim:Nim",
    "lookup": "turnwise.environments.builtin.lookup:Lookup",
}
FAMILIES = {
    "reasoning_gym": "turnwise.environments.families.reasoning_gym"
}  # a module whose ``environment(member)`` makes the class


def load(name: str) -> type[Any]:
    """The class of a built-in name, of ``"family:member"`` or of ``"module:Class"``."""
    family, _, member = name.partition(":")
    if family in FAMILIES:
        made: type[Any] = importlib.import_module(FAMILIES[family]).environment(member)
        return made
    spec = BUILT_IN.get(name, name)
    module_name, colon, class_name = spec.partition(":")
    if not colon:
        raise SettingError(f"no environment is called {name!r}; {nearest(name, BUILT_IN)}; or write module:Class")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        raise SettingError(f"environment {name!r}: no module {missing.name!r}; is it on the path?") from missing
    except ImportError as broken:
        raise SettingError(f"environment {name!r}: {module_name} cannot be imported: {broken}") from broken
    except (TypeError, ValueError) as odd:
        raise SettingError(f"environment {name!r} cannot be read ({odd}); write module:Class") from odd
    found = vars(module).get(class_name)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        known = nearest(class_name, classes)
        raise SettingError(f"environment {name!r}: {module_name} has no class {class_name!r}; {known}")
    return found


def make(name: str, difficulty: int = 1, split: str = "train") -> Any:
    """A new episode of ``load(name)``. A class that takes no difficulty or split has only the first of each."""
    cls = load(name)
    wanted: dict[str, Any] = {"difficulty": difficulty, "split": split}
    taken = settings(cls)
    for key, only in (("difficulty", 1), ("split", "train")):
        if key not in taken and wanted.pop(key) != only:
            raise SettingError(f"environment {name!r} has only {key} {only!r}: its __init__ takes no keyword {key!r}")
    return cls(**wanted)


def settings(cls: type[Any]) -> frozenset[str]:
    """Which of ``difficulty`` and ``split`` a class can be made with. Asked for every episode, looked up once."""
    return _settings(cls)  # type: ignore[arg-type]  # a class is hashable


@cache
def _settings(cls: type[Any]) -> frozenset[str]:
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class written in C
        return frozenset()
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return frozenset(key for key in ("difficulty", "split") if anything or key in parameters)
