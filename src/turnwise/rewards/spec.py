"""What ``--reward`` says: ``my.py:score``, ``0.5*package.module:score``, ``exact``, ``regex:pattern=^[0-9]+$``.

    WEIGHT*NAME:option=value;option=value

The weight is optional and precedes the name. A name is a function (``file.py:function``, ``module:function``) or built in.
Options belong to built-in rewards: a keyword of the reward, or the column that one of its arguments is read from
(``exact:answer=label``). Knows no process and no trajectory.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.config.named_object import call_arguments
from turnwise.errors import SettingError, nearest
from turnwise.rewards import builtin

BUILT_IN: Mapping[str, Callable[..., Any]] = {
    name: getattr(builtin, name) for name in ("exact", "majority", "regex", "json_schema", "math", "code")
}
VERDICTS = ("exact", "math", "code")
COMPARING = ("majority",)  # these compare the answers of a group, so that an answer alone has no score
ANSWERS = ("completion", "completions")
WEIGHTED = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*\*\s*(.*)", re.DOTALL)
OPTION = re.compile(r";(?=\w+=)")  # a semicolon inside a value, such as a pattern, does not separate
SYNTAX = "write file.py:function, module:function or a built-in name, with a weight as in 0.5*exact"


@dataclass(frozen=True)
class RewardSpec:
    """One reward of a run."""

    name: str  # unique among the rewards of the run
    target: str  # module:function, file.py:function, or object:NAME
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of a built-in reward
    columns: Mapping[str, str] = field(default_factory=dict)  # argument: column it is read from

    @property
    def built_in(self) -> bool:
        return self.target.startswith(f"{builtin.__name__}:")

    @property
    def gives_verdict(self) -> bool:
        """Whether a built-in reward says success or not; of other functions only their return values tell."""
        return self.built_in and self.label in VERDICTS

    @property
    def label(self) -> str:
        """What the user wrote, without weight and options."""
        return self.target.rpartition(":")[2] if self.built_in else self.target

    @classmethod
    def parse(cls, text: str) -> RewardSpec:
        weight, rest = 1.0, text.strip()
        weighted = WEIGHTED.fullmatch(rest)
        if weighted:
            weight, rest = float(weighted[1]), weighted[2].strip()
        if not rest or not math.isfinite(weight):
            raise SettingError(f"reward {text!r} cannot be read; {SYNTAX}")
        name, colon, options = rest.partition(":")
        if name in BUILT_IN:
            return _built_in(name, options, weight)
        if not colon or not options.replace(".", "_").isidentifier():
            raise SettingError(f"no reward is called {rest!r}; {nearest(name, BUILT_IN)}; {SYNTAX}")
        return cls(options.rpartition(".")[2], rest, weight)


def parse_rewards(texts: Sequence[str]) -> tuple[RewardSpec, ...]:
    """All rewards of a run. A name that occurs twice gets a number: ``score``, ``score_2``."""
    specs: list[RewardSpec] = []
    for spec in map(RewardSpec.parse, texts):
        taken, n = {s.name for s in specs}, 2
        name = spec.name
        while name in taken:
            name, n = f"{spec.name}_{n}", n + 1
        specs.append(replace(spec, name=name))
    return tuple(specs)


def _built_in(name: str, text: str, weight: float) -> RewardSpec:
    function, what = BUILT_IN[name], f"reward {name!r}"
    given: dict[str, str] = {}
    for part in OPTION.split(text) if text else ():
        key, equals, value = part.partition("=")
        if not equals:
            raise SettingError(f"{what} is followed by {part!r}; write {name}:option=value;option=value")
        given[key.strip()] = value
    parameters = inspect.signature(function).parameters
    from_columns = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD and n not in ANSWERS]
    columns = {key: value for key, value in given.items() if key in from_columns}
    options = call_arguments(function, {k: v for k, v in given.items() if k not in columns}, what, ANSWERS)
    missing = [
        n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default is p.empty and n not in options
    ]
    if missing:
        raise SettingError(f"{what} needs {missing[0]}; write {name}:{missing[0]}=...")
    return RewardSpec(name, f"{function.__module__}:{function.__qualname__}", weight, options, columns)
