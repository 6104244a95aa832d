"""Options of a model, after a comma: ``Qwen/Qwen3-30B-A3B,routes=free``, or several: ``tiny,routes=free,cache=pages``.

    routes=recorded  the learner forces the experts that the sampler's routers chose (the default)
    routes=free      its routers choose for themselves
    cache=rows       whoever samples keeps its KV cache in rows, whether or not they fit
    cache=pages      in pages, whether or not rows would fit (without the option: rows where they fit)

Knows names and options; does not load anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from turnwise.errors import SettingError, nearest

VALUES = {"routes": ("recorded", "free"), "cache": ("rows", "pages")}
OPTION = re.compile(r"^(?P<model>.+),(?P<name>\w+)=(?P<value>[^,/]*)$", re.DOTALL)
TINY = "tiny"  # the model that a run makes itself


def split_options(model: str) -> tuple[str, dict[str, str]]:
    """The name of a model and its options.

    >>> split_options("Qwen/Qwen3-30B-A3B,routes=free")
    ('Qwen/Qwen3-30B-A3B', {'routes': 'free'})
    """
    options: dict[str, str] = {}
    while (found := OPTION.match(model)) and not Path(model).exists():
        name, value = found["name"], found["value"]
        if name not in VALUES:
            raise SettingError(f"{name!r} is no option of a model; {nearest(name, VALUES)}")
        if value not in VALUES[name]:
            raise SettingError(f"the model's option {name} is {value!r}; write {' or '.join(VALUES[name])}")
        if name in options:
            raise SettingError(
                f"the model's option {name} is given twice: {value}, then {options[name]}; write it once"
            )
        model, options = found["model"], {name: value, **options}
    _, comma, word = model.rpartition(",")
    if comma and not Path(model).exists():
        raise SettingError(
            f"the model {model!r} is no folder, and {word!r} after its comma is no option; write NAME,cache=rows or "
            "NAME,routes=free, without spaces"
        )
    return model, options


def name_of(model: str) -> str:
    """The model's name without its options."""
    return split_options(model)[0]


def is_tiny(model: str) -> bool:
    """Whether a run makes its model itself."""
    return name_of(model) == TINY


def with_options(model: str, options: Mapping[str, str]) -> str:
    """The model with these options on top of its own.

    >>> with_options("tiny,cache=rows", {"cache": "pages"})
    'tiny,cache=pages'
    """
    name, own = split_options(model)
    return ",".join([name, *(f"{key}={value}" for key, value in {**own, **options}.items())])
