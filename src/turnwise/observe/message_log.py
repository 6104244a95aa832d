"""Keeps the messages of a run in ``messages.jsonl``, one line each, with the step at which they were told.

A listener that records and passes on: every message goes through it, whoever sends it. A text is written once, however often
it is sent. Does not know what a message means.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.core.protocols import Listener
from turnwise.observe.trackers import drop_rows_from, read_rows

MESSAGES = "messages.jsonl"


class MessageLog:
    """``MessageLog(path, listen, start)``: messages of steps after ``start`` are removed, since those steps are taken again."""

    def __init__(self, path: Path, listen: Listener, start: int = 0) -> None:
        drop_rows_from(path, start + 1)
        self.path, self.listen, self.step = path, listen, start
        self.rows = read_rows(path)
        self.earlier = len(self.rows)  # told before this process began

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        if event == "message":
            self._record(facts)
        elif event == "step" and facts.get("stage") == "learn":
            self.step = int(facts["step"])
        self.listen(event, facts)

    def _record(self, facts: Mapping[str, Any]) -> None:
        if any(row.get("text") == facts["text"] for row in self.rows):
            return
        row = {"step": self.step, "time": round(time.time(), 3), **facts}
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def told(self) -> dict[str, float]:
        """The last number of each named condition."""
        return {row["name"]: float(row["value"]) for row in self.rows if "name" in row and "value" in row}

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """What a report repeats: step and text of everything that is more than information, and what was told before a resume."""
        rows = [({"earlier": True} if n < self.earlier else {}, row) for n, row in enumerate(self.rows)]
        return [{"step": r["step"], "text": r["text"], **mark} for mark, r in rows if r.get("level", "info") != "info"]
