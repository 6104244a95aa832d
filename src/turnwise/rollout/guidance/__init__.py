"""Guidance: hints, prefixes of solutions and worked examples, and when an episode gets them. Knows no engine and no loss."""

from turnwise.rollout.guidance.backward import BackwardStarts, LateStarts
from turnwise.rollout.guidance.base import Guidance, LiveGuidance, NoGuidance
from turnwise.rollout.guidance.in_context import HalfInContext
from turnwise.rollout.guidance.plans import SelfRolledPlans
from turnwise.rollout.guidance.scheduled import HintByDifficulty, RecordedPrefixes, ShortestPrefix
from turnwise.rollout.guidance.when_stuck import GrowingPrefix, HintWhenStuck, SolvedExamples, WeakestHint

__all__ = [
    "BackwardStarts", "GrowingPrefix", "Guidance", "HalfInContext", "HintByDifficulty", "HintWhenStuck", "LateStarts",
    "LiveGuidance", "NoGuidance", "RecordedPrefixes", "SelfRolledPlans", "ShortestPrefix", "SolvedExamples", "WeakestHint",
]  # fmt: skip
