"""Verdicts that a judge has given, in a SQLite file: nothing is asked twice, and a resumed run gets the same verdicts again.

A verdict is stored before it is used. A question that got no verdict is stored with the reason, so that a resumed run takes the
same course; remove the file to ask again. Knows no judge.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from turnwise.errors import StoreError
from turnwise.rewards.judge import Transcript, Verdict, as_text

TABLES = """
CREATE TABLE IF NOT EXISTS verdicts (question TEXT, transcript TEXT, score REAL, reason TEXT, PRIMARY KEY (question, transcript));
CREATE TABLE IF NOT EXISTS failures (question TEXT PRIMARY KEY, reason TEXT);
CREATE TABLE IF NOT EXISTS trajectories (id TEXT PRIMARY KEY, score REAL, reason TEXT);
"""


@dataclass(frozen=True)
class StoredVerdicts:
    """The outcome of one question: verdicts by transcript, or why there are none."""

    verdicts: Mapping[str, Verdict]
    failure: str = ""


class VerdictCache:
    """``path``: the file; empty: kept in memory only."""

    def __init__(self, path: Path | None = None) -> None:
        try:
            self.connection = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = NORMAL")
            self.connection.executescript(TABLES)
        except sqlite3.Error as fault:
            raise StoreError(f"{path} cannot be used as the cache of verdicts: {fault}; move it away") from None

    def find(self, question: str) -> StoredVerdicts | None:
        failed = self.connection.execute("SELECT reason FROM failures WHERE question = ?", (question,)).fetchone()
        if failed is not None:
            return StoredVerdicts({}, failed[0])
        query = "SELECT transcript, score, reason FROM verdicts WHERE question = ?"
        rows = self.connection.execute(query, (question,)).fetchall()
        return (
            StoredVerdicts({transcript: Verdict(score, reason) for transcript, score, reason in rows}) if rows else None
        )

    def store(self, question: str, outcome: StoredVerdicts) -> None:
        """All verdicts of a question, or none."""
        rows = [(question, transcript, v.score, v.reason) for transcript, v in outcome.verdicts.items()]
        with self.connection:
            self.connection.execute("BEGIN")
            self.connection.executemany("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?)", rows)
            if outcome.failure:
                self.connection.execute("INSERT OR REPLACE INTO failures VALUES (?, ?)", (question, outcome.failure))

    def record(self, trajectory: str, verdict: Verdict) -> None:
        """Keep which verdict a trajectory got, for reports."""
        row = (trajectory, verdict.score, verdict.reason)
        self.connection.execute("INSERT OR REPLACE INTO trajectories VALUES (?, ?, ?)", row)

    def reason(self, trajectory: str) -> Verdict | None:
        """The verdict on a trajectory by its id."""
        row = self.connection.execute("SELECT score, reason FROM trajectories WHERE id = ?", (trajectory,)).fetchone()
        return Verdict(*row) if row else None

    def on_messages(self, messages: Transcript) -> Verdict | None:
        """The newest verdict on a dialogue, for reports."""
        query = "SELECT score, reason FROM verdicts WHERE transcript = ? ORDER BY rowid DESC LIMIT 1"
        row = self.connection.execute(query, (as_text(messages),)).fetchone()
        return Verdict(*row) if row else None

    def close(self) -> None:
        self.connection.close()
