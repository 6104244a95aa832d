"""Selection: which trajectories, turns, tokens and past batches are trained on, before any clipping."""

from __future__ import annotations

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.factor import TruncatedImportance
from turnwise.algebra.gate import Clip
from turnwise.algebra.mask import Both
from turnwise.algebra.penalty import KL, WeightedPenalty
from turnwise.algebra.ratio import Importance
from turnwise.credit.by_origin import RatioByOrigin
from turnwise.credit.downsampling import HighestEntropyTurns, LargestAdvantageEntropy, LargestVariance, ShareSchedule
from turnwise.credit.selectors import FromOrigin
from turnwise.data.replay import SharedExperience, SuccessBuffer
from turnwise.recipes.kind import Kind
from turnwise.recipes.recipe import Recipe
from turnwise.tasks.samplers import CyclePool
from turnwise.tasks.turn_limits import FallingWithSuccess

KIND = Kind.DATA


def d3s(
    rows: float = 0.25,
    rows_end: float = 0.75,
    tokens: float = 0.2,
    tokens_end: float = 0.8,
    steps: int = 100,
    by_group: bool = False,
    clip: float = 0.2,
) -> Recipe:
    """D3S: trains on the trajectories whose advantages have the largest variance, and in them on the largest |A|·entropy.

    A = z-score over all rows;  S = argmax Var(A over S), |S| = N;  tokens of S: the top K by |A| H;  N and K rise with the step

    Paper: Learning More with Less: A Dynamic Dual-Level Down-Sampling Framework, arXiv 2509.22115.
    Settings: not recovered; a quarter to three quarters of the rows and a fifth to four fifths of their tokens over 100
    batches are ours. by_group chooses inside each group (D3S-I).
    Deviation: progress is counted in batches; a step of several mini-batches chooses in each of them.
    Sure of: the formula (notes and reviews agree), not the constants.
    """
    subset = LargestVariance(ShareSchedule(rows, rows_end, steps), by_group)
    return Recipe(
        advantage=Standardise(),
        gate=Clip(clip, clip),
        keep=Both(subset, LargestAdvantageEntropy(ShareSchedule(tokens, tokens_end, steps), subset)),
    )


def swarm(folder: str = "swarm", foreign: int = 4, sender: str = "", clip: float = 0.2) -> Recipe:
    """Swarm SAPO: trains on groups of other runs as well, shared through a folder, as if the own policy had sampled them.

    A = z-score inside each group;  own: ρ = π/μ;  of other runs: ρ = π/π_old, so that the first ratio is 1;  clipped, no KL

    Paper: Sharing is Caring: Efficient LM Post-Training with Collective RL Experience Sharing, arXiv 2509.08721.
    Settings: 4 own and 4 foreign groups of 8, foreign groups without any reward left out; alone it is GRPO without a KL.
    Deviation: token ids are shared instead of text, so runs need one tokenizer; the sender's rewards are kept. Foreign groups are
    drawn at random among the last 256; the released agent also has a variant that takes the best.
    Sure of: the rule (official code).
    """
    return Recipe(
        advantage=Standardise(),
        ratio=RatioByOrigin(FromOrigin("replay"), Importance(proximal=True)),
        gate=Clip(clip, clip),
        replay=SharedExperience(folder, foreign, sender),
    )


def dart(
    share: float = 0.8,
    cap: float = 1.0,
    low: float = 0.2,
    high: float = 0.28,
    beta: float = 0.1,
    easy: float = 0.6,
    pool: int = 128,
) -> Recipe:
    """DART (GUI agents): trains on turns of high entropy, with truncated ratios and stored successes.

    kept: the share of a group's turns with the highest mean entropy;  ρ = π/π_old clipped, times min(π_old/μ, cap);  β k3

    Paper: Efficient Multi-turn RL for GUI Agents via Decoupled Training and Adaptive Data Curation, arXiv 2509.23866.
    Settings: share 0.8, cap 1, clip 0.2/0.28, KL 0.1, groups of 8, all rollouts up to a success rate of 0.6, turns limited by
    the longest success; repeated passes over a pool of 128 tasks.
    Deviation: a stored success replaces the first rollout of a group that failed, not its oldest; a failing group without one
    stays. Old data comes from --staleness; the four services are one process.
    Sure of: grouping, weights and constants (official code), the choice of turns (summary of the paper).
    """
    return Recipe(
        advantage=Standardise(),
        ratio=Importance(proximal=True),
        gate=Clip(low, high) * TruncatedImportance(cap),
        penalties=(WeightedPenalty(beta, KL("k3")),),
        keep=HighestEntropyTurns(share),
        budget=FallingWithSuccess(8, 8, easy),
        sampler=CyclePool(pool),
        replay=SuccessBuffer(),
    )
