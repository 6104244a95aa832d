"""Named strategies: how the rollouts of a group grow."""

from __future__ import annotations

from turnwise.rollout.strategies import (
    Branch,
    CorrectedSampling,
    EntropyControl,
    ForcedModes,
    Independent,
    Reworded,
    SamplingCorrection,
    Strategy,
)
from turnwise.rollout.strategies.tree import (
    AfterToolResults,
    BottleneckTree,
    BranchRule,
    ConfidenceTree,
    HintedRetry,
    PruneRule,
    RepairedAttempts,
    SegmentTree,
    UncertainTokens,
    Vines,
)


def independent() -> Strategy:
    """Independent: all rollouts of a group start from the prompt."""
    return Independent()


def branch(trunks: int = 2, where: str = "surprise") -> Strategy:
    """Branch: the rest of the group forks before turns of finished rollouts; where is surprise, even or every."""
    return Branch(trunks, where)


def entropy_control(target: float = 0.5, hot: float = 1.2, cold: float = 0.8, share: float = 0.25) -> Strategy:
    """Entropy control: a share of each group is sampled hotter or colder, to hold the policy's entropy."""
    return EntropyControl(target, hot, cold, share)


def wordings(wordings: int = 4) -> Strategy:
    """Wordings: the rollouts of a group read different wordings of their task.

    Paper: MathForge (question reformulation), arXiv 2601.20614."""
    return Reworded(wordings)


def arpo(trunks: int = 0, width: int = 2, chance: float = 0.5, weight: float = 0.2) -> Strategy:
    """ARPO (agentic): forks after tool results, more likely where the entropy has risen; forks are forked again.

    P(fork) = clip(chance + weight·(H − H₀), 0, 1)

    Paper: Agentic Reinforced Policy Optimization, arXiv 2507.19849.
    Settings: 16 rollouts, 8 from the prompt (trunks 0: half of the group), width 2, chance 0.5, weight 0.2, 20 tokens."""
    return AfterToolResults(trunks, width, chance, weight)


def spo_tree(factors: str = "4/2/2", segment: int = 8) -> Strategy:
    """SPO (tree): segments of a fixed number of tokens, inside responses, with fixed branching.

    Paper: Segment Policy Optimization, arXiv 2505.23564.
    Settings: factors 6/6/6, segments of 30 tokens or more."""
    return SegmentTree(factors, segment)


def latr(share: float = 0.5, look: int = 8, near: float = 0.4, again: int = 2) -> Strategy:
    """LATR: a tree at the most uncertain tokens; forks that come back to their parent's tokens are dropped.

    Paper: LATR, arXiv 2510.24302.
    Settings: half of the group, lookahead 20 to 50 tokens, edit distance 0.4."""
    return UncertainTokens(share, look, near, 1, again)


def echo(
    trunks: int = 4, high: float = 3.5, confident: float = 1.2, rise: float = 0.2, most: int = 4, prune: bool = True
) -> Strategy:
    """ECHO: forks at tokens of high entropy and low confidence, the more the less sure; weak forks are stopped while they grow.

    width = clip(round(1 + 2(H − low)/(high − low) − (C − confident)/confident), 1, most), low = 2/7 of high

    Paper: Entropy-Confidence Hybrid Optimization for Test-Time RL, arXiv 2602.02150.
    Settings: high 3.5, low 1, confident 1.2, rise 0.2, width 1 to 4, at least 4 tokens apart; means over 4 and 8 tokens."""
    rule = BranchRule(high, confident=confident, rise=rise, most=most)
    return ConfidenceTree(trunks, rule, PruneRule() if prune else None)


def ib_tpo(trunks: int = 4, best: int = 1, each: int = 1, beta: float = 5.0, segment: int = 16) -> Strategy:
    """IB-TPO: the tree grows, round after round, at the steps whose outcomes told most for how likely they were.

    J = (1 + β)/n Σ over children of (p(child)/p − (1 + 1/β))·π(child), p the success rate below a node

    Paper: Information Bottleneck Driven Tree-based Policy Optimization, arXiv 2605.28109.
    Settings: 4 trunks, 8 rounds of one continuation of the best node, β 5."""
    return BottleneckTree(trunks, best, each, beta, segment)


def r3l(tier: int = 1, diagnosis: str = "reflection") -> Strategy:
    """R3L: half attempts, half retries from the step that a reflection names, with its advice, which is not recorded.

    Paper: R3L, arXiv 2601.03715.
    Settings: the policy itself reflects (--helper policy), on every attempt, at temperature 1; a reflection that cannot be read,
    or that calls the attempt a success, leads to no retry."""
    return HintedRetry(tier, diagnosis)


def scope(repairs: int = 1, tier: int = 1, diagnosis: str = "verdicts", below: float = 0.5) -> Strategy:
    """SCOPE (step-wise correction): a failed rollout keeps its turns before the first error; a verified repair replaces the rest.

    Paper: Recycling Failures (SCOPE), arXiv 2602.24110."""
    return RepairedAttempts(repairs, tier, diagnosis, below)


def a2fm(openings: str = "answer:|<tool_call>", forced: int = 2) -> Strategy:
    """A2FM (mode rollouts): rollouts forced into each mode, and others that choose theirs; a mode is how a first turn begins.

    Paper: A2FM, arXiv 2510.12838.
    Settings: three modes, 3 forced rollouts of each and 3 free ones."""
    return ForcedModes(openings, forced)


def vines(trunks: int = 1, states: int = 2, vines: int = 8) -> Strategy:
    """Vines: continuations of evenly spaced states of finished rollouts, so many of each.

    Paper: Polychromic Objectives for Reinforcement Learning, arXiv 2509.25424.
    Settings: 2 states, 8 vines."""
    return Vines(trunks, states, vines)


def props(wave: int = 2, limit: float = 0.3, divergence: float = 0.01, fits: int = 16, rate: float = 3.0) -> Strategy:
    """PROPS (sampling): waves of rollouts, each by a behaviour policy that leans away from what the group has drawn too often.

    Paper: On-Policy Policy Gradient Reinforcement Learning Without On-Policy Sampling, arXiv 2311.08290."""
    return CorrectedSampling(wave, SamplingCorrection(limit, divergence, fits, rate))
