"""Encodes a trajectory as a database row: JSON text for readable fields, a compact blob for token arrays. No pickle.

The round trip is exact, log-probabilities bit for bit (float32 when that loses nothing, else
float64). Sequences are decoded as tuples; messages as JSON gives them (a tuple inside one becomes a list).

Does not know about SQL, groups' states or steps.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain
from numbers import Integral, Real
from typing import Any

import numpy as np

from turnwise.core.records import Fork, Limit, Origin, Status, Stop, Task, Trajectory, Turn
from turnwise.errors import StoreError

INTEGER_COLUMNS = ("context", "tokens", "version", "masked_context")
FLOAT_COLUMNS = ("mass", "logp")
KEPT = "kept"  # stored only where a filter was active: all ids, and how many each token has, as two columns
ROUTES = "routes"  # stored only where the policy has routers; every row is as wide as the others
STORED_AS = {"masked_context": "blind"}  # keys of the format that differ from the field of ``Turn``
FIELD_OF = {key: name for name, key in STORED_AS.items()}
KEPT_SIZES = "kept_sizes"
INTEGER_TYPES = {"|u1": "B", "<u2": "H", "<i4": "i", "<i8": "q"}  # NumPy dtype: struct format, narrowest first
WINDOW_BITS = (10, 15)  # smallest and largest zlib window
NOT_SCALAR = (*INTEGER_COLUMNS, *FLOAT_COLUMNS, KEPT, ROUTES, "facts")
SCALAR_DEFAULTS = {f.name: f.default for f in fields(Turn) if f.name not in NOT_SCALAR}


def encode_task(task: Task) -> str:
    return _JSON.encode([task.environment, task.seed, task.split, task.difficulty])


@contextlib.contextmanager
def explain_damage(what: str) -> Iterator[None]:
    """Say which stored text cannot be read: somebody else may have written it. The one place for all that a ledger holds."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, zlib.error) as fault:
        words = f"{type(fault).__name__}: {str(fault)[:200]}"
        raise StoreError(f"{what} in the ledger is damaged, and cannot be read ({words})") from fault


def decode_task(text: str) -> Task:
    with explain_damage(f"the task {text!r:.60} of a group"):
        return Task(*json.loads(text))


def decode_facts(record: str, name: str) -> dict[str, Any]:
    """The facts alone of the trajectory ``name``."""
    with explain_damage(f"the record of the trajectory {name!r}"):
        return dict(json.loads(record).get("facts", {}))


def encode(trajectory: Trajectory) -> tuple[str, bytes]:
    """``(record, blob)``: JSON of everything but the token arrays, and the token arrays."""
    columns: dict[str, Any] = {}
    parts: list[bytes] = []
    if any(turn.routes for turn in trajectory.turns):
        rows = [row for turn in trajectory.turns for row in turn.routes]
        experts = np.frombuffer(b"".join(rows), "<i2")
        # a byte each where there are at most 256 experts; int16 as in ``Turn`` otherwise
        kind = "|u1" if experts.size and int(experts.min()) >= 0 and int(experts.max()) < 256 else "<i2"
        columns[ROUTES] = [kind, [len(turn.routes) for turn in trajectory.turns], len(rows[0]) // 2]
        parts.append(experts.astype(kind).tobytes())
    if any(turn.kept for turn in trajectory.turns):
        ids = [np.frombuffer(b"".join(turn.kept), "<i4") for turn in trajectory.turns]
        kind, packed = _pack_integers(np.concatenate(ids).tolist())
        sizes, packed_sizes = _pack_integers([len(row) // 4 for turn in trajectory.turns for row in turn.kept])
        columns[KEPT] = [kind, [len(x) for x in ids]]
        columns[KEPT_SIZES] = [sizes, [len(turn.kept) for turn in trajectory.turns]]
        parts += [packed, packed_sizes]
    for name in (*INTEGER_COLUMNS, *FLOAT_COLUMNS):
        values: list[Sequence[Any]] = [getattr(turn, name) for turn in trajectory.turns]
        flat = values[0] if len(values) == 1 else list(chain.from_iterable(values))
        kind, packed = _pack_integers(flat) if name in INTEGER_COLUMNS else _pack_floats(flat)
        columns[STORED_AS.get(name, name)] = [kind, [len(value) for value in values]]
        parts.append(packed)
    turns: list[dict[str, Any]] = []
    for turn in trajectory.turns:  # only fields that differ from their default: records stay short
        changed = {name: x for name, default in SCALAR_DEFAULTS.items() if (x := getattr(turn, name)) != default}
        turns.append({**changed, "facts": dict(turn.facts)} if turn.facts else changed)
    fork, task = trajectory.fork, trajectory.task
    record = {
        "id": trajectory.id,
        "task": [task.environment, task.seed, task.split, task.difficulty],
        "turns": turns,
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
        **({"limit": trajectory.limit} if trajectory.limit else {}),
        **({"lost": True} if trajectory.lost else {}),
    }
    # Fit the window to the data: for 500 bytes, zlib spends half its time on clearing its default window of 32 KiB.
    data, (smallest, largest) = b"".join(parts[:-1]), WINDOW_BITS
    compressed = zlib.compress(data, 1, wbits=min(largest, max(smallest, len(data).bit_length())))
    # append log-probabilities, the last column, uncompressed: they do not compress, and trying takes half the time
    return _JSON.encode(record), compressed + parts[-1]


def decode(record: str, blob: bytes | None, name: str = "") -> Trajectory:
    """The inverse of :func:`encode`. Without the blob (pruned) the token arrays are empty and all else is kept. ``name``: the id
    of the row, for the words about one that is damaged."""
    with explain_damage(f"the record of the trajectory {name!r}"):
        return _decode(record, blob)


def _decode(record: str, blob: bytes | None) -> Trajectory:
    encoded = json.loads(record)
    arrays = _arrays(encoded["columns"], blob)
    turns = tuple(
        Turn(**arrays[index], **{**scalars, "stop": Stop(scalars.get("stop", Stop.TOKEN))})
        for index, scalars in enumerate(encoded["turns"])
    )
    return Trajectory(
        id=encoded["id"],
        task=Task(*encoded["task"]),
        turns=turns,
        rewards=encoded["rewards"],
        status=Status(encoded["status"]),
        reason=encoded["reason"],
        origin=Origin(encoded["origin"]),
        fork=None if encoded["fork"] is None else Fork(*encoded["fork"]),
        guidance=encoded["guidance"],
        success=encoded["success"],
        end=encoded["end"],
        facts=encoded["facts"],
        answer=tuple(encoded["answer"]),
        messages=tuple(encoded["messages"]),
        limit=Limit(encoded["limit"]) if "limit" in encoded else None,
        lost="lost" in encoded,
    )


def _arrays(columns: dict[str, Any], blob: bytes | None) -> list[dict[str, Any]]:
    """One dict of arrays per turn."""
    sizes = columns["tokens"][1]
    if blob is None:
        return [{"context": (), "tokens": ()} for _ in sizes]
    decompressor = zlib.decompressobj()
    data, start = decompressor.decompress(blob) + decompressor.unused_data, 0
    out: list[dict[str, Any]] = [{} for _ in sizes]
    for name, (dtype, lengths, *width) in columns.items():
        array = np.frombuffer(data, np.dtype(dtype), sum(lengths) * (width[0] if width else 1), start)
        start += array.nbytes
        # only routes have a width: ``Turn`` holds them as bytes, a row for each position
        values = [row.tobytes() for row in array.astype("<i2").reshape(-1, width[0])] if width else array.tolist()
        at = 0
        for turn, length in zip(out, lengths):
            turn[FIELD_OF.get(name, name)] = tuple(values[at : at + length])
            at += length
    for turn in out if KEPT in columns else ():
        sizes = turn.pop(KEPT_SIZES)
        ends, packed = np.cumsum(sizes, dtype=np.int64).tolist(), np.array(turn[KEPT], "<i4").tobytes()
        turn[KEPT] = tuple(packed[4 * (end - size) : 4 * end] for end, size in zip(ends, sizes))
    return out


def _pack_integers(values: Sequence[int]) -> tuple[str, bytes]:
    """The narrowest integer type that holds all values, and the packed values."""
    *narrow, (widest, widest_letter) = INTEGER_TYPES.items()
    for kind, letter in narrow:  # packing fails sooner than a search for the extremes would end
        with contextlib.suppress(struct.error):
            return kind, struct.pack(f"<{len(values)}{letter}", *values)
    return widest, struct.pack(f"<{len(values)}{widest_letter}", *values)


def _pack_floats(values: Sequence[float]) -> tuple[str, bytes]:
    if not len(values):  # the truth value of a NumPy array is undefined
        return "<f4", b""
    double = struct.pack(f"<{len(values)}d", *values)
    array = np.frombuffer(double, "<f8")
    with np.errstate(over="ignore"):  # values beyond float32 become inf, which the comparison detects
        single = array.astype("<f4")
    exact = bool((single == array).all()) or np.array_equal(single, array, equal_nan=True)
    return ("<f4", single.tobytes()) if exact else ("<f8", double)


def _plain(value: Any) -> Any:
    """Convert NumPy numbers to Python's; store anything else in a message as text, since only people read it."""
    if isinstance(value, Integral | np.bool_):
        return bool(value) if isinstance(value, np.bool_) else int(value)
    return float(value) if isinstance(value, Real) else str(value)


# escapes to ASCII: a lone surrogate from a partly decoded token is not valid UTF-8 for the database
_JSON = json.JSONEncoder(separators=(",", ":"), default=_plain)
