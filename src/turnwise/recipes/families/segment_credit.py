"""Methods that credit parts of an episode: segments between forks, branches, turns, what comes after a pivot."""

from __future__ import annotations

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import CriticsFirst
from turnwise.algebra.gate import Clip, Open, Taper
from turnwise.algebra.mask import Agreeing, All, Both
from turnwise.algebra.penalty import SquaredError, Weighted
from turnwise.algebra.ratio import Importance, OnPolicy
from turnwise.algebra.value import Constant, Outcome, ReturnToGo
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN
from turnwise.credit.critics import (
    AdvantageError,
    BaselineError,
    Closed,
    Judged,
    UtteranceError,
    ValueRise,
    VariedStates,
)
from turnwise.credit.forks import AfterForks, Earned, NestedRise, SampledRise, Through, Unforked
from turnwise.credit.segments import Above, Amplified, AtEnd, Credited, FewSegments, Unsure
from turnwise.recipes.kind import Kind, declares
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies import Branch
from turnwise.tasks.budgets import Fixed

KIND = Kind.CREDIT

# ------------------------------------------------------------- segments and trees


def spo_chain(rho: float = 0.9, clip: float = 0.2, trunks: int = 2) -> Recipe:
    """SPO-chain: an episode is cut in a few places, fresh completions tell what each is worth, and a segment gets the rise.

    A = V(end of segment) − V(start), V(cut) = mean outcome of the trajectories that left there, V(last) = R;
    only tokens of the trunks with μ(y) < rho are trained on and counted

    Paper: Segment Policy Optimization, arXiv 2505.23564.
    Settings: rho 0.9, clip 0.2; a cut before every 5th such token (2 to 100 tried), 9 completions at each.
    Deviation: cuts are before turns, as many as a group of 16 has forks for (the credit itself takes forks at any token);
    the prompt is worth what the other trunks earned.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=SampledRise(),
        strategy=Branch(trunks, "every"),
        budget=Fixed(8, 16),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        keep=Both(Unsure(rho), Unforked()),
    )


def spo_tree(rho: float = 0.9, scale: bool = False, clip: float = 0.2, trunks: int = 4) -> Recipe:
    """SPO-tree: the group is one tree, a segment's credit is how much more its end is worth than its beginning.

    A = V(child) − V(parent), V(leaf) = R, V(inner) = mean of its children; with scale over their std; A = 0 is dropped

    Paper: Segment Policy Optimization, arXiv 2505.23564.
    Settings: rho 0.9, branching 6-6-6 every 100 tokens (or 4-5-6), 1024 segments a step, clip 0.2.
    Deviation: a segment lies between two forks, however long it is; of 16 trajectories all but the trunks fork from those,
    spread evenly over their turns (the credit itself takes trees of any depth).
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=NestedRise(scale),
        strategy=Branch(trunks, "even"),
        budget=Fixed(8, 16),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        keep=Both(Unsure(rho), Credited()),
    )


def arpo(clip: float = 0.2, copies: bool = False, trunks: int = 8) -> Recipe:
    """ARPO (agentic): episodes branch after tool results; what branches share is credited with the mean of all of them.

    Aₜ = mean over the trajectories through token t of (R − mean)/(std + ε); the rest as GRPO, every token alike

    Paper: Agentic Reinforced Policy Optimization, arXiv 2507.19849.
    Settings: 16 trajectories a task, 8 of them from the prompt, a branch where u − 0.2 ΔH ≤ 0.5.
    Deviation: a shared token is stored once and counted once; with copies its credit is the sum, as if each trajectory
    had its own copy of it (the paper's soft setting). Branches leave before the turns that began least surely.
    Sure of: the soft setting and the branching (official code), the mean (summaries of the paper).
    """
    return Recipe(
        advantage=Through(Standardise(Earned()), copies),
        strategy=Branch(trunks),
        budget=Fixed(8, 16),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
    )


def r3l(
    alpha: float = 3.0, best: float = 1.0, perfect: float = 1.0, tau: float | None = None, trunks: int = 4
) -> Recipe:
    """R3L: a failed attempt is retried from its pivot; only what comes after the pivot is trained on, successes weigh more.

    A = R − mean (with tau: R − τ log mean exp(R/τ));  Â = perfect where R ≥ best, αA where A ≥ 0, else A;  ∇J = mean Â ∇ log π

    Paper: Reflect-then-Retry RL with Language-Guided Exploration, arXiv 2601.03715.
    Settings: alpha 3, group of 8 with its retries; perfect 1 as in its code (its text says alpha).
    Deviation: a retry is a trajectory that left its base attempt, whatever came of it, before a turn it began unsurely:
    no reflection names the pivot, and none is trained on.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=Amplified(Above(Earned(), tau), Earned(), alpha, best, perfect),
        ratio=OnPolicy(),
        keep=AfterForks(),
        strategy=Branch(trunks),
    )


def ipa(gamma: float = 0.95, mismatch: float = 5.0) -> Recipe:
    """IPA: a turn is the unit of return, of ratio and of trust in the sampler; good episodes are imitated, bad ones tapered.

    Gₖ = γ^{K−k} R;  ∇J = mean Σₖ mₖ wₖ Gₖ ∇ log π(turn k),  w = 1 where R > 0, else min(ρₖ, 1),
    ρₖ the geometric mean of π/π_prox, mₖ = 1 where that of π_prox/μ is at most ``mismatch``

    Paper: Let It Flow: Agentic Crafting on Rock and Roll, arXiv 2512.24873.
    Settings: gamma 0.95, mismatch 5 in a public re-run; failures pay −1.
    Deviation: episodes start at the beginning, not at prefixes of good ones. Failures that pay 0 teach nothing.
    Sure of: the formula (third-party notes), not the constants.
    """
    return Recipe(
        advantage=ReturnToGo(gamma),
        reward=AtEnd(Outcome()),
        ratio=Importance(TURN, proximal=True),
        gate=Taper(by=Outcome()).where(Agreeing(0.0, mismatch, TURN, mean=True)),
        aggregate=Sum(TRAJECTORY),
    )


@declares(Kind.OBJECTIVE)
def dcpo(segments: int | None = None, clip: float = 0.2) -> Recipe:
    """DCPO (MemAct): when an agent rewrites its context, each stretch is trained under the context that was really visible.

    A = (R − mean)/(std + ε), one vote for each trajectory, on every token of each of its segments; every token alike

    Paper: Memory as Action: Autonomous Context Curation for Long-Horizon Agentic Tasks, arXiv 2510.12635.
    Settings: at most ``segments`` of a trajectory are trained on, drawn by lot; None: all.
    Deviation: a turn that restarts its context is read under that context by itself; the fact ``memory`` is only needed
    to draw segments. Penalties for limits and malformed calls are the environment's.
    Sure of: the mechanism (third-party notes), not the constants.
    """
    return Recipe(
        advantage=Standardise(),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        keep=FewSegments(segments),
    )


# ------------------------------------------------------------------------ critics


@declares(Kind.OBJECTIVE)
def archer(
    gamma: float = 0.9, baseline: bool = False, value_weight: float = 1.0, passes: int = 10, warm: int = 10
) -> Recipe:
    """ArCHer: twin critics judge whole utterances; the tokens of an utterance follow its verdict.

    Q → r + γ V̄(s'), V → Q̄(s, a), bars: slow copies;  ∇J = mean over turns of (min Q − min V) Σₜ ∇ log π(yₜ)

    Paper: ArCHer: Training Language Model Agents via Hierarchical Multi-Turn RL, arXiv 2402.19446.
    Settings: gamma 0.9, target rate 0.1, critic lr 2e-5, 50 critic and 3 actor epochs (10 and 1 here), 20 iterations of warm-up
    (10 here): without it the policy learns to end soon, the only thing young critics know of.
    Deviation: critics and policy learn on the same fresh turns: no replay; the slow copies are read once for each batch; the
    action judged is the one taken. With baseline the token's own value head is subtracted and learns the verdict.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=Constant(1.0),
        ratio=OnPolicy(),
        gate=Open() * Judged(baseline),
        aggregate=Sum(TURN),
        penalties=(
            Weighted(value_weight, UtteranceError(gamma), Mean(TURN)),
            Weighted(baseline, BaselineError(), Mean(TOKEN)),
        ),
        control=CriticsFirst(passes, warm),
    )


def direct_advantage(beta: float = 0.1, least: float = 0.0, value_weight: float = 1.0) -> Recipe:
    """DAPO (direct advantage): the log-ratio of a step to the reference is regressed to its scaled advantage.

    min E (A/β − Σₜ log π/π_ref)² over steps, A = V(after) − V(before), R − V at the end

    Paper: Improving Multi-Step Reasoning with Direct Advantage Policy Optimization, arXiv 2412.18279.
    Settings: beta small; states whose advantages lie less than ``least`` apart are left out.
    Deviation: a step is a turn; the critic learns along, by squared error to the outcome, instead of beforehand by
    cross-entropy to success rates; the reference stays.
    Sure of: the quadratic loss (third-party summaries), not the constants.
    """
    return Recipe(
        advantage=ValueRise(),
        gate=Closed(),
        aggregate=Mean(TURN),
        keep=VariedStates(least),
        penalties=(
            Weighted(1.0, AdvantageError(beta)),
            Weighted(value_weight, SquaredError(Outcome()), Mean(TOKEN), rows=All()),
        ),
    )
