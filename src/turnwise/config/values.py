"""Settings whose text has parts (``4,drop``, ``past,keep=8``, ``local,generators=2``, ``tiny,cache=pages``), with fields.

Each is read once, where the settings of a run are read, and writes itself as the shortest text that is read back to it. Nothing
behind that looks at the text again. Knows what may be written, not what a run does with it.
"""

# ruff: noqa: RUF009  (the defaults are plain values)
from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from turnwise.config.convert import Count, Positive, convert
from turnwise.config.named_object import GIVEN_OBJECT
from turnwise.core.limits import Bounds
from turnwise.errors import SettingError, nearest

WAIT, DROP, KEEP = LATE = ("wait", "drop", "keep")
CONTINUOUS = "continuous"  # a synchronous run whose dialogues do not wait for each other's tools
LOCAL = "local"  # a cluster of this machine
TINY = "tiny"  # the model that a run makes itself
MODEL_OPTION = re.compile(r"^(?P<name>.+),(?P<key>\w+)=(?P<value>[^,/]*)$", re.DOTALL)


class SettingValue:
    """A setting with parts."""

    written_as: ClassVar[tuple[type, ...]] = (str, Path)

    @classmethod
    def read(cls, setting: str, value: Any) -> Any:
        """Text, or the parts by their names, as a config file may nest them; what the text refuses, the parts refuse."""
        if isinstance(value, Mapping):
            types = typing.get_type_hints(cls, include_extras=True)
            if unknown := next((name for name in value if name not in types), None):
                raise SettingError(f"{setting} has no part {unknown!r}; {nearest(str(unknown), types)}")
            value = str(cls(**{name: convert(f"{setting}: {name}", part, types[name]) for name, part in value.items()}))
        if not isinstance(value, cls.written_as):
            raise TypeError
        return cls.parse(str(value))  # type: ignore[attr-defined]

    def plain(self) -> int | str:
        """As run.json records it."""
        return str(self)


def option(default: Any) -> Any:
    """A part that is written ``key=value``."""
    return field(default=default, metadata={"option": True})


def _options(setting: str, kind: Any, pairs: Sequence[str]) -> dict[str, Any]:
    """The parts ``key=value`` by the declared fields of ``kind``."""
    declared = [f.name for f in fields(kind) if f.metadata]
    types, values = typing.get_type_hints(kind, include_extras=True), {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in declared:
            raise SettingError(f"{setting} has no option {key!r}; {nearest(key, declared)}")
        if key in values:
            raise SettingError(f"{setting}: {key} is given twice; write it once")
        values[key] = convert(f"{setting}: {key}", value, types[key])
    return values


def _written(head: str, value: Any) -> str:
    """The head and the options that are not as by default."""
    given = {
        f.name: getattr(value, f.name) for f in fields(value) if f.metadata and getattr(value, f.name) != f.default
    }
    return ",".join([head, *(f"{name}={part}" for name, part in given.items())])


@dataclass(frozen=True)
class Staleness(SettingValue):
    """``N``, ``N,wait``, ``N,drop``, ``N,keep`` or ``0,continuous``: the steps that rollouts may run ahead of training, and what
    happens to groups that come late, or how a synchronous run samples."""

    written_as = (str, int)
    limit: int = 0
    late: str = WAIT

    @classmethod
    def parse(cls, value: Any) -> Self:
        number, comma, late = (part.strip() for part in str(value).partition(","))
        late, wrong = late if comma else WAIT, ""
        if not number.isdecimal():
            wrong = (
                f"{value}; write 0 for synchronous, or a positive number of steps (4), which may be followed by "
                "what happens to groups that come late: 4,wait 4,drop 4,keep; 0,continuous does not wait for slow tools"
            )
        elif late not in (*LATE, CONTINUOUS):
            wrong = f"{value!r}, and {late!r} does not say what to do; {nearest(late, (*LATE, CONTINUOUS))}"
        elif late == CONTINUOUS and int(number):
            instead = f"write {number}, or 0,{CONTINUOUS} for a synchronous run"
            wrong = f"{value!r}, and rollouts that run ahead never wait for each other's tools; {instead}"
        elif late in (DROP, KEEP) and not int(number):
            wrong = f"{value!r}, and nothing comes late in a synchronous run; write 0, or 1,{late}"
        if wrong:
            raise SettingError(f"staleness is {wrong}")
        return cls(int(number), late)

    @property
    def synchronous(self) -> bool:
        return self.limit == 0

    @property
    def deterministic(self) -> bool:
        """Whether batches of the generator may not depend on how long environments take: it samples the next turns once all
        have answered."""
        return self.synchronous and self.late != CONTINUOUS

    def capacity(self, per_step: int, steps: int = 0) -> int:
        """The most groups that are outstanding at any time. ``steps``: that the run still takes; 0: its end is not known."""
        return per_step * (min(self.limit + 1, steps) if steps else self.limit + 1)

    def __str__(self) -> str:
        return str(self.plain())

    def plain(self) -> int | str:
        """A number where training waits, as in releases that knew nothing else."""
        return self.limit if self.late == WAIT else f"{self.limit},{self.late}"


@dataclass(frozen=True)
class Opponents(SettingValue):
    """Who holds the seats that are not the policy's own, in environments of several agents.

    self                        the current policy plays, and is trained on, every seat
    past,keep=8,every=5         older policies of this run; ``pool=latest`` keeps the newest instead of spreading them
    scripted:random             a scripted policy of the environment: oracle, random, demonstrator
    """

    kind: Literal["self", "past", "scripted"] = "self"
    scripted: str = ""
    keep: Positive = option(8)
    every: Positive = option(5)
    pool: Literal["spread", "latest"] = option("spread")

    @classmethod
    def parse(cls, text: str) -> Opponents:
        head, *pairs = text.split(",")
        kind, _, name = head.partition(":")
        kinds, wrong = ("self", "past", "scripted"), ""
        if kind not in kinds:
            wrong = nearest(kind, kinds)
        elif (kind == "scripted") != bool(name):
            wrong = "write scripted:NAME, such as scripted:random"
        elif pairs and kind != "past":
            wrong = "only `past` takes options: keep, every, pool"
        if wrong:
            raise SettingError(f"opponents is {text!r}; {wrong}")
        return cls(kind, name, **_options("opponents", cls, pairs))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return _written(f"{self.kind}:{self.scripted}" if self.scripted else self.kind, self)


@dataclass(frozen=True)
class Cluster(SettingValue):
    """Whether a run is spread over actors of a Ray cluster; without an address it is not.

    local,generators=2,environments=2         a cluster of this machine, which ends with the command
    10.0.0.5:6379,generators=8,gpus=1         a cluster that `ray start` made; the run goes on when the command dies
    """

    address: str = ""
    generators: Positive = option(1)
    # actors that play; 0: the learner's process does
    environments: Annotated[int | Literal["auto"], Bounds(least=0)] = option(0)
    cpus: Positive = option(1)  # reserved for each generator; an environment actor takes one
    gpus: Count = option(0)
    placement: Literal["pack", "spread"] = option("pack")
    restarts: Count = option(100)  # of each actor, before it stays dead

    @classmethod
    def parse(cls, text: str) -> Cluster:
        address, *pairs = text.split(",")
        if text and address != LOCAL and not re.fullmatch(r"[\w.-]+:\d{1,5}", address):
            raise SettingError(
                f"cluster is {text!r}; write local, or the HOST:PORT of a cluster that `ray start` made; then ,key=value: "
                f"{', '.join(f.name for f in fields(cls) if f.metadata)}"
            )
        return cls(address, **_options("cluster", cls, pairs))

    @property
    def local(self) -> bool:
        return self.address == LOCAL

    def environment_actors(self, cpus: int, ranks: int = 1) -> int:
        """How many, on a cluster with so many CPUs; ``auto``: one for each that is left."""
        if self.environments == "auto":
            return max(1, cpus - self.generators * self.cpus - ranks)
        return self.environments

    def __bool__(self) -> bool:
        return bool(self.address)

    def __str__(self) -> str:
        return _written(self.address, self)


@dataclass(frozen=True)
class ModelName(SettingValue):
    """A folder, a Hub id or a known name, and options after commas: ``Qwen/Qwen3-30B-A3B,routes=free,cache=pages``.

    routes=recorded  the learner forces the experts that the sampler's routers chose (the default)
    routes=free      its routers choose for themselves
    cache=rows       whoever samples keeps its KV cache in rows, whether or not they fit
    cache=pages      in pages, whether or not rows would fit (without the option: rows where they fit)
    """

    name: str = ""
    routes: Literal["", "recorded", "free"] = option("")
    cache: Literal["", "rows", "pages"] = option("")

    @classmethod
    def parse(cls, value: Any) -> ModelName:
        name, options = str(value), {}  # type: str, dict[str, str]
        declared = {"routes": ("recorded", "free"), "cache": ("rows", "pages")}
        while (match := MODEL_OPTION.match(name)) and not Path(name).exists():  # a folder may have such a name
            key, word, wrong = match["key"], match["value"], ""
            if key not in declared:
                wrong = f"{key!r} is no option of a model; {nearest(key, declared)}"
            elif word not in declared[key]:
                wrong = f"the model's option {key} is {word!r}; write {' or '.join(declared[key])}"
            elif key in options:
                wrong = f"the model's option {key} is given twice: {word}, then {options[key]}; write it once"
            if wrong:
                raise SettingError(wrong)
            name, options = match["name"], {key: word, **options}
        _, comma, word = name.rpartition(",")
        if comma and not Path(name).exists():
            raise SettingError(
                f"the model {name!r} is no folder, and {word!r} after its comma is no option; write NAME,cache=rows or "
                "NAME,routes=free, without spaces"
            )
        return cls(name, **options)  # type: ignore[arg-type]

    @property
    def tiny(self) -> bool:
        """Whether a run makes its model itself."""
        return self.name == TINY

    @property
    def given_object(self) -> str:
        """The class of a model that was given to ``train`` as an object; empty otherwise."""
        return self.name.removeprefix(GIVEN_OBJECT) if self.name.startswith(GIVEN_OBJECT) else ""

    def with_options(self, other: ModelName) -> ModelName:
        """This model with the options that ``other`` gives on top of its own."""
        return ModelName(self.name, other.routes or self.routes, other.cache or self.cache)

    def __bool__(self) -> bool:
        return bool(self.name)

    def __str__(self) -> str:
        return _written(self.name, self)
