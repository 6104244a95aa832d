"""What a view is asked for and what it is made of. A view is data: the template draws it, ``--json`` prints it, an exported
file contains it.

Texts are plain text here. Only the template turns them into HTML, and it escapes every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from turnwise.errors import SettingError
from turnwise.inspector.queries import StepMetrics
from turnwise.observe.charts import NOISE, Cell, LineChart, Link, Series, number

WHOLE = ("step", "token", "update", "offset")
WORDY = 40  # characters of a cell


@dataclass(frozen=True)
class ViewQuery:
    """What to show: ``ViewQuery(step=3, method="gspo")``. Empty, step 0 or token −1: the view chooses."""

    step: int = 0
    group: str = ""
    trajectory: str = ""
    token: int = -1
    update: int = -1
    method: str = ""
    colour: str = ""  # of tokens: movement, push or advantage
    search: str = ""
    offset: int = 0

    @classmethod
    def parse(cls, values: Mapping[str, str]) -> ViewQuery:
        """Parameters of a URL or of flags. Unknown ones are ignored: a browser or a proxy may add some."""
        parsed: dict[str, Any] = {}
        for name in (f.name for f in fields(cls) if values.get(f.name)):
            value = values[name]
            # the bound on length: int() of a long text takes quadratic time
            if name in WHOLE and (not value.lstrip("-").isdigit() or len(value) > 12):
                raise SettingError(f"{name} is {value[:40]!r}; write a whole number")
            parsed[name] = int(value) if name in WHOLE else value[:500]
        return cls(**parsed)


@dataclass(frozen=True)
class Note:
    """One sentence. ``level``: info, warning or good."""

    text: str
    level: str = "info"


@dataclass(frozen=True)
class FactList:
    """Names with their values."""

    title: str
    rows: Sequence[tuple[str, Cell]]


@dataclass(frozen=True)
class DataTable:
    """Rows under column names. ``about`` says what a row is."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    about: str = ""

    @property
    def filled(self) -> list[int]:
        """The columns that say something in some row: a page shows no others."""
        blank = ("", None)
        return [i for i in range(len(self.columns)) if not self.rows or any(row[i] not in blank for row in self.rows)]

    @property
    def wordy(self) -> bool:
        """Whether a cell holds a sentence: a narrow window then shows each row as a card."""
        return any(isinstance(cell, str) and len(cell) > WORDY for row in self.rows for cell in row)


@dataclass(frozen=True)
class BarChart:
    """One bar for each label; a negative value points to the left."""

    title: str
    labels: Sequence[str]
    values: Sequence[float]
    about: str = ""
    percent: bool = False


@dataclass(frozen=True)
class TokenCell:
    """One sampled token: its text, how strongly it is coloured (−1 to 1; NaN: not measured), and what a pointer over it shows.
    ``shared``: how many of its characters a sibling says, too, after the same tokens."""

    text: str
    tone: float = 0.0
    hint: str = ""
    link: Link | None = None
    selected: bool = False
    shared: int = 0


@dataclass(frozen=True)
class TurnBlock:
    """One message of a transcript: text that was read, or tokens that were sampled."""

    role: str
    text: str = ""
    tokens: Sequence[TokenCell] = ()
    note: str = ""
    more: Link | None = None  # where the rest is, if only a part is shown


@dataclass(frozen=True)
class Transcript:
    """The messages of one trajectory in order. ``full``: the number that has the full colour, 0: nothing is coloured."""

    title: str
    turns: Sequence[TurnBlock]
    about: str = ""
    full: float = 0.0

    @property
    def unmeasured(self) -> bool:
        """Whether some token has no number of those that colour the others."""
        return any(math.isnan(token.tone) for turn in self.turns for token in turn.tokens)


@dataclass(frozen=True)
class SideBySide:
    """Blocks to read from left to right. A click on a token on the left replaces the right side without loading the page."""

    left: Sequence[Any]
    right: Sequence[Any]


@dataclass(frozen=True)
class Choice:
    """A choice that reloads the view: one value of ``options`` for the parameter ``name``; no options: free text."""

    name: str
    label: str
    value: str
    options: Sequence[str] = ()
    keep: Mapping[str, Any] = field(default_factory=dict)  # other parameters of the view
    impossible: Mapping[str, str] = field(default_factory=dict)  # options that cannot be chosen, and why
    about: str = ""  # why this value stands there, if the view chose it


@dataclass(frozen=True)
class ViewPage:
    """A view: what it shows, in one sentence, and its blocks."""

    name: str
    title: str
    about: str
    blocks: Sequence[Any]
    empty: Mapping[str, str] = field(default_factory=dict)  # views that have nothing to show of this run, and why


def step_choice(step: int, steps: Sequence[int], keep: Mapping[str, Any] | None = None, about: str = "") -> Choice:
    return Choice("step", "step", str(step), [str(s) for s in steps], keep or {}, about=about)


def token_link(text: str, trajectory: str, step: int, token: int, colour: str = "") -> Link:
    """The way to what a step did to one sampled token."""
    keep = {"colour": colour} if colour else {}
    return Link(text, "why", {"trajectory": trajectory, "step": step, "token": token, **keep})


def curves(metrics: Sequence[StepMetrics], wanted: Sequence[tuple[str, str, str]]) -> Iterator[LineChart | Note]:
    """One chart for each metric of ``wanted`` (name, title, what it means) that has two values or more. What is the same in
    every step but for rounding is named in one sentence: its chart would be a flat line, or noise on an axis of its own."""
    flat = []
    for name, title, about in wanted:
        x, y = points(metrics, name)
        if len(x) > 1 and max(y) - min(y) < NOISE:
            flat.append(f"{title} ({number(0.0 if abs(y[0]) < NOISE else y[0])})")
        elif len(x) > 1:
            yield LineChart(title, (Series(title, x, y),), about)
    if flat:
        yield Note(f"The same in every step, to within {NOISE:g}: {'; '.join(flat)}.")


def points(metrics: Sequence[StepMetrics], name: str) -> tuple[list[float], list[float]]:
    """Steps and finite values of one metric."""
    rows = [(float(row.step), value) for row in metrics if (value := row[name]) is not None]
    return [x for x, _ in rows], [y for _, y in rows]


def as_json(value: Any) -> Any:
    """Blocks as plain data; each names its kind. A number that is not finite becomes null."""
    if isinstance(value, Link):
        return {"text": value.text, "href": value.href}
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__, **{f.name: as_json(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    # JSON has neither NaN nor infinity
    return None if isinstance(value, float) and not math.isfinite(value) else value
