"""The report of a method check. Does not know how anything was found."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MethodReport:
    """What was checked, what is wrong, and what the method requires."""

    name: str
    checked: dict[str, str]  # by check: what was found, in words
    problems: tuple[str, ...]
    notes: tuple[str, ...]  # what could not be checked, and why
    requires: tuple[str, ...]  # of environment, data or settings
    signals: tuple[str, ...]  # that the learner measures

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ok": self.ok,
            "checked": self.checked,
            "problems": list(self.problems),
            "notes": list(self.notes),
            "requires": list(self.requires),
            "signals": list(self.signals),
        }

    def text(self) -> str:
        verdict = "ok" if self.ok else f"{len(self.problems)} problem{'s' * (len(self.problems) > 1)}"
        rows = [*self.checked.items()]
        rows += [("requires", ", ".join(self.requires) or "nothing of environment and settings")]
        rows += [("signals", ", ".join(self.signals))]
        lines = [f"  {name + ':':<15}{value}" for name, value in rows]
        lines += [f"  note: {text}" for text in self.notes] + [f"  problem: {text}" for text in self.problems]
        wrapped = (textwrap.fill(line, 118, subsequent_indent=" " * 6, break_on_hyphens=False) for line in lines)
        return "\n".join([f"{self.name}: {verdict}", *wrapped])
