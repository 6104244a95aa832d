"""Guidance: hints, prefixes of solutions and worked examples, and when an episode gets them. Knows no engine and no loss."""

from turnwise.rollout.guidance.base import Guidance, LiveGuidance, NoGuidance
from turnwise.rollout.guidance.scheduled import HintByDifficulty, RecordedPrefixes, ShortestPrefix
from turnwise.rollout.guidance.when_stuck import GrowingPrefix, HintWhenStuck, SolvedExamples, WeakestHint

__all__ = [
    "GrowingPrefix", "Guidance", "HintByDifficulty", "HintWhenStuck", "LiveGuidance", "NoGuidance", "RecordedPrefixes",
    "ShortestPrefix", "SolvedExamples", "WeakestHint",
]  # fmt: skip
