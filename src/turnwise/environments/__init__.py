"""Environments by name: the built-in ones, classes of the user, and families of other packages.

    make("keydoor", difficulty=2)               a new episode, not yet reset
    load("my_package.my_module:MyEnvironment")  a class of your own; also load("folder/file.py:MyEnvironment")
    load("shop:Shop,db=orders.sqlite,size=3")   the same with arguments of its constructor
    load("reasoning_gym:chain_sum")             one of a family that another package provides

Built-in classes are imported on first use, so that an environment needs only its own dependencies.
Does not know what makes an environment valid: ``environments.checker`` does.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from turnwise.config import named_object
from turnwise.environments.base import overrides
from turnwise.errors import SettingError, nearest

BUILT_IN = {
    name: f"turnwise.environments.builtin.{name}:{cls}"
    for name, cls in {
        "calculator": "Calculator", "countdown": "Countdown", "guess": "Guess", "keydoor": "KeyDoor", "nim": "Nim",
        "lookup": "Lookup", "archive": "Archive", "service": "CustomerService",
    }.items()
}  # fmt: skip
OTHER_PACKAGES = (
    "reasoning_gym", "gymnasium", "minigrid", "open_spiel", "textarena", "scienceworld", "textworld", "bfcl", "mcp", "openenv",
    "miniwob", "verifiers",
)  # fmt: skip
FAMILIES = {  # a module whose ``environment(member)`` returns the class
    "demonstrated": "turnwise.environments.demonstrated",  # single turns of the dialogues of a file
    "prompts": "turnwise.environments.prompts",  # rows of --data, where --reward scores the answers
    **{family: f"turnwise.environments.families.{family}" for family in OTHER_PACKAGES},
}

PROMISE = ",deterministic=true"  # ends the name of an environment of another package whose actions may be played again
RUN_ARGUMENTS = ("difficulty", "split")  # arguments of a constructor that the run gives


def load(name: str) -> type[Any]:
    """The class of a built-in name, of ``"family:member"``, of ``"module:Class"`` or ``"file.py:Class"``; arguments of its
    constructor may follow, as in ``"module:Class,key=value"``."""
    family, _, member = name.partition(":")
    if family in FAMILIES:
        named_object.check_reading(name, f"environment {name!r}")
        family_class: type[Any] = importlib.import_module(FAMILIES[family]).environment(member.removesuffix(PROMISE))
        if member.endswith(PROMISE) and not family_class.deterministic:
            body = {"deterministic": True, "__module__": family_class.__module__, "__doc__": family_class.__doc__}
            family_class = type(name, (family_class,), body)
        return family_class
    # a word that resembles a family and names no module; the running program, __main__, is one without a spec
    close = difflib.get_close_matches(family, FAMILIES, n=1) if family.isidentifier() and family not in BUILT_IN else []
    named_object.import_from_current_folder()
    if close and family not in sys.modules and not importlib.util.find_spec(family):
        raise SettingError(f"there is no family {family!r} of environments; did you mean {close[0]}:{member}?")
    class_name, arguments = named_object.split_arguments(name)
    if class_name.startswith(named_object.GIVEN_OBJECT):
        shown = class_name.removeprefix(named_object.GIVEN_OBJECT)
        raise SettingError(
            f"the environment {shown} was given to train() as an object, which no name refers to; give it again in Python: "
            "resume(run, env=...), or move the class into a module"
        )
    if class_name in BUILT_IN:  # a name of ours, also where a run that is only read has it
        module, _, title = BUILT_IN[class_name].partition(":")
        cls: type[Any] = getattr(importlib.import_module(module), title)
    elif ":" in class_name:
        what = f"environment {name!r}"
        cls = named_object.load_object(class_name, what, lambda value: isinstance(value, type), "class")
    else:
        raise SettingError(f"no environment is called {name!r}; {nearest(class_name, BUILT_IN)}; or write module:Class")
    return require_arguments(bind(cls, arguments, class_name) if arguments else cls, name)


def require_arguments(cls: type[Any], name: str) -> type[Any]:
    """The class; refuses one whose constructor still needs an argument that the run does not give."""
    for key, parameter in named_object.signature_of(cls).items():
        named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if named and parameter.default is parameter.empty and key not in RUN_ARGUMENTS:
            raise SettingError(
                f"{name} needs the argument {key!r}; write {name},{key}=VALUE, or in Python functools.partial(Class, {key}=...)"
            )
    return cls


def bind(cls: type[Any], arguments: Mapping[str, Any], name: str = "") -> type[Any]:
    """A subclass whose constructor has these arguments filled in. Text is converted by the constructor's signature."""
    values = named_object.call_arguments(cls, arguments, name or cls.__name__, RUN_ARGUMENTS)

    def construct(self: Any, **others: Any) -> None:
        cls.__init__(self, **values, **others)

    bound = type(cls.__name__, (cls,), {"__init__": construct, "__module__": cls.__module__, "__doc__": cls.__doc__})
    with contextlib.suppress(TypeError, ValueError):  # a class written in C has no signature
        signature = inspect.signature(cls)
        # what the run may still give is read from this
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
    # positional arguments get their names, so that the run can record them
    arguments = {**dict(zip(inspect.signature(cls).parameters, env.args)), **env.keywords} if partial else {}
    name = named_object.importable_name(cls)
    spec = named_object.join_arguments(name, arguments) if name else ""
    bound = require_arguments(bind(cls, arguments) if arguments else cls, cls.__name__)
    return spec or f"{named_object.GIVEN_OBJECT}{cls.__name__}", bound


def make(name: str, difficulty: int = 1, split: str = "train") -> Any:
    """A new episode of ``load(name)``. A class whose constructor takes no difficulty or split has only the default one."""
    cls = load(name)
    arguments: dict[str, Any] = {"difficulty": difficulty, "split": split}
    accepted = settings(cls)
    for key, only in (("difficulty", 1), ("split", "train")):
        if key not in accepted and arguments.pop(key) != only:
            raise SettingError(f"environment {name!r} has only {key} {only!r}: its __init__ takes no keyword {key!r}")
    return cls(**arguments)


def _settings(cls: type[Any]) -> frozenset[str]:
    """Which of ``difficulty`` and ``split`` the constructor of a class accepts."""
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class written in C
        return frozenset()
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return frozenset(key for key in RUN_ARGUMENTS if accepts_any or key in parameters)


# cached, because every episode asks; typed anew, because mypy takes a class for unhashable
settings: Callable[[type[Any]], frozenset[str]] = cache(_settings)  # type: ignore[assignment]


# ---------------------------------------------- what each offers, read from classes and docstrings, never played

OPTIONAL = {  # an optional method, and what it makes possible
    "oracle": "oracle",
    "demonstrate": "demonstrations",
    "state_key": "state key",
    "answer": "answer",
    "hint": "hint",
}
PACKAGES = {  # the module that must be importable, and the words after `pip install`
    "demonstrated": ("", ""),
    "prompts": ("", ""),
    "reasoning_gym": ("reasoning_gym", "'turnwise-rl[reasoning]'"),
    "open_spiel": ("pyspiel", "'turnwise-rl[open-spiel]'"),
    "bfcl": ("bfcl_eval", "--no-deps bfcl-eval"),
    "openenv": ("websockets", "'turnwise-rl[openenv]'"),
}


def can_fork(cls: type[Any]) -> bool:
    """Whether episodes may be forked: by snapshots, or by actions that are played again, which is tried where nobody says."""
    snapshots = overrides(cls, "snapshot") and overrides(cls, "restore")
    return snapshots or getattr(cls, "deterministic", None) is not False


def environment_rows() -> list[dict[str, Any]]:
    """One row for each built-in environment and each family."""
    rows = []
    for name in BUILT_IN:
        cls = load(name)
        row = {
            "environment": name,
            "kind": "built in",
            "installed": True,
            "about": _about(cls.__module__)[0],
            "difficulties": list(cls.difficulties),
            # the limit; several where it depends on the difficulty
            "turns": sorted(set(getattr(cls, "limits", {}).values())) or [cls.max_turns],
            "tools": [tool["function"]["name"] for tool in cls.tools],
            "offers": [word for method, word in OPTIONAL.items() if overrides(cls, method)] + ["forks"] * can_fork(cls),
        }
        rows.append(row)
    for name, module in FAMILIES.items():  # neither the module nor its package is imported
        package, install = PACKAGES.get(name, (name, f"'turnwise-rl[{name}]'"))
        about, doc = _about(module)
        example = re.search(r'load\("([^"]+)"\)', doc)
        row = {
            "environment": f"{name}:...",
            "kind": "family",
            "installed": not package or importlib.util.find_spec(package) is not None,
            "about": about,
            "example": example.group(1) if example else f"{name}:NAME",
            "install": f"pip install {install}" if install else "",
        }
        rows.append(row)
    return rows


def _about(module: str) -> tuple[str, str]:
    """The first sentence of a module's docstring, on one line, and all of it; the module is not imported."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(doc.split("\n\n")[0].split()))[0], doc
