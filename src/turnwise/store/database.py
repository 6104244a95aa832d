"""The SQLite database of a ledger: its tables, how it is opened, and errors for a broken one. Knows no rule about steps."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise.errors import StoreError
from turnwise.store.atomic import atomic_write

FORMAT = 1
APPLICATION_ID = 0x54574C31  # "TWL1": distinguishes a ledger from the databases of other programs

TABLES = """
CREATE TABLE groups (
    row         INTEGER PRIMARY KEY,
    id          TEXT    NOT NULL,
    task        TEXT    NOT NULL,
    version     INTEGER NOT NULL,
    state       TEXT    NOT NULL CHECK (state IN ('in_flight', 'finished', 'trained', 'dropped')),
    step        INTEGER NOT NULL,           -- of its last transition
    reason      TEXT    NOT NULL DEFAULT '',
    void        INTEGER NOT NULL DEFAULT 0, -- undone by a resume: its id may be issued again
    issued_at   INTEGER NOT NULL,           -- the ledger's clock at each transition
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

CREATE_SCRIPT = (
    f"BEGIN IMMEDIATE; {TABLES} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT}; COMMIT;"
)

MIXED_TABLE = """
CREATE TABLE IF NOT EXISTS mixed (          -- replayed or demonstrated trajectories that a step also trains on
    clock      INTEGER NOT NULL,
    step       INTEGER NOT NULL,
    trajectory TEXT    NOT NULL,
    origin     TEXT    NOT NULL,
    void       INTEGER NOT NULL DEFAULT 0   -- undone by a resume
)
"""

TOKEN_COLUMNS_TABLE = """
CREATE TABLE IF NOT EXISTS token_columns (  -- what an update computed for each token; older steps are pruned
    step     INTEGER NOT NULL,              -- as in ``groups``: the number of steps completed before it
    position INTEGER NOT NULL,              -- of the update within the step
    head     TEXT    NOT NULL,
    data     BLOB    NOT NULL,
    PRIMARY KEY (step, position)
)
"""


class Database:
    """One connection, shared by threads under a mutex."""

    def __init__(self, path: Path, readonly: bool) -> None:
        if readonly and not path.exists():
            raise StoreError(f"there is no ledger at {path}")
        self.path = path
        self._mutex = threading.RLock()
        if not path.exists():
            _create(path)
        uri = f"{path.resolve().as_uri()}?mode={'ro' if readonly else 'rwc'}"
        with explain_sqlite_errors(path):
            self._db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=10.0)
            self._db.row_factory = sqlite3.Row
            try:
                if not readonly:
                    _prepare(self._db)
                _check(self._db, path)
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        with self._mutex:
            self._db.close()

    def fetch_all(self, sql: str, values: Any = ()) -> list[sqlite3.Row]:
        with self._mutex, explain_sqlite_errors(self.path):
            return self._db.execute(sql, values).fetchall()

    def next_tick(self) -> int:
        """Advance the ledger's clock and return it: one tick per event, never reused. Call inside a transaction."""
        self._db.execute("UPDATE facts SET value = value + 1 WHERE name = 'clock'")
        return int(self._db.execute("SELECT value FROM facts WHERE name = 'clock'").fetchone()[0])

    @contextlib.contextmanager
    def transaction(self, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Commit the whole block or roll it back. ``durable``: it and everything before it also survive a power failure."""
        with self._mutex, explain_sqlite_errors(self.path):
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                # on a full disk SQLite may already have rolled back
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


@contextlib.contextmanager
def explain_sqlite_errors(path: Path) -> Iterator[None]:
    """Re-raise SQLite errors as :class:`StoreError`, with what the user can do."""
    try:
        yield
    except (sqlite3.DatabaseError, OSError) as error:
        message = str(error)
        if "disk is full" in message or "No space left" in message:
            raise StoreError(f"no space left on the disk for {path}; free some space and resume the run") from error
        if "malformed" in message or "not a database" in message:
            raise StoreError(f"{path} is damaged or is not a ledger: {error}") from error
        raise StoreError(f"the ledger {path} failed: {error}") from error


def _create(path: Path) -> None:
    """Create it atomically: SQLite creates the file before it writes tables, and a kill in between would leave an empty file."""
    with (
        atomic_write(path) as temporary,
        contextlib.closing(sqlite3.connect(temporary)) as db,
        explain_sqlite_errors(path),
    ):
        db.executescript(CREATE_SCRIPT)


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    is_empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if is_empty and db.execute("PRAGMA application_id").fetchone()[0] == 0:
        db.executescript(CREATE_SCRIPT)  # an older version was killed before it wrote the tables
    if db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID:
        db.execute(MIXED_TABLE)  # ledgers of older versions lack these tables
        db.execute(TOKEN_COLUMNS_TABLE)


def _check(db: sqlite3.Connection, path: Path) -> None:
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise StoreError(f"{path} is not a Turnwise ledger")
    format_number = db.execute("PRAGMA user_version").fetchone()[0]
    if format_number != FORMAT:
        raise StoreError(
            f"{path} was written in ledger format {format_number}, this version reads format {FORMAT}; "
            "use the version of Turnwise that wrote it, or start a new run"
        )
