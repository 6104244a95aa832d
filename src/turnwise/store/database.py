"""The database under a ledger: its tables, how it is opened, and what a broken one says. Knows no rule about steps."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise.errors import StoreError
from turnwise.store.atomic import aside

VERSION = 1
APPLICATION = 0x54574C31  # "TWL1": no other program's database is mistaken for a ledger

TABLES = """
CREATE TABLE groups (
    row         INTEGER PRIMARY KEY,
    id          TEXT    NOT NULL,
    task        TEXT    NOT NULL,
    version     INTEGER NOT NULL,
    state       TEXT    NOT NULL CHECK (state IN ('in_flight', 'finished', 'trained', 'dropped')),
    step        INTEGER NOT NULL,           -- of the last thing that happened to it
    reason      TEXT    NOT NULL DEFAULT '',
    void        INTEGER NOT NULL DEFAULT 0, -- undone by a resume: its id may be issued again
    issued_at   INTEGER NOT NULL,           -- the ledger's clock when each thing happened
    finished_at INTEGER,
    trained_at  INTEGER,
    dropped_at  INTEGER
);
CREATE UNIQUE INDEX group_live ON groups (id) WHERE void = 0;
CREATE INDEX group_state ON groups (state, row);
CREATE INDEX group_step ON groups (step);
CREATE INDEX group_issued ON groups (issued_at);
CREATE TABLE trajectories (
    row      INTEGER PRIMARY KEY,
    owner    INTEGER NOT NULL REFERENCES groups (row),
    id       TEXT    NOT NULL,
    status   TEXT    NOT NULL,
    reason   TEXT    NOT NULL,
    reward   REAL,
    success  INTEGER,
    turns    INTEGER NOT NULL,
    sampled  INTEGER NOT NULL,
    record   TEXT    NOT NULL,
    tokens   BLOB                           -- NULL once pruned
);
CREATE INDEX trajectory_owner ON trajectories (owner);
CREATE INDEX trajectory_id ON trajectories (id);
CREATE TABLE seals (clock INTEGER PRIMARY KEY, step INTEGER NOT NULL, void INTEGER NOT NULL DEFAULT 0);
CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO facts VALUES ('issued', 0), ('clock', 0);
"""

BIRTH = f"BEGIN IMMEDIATE; {TABLES} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; COMMIT;"

MIXED = """
CREATE TABLE IF NOT EXISTS mixed (          -- past or foreign trajectories that a step also learned from
    clock      INTEGER NOT NULL,
    step       INTEGER NOT NULL,
    trajectory TEXT    NOT NULL,
    origin     TEXT    NOT NULL,
    void       INTEGER NOT NULL DEFAULT 0   -- undone by a resume
)
"""


class Database:
    """One connection, shared by threads."""

    def __init__(self, path: Path, readonly: bool) -> None:
        if readonly and not path.exists():
            raise StoreError(f"there is no ledger at {path}")
        self.path = path
        self._guard = threading.RLock()
        if not path.exists():
            _create(path)
        where = f"{path.resolve().as_uri()}?mode={'ro' if readonly else 'rwc'}"
        with in_words(path):
            self._db = sqlite3.connect(where, uri=True, isolation_level=None, check_same_thread=False, timeout=10.0)
            self._db.row_factory = sqlite3.Row
            try:
                if not readonly:
                    _prepare(self._db)
                _check(self._db, path)
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        with self._guard:
            self._db.close()

    def all(self, sql: str, values: Any = ()) -> list[sqlite3.Row]:
        with self._guard, in_words(self.path):
            return self._db.execute(sql, values).fetchall()

    def tick(self) -> int:
        """The next reading of the ledger's clock: one per event, never reused. Inside a transaction."""
        self._db.execute("UPDATE facts SET value = value + 1 WHERE name = 'clock'")
        return int(self._db.execute("SELECT value FROM facts WHERE name = 'clock'").fetchone()[0])

    @contextlib.contextmanager
    def transaction(self, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """All of the block or nothing of it. ``durable`` also survives a power cut, with everything before it."""
        with self._guard, in_words(self.path):
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                # a full disk may already have rolled back by itself
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


@contextlib.contextmanager
def in_words(path: Path) -> Iterator[None]:
    """Turn what SQLite says into a :class:`StoreError` a person can act on."""
    try:
        yield
    except (sqlite3.DatabaseError, OSError) as error:
        said = str(error)
        if "disk is full" in said or "No space left" in said:
            raise StoreError(f"no room left on the disk for {path}; free some space and resume the run") from error
        if "malformed" in said or "not a database" in said:
            raise StoreError(f"{path} is damaged or is not a ledger: {error}") from error
        raise StoreError(f"the ledger {path} failed: {error}") from error


def _create(path: Path) -> None:
    """Aside: SQLite makes the file first and fills it then, and a kill in between would leave a ledger that is none."""
    with aside(path) as new, contextlib.closing(sqlite3.connect(new)) as db, in_words(path):
        db.executescript(BIRTH)


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    fresh = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if fresh and db.execute("PRAGMA application_id").fetchone()[0] == 0:
        db.executescript(BIRTH)  # an older version was killed before it had filled the file
    if db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION:
        db.execute(MIXED)  # a ledger of an older version had none


def _check(db: sqlite3.Connection, path: Path) -> None:
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise StoreError(f"{path} is not a ledger of Turnwise")
    seen = db.execute("PRAGMA user_version").fetchone()[0]
    if seen != VERSION:
        raise StoreError(
            f"{path} was written in ledger format {seen}, this version reads format {VERSION}; "
            "use the version of Turnwise that wrote it, or start a new run"
        )
