"""Options of a model, after a comma: ``Qwen/Qwen3-30B-A3B,routes=free``.

    routes=recorded  the learner forces the experts that the sampler's routers chose (the default)
    routes=free      its routers choose for themselves

Knows names and options; does not load anything.
"""

from __future__ import annotations

import re
from pathlib import Path

from turnwise.errors import SettingError, nearest

VALUES = {"routes": ("recorded", "free")}
OPTION = re.compile(r"^(?P<model>.+),(?P<name>\w+)=(?P<value>\w*)$", re.DOTALL)


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
        model, options = found["model"], {name: value, **options}
    return model, options


def name_of(model: str) -> str:
    """The model's name without its options."""
    return split_options(model)[0]
