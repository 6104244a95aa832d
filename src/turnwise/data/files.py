"""Reading data files: JSON Lines, a JSON array, CSV, TSV, each also gzipped; Parquet; data sets in the format of the package
``datasets``, from a folder or the Hugging Face hub. Every row keeps its line number, so that an error can name it.

Knows no column's meaning.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import hashlib
import io
import json
import logging
import math
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, cast

from turnwise.core.text import MAX_DEPTH, clean_tree
from turnwise.data import hub
from turnwise.errors import SettingError

MAX_QUOTED = 4  # errors quoted in a message; further ones are counted
JSON_LINES = {".jsonl", ".ndjson", ""}
SEPARATORS = {".csv": ",", ".tsv": "\t"}
FORMATS = "a .jsonl, .json, .csv, .tsv (each also .gz) or .parquet file"
MAX_FIELD = 10_000_000  # characters of one CSV field
# what a compressed file may hold: text and tables of any kind stay far below, and what is made to fill the memory does not
MAX_EXPANSION, SMALL_BYTES = 200, 1 << 30
BATCH = 16_384  # rows that are read together
VALUE_BYTES = 64  # of one value as a Python object, beside its text
REPORT_SECONDS = (2.0, 10.0)  # until the first report of how far a large file is read, and between two
Stored = bytes | dict[str, Any]  # a row: a line of JSON, or its columns
log = logging.getLogger(__name__)


@dataclass
class LineErrors:
    """Collects the errors of a file by line, to report them all at once."""

    path: Path
    errors: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, message: str) -> None:
        self.errors.append((line, message))

    def raise_if_any(self, rows: int) -> None:
        """Raise one error if there are any: how many of ``rows`` rows are affected, and the first few messages."""
        if not self.errors:
            return
        by_message: dict[str, list[int]] = {}
        for line, message in sorted(self.errors):
            by_message.setdefault(message, []).append(line)
        quoted = []
        for message, lines in list(by_message.items())[:MAX_QUOTED]:
            shown = ", ".join(map(str, lines[:MAX_QUOTED]))
            shown += f" and {len(lines) - MAX_QUOTED} more" if len(lines) > MAX_QUOTED else ""
            quoted.append(f"line{'s' * (len(lines) > 1)} {shown}: {message}")
        unquoted = sum(len(lines) for lines in list(by_message.values())[MAX_QUOTED:])
        quoted += [f"and {unquoted} more"] * bool(unquoted)
        bad = len({line for line, _ in self.errors})
        raise SettingError(f"{self.path}: {bad} of {rows} rows cannot be used. {'; '.join(quoted)}")


def read_table(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """All rows of a file with their line numbers (in Parquet, a JSON array or a data set: their position, from 1)."""
    return [(line, row) for line, row, _ in scan_table(path)]


def scan_table(path: str | Path) -> Iterator[tuple[int, dict[str, Any], Stored]]:
    """The rows of a file one after another, each also as it is best stored: a large file of JSON Lines is never in memory as
    objects. The file's errors are raised after its last row, and reading that takes long is reported."""
    name, path = str(path), Path(path)
    rows: Iterable[tuple[int, Stored]]
    if hub.is_saved_dataset(path) or hub.is_hub_id(name):
        rows = enumerate((without_nulls(row) for row in hub.rows_of(name)), start=1)
    elif not path.is_file():
        what = "a folder, not a file of rows" if path.is_dir() else "not there"
        raise SettingError(f"{path} is {what}; write the path of {FORMATS}, or a data set's folder or hub id")
    else:
        rows = _parquet(path) if path.suffix == ".parquet" else _text(path)
    faults = {ValueError: LineErrors(path), RecursionError: LineErrors(path)}  # no JSON comes before nested too deep
    count, report = 0, time.monotonic() + REPORT_SECONDS[0]
    for count, (line, stored) in enumerate(rows, start=1):
        try:
            yield line, parse_row(stored), stored
        except (ValueError, RecursionError) as fault:
            faults[type(fault)].add(line, str(fault))
        if time.monotonic() > report:
            log.warning("%s: %s rows read", path, f"{count:,}")
            report = time.monotonic() + REPORT_SECONDS[1]
    if not count:
        raise SettingError(f"{path} holds no rows; write one JSON object on each line")
    for errors in faults.values():
        errors.raise_if_any(count)


def parse_row(stored: Stored) -> dict[str, Any]:
    """A row as it was stored. A JSON escape can write half a character, which no file could hold again: it is replaced."""
    row = stored
    if isinstance(stored, bytes):
        text = stored.decode()
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as fault:
            reason = getattr(fault, "msg", "too deep")
            raise ValueError(f"{text.strip()[:40]!r} is not JSON ({reason}); write {{...}}") from fault
        if not isinstance(row, dict):
            raise ValueError(f"{text.strip()[:40]!r} is not an object; write {{...}}")
        if b"\\u" not in stored and stored.count(b"[") + stored.count(b"{") <= MAX_DEPTH:
            return row  # no escapes, so no half characters; and not that deep
    try:
        return cast("dict[str, Any]", clean_tree(row))
    except RecursionError as fault:
        raise RecursionError(f"a column is {fault}; write flat columns") from fault


def digest(path: str | Path) -> str:
    """SHA-256 of the file's bytes, or of a data set's rows: a resumed run must read the same data."""
    name, path = str(path), Path(path)
    if not path.is_file():
        rows = json.dumps([row for _, row in read_table(name)], sort_keys=True, default=str)
        return hashlib.sha256(rows.encode()).hexdigest()
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _text(path: Path) -> Iterator[tuple[int, Stored]]:
    suffix = path.suffixes[-2] if path.suffix == ".gz" and len(path.suffixes) > 1 else path.suffix
    try:
        with _Unzipped(path) if path.suffix == ".gz" else path.open("rb") as stream:
            if suffix in JSON_LINES:
                yield from _lines(path, stream)
                return
            text = stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise SettingError(f"{path} is not UTF-8 text (byte {fault.start}); write {FORMATS}") from fault
    except (OSError, EOFError, zlib.error) as fault:
        raise SettingError(f"{path} cannot be read: {fault}") from fault
    if suffix in SEPARATORS:
        yield from _separated(path, text, SEPARATORS[suffix])
    elif text.lstrip()[:1] == "[":
        yield from _array(path, text)
    else:
        yield from _lines(path, io.BytesIO(text.encode()))


def _separated(path: Path, text: str, separator: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """CSV with a header line. Every value is text; an empty one is absent; a list or object written as JSON is read."""
    csv.field_size_limit(MAX_FIELD)
    reader, errors, rows = csv.reader(io.StringIO(text), delimiter=separator, strict=True), LineErrors(path), []
    try:
        header = next(reader, [])
        if not any(header) or len(set(header)) != len(header):
            raise SettingError(
                f"{path} begins with {','.join(header)[:60]!r}; write a header with a name for each column"
            )
        for values in reader:
            if values and len(values) != len(header):
                errors.add(
                    reader.line_num, f"{len(values)} values for {len(header)} columns; quote values with separators"
                )
            elif values:
                rows.append((reader.line_num, {k: parse_cell(v) for k, v in zip(header, values) if v != ""}))
    except csv.Error as fault:
        raise SettingError(f"{path} line {reader.line_num}: {fault}") from fault
    errors.raise_if_any(len(rows) + len(errors.errors))
    yield from rows


def parse_cell(text: Any) -> Any:
    """A text that holds a JSON list or object, as that; anything else as it is."""
    if isinstance(text, str) and text[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    return text


def _array(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise SettingError(
            f"{path} is not JSON: {fault}; write an array of objects, or one object on each line"
        ) from fault
    errors = LineErrors(path)
    for n, value in enumerate(values, start=1):
        if not isinstance(value, dict):
            errors.add(n, f"{json.dumps(value)[:40]} is not an object; write {{...}}")
    errors.raise_if_any(len(values))
    yield from enumerate(values, start=1)


def _lines(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    start = 0  # byte of the line in the file
    for n, line in enumerate(lines, start=1):
        row = line.removeprefix(codecs.BOM_UTF8) if n == 1 else line
        try:
            blank = not row.decode().strip()
        except UnicodeDecodeError as fault:
            where = start + len(line) - len(row) + fault.start
            raise SettingError(f"{path} is not UTF-8 text (byte {where}); write {FORMATS}") from fault
        if not blank:
            yield n, row.rstrip(b"\n")
        start += len(line)


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise SettingError(
            f"{path} is Parquet, which needs the package pyarrow; pip install 'turnwise-rl[data]', or write JSON Lines"
        ) from None
    try:
        yield from enumerate(map(without_nulls, _parquet_values(path, parquet)), start=1)
    except SettingError:
        raise
    except Exception as fault:  # pyarrow's errors have no common base class
        raise SettingError(f"{path} cannot be read as Parquet: {str(fault).splitlines()[0]}") from fault


def _parquet_values(path: Path, parquet: Any) -> Iterator[dict[str, Any]]:
    """The rows, a few at a time. Values that are alike share one copy until we know that all of them fit."""
    room = Room(path)
    with parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
        columns = [group.column(n) for group in groups for n in range(group.num_columns)]
        room.take(sum(c.total_uncompressed_size + VALUE_BYTES * c.num_values for c in columns))
        leaves = [file.schema.column(n) for n in range(file.metadata.num_columns)]
    shared = [
        leaf.path
        for leaf in leaves
        if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type in ("STRING", "JSON", "NONE")
    ]
    room = Room(path)
    with parquet.ParquetFile(path, read_dictionary=shared) as file:
        # a batch of one group has one dictionary: nested columns cannot have several
        for batch in chain.from_iterable(file.iter_batches(BATCH, row_groups=[n]) for n in range(len(groups))):
            room.take(sum(map(_expanded, batch.columns)))
            yield from batch.to_pylist()


def _expanded(array: Any) -> int:
    """The bytes of an Arrow array as Python values, each with a copy of its own."""
    import pyarrow
    from pyarrow import compute

    size = VALUE_BYTES * len(array)
    if isinstance(array, pyarrow.DictionaryArray):
        counts = compute.value_counts(array.indices.drop_null())
        lengths = compute.binary_length(array.dictionary.take(counts.field("values")))
        return size + int(compute.sum(compute.multiply(lengths.cast("int64"), counts.field("counts"))).as_py() or 0)
    if not pyarrow.types.is_nested(array.type):
        return size + int(array.nbytes)
    parts = array.flatten()
    return size + sum(map(_expanded, parts if isinstance(parts, list | tuple) else [parts]))


class Room:
    """How much a compressed file may still hold: a file of a few kilobytes can describe more than any machine has."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size
        self.left = max(SMALL_BYTES, MAX_EXPANSION * self.size)

    def take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise SettingError(
                f"{self.path} has {self.size:,} bytes and expands to more than {MAX_EXPANSION} times as many and more than "
                f"{SMALL_BYTES >> 20:,} MiB: it would fill the memory; if you trust it, unpack it to JSON Lines"
            )


class _Unzipped(io.BufferedReader):
    """A gzipped file, as far as there is room for it."""

    def __init__(self, path: Path) -> None:
        super().__init__(_Gunzip(path), 1 << 16)


class _Gunzip(io.RawIOBase):
    def __init__(self, path: Path) -> None:
        self.room, self.stream = Room(path), gzip.open(path)  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        self.room.take(len(data))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.stream.close()
        super().close()


def without_nulls(value: Any) -> Any:
    """A Parquet value without null fields: Parquet gives every struct all the fields of its column, written or not."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def is_finite_number(value: Any) -> bool:
    """Whether a value is a finite number or a bool."""
    return isinstance(value, bool | int | float) and math.isfinite(value)
