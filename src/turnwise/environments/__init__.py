"""Environments by name: the built-in ones, classes of the user, and families of other packages.

    make("keydoor", difficulty=2)               a new episode, not yet reset
    load("my_package.my_module:MyEnvironment")  a class of your own
    load("reasoning_gym:chain_sum")             one of a family that another package provides

Built-in classes are imported on first use, so that an environment needs only its own dependencies.
Does not know what makes an environment valid: ``environments.checker`` does.
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
}  # a module whose ``environment(member)`` returns the class


def load(name: str) -> type[Any]:
    """The class of a built-in name, of ``"family:member"`` or of ``"module:Class"``."""
    family, _, member = name.partition(":")
    if family in FAMILIES:
        family_class: type[Any] = importlib.import_module(FAMILIES[family]).environment(member)
        return family_class
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
    cls = vars(module).get(class_name)
    if not isinstance(cls, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        hint = nearest(class_name, classes)
        raise SettingError(f"environment {name!r}: {module_name} has no class {class_name!r}; {hint}")
    return cls


def make(name: str, difficulty: int = 1, split: str = "train") -> Any:
    """A new episode of ``load(name)``. A class whose constructor takes no difficulty or split has only the default one."""
    cls = load(name)
    arguments: dict[str, Any] = {"difficulty": difficulty, "split": split}
    accepted = settings(cls)
    for key, only in (("difficulty", 1), ("split", "train")):
        if key not in accepted and arguments.pop(key) != only:
            raise SettingError(f"environment {name!r} has only {key} {only!r}: its __init__ takes no keyword {key!r}")
    return cls(**arguments)


def settings(cls: type[Any]) -> frozenset[str]:
    """Which of ``difficulty`` and ``split`` the constructor of a class accepts; cached, because every episode asks."""
    return _settings(cls)  # type: ignore[arg-type]  # a class is hashable


@cache
def _settings(cls: type[Any]) -> frozenset[str]:
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class written in C
        return frozenset()
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return frozenset(key for key in ("difficulty", "split") if accepts_any or key in parameters)
