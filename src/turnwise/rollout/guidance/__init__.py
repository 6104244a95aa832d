"""Guidance: hints, prefixes of solutions and worked examples, and when an episode gets them. Knows no engine and no loss."""

from turnwise.rollout.guidance.pieces import (
    BackwardStarts,
    CaseMemory,
    GrowingPrefix,
    Guidance,
    HalfInContext,
    HintByDifficulty,
    HintWhenStuck,
    LateStarts,
    LiveGuidance,
    NoGuidance,
    RecordedPrefixes,
    SelfRolledPlans,
    ShortestPrefix,
    SolvedExamples,
    WeakestHint,
)

__all__ = [
    "BackwardStarts", "CaseMemory", "GrowingPrefix", "Guidance", "HalfInContext", "HintByDifficulty", "HintWhenStuck",
    "LateStarts", "LiveGuidance", "NoGuidance", "RecordedPrefixes", "SelfRolledPlans", "ShortestPrefix", "SolvedExamples",
    "WeakestHint",
]  # fmt: skip
