"""Replay: which past trajectories are mixed into a step. Knows no tokens, no losses, no files."""

from turnwise.data.replay.base import FindDemonstration, LiveReplay, NoReplay, ReadTrajectory, Replay
from turnwise.data.replay.buffers import ExpertCache, RecentBuffer, SuccessBuffer, WeightedPool
from turnwise.data.replay.expert_items import ExpertItems
from turnwise.data.replay.past_batches import PastBatches
from turnwise.data.replay.shared import SharedExperience

__all__ = [
    "ExpertCache", "ExpertItems", "FindDemonstration", "LiveReplay", "NoReplay", "PastBatches", "ReadTrajectory", "RecentBuffer",
    "Replay", "SharedExperience", "SuccessBuffer", "WeightedPool",
]  # fmt: skip
