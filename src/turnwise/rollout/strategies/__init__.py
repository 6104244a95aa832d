"""Rollout strategies: how the trajectories of a group are sampled. Know sessions and trajectories; no engine, no loss.

``tree`` and ``retry`` are imported by those who use them: they know episodes, which know this package.
"""

from turnwise.rollout.sampling_correction import SamplingCorrection
from turnwise.rollout.strategies.base import EpisodeRunner, GroupRequest, OpenSession, StepMetrics, Strategy
from turnwise.rollout.strategies.branch import FORK_RULES, Branch
from turnwise.rollout.strategies.corrected import CorrectedSampling
from turnwise.rollout.strategies.drafts import DRAFT_TOKENS, DraftSelection
from turnwise.rollout.strategies.greedy import GREEDY_REWARD, GreedyBaseline
from turnwise.rollout.strategies.hinted import Hinted
from turnwise.rollout.strategies.independent import EntropyControl, Independent, OneTurn, Reworded
from turnwise.rollout.strategies.steered import ValueSteered

__all__ = [
    "DRAFT_TOKENS", "FORK_RULES", "GREEDY_REWARD", "Branch", "CorrectedSampling", "DraftSelection", "EntropyControl",
    "EpisodeRunner", "GreedyBaseline", "GroupRequest", "Hinted", "Independent", "OneTurn", "OpenSession", "Reworded",
    "SamplingCorrection", "StepMetrics", "Strategy", "ValueSteered",
]  # fmt: skip
