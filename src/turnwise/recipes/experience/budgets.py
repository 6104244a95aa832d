"""Named budgets: how many rollouts and turns each task gets. Groups and mean size come from the method or the settings."""

from __future__ import annotations

from turnwise.tasks.budgets import (
    BinBandit,
    Budget,
    FallingWithSuccess,
    Fixed,
    PredictedUtility,
    RoundsOfUncertainty,
    TurnPercentile,
    Wide,
)


def fixed() -> Budget:
    """Fixed: the same number for every task."""
    return Fixed()


def brorl(width: int = 512) -> Budget:
    """BroRL: hundreds of rollouts for few tasks, at the same number of rollouts per step.

    Paper: BroRL, arXiv 2510.01180.
    Settings: 512 rollouts by task."""
    return Wide(size=width)


def rollout_gdro(
    least: int = 2,
    most: int = 8,
    bins: int = 10,
    rate: float = 0.1,
    floor: float = 0.15,
    pace: float = 0.01,
    sign: float = -1.0,
) -> Budget:
    """Rollout-GDRO: a bandit by bin of difficulty chooses the number of rollouts; the mean is exact.

    Paper: Group Distributionally Robust Optimization-Driven RL, arXiv 2601.19280.
    Settings: mean 4, rate 0.1, floor 0.15."""
    return BinBandit(8, 4, least, most, bins, 8, rate, floor, pace, sign)


def v0(least: int = 2, most: int = 128, keep: float = 0.9, context: int = 256) -> Budget:
    """V0 (allocation): rollouts one at a time where they most raise the expected number of useful wrong samples.

    U(n, p) = n(1 − p)(1 − (1 − p)^(n − 1))

    Paper: V0, arXiv 2602.03584.
    Settings: 2 to 128 rollouts by task, a context of 256 outcomes."""
    return PredictedUtility(8, 8, least, most, keep, context)


def xrpo(first: int = 4, most: int = 64, bonus: float = 1.0, confidence: float = 0.95) -> Budget:
    """XRPO (allocator): a first round for every task, then rollouts where one more sample most narrows the interval of its mean.

    Paper: XRPO, arXiv 2510.06672.
    Settings: the paper's bonus, confidence and first round are not known."""
    return RoundsOfUncertainty(8, 16, first, most, bonus, confidence)


def dart(easy: float = 0.6, least: int = 1, window: int = 4, spare: int = 0) -> Budget:
    """DART (adaptive number and length): fewer rollouts as a task succeeds; turns limited by its longest success.

    Paper: DART-GUI, arXiv 2509.23866.
    Settings: all rollouts up to a success rate of 0.6."""
    return FallingWithSuccess(8, 8, easy, least, window, spare)


def turn_control(
    percent: float = 75.0, calibrate: int = 64, probe_every: int = 8, remind: bool = True, start: float = 0.0
) -> Budget:
    """Turn control: episodes end at a percentile of the turns that finished episodes of their difficulty took, and say so.

    Paper: More with Less (turn control), arXiv 2510.16786.
    Settings: the 75th percentile, a reminder after every turn; start 50 is the dynamic variant: the policy is told of that lower
    limit, which is extended to the other where the task is not done by then."""
    return TurnPercentile(8, 8, percent, calibrate, probe_every, remind, start)
