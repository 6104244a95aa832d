"""Named guidance: which help the rollouts of a group get."""

from __future__ import annotations

from turnwise.rollout.guidance import (
    GrowingPrefix,
    Guidance,
    HintByDifficulty,
    HintWhenStuck,
    NoGuidance,
    RecordedPrefixes,
    ShortestPrefix,
    SolvedExamples,
    WeakestHint,
)


def none() -> Guidance:
    """None: no help."""
    return NoGuidance()


def ghpo(shares: str = "0.25/0.5/0.75", begin: int = 0) -> Guidance:
    """GHPO: a group without a success is sampled again with a growing share of the solution in its prompt.

    The last group sampled replaces the plain one and is trained under the prompt it was sampled with.

    Paper: GHPO, arXiv 2507.10628.
    Settings: shares 0.25, 0.5 and 0.75.
    Deviation: the solution is that of the environment's scripted policy.
    Sure of: the loop (official code).
    """
    return GrowingPrefix(shares, begin)


def scaf(tiers: int = 4, warmup: int = 10) -> Guidance:
    """Scaf-GRPO: after a warm-up, the weakest tier of hints that works; its success replaces one failed rollout.

    Paper: Scaf-GRPO, arXiv 2510.19807.
    Settings: warm-up of 15 % of the steps, 12 tiers, 1 replacement.
    Deviation: tiers are the environment's own, tried one after the other; the second replacement under the plain prompt is
    not offered.
    Sure of: the replacement (official code).
    """
    return WeakestHint(tiers, warmup)


def guide(more: int = 0, tier: int = 1, union: bool = True) -> Guidance:
    """Guide: a group without a success gets hinted rollouts, trained as the plain policy with an off-policy ratio.

    ρₜ = π(yₜ | x, y<t) / μ(yₜ | x, hint, y<t)

    Paper: Adaptive Guidance Accelerates RL of Reasoning Models, arXiv 2506.13923.
    Settings: as many hinted rollouts as plain ones.
    Deviation: hints come from the environment.
    Sure of: the ratio (reviews); union or replacement is not known.
    """
    return HintWhenStuck(more, tier, union)


def pope(shares: str = "0.25/0.5/0.75", tries: int = 8) -> Guidance:
    """POPE: hard tasks with the shortest prefix of a solution that works in their prompt, and without it, in turn.

    Paper: POPE, arXiv 2601.18779.
    Deviation: hard tasks and workable prefixes are found during the run; tries and shares are ours. Write --sampler cycle or
    another pool, so that tasks come back.
    Sure of: the rule (summaries).
    """
    return ShortestPrefix(shares, tries)


def prefix(prefixes: int = 3, low: float = 0.4, high: float = 0.8) -> Guidance:
    """PrefixRL: three of four groups continue a recorded solution from a fixed cut; the prefix is context.

    Paper: Reuse your FLOPs (PrefixRL), arXiv 2601.18795.
    Settings: 3 prefixes by task, cut between 0.4 and 0.8 of the solution.
    Deviation: the solution is that of the environment's scripted policy.
    Sure of: cuts and masking (summary of the paper).
    """
    return RecordedPrefixes(prefixes, low, high)


def adhint(most: float = 0.8) -> Guidance:
    """ADHint: half of a group without help; the harder it was, the longer the prefix that the other half continues.

    Paper: ADHint, arXiv 2512.13095.
    Deviation: the share most·(1 − success) is ours; prefix tokens are context, not trained with modulated gradients; one
    baseline for both halves.
    Sure of: the idea (abstract).
    """
    return HintByDifficulty(most)


def xrpo(examples: int = 2, more: int = 0, corpus: int = 256) -> Guidance:
    """XRPO (in-context seeding): rollouts of a failing group with solved tasks in the prompt, from a growing corpus.

    Paper: XRPO, arXiv 2510.06672.
    Settings: 2 examples.
    Deviation: similarity is the share of common words; trained under the prompt with the examples.
    Sure of: the rule (restatements of the paper).
    """
    return SolvedExamples(examples, more, corpus)
