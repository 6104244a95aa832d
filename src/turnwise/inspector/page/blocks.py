"""What a view is made of. A view is data: the template draws it, ``--json`` prints it, an exported file contains it.

Texts are plain text here. Only the template turns them into HTML, and it escapes every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from turnwise.observe.charts import Cell, Link


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
    """One sampled token: its text, how strongly it is coloured (−1 to 1), and what a pointer over it shows."""

    text: str
    tone: float = 0.0
    hint: str = ""
    link: Link | None = None
    selected: bool = False


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
    """The messages of one trajectory in order."""

    title: str
    turns: Sequence[TurnBlock]
    about: str = ""


@dataclass(frozen=True)
class Choice:
    """A choice that reloads the view: one value of ``options`` for the parameter ``name``; no options: free text."""

    name: str
    label: str
    value: str
    options: Sequence[str] = ()
    keep: Mapping[str, Any] = field(default_factory=dict)  # other parameters of the view


@dataclass(frozen=True)
class ViewPage:
    """A view: what it shows, in one sentence, and its blocks."""

    name: str
    title: str
    about: str
    blocks: Sequence[Any]


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
    return None if isinstance(value, float) and not math.isfinite(value) else value
