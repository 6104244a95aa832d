"""The report of an environment check. Does not know how anything was found."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.environments.checker.driver import EpisodeRecord


@dataclass
class PlayStats:
    """Counts over the episodes of one scripted policy."""

    episodes: int = 0
    won: int = 0
    turns: int = 0

    def add(self, record: EpisodeRecord) -> None:
        self.episodes += 1
        self.won += bool(record.success)
        self.turns += len(record.actions)

    def __str__(self) -> str:
        episodes = max(self.episodes, 1)
        return f"{self.episodes} episodes, {self.won / episodes:.0%} won, {self.turns / episodes:.1f} turns each"


@dataclass(frozen=True)
class CheckReport:
    """The findings. ``problems`` must be fixed; ``warnings`` should be reviewed."""

    name: str
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    played: dict[str, PlayStats] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)  # how fast it is
    tried: tuple[str, ...] = ()  # what was tried, in words; what was not, and why

    @property
    def ok(self) -> bool:
        return not self.problems

    def text(self) -> str:
        verdict = "ok" if self.ok else f"{len(self.problems)} problem{'s' * (len(self.problems) > 1)}"
        head = f"{self.name}: {verdict}" + f", {len(self.warnings)} to look at" * bool(self.warnings)
        lines = [f"  {policy + ':':<15}{stats}" for policy, stats in self.played.items()]
        lines += [f"  {name + ':':<15}{text}" for name, text in self.facts.items()]
        lines += [f"  problem: {text}" for text in self.problems] + [f"  warning: {text}" for text in self.warnings]
        lines += [f"  tried: {text}" for text in self.tried]
        return "\n".join([head, *lines])
