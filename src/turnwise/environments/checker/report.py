"""What a check of an environment found, for people. It does not know how anything was found."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.environments.checker.driver import Record


@dataclass
class Tally:
    episodes: int = 0
    won: int = 0
    turns: int = 0

    def add(self, record: Record) -> None:
        self.episodes += 1
        self.won += bool(record.success)
        self.turns += len(record.actions)

    def __str__(self) -> str:
        many = max(self.episodes, 1)
        return f"{self.episodes} episodes, {self.won / many:.0%} won, {self.turns / many:.1f} turns each"


@dataclass(frozen=True)
class Report:
    """What was found. ``problems`` must be mended; ``warnings`` deserve a look."""

    name: str
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    played: dict[str, Tally] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    def text(self) -> str:
        verdict = "ok" if self.ok else f"{len(self.problems)} problem{'s' * (len(self.problems) > 1)}"
        head = f"{self.name}: {verdict}" + f", {len(self.warnings)} to look at" * bool(self.warnings)
        lines = [f"  {player + ':':<15}{tally}" for player, tally in self.played.items()]
        lines += [f"  problem: {text}" for text in self.problems] + [f"  warning: {text}" for text in self.warnings]
        return "\n".join([head, *lines])
