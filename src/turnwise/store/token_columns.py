"""What an update computed for each token (advantage, log-probability, gate, weight, gradient), as compressed rows of the ledger.

One row for each optimiser step: a JSON head (which trajectories, how many tokens of each, the columns' types) and one blob.
The bytes of a column are stored plane by plane, all first bytes, then all second bytes: neighbouring floats share sign and
exponent, so that zlib finds the repetition. A column that equals an earlier one is stored as its name.

Does not know what a column means, or how it is recomputed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnwise.store.database import LedgerReader
from turnwise.store.trajectory_codec import explain_damage

NARROW = {"entropy": "<f2", "gate": "<f2"}  # columns that people read and nobody computes with
LEVEL = 1  # of zlib: the higher ones take five times as long and save a tenth


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """The tokens of one optimiser step, by trajectory in the order of its batch.

    ``columns["advantage"]`` has one number for each sampled token; ``groups`` holds group id and trajectory ids of the whole
    batch that the step was credited with, and ``memory`` the state of the method's pieces before that."""

    step: int
    position: int
    trajectories: tuple[str, ...]
    sizes: tuple[int, ...]
    columns: Mapping[str, np.ndarray]
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)

    def of(self, trajectory: str) -> dict[str, np.ndarray]:
        """The columns of one trajectory; empty if this update did not read it."""
        if trajectory not in self.trajectories:
            return {}
        index = self.trajectories.index(trajectory)
        start = sum(self.sizes[:index])
        return {name: values[start : start + self.sizes[index]] for name, values in self.columns.items()}


def encode_columns(tokens: TokenColumns) -> tuple[str, bytes]:
    """``(head, data)`` of one update."""
    kinds: list[list[str]] = []
    parts: list[bytes] = []
    written: dict[str, bytes] = {}
    for name, values in tokens.columns.items():
        with np.errstate(over="ignore"):  # beyond the range of a narrow type: people read "inf"
            array = np.ascontiguousarray(values, "|u1" if values.dtype == np.bool_ else NARROW.get(name, "<f4"))
        raw = array.tobytes()
        same = next((other for other, bytes_ in written.items() if bytes_ == raw), "")
        kinds.append([name, array.dtype.str, same])
        if not same:
            written[name] = raw
            parts.append(array.view("u1").reshape(len(array), -1).T.tobytes() if len(array) else b"")
    head = {
        "trajectories": tokens.trajectories,
        "sizes": tokens.sizes,
        "columns": kinds,
        "groups": tokens.groups,
        "memory": tokens.memory,
    }
    return json.dumps(head, separators=(",", ":")), zlib.compress(b"".join(parts), LEVEL)


def decode_columns(step: int, position: int, head: str, data: bytes) -> TokenColumns:
    with explain_damage(f"update {position} of step {step}"):
        return _decode_columns(step, position, head, data)


def _decode_columns(step: int, position: int, head: str, data: bytes) -> TokenColumns:
    facts = json.loads(head)
    count, raw, start = sum(facts["sizes"]), zlib.decompress(data), 0
    columns: dict[str, np.ndarray] = {}
    for name, kind, same in facts["columns"]:
        if same:
            columns[name] = columns[same]
            continue
        dtype = np.dtype(kind)
        planes = np.frombuffer(raw, "u1", count * dtype.itemsize, start).reshape(dtype.itemsize, count)
        columns[name] = np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
        start += count * dtype.itemsize
    groups = tuple((group, tuple(members)) for group, members in facts["groups"])
    return TokenColumns(
        step, position, tuple(facts["trajectories"]), tuple(facts["sizes"]), columns, groups, facts["memory"]
    )


def read_columns(database: LedgerReader, step: int) -> tuple[TokenColumns, ...]:
    """The kept updates of one step, in order; none for a pruned step."""
    sql = "SELECT position, head, data FROM token_columns WHERE step = ? ORDER BY position"
    return tuple(decode_columns(step, *row) for row in database.fetch_all(sql, (step,)))


def kept_steps(database: LedgerReader) -> tuple[int, ...]:
    """The steps whose columns are still stored, ascending."""
    return tuple(row[0] for row in database.fetch_all("SELECT DISTINCT step FROM token_columns ORDER BY step"))


__all__ = ["TokenColumns", "decode_columns", "encode_columns", "kept_steps", "read_columns"]
