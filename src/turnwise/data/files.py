"""Files of rows: JSON Lines, a JSON array, Parquet. Every row keeps its line, so that a fault can be found again.

Knows no column's meaning.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.errors import SettingError

SHOWN = 4  # faults told in words; the rest is counted
LINES = {".jsonl", ".ndjson", ""}


@dataclass
class Faults:
    """What is wrong with which line of a file."""

    path: Path
    found: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, words: str) -> None:
        self.found.append((line, words))

    def refuse(self, rows: int) -> None:
        """Raises when there is any: how many, and the first few in words."""
        if not self.found:
            return
        alike: dict[str, list[int]] = {}
        for line, words in sorted(self.found):
            alike.setdefault(words, []).append(line)
        some = "; ".join(f"{_lines_of(lines)}: {words}" for words, lines in list(alike.items())[:SHOWN])
        rest = sum(len(lines) for lines in list(alike.values())[SHOWN:])
        more = f"; and {rest} more" if rest else ""
        bad = len({line for line, _ in self.found})
        raise SettingError(f"{self.path}: {bad} of {rows} rows cannot be used. {some}{more}")


def _lines_of(lines: list[int]) -> str:
    shown = ", ".join(map(str, lines[:SHOWN]))
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return f"line{'s' * (len(lines) > 1)} {shown}{more}"


def read_table(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """All rows of a file with their lines (of a Parquet file or a JSON array: their number, from 1)."""
    path = Path(path)
    if not path.is_file():
        what = "a folder, not a file of rows" if path.is_dir() else "not there"
        raise SettingError(f"{path} is {what}; write the path of a .jsonl, .json or .parquet file")
    rows = list(_parquet(path) if path.suffix == ".parquet" else _text(path))
    if not rows:
        raise SettingError(f"{path} holds no rows; write one JSON object on each line")
    return rows


def digest(path: str | Path) -> str:
    """Of the file's bytes: a resumed run must find the same."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _text(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as fault:
        raise SettingError(
            f"{path} is not UTF-8 text (byte {fault.start}); write a .jsonl, .json or .parquet file"
        ) from fault
    whole = text.lstrip()[:1] == "[" and path.suffix not in LINES
    return _array(path, text) if whole else _lines(path, text)


def _array(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise SettingError(
            f"{path} is not JSON: {fault}; write an array of objects, or one object on each line"
        ) from fault
    faults = Faults(path)
    for n, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            faults.add(n, f"{json.dumps(value)[:40]} is not an object; write {{...}}")
    faults.refuse(len(values))
    yield from enumerate(values, start=1)


def _lines(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    faults, rows = Faults(path), []
    for n, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as fault:
            value = None
            faults.add(n, f"{line.strip()[:40]!r} is not JSON ({getattr(fault, 'msg', 'too deep')}); write {{...}}")
        else:
            if not isinstance(value, dict):
                faults.add(n, f"{line.strip()[:40]!r} is not an object; write {{...}}")
        rows.append((n, value))
    faults.refuse(len(rows))
    yield from rows


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise SettingError(
            f"{path} is Parquet, which needs the package pyarrow; install it, or write the rows as JSON Lines"
        ) from None
    try:
        values = parquet.read_table(path).to_pylist()
    except Exception as fault:  # its errors have no common root
        raise SettingError(f"{path} cannot be read as Parquet: {str(fault).splitlines()[0]}") from fault
    yield from enumerate(map(_said, values), start=1)


def _said(value: Any) -> Any:
    """A value of Parquet, where every record has every field of its kin, without those that were never written."""
    if isinstance(value, dict):
        return {name: _said(each) for name, each in value.items() if each is not None}
    return [_said(each) for each in value] if isinstance(value, list) else value


def number(value: Any) -> bool:
    """A finite number or a truth value."""
    return isinstance(value, bool | int | float) and math.isfinite(value)
