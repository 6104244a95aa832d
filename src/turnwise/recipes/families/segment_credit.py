"""Segment-level credit: segments between forks, branches of a tree, memory segments, utterances and steps."""

from __future__ import annotations

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import CriticsFirst
from turnwise.algebra.gae import GAE, LambdaReturn
from turnwise.algebra.gate import Clip, ClipByOutcome, NoGate
from turnwise.algebra.mask import AllTokens, Both, MismatchWithin
from turnwise.algebra.penalty import ClippedValueLoss, WeightedPenalty
from turnwise.algebra.ratio import Importance, OnPolicy
from turnwise.algebra.value import Constant, Outcome, ReturnToGo
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN
from turnwise.credit.baselines import OptimalTokenBaseline
from turnwise.credit.critics import (
    AdvantageRegressionError,
    PresentActions,
    RecordedActions,
    StatesWithSpread,
    TokenBaselineError,
    TurnValueDifference,
    UtteranceAdvantage,
    UtteranceQError,
    UtteranceVError,
    ZeroGate,
)
from turnwise.credit.forks import (
    AfterLastFork,
    MeanOverPaths,
    MonteCarloValueDifference,
    PathReturn,
    TreeValueDifference,
    UnforkedTrajectories,
)
from turnwise.credit.reference_reset import ResetReference
from turnwise.credit.regression import ActiveBatches
from turnwise.credit.segments import (
    AmplifiedPositive,
    CentredOnGroup,
    NonZeroAdvantage,
    PaidAtEnd,
    ProbabilityBelow,
    SampledSegments,
)
from turnwise.credit.step_values import StepCrossEntropy
from turnwise.credit.vines import BehaviourKL, VineSetAdvantage
from turnwise.data.replay import RecentBuffer
from turnwise.data.replay.fresh_actions import FreshActions
from turnwise.recipes.kind import Kind, declares
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies import Branch
from turnwise.rollout.strategies.vines import Vines
from turnwise.tasks.budgets import Fixed

KIND = Kind.CREDIT

# ------------------------------------------------------------- segments and trees


def spo_chain(rho: float = 0.9, clip: float = 0.2, trunks: int = 2) -> Recipe:
    """SPO-chain: Monte-Carlo values at a few cut points; each segment's advantage is the value difference.

    A = V(end of segment) − V(start), V(cut) = mean outcome of the trajectories that left there, V(last) = R;
    only tokens of the trunks with μ(y) < rho are trained on and counted

    Paper: Segment Policy Optimization, arXiv 2505.23564.
    Settings: rho 0.9, clip 0.2; a cut before every 5th such token (2 to 100 tried), 9 completions at each.
    Deviation: cuts are before turns, as many as a group of 16 has forks for (the credit itself takes forks at any token);
    the value of the prompt is the mean return of the other trunks.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=MonteCarloValueDifference(),
        strategy=Branch(trunks, "every"),
        budget=Fixed(8, 16),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        keep=Both(ProbabilityBelow(rho), UnforkedTrajectories()),
    )


def spo_tree(rho: float = 0.9, scale: bool = False, clip: float = 0.2, trunks: int = 4) -> Recipe:
    """SPO-tree: tree-structured rollouts; each segment's advantage is the value of its end minus that of its start.

    A = V(child) − V(parent), V(leaf) = R, V(inner) = mean of its children; with scale over their std; A = 0 is dropped

    Paper: Segment Policy Optimization, arXiv 2505.23564.
    Settings: rho 0.9, branching 6-6-6 every 100 tokens (or 4-5-6), 1024 segments a step, clip 0.2.
    Deviation: a segment lies between two forks, however long it is; of 16 trajectories all but the trunks fork from those,
    spread evenly over their turns (the credit itself takes trees of any depth).
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=TreeValueDifference(scale),
        strategy=Branch(trunks, "even"),
        budget=Fixed(8, 16),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        keep=Both(ProbabilityBelow(rho), NonZeroAdvantage()),
    )


def arpo(clip: float = 0.2, copies: bool = False, trunks: int = 8) -> Recipe:
    """ARPO (agentic): branches after tool results; shared tokens get the mean advantage of all branches through them.

    Aₜ = mean over the trajectories through token t of (R − mean)/(std + ε); the rest as GRPO, every token alike

    Paper: Agentic Reinforced Policy Optimization, arXiv 2507.19849.
    Settings: 16 trajectories a task, 8 of them from the prompt, a branch where u − 0.2 ΔH ≤ 0.5.
    Deviation: a shared token is stored once and counted once; with copies its credit is the sum, as if each trajectory
    had its own copy of it (the paper's soft setting). Branches start before the turns with the least certain first
    tokens.
    Sure of: the soft setting and the branching (official code), the mean (summaries of the paper).
    """
    return Recipe(
        advantage=MeanOverPaths(Standardise(PathReturn()), copies),
        strategy=Branch(trunks),
        budget=Fixed(8, 16),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
    )


def r3l(
    alpha: float = 3.0, best: float = 1.0, perfect: float = 1.0, tau: float | None = None, trunks: int = 4
) -> Recipe:
    """R3L (its credit; reflection is `--strategy r3l`): trains only on tokens after the pivot of a retry and amplifies successes.

    A = R − mean (with tau: R − τ log mean exp(R/τ));  Â = perfect where R ≥ best, αA where A ≥ 0, else A;  ∇J = mean Â ∇ log π

    Paper: Reflect-then-Retry RL with Language-Guided Exploration, arXiv 2601.03715.
    Settings: alpha 3, group of 8 with its retries; perfect 1 as in its code (its text says alpha).
    Deviation: a retry is a trajectory that forks from its base attempt, whatever its outcome, before a turn with an
    uncertain first token; with `--strategy r3l` a diagnosis names the pivot.
    Sure of: the formula (official code).
    """
    return Recipe(
        advantage=AmplifiedPositive(CentredOnGroup(PathReturn(), tau), PathReturn(), alpha, best, perfect),
        ratio=OnPolicy(),
        keep=AfterLastFork(),
        strategy=Branch(trunks),
    )


def ipa(gamma: float = 0.95, mismatch: float = 5.0) -> Recipe:
    """IPA (its credit; tapers negative rewards only): turn-level returns, ratios and mismatch masks.

    Gₖ = γ^{K−k} R;  ∇J = mean Σₖ mₖ wₖ Gₖ ∇ log π(turn k),  w = 1 where R > 0, else min(ρₖ, 1),
    ρₖ the geometric mean of π/π_prox, mₖ = 1 where that of π_prox/μ is at most ``mismatch``

    Paper: Let It Flow: Agentic Crafting on Rock and Roll, arXiv 2512.24873.
    Settings: gamma 0.95, mismatch 5 in a public re-run; failures pay −1.
    Deviation: episodes start at the beginning; --guidance ipa --sampler cycle starts them near the end of a solution, and
    earlier as they succeed. Failures with reward 0 have no gradient.
    Sure of: the formula (third-party notes), not the constants.
    """
    return Recipe(
        advantage=ReturnToGo(gamma),
        reward=PaidAtEnd(Outcome()),
        ratio=Importance(TURN, proximal=True),
        gate=ClipByOutcome(by=Outcome()).where(MismatchWithin(0.0, mismatch, TURN, mean=True)),
        aggregate=Sum(TRAJECTORY),
    )


@declares(Kind.OBJECTIVE)
def dcpo(segments: int | None = None, clip: float = 0.2) -> Recipe:
    """DCPO (MemAct; needs episodes that restart their context): trains each segment under the context visible there.

    A = (R − mean)/(std + ε), one vote for each trajectory, on every token of each of its segments; every token alike

    Paper: Memory as Action: Autonomous Context Curation for Long-Horizon Agentic Tasks, arXiv 2510.12635.
    Settings: at most ``segments`` of a trajectory are trained on, at random; None: all.
    Deviation: a turn that restarts its context is read under that context by itself; the fact ``memory`` is only needed
    to draw segments. Penalties for limits and malformed calls are the environment's.
    Sure of: the mechanism (third-party notes), not the constants.
    """
    return Recipe(
        advantage=Standardise(),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        keep=SampledSegments(segments),
    )


def optimal_token(clip: float = 0.2, eps: float = 1e-8) -> Recipe:
    """Optimal token baseline: at each token the baseline of least variance, a mean over the group weighted by path energy.

    A = G − Σ G W / Σ W over the rows at token t;  G: reward to go;  W = Σ_{j≤t} (1 − 2π(yⱼ) + Σₐ π(a)²);  clipped token mean

    Paper: the advantage estimator optimal_token_baseline of a public trainer (verl), 2026.
    Settings: clip 0.2, eps 1e-8; the end of the longest row, beyond all others, has no baseline, and a group of one has none.
    Deviation: no importance weights on W for samplers that differ from the learner.
    Sure of: formula and constants (released code of a public trainer).
    """
    return Recipe(advantage=OptimalTokenBaseline(eps), gate=Clip(clip, clip), aggregate=Mean(TOKEN))


# ------------------------------------------------------------------------ critics


@declares(Kind.OBJECTIVE)
def archer(
    gamma: float = 0.9,
    baseline: bool = False,
    value_weight: float = 1.0,
    fresh: int = 1,
    passes: int = 10,
    warm: int = 10,
    share: float = 1.0,
    oldest: int = 10,
) -> Recipe:
    """ArCHer: twin turn-level critics with replay; fresh actions at recorded states get their advantage and its policy gradient.

    Q → r + γ V̄(s'), V → Q̄(s, a'), bars: slow copies;  a' ∼ π(s);  ∇J = mean over a' of (min Q − min V) Σₜ ∇ log π(a'ₜ)

    Paper: ArCHer: Training Language Model Agents via Hierarchical Multi-Turn RL, arXiv 2402.19446.
    Settings: gamma 0.9, target rate 0.1, critic lr 2e-5, 50 critic and 3 actor epochs (10 and 1 here), 20 iterations of
    warm-up (10 here): without it the policy learns to end early, which is all an untrained critic predicts. Turns of the last 10
    steps, as many as fresh ones (share 1), are replayed. One fresh action of each state; fresh 0: the turns of the step itself.
    Deviation: fresh actions are drawn once for a batch, by the policy before it, and slow copies are read once for each batch.
    With baseline the token's own value head is subtracted and learns the verdict.
    Sure of: the formula (official code).
    """
    actor = PresentActions(fresh)
    return Recipe(
        advantage=Constant(1.0), ratio=OnPolicy(), gate=NoGate() * UtteranceAdvantage(baseline), aggregate=Sum(TURN),
        penalties=(
            WeightedPenalty(value_weight, UtteranceQError(gamma), Mean(TURN), rows=RecordedActions()),
            WeightedPenalty(value_weight, UtteranceVError(), Mean(TURN), rows=actor),
            WeightedPenalty(baseline, TokenBaselineError(), Mean(TOKEN)),
        ),
        keep=actor, control=CriticsFirst(passes, warm), replay=FreshActions(RecentBuffer(oldest, share=share), fresh),
    )  # fmt: skip


def direct_advantage(
    beta: float = 0.1, least: float = 0.0, value_weight: float = 1.0, warm: int = 20, every: int = 20
) -> Recipe:
    """DAPO (direct advantage): a critic learns first and is frozen; then a step's log-ratio is regressed onto its advantage.

    min E (A/β − Σₜ log π/π_ref)² over steps, A = V(after) − V(before), R − V at the end;  V by cross-entropy to success

    Paper: Improving Multi-Step Reasoning with Direct Advantage Policy Optimization, arXiv 2412.18279.
    Settings: beta small; states whose advantages span less than ``least`` are left out. 20 batches for the critic and a new
    reference after every 20 batches are ours (0: never); with --critic separate nothing that the critic reads moves.
    Deviation: a step is a turn; one action of each state unless --strategy branch; each rollout labels its states with its own
    success, which has the gradient of their success rate.
    Sure of: the quadratic loss (third-party summaries), not the constants.
    """
    regression = ResetReference(AdvantageRegressionError(beta), warm, every)
    return Recipe(
        advantage=TurnValueDifference(probability=True), gate=ZeroGate(), aggregate=Mean(TURN),
        keep=StatesWithSpread(least),
        penalties=(
            WeightedPenalty(ActiveBatches(1.0, warm), regression),
            WeightedPenalty(ActiveBatches(value_weight, 0, warm), StepCrossEntropy(), Sum(TURN), rows=AllTokens()),
        ),
    )  # fmt: skip


def polychromic_ppo(
    trunks: int = 1,
    states: int = 2,
    vines: int = 8,
    size: int = 4,
    sets: int = 4,
    window: int = 5,
    bottom: float = 0.0,
    top: float = 1.0,
    beta: float = 0.005,
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
) -> Recipe:
    """Polychromic PPO: vines from states inside an episode, credited in sets by mean return times diversity; GAE elsewhere.

    f(set) = mean R · share of distinct members;  A = mean of f over a vine's sets − mean of f over all sets of its state
    J = clipped ρA − β KL(μ‖π) − critic;  A = GAE outside of the first ``window`` + 1 turns of vines

    Paper: Polychromic Objectives for Reinforcement Learning, arXiv 2509.25424.
    Settings: 8 vines, 4 sets of 4, 2 states, window 5, 2 epochs, gamma 1, beta about 0.005. Groups of 17: a trunk and its vines.
    A set of equal members has f = 0.
    Deviation: an action in several sets takes their mean; a vine in no set is credited by GAE. Trajectories are equal by the
    fact `key`; where it is not recorded, by their actions after the state.
    Sure of: the formula (third-party notes), what several sets give (ours).
    """
    return Recipe(
        advantage=VineSetAdvantage(size, sets, window, bottom, top, GAE(gamma, lam)),
        gate=Clip(clip, clip),
        aggregate=Mean(TOKEN),
        penalties=(
            WeightedPenalty(beta, BehaviourKL()),
            WeightedPenalty(value_weight, ClippedValueLoss(LambdaReturn(gamma, lam), value_clip), Mean(TOKEN)),
        ),
        strategy=Vines(trunks, states, vines),
        budget=Fixed(8, 17),
    )
