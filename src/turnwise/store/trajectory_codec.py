"""A trajectory as a row: one JSON text for what people read, one compact blob for its token arrays. Never pickle.

Exact: what comes back equals what went in, log-probabilities bit for bit (float32 when that loses nothing, else
float64). Sequences come back as tuples; messages as JSON gives them (a tuple inside one comes back as a list).

Does not know about SQL, groups' states or steps.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from numbers import Integral, Real
from typing import Any

import numpy as np

from turnwise.core.records import Fork, Origin, Status, Stop, Task, Trajectory, Turn

WHOLE = ("context", "tokens", "version", "blind")
REAL = ("mass", "logp")
NARROW = (
    ("|u1", "B"),
    ("<u2", "H"),
    ("<i4", "i"),
    ("<i8", "q"),
)  # NumPy's name of a kind of whole number, and struct's
WINDOW = (10, 15)  # bits of the smallest and the largest window a compressor looks back through
SCALARS = {f.name: f.default for f in fields(Turn) if f.name not in (*WHOLE, *REAL, "facts")}


def encode_task(task: Task) -> str:
    return _dumps(_fields(task))


def _fields(task: Task) -> list[Any]:
    return [task.environment, task.seed, task.split, task.difficulty]


def decode_task(text: str) -> Task:
    return Task(*json.loads(text))


def encode(trajectory: Trajectory) -> tuple[str, bytes]:
    """``(record, blob)``: everything but the token arrays, and the token arrays."""
    columns: dict[str, Any] = {}
    parts: list[bytes] = []
    for name in (*WHOLE, *REAL):
        values: list[Sequence[Any]] = [getattr(turn, name) for turn in trajectory.turns]
        flat = values[0] if len(values) == 1 else list(chain.from_iterable(values))
        kind, packed = _narrow_whole(flat) if name in WHOLE else _narrow_real(flat)
        columns[name] = [kind, [len(value) for value in values]]
        parts.append(packed)
    fork = trajectory.fork
    record = {
        "id": trajectory.id,
        "task": _fields(trajectory.task),
        "turns": [_scalars(turn) for turn in trajectory.turns],
        "rewards": dict(trajectory.rewards),
        "status": trajectory.status,
        "reason": trajectory.reason,
        "origin": trajectory.origin,
        "fork": None if fork is None else [fork.parent, fork.turn, fork.token],
        "guidance": trajectory.guidance,
        "success": trajectory.success,
        "end": trajectory.end,
        "facts": dict(trajectory.facts),
        "answer": list(trajectory.answer),
        "messages": list(trajectory.messages),
        "columns": columns,
    }
    # log-probabilities, the last column, stand behind the compressed ones: their bits are noise that costs half the time
    return _dumps(record), _compressed(b"".join(parts[:-1])) + parts[-1]


def decode(record: str, blob: bytes | None) -> Trajectory:
    """The inverse. Without its blob (pruned) the trajectory comes back with empty token arrays, all else kept."""
    read = json.loads(record)
    arrays = _arrays(read["columns"], blob)
    turns = tuple(
        Turn(**arrays[place], **{**scalars, "stop": Stop(scalars.get("stop", Stop.TOKEN))})
        for place, scalars in enumerate(read["turns"])
    )
    return Trajectory(
        id=read["id"],
        task=Task(*read["task"]),
        turns=turns,
        rewards=read["rewards"],
        status=Status(read["status"]),
        reason=read["reason"],
        origin=Origin(read["origin"]),
        fork=None if read["fork"] is None else Fork(*read["fork"]),
        guidance=read["guidance"],
        success=read["success"],
        end=read.get("end"),
        facts=read.get("facts", {}),
        answer=tuple(read.get("answer", ())),
        messages=tuple(read["messages"]),
    )


def _arrays(columns: dict[str, Any], blob: bytes | None) -> list[dict[str, Any]]:
    """Per turn, its arrays."""
    sizes = columns["tokens"][1]
    if blob is None:
        return [{"context": (), "tokens": ()} for _ in sizes]
    reader = zlib.decompressobj()
    data, start = reader.decompress(blob) + reader.unused_data, 0  # a blob of an earlier version has nothing behind
    out: list[dict[str, Any]] = [{} for _ in sizes]
    for name, (kind, lengths) in columns.items():
        array = np.frombuffer(data, np.dtype(kind), sum(lengths), start)
        start += array.nbytes
        values, at = array.tolist(), 0
        for turn, length in zip(out, lengths):
            turn[name] = tuple(values[at : at + length])
            at += length
    return out


def _scalars(turn: Turn) -> dict[str, Any]:
    """Only what differs from the default: short records, and old ones stay readable when a field is added."""
    said = {name: value for name, default in SCALARS.items() if (value := getattr(turn, name)) != default}
    return {**said, "facts": dict(turn.facts)} if turn.facts else said


def _narrow_whole(values: Sequence[int]) -> tuple[str, bytes]:
    """The narrowest kind that holds them all, and the numbers in it."""
    for kind, letter in NARROW[:-1]:
        with contextlib.suppress(struct.error):
            return kind, struct.pack(f"<{len(values)}{letter}", *values)
    kind, letter = NARROW[-1]
    return kind, struct.pack(f"<{len(values)}{letter}", *values)


def _narrow_real(values: Sequence[float]) -> tuple[str, bytes]:
    if not len(values):  # NumPy arrays have no truth of their own
        return "<f4", b""
    double = struct.pack(f"<{len(values)}d", *values)
    array = np.frombuffer(double, "<f8")
    with np.errstate(over="ignore"):  # too large for float32 becomes inf, which the comparison notices
        single = array.astype("<f4")
    exact = bool((single == array).all()) or np.array_equal(single, array, equal_nan=True)
    return ("<f4", single.tobytes()) if exact else ("<f8", double)


def _compressed(data: bytes) -> bytes:
    """Of half a thousand bytes, half the time of a compressor is spent on clearing a window of 32 thousand."""
    least, most = WINDOW
    return zlib.compress(data, 1, wbits=min(most, max(least, len(data).bit_length())))


def clean(text: str) -> str:
    """For columns of the database: lone surrogates of half-decoded tokens are no valid UTF-8. The record is exact."""
    return text.encode("utf-8", "replace").decode()


def _dumps(value: Any) -> str:
    # ASCII only: a lone surrogate from a half-decoded token must not break the database's UTF-8
    return _JSON.encode(value)


def _plain(value: Any) -> Any:
    """NumPy numbers become Python's; anything else in a message is for people, so its text will do."""
    if isinstance(value, Integral | np.bool_):
        return bool(value) if isinstance(value, np.bool_) else int(value)
    return float(value) if isinstance(value, Real) else str(value)


_JSON = json.JSONEncoder(separators=(",", ":"), default=_plain)
