"""What came out of attempts, and the file of rows that keeps it: an interrupted trial loses nothing and continues."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from turnwise import __version__


@dataclass(frozen=True)
class Outcome:
    """What was tried, what came out, and the fault if it must not come out so. ``part`` and ``name`` identify it."""

    part: str
    name: str
    result: str  # "refused", "ran", "held", "resumed", "no raise", ...
    fault: str = ""  # empty: as it should be
    seconds: float = 0.0
    count: int = 1  # attempts that this stands for: the kills of one run, the episodes of one block
    kind: str = ""  # what the rows of a part are grouped by in the report


class Results:
    """Outcomes by part and name; ``path`` keeps one line for each. A later line of the same name replaces an earlier one."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.outcomes, self.tried = path, {}, set[str]()
        if path is not None and path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.tried.add(row.pop("tried"))
                self._keep(Outcome(**row))

    def _keep(self, outcome: Outcome) -> None:
        self.outcomes[outcome.part, outcome.name] = outcome

    def add(self, outcome: Outcome) -> None:
        self._keep(outcome)
        tried = f"{__version__} on {datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
        self.tried.add(tried)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            row = {**dataclasses.asdict(outcome), "seconds": round(outcome.seconds, 2), "tried": tried}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def done(self, part: str, name: str) -> bool:
        """Whether it was tried and came out as it should. What failed is tried again."""
        outcome = self.outcomes.get((part, name))
        return outcome is not None and not outcome.fault

    def count(self, part: str, kind: str) -> int:
        return sum(o.count for o in self.outcomes.values() if (o.part, o.kind) == (part, kind) and not o.fault)


def faults(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.fault]
