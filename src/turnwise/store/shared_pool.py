"""A pool of finished groups that several runs write and read: one SQLite file in a folder of its own.

    write(sender, step, groups)      once for each group; the same group again changes nothing
    read(reader, step)               the groups of the other senders, as the pool was when the reader first took that step

The pool is bounded: a reader sees the last ``capacity`` groups, and groups that no reader can see any more are deleted. What a
reader saw is recorded by step, so that a resumed run sees the same again. Does not know who trains on what.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from turnwise.core.records import Group
from turnwise.core.text import clean
from turnwise.errors import StoreError
from turnwise.store.database import explain_sqlite_errors, whole
from turnwise.store.trajectory_codec import decode, encode

FILE = "pool.sqlite"
FORMAT = 1
APPLICATION_ID = 0x54575031  # "TWP1"
LEAST = 1024  # groups that are kept at least: a resumed run looks back further than a reader
BEHIND = 4  # otherwise so many times ``capacity``
TABLES = """
CREATE TABLE groups (
    row       INTEGER PRIMARY KEY AUTOINCREMENT,
    sender    TEXT    NOT NULL,
    step      INTEGER NOT NULL,
    id        TEXT    NOT NULL,
    tokenizer TEXT    NOT NULL,           -- digest: ids of another tokenizer mean other tokens
    UNIQUE (sender, id)
);
CREATE TABLE trajectories (owner INTEGER NOT NULL, position INTEGER NOT NULL, record TEXT NOT NULL, tokens BLOB NOT NULL);
CREATE INDEX trajectory_owner ON trajectories (owner);
CREATE TABLE reads (reader TEXT NOT NULL, step INTEGER NOT NULL, last INTEGER NOT NULL, PRIMARY KEY (reader, step));
"""


class SharedPool:
    """One connection to a pool. Other processes may use the same folder at the same time."""

    def __init__(self, folder: Path, capacity: int, tokenizer: str) -> None:
        self.path, self.capacity, self.tokenizer = folder / FILE, capacity, tokenizer
        with explain_sqlite_errors(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=60.0)
        with self._transaction() as db:  # two runs may create the pool at the same moment
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                for statement in TABLES.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {FORMAT}")
            kind, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if kind != APPLICATION_ID:
            raise StoreError(f"{self.path} is not a shared pool; name a folder of its own")
        if version != FORMAT:
            raise StoreError(
                f"{self.path} was written in pool format {version}, this version reads format {FORMAT}; name a new folder"
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with explain_sqlite_errors(self.path), whole(self._db):
            yield self._db

    def close(self) -> None:
        self._db.close()

    def write(self, sender: str, step: int, groups: Sequence[Group]) -> None:
        """Add groups. Of a group that the sender has written before, the first version stays: others may have read it."""
        with self._transaction() as db:
            for group in groups:
                added = db.execute(
                    "INSERT OR IGNORE INTO groups (sender, step, id, tokenizer) VALUES (?, ?, ?, ?)",
                    (sender, step, clean(group.id), self.tokenizer),
                )
                if added.rowcount:
                    rows = [(added.lastrowid, i, *encode(t)) for i, t in enumerate(group.trajectories)]
                    db.executemany("INSERT INTO trajectories VALUES (?, ?, ?, ?)", rows)
            expired = _last_row(db) - max(LEAST, BEHIND * self.capacity)
            db.execute("DELETE FROM trajectories WHERE owner <= ?", (expired,))
            db.execute("DELETE FROM groups WHERE row <= ?", (expired,))

    def read(self, reader: str, step: int) -> list[tuple[str, Group]]:
        """(sender, group) of the other senders with the same tokenizer, oldest first."""
        with self._transaction() as db:
            seen = db.execute("SELECT last FROM reads WHERE reader = ? AND step = ?", (reader, step)).fetchone()
            last = _last_row(db) if seen is None else int(seen[0])
            if seen is None:
                db.execute("INSERT INTO reads VALUES (?, ?, ?)", (reader, step, last))
            groups = db.execute(
                "SELECT row, sender, id FROM groups WHERE row > ? AND row <= ? AND sender != ? AND tokenizer = ? ORDER BY row",
                (last - self.capacity, last, reader, self.tokenizer),
            ).fetchall()
            read = []
            for row, sender, key in groups:
                sql = "SELECT record, tokens FROM trajectories WHERE owner = ? ORDER BY position"
                members = tuple(decode(record, tokens, key) for record, tokens in db.execute(sql, (row,)))
                read.append((sender, Group(key, members[0].task, members)))
            return read

    def counts(self) -> dict[str, int]:
        """Groups in the pool: all of them, and those of another tokenizer, which this reader cannot use."""
        with self._transaction() as db:
            total = db.execute("SELECT count(*) FROM groups").fetchone()[0]
            other = db.execute("SELECT count(*) FROM groups WHERE tokenizer != ?", (self.tokenizer,)).fetchone()[0]
        return {"groups": int(total), "other_tokenizer": int(other)}


def _last_row(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT coalesce(max(row), 0) FROM groups").fetchone()[0])
