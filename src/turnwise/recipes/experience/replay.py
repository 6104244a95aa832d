"""Named replay buffers: which past trajectories are mixed into a step."""

from __future__ import annotations

from turnwise.data.replay import (
    ExpertCache,
    ExpertItems,
    NoReplay,
    PastBatches,
    RecentBuffer,
    Replay,
    SharedExperience,
    SuccessBuffer,
    WeightedPool,
)


def none() -> Replay:
    """None: a step trains only on its own rollouts."""
    return NoReplay()


def arpo_gui(capacity: int = 8, least: float = 0.1, spread: float = 0.05, mean: float = 0.2) -> Replay:
    """ARPO for GUI agents: past successes of a task replace a rollout of its failing group.

    Paper: ARPO for GUI agents, arXiv 2505.16282.
    Settings: 8 successes by task."""
    return SuccessBuffer(capacity, least, spread, mean)


def spear(oldest: int = 10, size: int = 2048, share: float = 0.5, above: float = 0.0) -> Replay:
    """SPEAR: recent trajectories with a positive advantage, mixed in at random.

    Paper: SPEAR, arXiv 2509.22601.
    Settings: at most 10 steps old, 2048 trajectories."""
    return RecentBuffer(oldest, size, share, above)


def r1v2(size: int = 2048, share: float = 0.5, power: float = 1.0) -> Replay:
    """Skywork R1V2 (selective sample buffer): trajectories with non-zero advantage, drawn by its size.

    Paper: Skywork R1V2, arXiv 2504.16656."""
    return WeightedPool(size, share, power)


def bepa(least: float = 0.0) -> Replay:
    """BEPA (cache): one success by task, the expert's until the policy has its own; failing groups get it.

    Paper: BEPA, arXiv 2601.05787."""
    return ExpertCache(least)


def remix(share: float = 0.4, window: int = 2, until: int = 0) -> Replay:
    """ReMix (mix-policy): whole groups of the last batches, a fixed share of each step.

    Paper: ReMix, arXiv 2507.06892.
    Settings: share 0.4, the last 2 policies, until step 50 or 100."""
    return PastBatches(share, window, until)


def swarm(folder: str = "swarm", foreign: int = 4, sender: str = "", capacity: int = 256) -> Replay:
    """Swarm SAPO (sharing): groups of other runs, through a pool in a folder that several runs write and read.

    Paper: Sharing is Caring, arXiv 2509.08721.
    Settings: 4 own groups and 4 of others a step."""
    return SharedExperience(folder, foreign, sender, capacity)


def dynaweb(share: float = 0.5) -> Replay:
    """DynaWeb (expert items): each rollout is replaced by an expert's trajectory of its task with a fixed probability.

    Paper: DynaWeb, arXiv 2601.22149.
    Settings: share 0.5 (other summaries give 0.4)."""
    return ExpertItems(share)
