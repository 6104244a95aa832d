"""Named guidance: which help the rollouts of a group get."""

from __future__ import annotations

from turnwise.recipes.families.actor_critic import Windows
from turnwise.rollout.guidance import (
    BackwardStarts,
    CaseMemory,
    GrowingPrefix,
    Guidance,
    HalfInContext,
    HintByDifficulty,
    HintWhenStuck,
    LateStarts,
    NoGuidance,
    RecordedPrefixes,
    SelfRolledPlans,
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
    Settings: shares 0.25, 0.5 and 0.75."""
    return GrowingPrefix(shares, begin)


def scaf(tiers: int = 4, warmup: int = 10) -> Guidance:
    """Scaf-GRPO: after a warm-up, the weakest tier of hints that works; its success replaces one failed rollout.

    Paper: Scaf-GRPO, arXiv 2510.19807.
    Settings: warm-up of 15 % of the steps, 12 tiers, 1 replacement."""
    return WeakestHint(tiers, warmup)


def guide(more: int = 0, tier: int = 1, union: bool = True) -> Guidance:
    """Guide: a group without a success gets hinted rollouts, trained as the plain policy with an off-policy ratio.

    ρₜ = π(yₜ | x, y<t) / μ(yₜ | x, hint, y<t)

    Paper: Adaptive Guidance Accelerates RL of Reasoning Models, arXiv 2506.13923.
    Settings: as many hinted rollouts as plain ones."""
    return HintWhenStuck(more, tier, union)


def pope(shares: str = "0.25/0.5/0.75", tries: int = 8) -> Guidance:
    """POPE: hard tasks with the shortest prefix of a solution that works in their prompt, and without it, in turn.

    Paper: POPE, arXiv 2601.18779."""
    return ShortestPrefix(shares, tries)


def prefix(prefixes: int = 3, low: float = 0.4, high: float = 0.8) -> Guidance:
    """PrefixRL: three of four groups continue a recorded solution from a fixed cut; the prefix is context.

    Paper: Reuse your FLOPs (PrefixRL), arXiv 2601.18795.
    Settings: 3 prefixes by task, cut between 0.4 and 0.8 of the solution."""
    return RecordedPrefixes(prefixes, low, high)


def adhint(most: float = 0.8) -> Guidance:
    """ADHint: half of a group without help; the harder it was, the longer the prefix that the other half continues.

    Paper: ADHint, arXiv 2512.13095."""
    return HintByDifficulty(most)


def memento(cases: int = 4, size: int = 256, rate: float = 0.0) -> Guidance:
    """Memento (AgentFly's case memory): prompts show similar finished tasks, solved ones to follow and failed ones to avoid.

    Paper: AgentFly: Fine-tuning LLM Agents without Fine-tuning LLMs, arXiv 2508.16153.
    Settings: 4 cases (8 in its code); rate=0.1 learns which help."""
    return CaseMemory(cases, size, rate=rate)


def xrpo(examples: int = 2, more: int = 0, corpus: int = 256) -> Guidance:
    """XRPO (in-context seeding): rollouts of a failing group with solved tasks in the prompt, from a growing corpus.

    Paper: XRPO, arXiv 2510.06672.
    Settings: 2 examples."""
    return SolvedExamples(examples, more, corpus)


def trimpi(share: float = 0.5, tier: int = 1, document: str = "") -> Guidance:
    """TriMPI (policy rollout): half of each group reads a document in its prompt; all are trained without it.

    Paper: Multimodal Policy Internalization (TriMPI), arXiv 2510.09474.
    Settings: as many rollouts with the document as without."""
    return HalfInContext(share, tier, document)


def ipa(first: int = 1, by: int = 1, enough: float = 0.5) -> Guidance:
    """IPA (chunk-initialised resampling): groups start near the end of a solution, and earlier as they succeed.

    Paper: Let It Flow (ROME, IPA), arXiv 2512.24873."""
    return BackwardStarts(first, by, enough)


def wovr(starts: int = 3, apart: int = 2) -> Guidance:
    """WoVR (keyframe starts): each group starts at the prompt or at one of a few late turns of a solution, drawn evenly.

    Paper: WoVR, arXiv 2602.13977."""
    return LateStarts(starts, apart)


def bepa(tries: int = 4) -> Guidance:
    """BEPA (level 1): the policy plays tasks on which it fails with a plan of the expert's trace; the cache keeps successes.

    Paper: From Off-Policy to On-Policy (BEPA), arXiv 2601.05787.
    Settings: one trace for each of 128 tasks; the number of tries is ours."""
    return SelfRolledPlans(tries)


def t_ppo(length: int = 32) -> Guidance:
    """T-PPO (windows): episodes end after a window of tokens and go on in the group with which their task comes back.

    Paper: Truncated Proximal Policy Optimization, arXiv 2506.15050.
    Settings: windows of 8k of 24k tokens (recalled)."""
    return Windows(length)
