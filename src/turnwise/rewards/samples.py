"""What a reward function is called with: the answers to one prompt, and the columns of its row. Plain data that can be sent
to another process. Knows no token and no trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class AnswerSample:
    """One answer to be scored."""

    text: str  # of the last assistant message
    messages: Messages = field(default_factory=list)  # everything after the prompt
    ids: list[int] = field(default_factory=list)  # sampled token ids


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """Several answers to one prompt."""

    prompt: str | Messages
    answers: tuple[AnswerSample, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)

    def only(self, *indices: int) -> AnswerGroup:
        return replace(self, answers=tuple(self.answers[i] for i in indices))


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """What a function says of one answer: a score (None: the function does not apply to this row), or why there is none."""

    score: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)  # further numbers by name; they have no weight
    success: bool | None = None
    fault: str = ""
