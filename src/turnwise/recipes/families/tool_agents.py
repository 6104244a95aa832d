"""Tool-using agents: credit by the time of tool calls and by information gain about the answer."""

from __future__ import annotations

from turnwise.algebra.adaptive_clip import InformationClip
from turnwise.algebra.advantage import DivideByBatchStd, InformationGain, Standardise
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.gate import CappedWeight, Clip
from turnwise.algebra.mask import InformativeGroups
from turnwise.algebra.ratio import Importance, PerToken
from turnwise.core.levels import GROUP, TOKEN, TURN
from turnwise.credit.trajectories import EarlyToolBonus
from turnwise.recipes.kind import Kind, declares
from turnwise.recipes.recipe import Recipe
from turnwise.tasks.admission import Spread
from turnwise.tasks.samplers import Unsolved

KIND = Kind.CREDIT


def aspo(delta: float = -2.0, k: float = 0.7, low: float = 0.2, high: float = 0.28) -> Recipe:
    """ASPO (tools): a bounded advantage bonus for successful episodes that call a tool earlier than their group.

    A ← A + clip(δ (p − mean p)/mean L, ±kA), p the token where the first call begins; on DAPO

    Paper: Understanding Tool-Integrated Reasoning, arXiv 2508.19201.
    Settings: delta −2, k 0.7.
    Deviation: p is the first token of the first turn with a call.
    Sure of: the formula (paper text and third-party notes).
    """
    return Recipe(
        advantage=EarlyToolBonus(Standardise(), delta, k),
        gate=Clip(low, high),
        aggregate=Mean(TOKEN),
        admission=Spread(),
    )


def a2tgpo(alpha: float = 0.3, beta: float = 0.3, gamma: float = 1.0, low: float = 0.2, high: float = 0.2) -> Recipe:
    """A2TGPO: turn-level information gain about the gold answer as extra advantage, and as the width of the turn's clip.

    Aₖ = A + α Dₖ, Dₖ = 1/√(n−k) Σ_{j≥k} γ^{j−k} zⱼ;  turn ratio, clip 1 ± eps·(1 + β(2σ(zₖ) − 1))

    Paper: Agentic Turn-Group Policy Optimization with Adaptive Turn-level Clipping, arXiv 2605.06200.
    Settings: alpha 0.3, beta 0.3, gamma 1.
    Deviation: the likelihood is the mean log-probability of the answer's tokens.
    Sure of: the formula (third-party walk-through quoting official code).
    """
    return Recipe(
        advantage=Standardise() + alpha * InformationGain(gamma),
        ratio=PerToken(Importance(TURN)),
        gate=InformationClip(beta, low, high),
        aggregate=Mean(TOKEN),
    )


@declares(Kind.OBJECTIVE)
def scale_rl(cap: float = 5.0, solved: float = 0.9) -> Recipe:
    """ScaleRL: capped importance weights, prompt-level means, batch-level std, zero-variance filtering, no solved tasks.

    ∇J = mean over tasks of token means of sg[min(ρ, cap)] A ∇ log π,  A = (R − mean)/std of the batch

    Paper: The Art of Scaling Reinforcement Learning Compute for LLMs, arXiv 2510.13786.
    Settings: cap 5, tasks solved at 0.9 are not sampled again, 48 tasks of 16, staleness up to 8.
    Deviation: no forced interruption of long reasoning; staleness is a setting of the run. Its curve fit is in
    `turnwise.maths.scaling`.
    Sure of: the recipe (paper text), batch and learning rate (recalled).
    """
    return Recipe(
        advantage=DivideByBatchStd(Standardise(scale=False)),
        gate=CappedWeight(cap),
        aggregate=Mean(GROUP),
        keep=InformativeGroups(),
        sampler=Unsolved(solved),
    )
