"""Environments by name: the built-in ones, classes of the user, and families of other packages.

    make("keydoor", difficulty=2)               a new episode, not yet reset
    load("my_package.my_module:MyEnvironment")  a class of your own; also load("folder/file.py:MyEnvironment")
    load("shop:Shop,db=orders.sqlite,size=3")   the same with arguments of its constructor
    load("reasoning_gym:chain_sum")             one of a family that another package provides

Built-in classes are imported on first use, so that an environment needs only its own dependencies.
Does not know what makes an environment valid: ``environments.checker`` does.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from turnwise.config.named_object import (
    GIVEN_OBJECT,
    call_arguments,
    importable_name,
    join_arguments,
    load_object,
    signature_of,
    split_arguments,
)
from turnwise.errors import SettingError, nearest

BUILT_IN = {
    "calculator": "turnwise.environments.builtin.calculator:Calculator",
    "countdown": "turnwise.environments.builtin.countdown:Countdown",
    "guess": "turnwise.environments.builtin.guess:Guess",
    "keydoor": "turnwise.environments.builtin.keydoor:KeyDoor",
    "nim": "turnwise.environments.builtin.nim:Nim",
    "lookup": "turnwise.environments.builtin.lookup:Lookup",
    "archive": "turnwise.environments.builtin.archive:Archive",
    "service": "turnwise.environments.builtin.service:CustomerService",
}
FAMILIES = {
    "demonstrated": "turnwise.environments.demonstrated",  # single turns of the dialogues of a file
    "prompts": "turnwise.environments.prompts",  # rows of --data, where --reward scores the answers
    "reasoning_gym": "turnwise.environments.families.reasoning_gym",
    "gymnasium": "turnwise.environments.families.gymnasium",
    "minigrid": "turnwise.environments.families.minigrid",
    "open_spiel": "turnwise.environments.families.open_spiel",
    "textarena": "turnwise.environments.families.textarena",
    "scienceworld": "turnwise.environments.families.scienceworld",
    "textworld": "turnwise.environments.families.textworld",
    "bfcl": "turnwise.environments.families.bfcl",
    "mcp": "turnwise.environments.families.mcp",
    "openenv": "turnwise.environments.families.openenv",
    "miniwob": "turnwise.environments.families.miniwob",
    "verifiers": "turnwise.environments.families.verifiers",
}  # a module whose ``environment(member)`` returns the class

RUN_ARGUMENTS = ("difficulty", "split")  # arguments of a constructor that the run gives


def load(name: str) -> type[Any]:
    """The class of a built-in name, of ``"family:member"``, of ``"module:Class"`` or ``"file.py:Class"``; arguments of its
    constructor may follow, as in ``"module:Class,key=value"``."""
    family, _, member = name.partition(":")
    if family in FAMILIES:
        family_class: type[Any] = importlib.import_module(FAMILIES[family]).environment(member)
        return family_class
    # a word that resembles a family and names no module; the running program, __main__, is one without a spec
    close = difflib.get_close_matches(family, FAMILIES, n=1) if family.isidentifier() and family not in BUILT_IN else []
    if close and family not in sys.modules and not importlib.util.find_spec(family):
        raise SettingError(f"there is no family {family!r} of environments; did you mean {close[0]}:{member}?")
    class_name, arguments = split_arguments(name)
    if class_name.startswith(GIVEN_OBJECT):
        raise SettingError(
            f"the environment {class_name.removeprefix(GIVEN_OBJECT)} was given to train() as an object, which no name refers "
            "to; give it again in Python: resume(run, env=...), or move the class into a module"
        )
    spec = BUILT_IN.get(class_name, class_name)
    if ":" not in spec:
        raise SettingError(f"no environment is called {name!r}; {nearest(class_name, BUILT_IN)}; or write module:Class")
    cls = load_object(spec, f"environment {name!r}", lambda value: isinstance(value, type), "class")
    return require_arguments(bind(cls, arguments, class_name) if arguments else cls, name)


def require_arguments(cls: type[Any], name: str) -> type[Any]:
    """The class; refuses one whose constructor still needs an argument that the run does not give."""
    for key, parameter in signature_of(cls).items():
        named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if named and parameter.default is parameter.empty and key not in RUN_ARGUMENTS:
            raise SettingError(
                f"{name} needs the argument {key!r}; write {name},{key}=VALUE, or in Python functools.partial(Class, {key}=...)"
            )
    return cls


def bind(cls: type[Any], arguments: Mapping[str, Any], name: str = "") -> type[Any]:
    """A subclass whose constructor has these arguments filled in. Text is converted by the constructor's signature."""
    values = call_arguments(cls, arguments, name or cls.__name__, RUN_ARGUMENTS)

    def construct(self: Any, **others: Any) -> None:
        cls.__init__(self, **values, **others)

    bound = type(cls.__name__, (cls,), {"__init__": construct, "__module__": cls.__module__, "__doc__": cls.__doc__})
    with contextlib.suppress(TypeError, ValueError):  # a class written in C has no signature
        signature = inspect.signature(cls)
        remaining = [p for key, p in signature.parameters.items() if key not in values]
        bound.__signature__ = signature.replace(parameters=remaining)  # type: ignore[attr-defined]
    return bound


def name_of(env: Any) -> tuple[str, type[Any]]:
    """The name to record for a class or ``functools.partial`` of one that the user gave, and the class to play.

    Where another process could not build the same class from a name, the name only says so (``object:Shop``)."""
    partial = isinstance(env, functools.partial)
    cls = env.func if partial else env
    if not isinstance(cls, type):
        raise SettingError(f"env is {env!r}; write a name, a class, or functools.partial(Class, key=value)")
    arguments = {**dict(zip(inspect.signature(cls).parameters, env.args)), **env.keywords} if partial else {}
    name = importable_name(cls)
    spec = join_arguments(name, arguments) if name else ""
    bound = require_arguments(bind(cls, arguments) if arguments else cls, cls.__name__)
    return spec or f"{GIVEN_OBJECT}{cls.__name__}", bound


def make(name: str, difficulty: int = 1, split: str = "train") -> Any:
    """A new episode of ``load(name)``. A class whose constructor takes no difficulty or split has only the default one."""
    cls = load(name)
    arguments: dict[str, Any] = {"difficulty": difficulty, "split": split}
    accepted = settings(cls)
    for key, only in (("difficulty", 1), ("split", "train")):
        if key not in accepted and arguments.pop(key) != only:
            raise SettingError(f"environment {name!r} has only {key} {only!r}: its __init__ takes no keyword {key!r}")
    return cls(**arguments)


@cache  # every episode asks
def settings(cls: type[Any]) -> frozenset[str]:
    """Which of ``difficulty`` and ``split`` the constructor of a class accepts."""
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class written in C
        return frozenset()
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return frozenset(key for key in RUN_ARGUMENTS if accepts_any or key in parameters)
