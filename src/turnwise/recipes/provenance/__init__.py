"""Where a method is from, as data: one TOML file for each family (or kind of named pieces), one table for each method.

A record names paper and code, the facts that decide what a gradient is, who says so, and where our default is another.
What `turnwise explain` and the pages say of a source is written from it; ``tests/provenance`` compares the facts with the pieces.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from turnwise.errors import RecipeError

FOLDER = Path(__file__).parent
UNKNOWN = "unknown"  # neither paper nor code says it, or nobody here could read them
ORIGINS = {"paper": "paper", "notes": "notes of others", "ours": "ours"}  # and "code", in the words of WHOSE
WHOSE = {"authors": "the authors' code", "fork": "the authors' code in a fork", "trainer": "a public trainer's code"}
LEVELS = ("token", "turn", "segment", "trajectory", "group", "batch")
WORDS = {  # what a fact may say
    "ratio": ("none", *LEVELS, *(f"{level} product" for level in LEVELS[1:]), "prefix", "other"),
    "average": (*LEVELS[:-1], *(f"sum over {level}" for level in LEVELS[1:-1]), "constant", "other"),
    "kl": ("none", "other"),
    "normaliser": ("none", "std", "population std", "batch std", "other"),
    "clip": ("none", "adaptive", "other"),
    "rows": ("token", "turn", "segment", "trajectory", "pair"),
}
FACTS = {  # each fact of a method and its words on a page
    "ratio": "ratio", "average": "average over", "kl": "KL", "normaliser": "normaliser", "clip": "clip",
    "rows": "rows of the batch", "optimiser": "optimiser",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Code:
    """Released code at one commit. ``files`` are paths, with the functions that were read behind a colon."""

    address: str
    commit: str
    whose: str = "authors"
    files: tuple[str, ...]

    def __post_init__(self) -> None:
        check(re.fullmatch(r"[0-9a-f]{40}", self.commit), f"commit {self.commit!r} is not 40 hex digits")
        check(
            self.whose in WHOSE and self.files,
            f"code of {self.address}: whose is one of {[*WHOSE]}, files name one or more",
        )

    def __str__(self) -> str:
        return f"{self.address} at {self.commit[:12]}: {'; '.join(self.files)} ({WHOSE[self.whose]})"


@dataclass(frozen=True, kw_only=True)
class KLTerm:
    """A KL to the reference: the estimator, its coefficient, and whether it is in the loss or in the reward."""

    estimator: str
    weight: float
    place: str

    def __post_init__(self) -> None:
        check(self.place in ("loss", "reward"), f"a KL is in the loss or in the reward, not in {self.place!r}")

    def __str__(self) -> str:
        return f"{self.weight:g} {self.estimator} in the {self.place}"


@dataclass(frozen=True, kw_only=True)
class ClipBounds:
    """The ratio is cut below 1 − low and above 1 + high; where A < 0 also above ``dual``."""

    low: float
    high: float
    dual: float | None = None

    def __str__(self) -> str:
        return f"1 − {self.low:g} to 1 + {self.high:g}" + (f", dual {self.dual:g}" if self.dual else "")


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """How the authors step: learning rate, passes over a batch, mini-batches of a pass, tasks of a batch, rollouts of a task."""

    rate: float | None = None
    epochs: int | None = None
    minibatches: int | None = None
    tasks: int | None = None
    group: int | None = None

    @property
    def updates(self) -> int | None:
        """Optimiser steps for each batch; None where it is not said."""
        return self.epochs * self.minibatches if self.epochs and self.minibatches else None

    def __str__(self) -> str:
        parts = {"learning rate": self.rate, "epochs": self.epochs, "mini-batches": self.minibatches,
                 "tasks": self.tasks, "rollouts of a task": self.group}  # fmt: skip
        return ", ".join(f"{name} {value:g}" for name, value in parts.items() if value is not None)


TABLES = {"kl": KLTerm, "clip": ClipBounds, "optimiser": Optimiser}


@dataclass(frozen=True, kw_only=True)
class Record:
    """One method or named piece. ``origin`` says where all of it is from, but for the facts of ``sources`` ("from" in the file)
    and the named ``parts`` of the method."""

    paper: str  # arXiv id with its version where it is known, or a title
    at: str = ""  # equations and sections
    code: tuple[Code, ...] = ()
    origin: str
    sources: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    differs: Mapping[str, str] = field(default_factory=dict)  # each fact in which our default is another, and why
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for origin in (self.origin, *self.sources.values(), *self.parts.values()):
            check(
                origin in ORIGINS or (origin == "code" and self.code),
                f"no origin {origin!r}, or code without its files",
            )
        for fact in (*self.sources, *self.differs):
            check(fact in self.facts, f"no fact {fact!r}; there are: {[*self.facts]}")
        for fact, why in self.differs.items():
            check(
                self.facts[fact] != UNKNOWN and why.endswith("."), f"{fact} differs: write a known fact and a sentence"
            )

    def origin_of(self, fact: str) -> str:
        return UNKNOWN if self.facts[fact] == UNKNOWN else self.sources.get(fact, self.origin)

    def words(self, origin: str) -> str:
        """An origin in words; whose code it is."""
        return ORIGINS.get(origin) or " and ".join(dict.fromkeys(WHOSE[one.whose] for one in self.code))

    @property
    def sure_of(self) -> str:
        """Who says what, in one sentence."""
        said: dict[str, list[str]] = {self.words(self.origin): ["the formula"]}
        for name, origin in {**{f: self.origin_of(f) for f in self.facts}, **self.parts}.items():
            if origin != UNKNOWN:
                said.setdefault(self.words(origin), []).append(FACTS.get(name, name))
        lost = [FACTS[fact] for fact, value in self.facts.items() if value == UNKNOWN]
        return "; ".join(f"{', '.join(names)} ({who})" for who, names in said.items()) + (
            f"; not found: {', '.join(lost)}" if lost else "")  # fmt: skip

    def lines(self) -> dict[str, str]:
        """What a page and ``turnwise explain`` say of the sources, by title."""
        told = "; ".join(f"{FACTS[fact]}: {value}" for fact, value in self.facts.items() if value != UNKNOWN)
        differs = " ".join(f"{FACTS[fact].capitalize()}: {why}" for fact, why in self.differs.items())
        rows = {"Equations": self.at, "Code": " · ".join(map(str, self.code)), "As published": told,
                "Ours differs": differs, "Left out": " ".join(self.left_out), "Sure of": self.sure_of}  # fmt: skip
        return {title: text for title, text in rows.items() if text}


@cache
def records(file: str) -> Mapping[str, Record]:
    """The records of a family of methods, or of a kind of named pieces, by name; none without a file."""
    path = FOLDER / f"{file}.toml"
    return read(path.read_text(encoding="utf-8"), path.name) if path.exists() else {}


def read(text: str, name: str) -> dict[str, Record]:
    """The records of a file. An unknown key, word or repository is refused with the table that has it."""
    tables = tomllib.loads(text)
    repositories = tables.pop("repositories", {})
    read_records = {}
    for method, table in tables.items():
        try:
            read_records[method] = _record(table, repositories)
        except (RecipeError, TypeError, AttributeError) as wrong:
            raise RecipeError(f"{name}, [{method}]: {wrong}") from wrong
    return read_records


def _record(table: dict[str, Any], repositories: Mapping[str, Any]) -> Record:
    facts = {fact: _fact(fact, table.pop(fact)) for fact in FACTS if fact in table}
    check(not facts or len(facts) == len(FACTS), f"name all of {[*FACTS]} ({UNKNOWN!r} where nobody says it), or none")
    code = []
    for short, files in table.pop("code", {}).items():
        check(short in repositories, f"no repository {short!r}; [repositories] has {[*repositories]}")
        code.append(_typed(Code, repositories[short] | {"files": tuple(files)}))
    check(
        not {"sources", "facts"} & set(table), 'write each fact in the table of its method, and "from" for the sources'
    )
    said = {"sources": table.pop("from", {}), "left_out": tuple(table.pop("left_out", ()))}
    return _typed(Record, {**table, **said, "code": tuple(code), "facts": facts})


def _fact(fact: str, value: Any) -> Any:
    if isinstance(value, dict) and fact in TABLES:
        return _typed(TABLES[fact], value)
    words = (*WORDS.get(fact, ()), UNKNOWN)
    check(value in words, f"{fact} = {value!r}; write one of: {', '.join(words)}")
    return value


def _typed(kind: type, table: Mapping[str, Any]) -> Any:
    names = {f.name: f for f in fields(kind)}
    missing = [n for n, f in names.items() if f.default is f.default_factory is MISSING and n not in table]
    check(
        not missing and not set(table) - set(names),
        f"{kind.__name__} has {[*names]}; missing {missing}, given {[*table]}",
    )
    return kind(**table)


def check(ok: object, message: str) -> None:
    """Refuse a record."""
    if not ok:
        raise RecipeError(message)
