"""What a probe found, in plain words and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from turnwise.inspector.probe.play import ProbeEpisode
from turnwise.inspector.probe.verdict import ProbeVerdict

SHOWN = 5  # behaviours in the text; JSON holds all
LONGEST = 240  # characters of a message in the text


@dataclass(frozen=True)
class ProbeFinding:
    """One behaviour that is paid although something calls it wrong."""

    family: str
    about: str
    verdict: ProbeVerdict

    def text(self) -> str:
        v = self.verdict
        pay = f"paid {v.reward:.3g} on average, the oracle {v.oracle:.3g}, in {v.tasks} of {v.played} tasks"
        lines = [f"{self.family}: {self.about}", f"  {v.reason}: {pay}", f"  for example ({v.example.task}):"]
        return "\n".join(
            [*lines, *(f"    {line}" for line in transcript(v.example)), f"    reward: {v.example.reward:.3g}"]
        )

    def as_dict(self) -> dict[str, Any]:
        v = self.verdict
        numbers = {"reward": v.reward, "oracle": v.oracle, "tasks": v.tasks, "played": v.played}
        example = {"task": str(v.example.task), "reward": v.example.reward, "messages": list(v.example.messages)}
        return {"family": self.family, "about": self.about, "reason": v.reason, **numbers, "example": example}


@dataclass(frozen=True)
class ProbeReport:
    """``findings``: at most one for each family, the best-paid first."""

    environment: str
    findings: tuple[ProbeFinding, ...]
    behaviours: int
    episodes: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings

    def text(self) -> str:
        tried = f"{self.behaviours} behaviours in {self.episodes} episodes, {self.seconds:.0f} s"
        if self.ok:
            head = f"{self.environment}: no paid behaviour was called wrong ({tried}). That is no proof that there is none."
        else:
            count = f"{len(self.findings)} kind{'s' * (len(self.findings) > 1)} of behaviour"
            head = f"{self.environment}: {count} paid although wrong ({tried}), the best paid first"
        blocks = [head, *(finding.text() for finding in self.findings[:SHOWN])]
        if len(self.findings) > SHOWN:
            blocks.append(
                f"{len(self.findings) - SHOWN} more kinds: " + ", ".join(f.family for f in self.findings[SHOWN:])
            )
        return "\n\n".join([*blocks, *(f"note: {note}" for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        facts = {"behaviours": self.behaviours, "episodes": self.episodes, "seconds": round(self.seconds, 1)}
        found = [finding.as_dict() for finding in self.findings]
        return {"environment": self.environment, "ok": self.ok, **facts, "findings": found, "notes": list(self.notes)}


def transcript(episode: ProbeEpisode) -> Iterator[str]:
    """The dialogue, one line for each message, long texts and long dialogues cut."""
    lines = [f"{message['role']}: {_shown(str(message['content']))}" for message in episode.messages]
    if len(lines) > 14:
        lines = [*lines[:8], f"… ({len(lines) - 12} more messages)", *lines[-4:]]
    yield from lines


def _shown(content: str) -> str:
    text = " ".join(content.split())
    return f"{text[:LONGEST]} … ({len(text)} characters)" if len(text) > LONGEST else text or "(nothing)"
