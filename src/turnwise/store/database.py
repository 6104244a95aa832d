"""The SQLite database of a ledger: its tables, how it is opened and read, and errors for a broken one.

Knows no rule about steps, and no rule about which transitions are allowed."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.core.records import Facts, Group, Status, Task, Trajectory
from turnwise.core.text import clean
from turnwise.errors import StoreError
from turnwise.store.atomic import atomic_write
from turnwise.store.resume import IssuedGroup
from turnwise.store.trajectory_codec import decode, decode_facts, decode_task

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
CREATE TABLE mixed (                        -- replayed or demonstrated trajectories that a step also trains on
    clock      INTEGER NOT NULL,
    step       INTEGER NOT NULL,
    trajectory TEXT    NOT NULL,
    origin     TEXT    NOT NULL,
    void       INTEGER NOT NULL DEFAULT 0   -- undone by a resume
);
CREATE TABLE token_columns (                -- what an update computed for each token; older steps are pruned
    step     INTEGER NOT NULL,              -- as in ``groups``: the number of steps completed before it
    position INTEGER NOT NULL,              -- of the update within the step
    head     TEXT    NOT NULL,
    data     BLOB    NOT NULL,
    PRIMARY KEY (step, position)
);
"""

CREATE_SCRIPT = (
    f"BEGIN IMMEDIATE; {TABLES} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT}; COMMIT;"
)


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Groups by state. ``issued == in_flight + finished + trained + dropped`` always holds."""

    issued: int
    in_flight: int
    finished: int
    trained: int
    dropped: int
    reasons: Mapping[str, int]  # number of dropped groups by reason


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group without its token arrays, for listings."""

    group_id: str
    task: Task
    state: str
    reason: str
    version: int
    step: int  # of its last transition: for a trained group, the step that trained on it
    trajectories: tuple[str, ...]
    reward: float | None  # mean over its trajectories
    success: float | None  # success rate, where the environment reports success


@dataclass(frozen=True, slots=True)
class EpisodeFacts:
    """One trajectory without tokens and messages."""

    status: str
    reason: str
    sampled: int  # tokens
    trained: bool
    facts: Facts


STATES = ("in_flight", "finished", "trained", "dropped")


class LedgerReader:
    """A ledger that is read: one connection, shared by threads under a mutex."""

    def __init__(self, path: Path, readonly: bool = True) -> None:
        if readonly and not path.exists():
            raise StoreError(f"there is no ledger at {path}")
        self.path = path
        self._mutex = threading.RLock()
        if not path.exists():
            # atomically: SQLite creates the file before it writes tables, and a kill in between would leave an empty file
            with (
                atomic_write(path) as temporary,
                contextlib.closing(sqlite3.connect(temporary)) as db,
                explain_sqlite_errors(path),
            ):
                db.executescript(CREATE_SCRIPT)
        uri = f"{path.resolve().as_uri()}?mode={'ro' if readonly else 'rwc'}"
        with explain_sqlite_errors(path):
            self._db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=10.0)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA trusted_schema = OFF")  # a stranger's views and triggers call no function
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
            with whole(self._db):
                yield self._db

    # --------------------------------------------------------------- queries

    def group_counts(self) -> GroupCounts:
        """Counts by state; raises when they do not sum to the number issued."""
        state_rows = self.fetch_all(
            "SELECT state, count(*) AS n, (SELECT value FROM facts WHERE name = 'issued') AS issued"
            " FROM groups GROUP BY state"
        )
        reason_rows = self.fetch_all(
            "SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason ORDER BY 2 DESC, 1"
        )
        states = {**dict.fromkeys(STATES, 0), **{row["state"]: row["n"] for row in state_rows}}
        issued = state_rows[0]["issued"] if state_rows else 0
        if issued != sum(states.values()):
            raise StoreError(f"{self.path} is inconsistent: {issued} groups were issued but {states} are recorded")
        return GroupCounts(issued=issued, **states, reasons={row[0]: row[1] for row in reason_rows})

    def pending(self) -> tuple[Group, ...]:
        """Finished but untrained groups, oldest first."""
        rows = self.fetch_all("SELECT * FROM groups WHERE state = 'finished' ORDER BY row")
        return tuple(map(self._load_group, rows))

    def in_flight(self) -> tuple[IssuedGroup, ...]:
        return tuple(map(issued_group, self.fetch_all("SELECT * FROM groups WHERE state = 'in_flight' ORDER BY row")))

    def groups(self, step: int | None = None) -> tuple[GroupSummary, ...]:
        """The groups whose last transition was during ``step`` (including those it trained on); ``None``: all."""
        where = "" if step is None else "WHERE step = :step"
        summaries = []
        for row in self.fetch_all(f"SELECT * FROM groups {where} ORDER BY row", {"step": step}):
            members = self.fetch_all(
                "SELECT id, reward, success FROM trajectories WHERE owner = ? ORDER BY row", (row["row"],)
            )
            means = []
            for name in ("reward", "success"):
                numbers = [m[name] for m in members if m[name] is not None]
                means.append(sum(numbers) / len(numbers) if numbers else None)
            task, ids = decode_task(row["task"]), tuple(m["id"] for m in members)
            summaries.append(
                GroupSummary(row["id"], task, row["state"], row["reason"], row["version"], row["step"], ids, *means)
            )
        return tuple(summaries)

    def group(self, group_id: str) -> Group:
        row = self.find_group(group_id)
        if row is None:
            raise StoreError(f"there is no group {group_id!r} in {self.path}")
        return self._load_group(row)

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """The newest trajectory with that id. After pruning, its token arrays are empty and all else is kept."""
        sql = "SELECT record, tokens FROM trajectories WHERE id = ? ORDER BY row DESC LIMIT 1"
        rows = self.fetch_all(sql, (clean(trajectory_id),))
        if not rows:
            raise StoreError(f"there is no trajectory {trajectory_id!r} in {self.path}")
        return decode(rows[0]["record"], rows[0]["tokens"], trajectory_id)

    def mixed(self) -> tuple[tuple[int, str, str], ...]:
        """Mixed-in trajectories in order: step, trajectory id, origin."""
        rows = self.fetch_all("SELECT step, trajectory, origin FROM mixed WHERE void = 0 ORDER BY clock, rowid")
        return tuple((row["step"], row["trajectory"], row["origin"]) for row in rows)

    def failures(self) -> dict[str, int]:
        """Numbers of failed trajectories by reason, most frequent first."""
        sql = "SELECT reason, count(*) FROM trajectories WHERE status = 'failed' GROUP BY reason ORDER BY 2 DESC, 1"
        return {row[0]: row[1] for row in self.fetch_all(sql)}

    def episode_counts(self) -> dict[str, int]:
        """Numbers of stored trajectories by status, of groups that no resume has rolled back."""
        sql = "SELECT t.status, count(*) FROM trajectories t JOIN groups g ON g.row = t.owner WHERE g.void = 0 GROUP BY t.status"
        return {row[0]: row[1] for row in self.fetch_all(sql)}

    def episode_facts(self) -> tuple[EpisodeFacts, ...]:
        """Status, size and facts of every stored trajectory, in order, without tokens and messages."""
        rows = self.fetch_all(
            "SELECT g.state, t.id, t.status, t.reason, t.sampled, t.record FROM trajectories t JOIN groups g ON g.row = t.owner"
            " WHERE g.void = 0 ORDER BY t.row"
        )
        episodes = []
        for row in rows:
            trained = row["state"] == "trained" and row["status"] != Status.FAILED
            facts = decode_facts(row["record"], row["id"])
            episodes.append(EpisodeFacts(row["status"], row["reason"], row["sampled"], trained, facts))
        return tuple(episodes)

    def find_group(self, group_id: str) -> sqlite3.Row | None:
        """The row of a group that no resume has rolled back."""
        rows = self.fetch_all("SELECT * FROM groups WHERE id = ? AND void = 0", (group_id,))
        return rows[0] if rows else None

    def _load_group(self, row: sqlite3.Row) -> Group:
        return Group(row["id"], decode_task(row["task"]), self.members(row["row"]))

    def members(self, owner: int) -> tuple[Trajectory, ...]:
        """The trajectories of the group in row ``owner``, in order."""
        sql = "SELECT record, tokens, id FROM trajectories WHERE owner = ? ORDER BY row"
        return tuple(decode(*member) for member in self.fetch_all(sql, (owner,)))


def issued_group(row: sqlite3.Row) -> IssuedGroup:
    return IssuedGroup(row["id"], decode_task(row["task"]), row["step"], row["version"])


@contextlib.contextmanager
def whole(db: sqlite3.Connection) -> Iterator[None]:
    """A transaction: commit the whole block or roll it back."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        # on a full disk SQLite may already have rolled back
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def explain_sqlite_errors(path: Path) -> Iterator[None]:
    """Re-raise SQLite errors as :class:`StoreError`, with what the user can do."""
    try:
        yield
    except (sqlite3.DatabaseError, OSError) as error:
        message, text = str(error), f"the ledger {path} failed: {error}"
        if "disk is full" in message or "No space left" in message:
            text = f"no space left on the disk for {path}; free some space and resume the run"
        elif "malformed" in message or "not a database" in message:
            text = f"{path} is damaged or is not a ledger: {error}"
        raise StoreError(text) from error


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    is_empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if is_empty and db.execute("PRAGMA application_id").fetchone()[0] == 0:
        db.executescript(CREATE_SCRIPT)  # an empty file becomes a ledger; a database of another program does not


def _check(db: sqlite3.Connection, path: Path) -> None:
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise StoreError(f"{path} is not a Turnwise ledger")
    format_number = db.execute("PRAGMA user_version").fetchone()[0]
    if format_number != FORMAT:
        raise StoreError(
            f"{path} was written in ledger format {format_number}, this version reads format {FORMAT}; "
            "use the version of Turnwise that wrote it, or start a new run"
        )
