"""Rollout strategies: how the trajectories of a group are sampled. Know sessions and trajectories; no engine, no loss.

``tree`` and ``retry`` are imported by those who use them: they know episodes, which know this package.
"""

from turnwise.rollout.sampling_correction import SamplingCorrection
from turnwise.rollout.strategies.base import EpisodeRunner, GroupRequest, OpenSession, StepMetrics, Strategy
from turnwise.rollout.strategies.independent import (
    DRAFT_TOKENS,
    FORK_RULES,
    GREEDY_REWARD,
    Branch,
    CorrectedSampling,
    DraftSelection,
    EntropyControl,
    GreedyBaseline,
    Hinted,
    Independent,
    OneTurn,
    Reworded,
    ValueSteered,
)

__all__ = [
    "DRAFT_TOKENS", "FORK_RULES", "GREEDY_REWARD", "Branch", "CorrectedSampling", "DraftSelection", "EntropyControl",
    "EpisodeRunner", "GreedyBaseline", "GroupRequest", "Hinted", "Independent", "OneTurn", "OpenSession", "Reworded",
    "SamplingCorrection", "StepMetrics", "Strategy", "ValueSteered",
]  # fmt: skip
