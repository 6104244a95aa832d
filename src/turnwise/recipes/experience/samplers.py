"""Named samplers: which task comes next. One function per published rule, with the constants of its paper."""

from __future__ import annotations

from turnwise.tasks.pool_samplers import (
    BinAdversary,
    GaussianFrontier,
    PivotFilter,
    SlidingWindow,
    ThompsonFrontier,
    VariancePromotion,
)
from turnwise.tasks.samplers import (
    Begun,
    CyclePool,
    Sampler,
    Stages,
    UncertaintySampler,
    Uniform,
    Unsolved,
    WeightedSets,
)


def uniform() -> Sampler:
    """Uniform: every draw is a new task; all difficulties are equally likely."""
    return Uniform()


def cycle(pool: int = 128) -> Sampler:
    """Cycle: a fixed pool, each task once per pass."""
    return CyclePool(pool)


def unsolved(solved: float = 0.9, pool: int = 1024) -> Sampler:
    """Unsolved: a pool without the tasks whose success rate has reached a threshold."""
    return Unsolved(solved, pool)


def spo(pool: int = 1024, floor: float = 0.05, keep: float = 0.96) -> Sampler:
    """SPO: tasks in proportion to √(p(1 − p)) + floor, p tracked by task.

    Paper: Single-stream Policy Optimization, arXiv 2509.13232."""
    return UncertaintySampler(pool=pool, floor=floor, keep=keep)


def vade(pool: int = 1024, fast: float = 0.2, slow: float = 0.999, candidates: int = 1024) -> Sampler:
    """VADE: Thompson sampling of the most informative tasks, score p̃(1 − p̃)², p̃ from a Beta posterior by task.

    Chosen tasks: α ← fast·α + successes, β ← fast·β + failures. Others: both times slow.

    Paper: VADE, arXiv 2511.18902.
    Settings: fast 0.2, slow 0.999, 8 rollouts by task."""
    return ThompsonFrontier(pool, fast, slow, candidates)


def mmr1(
    pool: int = 1024,
    variance: float = 0.8,
    diversity: float = 0.2,
    share: float = 0.5,
    every: int = 28,
    momentum: float = 0.0,
) -> Sampler:
    """MMR1 (variance-aware sampling): half of a step in proportion to a·p(1 − p) + b·diversity, half in a fixed order.

    Diversity is one minus the mean self-BLEU of a group's answers.

    Paper: MMR1, arXiv 2509.21268.
    Settings: a 0.8, b 0.2, half of the batch weighted, weights renewed every 28 steps."""
    return VariancePromotion(pool, variance, diversity, share, every, momentum)


def prompt_gdro(
    pool: int = 1024, bins: int = 10, rate: float = 0.1, floor: float = 0.15, smooth: float = 0.1, memory: int = 8
) -> Sampler:
    """Prompt-GDRO: an adversary over bins of difficulty prefers bins of high recent loss.

    q(b) = (1 − floor)·exp(rate·S(b))/Σ + floor/bins, S(b) an exponential mean of the loss of bin b

    Paper: Group Distributionally Robust Optimization-Driven RL, arXiv 2601.19280.
    Settings: rate 0.1, floor 0.15, smoothing 0.1, 10 bins."""
    return BinAdversary(pool, bins, rate, floor, smooth, 10.0, memory)


def fg_expo(pool: int = 1024, keep: float = 0.9, width: float = 0.35) -> Sampler:
    """FG-ExPO (Gaussian curriculum): weight exp(−(p − ½)²/(2·width²)), p an exponential mean of the success rate.

    Paper: FG-ExPO, arXiv 2605.11403.
    Settings: keep 0.9, width 0.35."""
    return GaussianFrontier(pool, keep, width)


def craft(groups: int = 400, window: int = 64, solved: float = 0.9, review: float = 0.2) -> Sampler:
    """CRAFT-GUI (staged curriculum): the difficulties one after the other, with a share of earlier ones.

    Paper: CRAFT-GUI, arXiv 2508.11360."""
    return Stages(groups, window, solved, review)


def pivot(pool: int = 256, below: float = 0.9, renew: bool = True) -> Sampler:
    """PivotRL (filter): after one profiling pass, only tasks whose outcomes differ and whose mean is below a threshold.

    Paper: PivotRL, arXiv 2603.21383."""
    return PivotFilter(pool, below, renew)


def gain_rl(
    pool: int = 1024,
    width: float = 0.0,
    step: float = 500.0,
    slope: float = 2.0,
    target: float = 0.5,
    inter: float = 8.0,
) -> Sampler:
    """GAIN-RL: a Gaussian window over a ranking of the tasks by angles of hidden states; it moves with accuracy.

    score = mean cosine of question tokens + inter·mean cosine of question and context tokens, of the last MLP's inputs

    Paper: Angles Don't Lie, arXiv 2506.02281.
    Settings: step 500, slope 2, target ½, width 1000, inter 8."""
    return SlidingWindow.scaled(pool, width, step, slope, target, inter)


def sets(weights: str = "") -> Sampler:
    """Sets: the tasks of each difficulty in given shares, weights=0.2/0.3/0.5."""
    return WeightedSets(weights)


def t_ppo() -> Sampler:
    """T-PPO (slots): tasks with unfinished episodes first, in order; then new ones.

    Paper: Truncated Proximal Policy Optimization, arXiv 2506.15050."""
    return Begun()
