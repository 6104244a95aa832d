"""Tool-using agents: credit by the time of tool calls and by information gain about the answer."""

from __future__ import annotations

from dataclasses import replace

from turnwise.algebra.advantage import DivideByBatchStd, Standardise
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.control import Passes
from turnwise.algebra.gate import CappedWeight, Clip, Gate, clipped
from turnwise.algebra.mask import InformativeGroups
from turnwise.algebra.piece import MicroBatchView, StepView
from turnwise.algebra.ratio import Importance, PerToken
from turnwise.algebra.term import Term
from turnwise.algebra.value import is_last, shift_turns
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.signals import Signal
from turnwise.credit.selectors import Finished
from turnwise.maths import returns
from turnwise.maths.lazy_torch import torch
from turnwise.recipes.families.actor_critic import ppo
from turnwise.recipes.families.critic_free import dapo
from turnwise.recipes.recipe import Kind, Recipe, declares
from turnwise.recipes.signatures import suggests
from turnwise.tasks.admission import Spread
from turnwise.tasks.samplers import Unsolved

KIND = Kind.CREDIT


class EarlyToolBonus(Term):
    """A + clip(δ (p − mean p) / mean L, ±k A) for successful trajectories that call a tool and have A > 0; A elsewhere.

    p is the token at which the first turn with a call starts, L the length; means over those trajectories of the group.
    δ < 0 rewards early calls."""

    requires = frozenset({"verdict", "tools"})
    term: Term
    delta: float = -2.0
    k: float = 0.7

    def __call__(self, batch: Batch) -> Field:
        a, tree = self.term(batch), batch.tree
        begins = (tree.size(TOKEN, TURN).x.cumsum(0) - tree.size(TOKEN, TURN).x).to(a.x.dtype)
        offset = Field(tree, TURN, begins) - Field(tree, TURN, begins).min(TRAJECTORY)
        first = where(batch.tool_calls > 0, offset, torch.inf).min(TRAJECTORY)
        eligible = (batch.success > 0.5) & (batch.tool_calls.max(TRAJECTORY) > 0)
        count = where(eligible, 1.0, 0.0).sum(GROUP).clamp(low=1.0)
        mean = lambda x: where(eligible, x, 0.0).sum(GROUP) / count  # noqa: E731
        length = tree.size(TOKEN, TRAJECTORY).to(a.x.dtype)
        shift = self.delta * (first - mean(first)) / mean(length).clamp(low=1e-9)
        return where(eligible & (a > 0), a + shift.maximum(-self.k * a).minimum(self.k * a), a)


def aspo(delta: float = -2.0, k: float = 0.7, low: float = 0.2, high: float = 0.28) -> Recipe:
    """ASPO (tools): a bounded advantage bonus for successful episodes that call a tool earlier than their group.

    A ← A + clip(δ (p − mean p)/mean L, ±kA), p the token where the first call begins; on DAPO

    Paper: Understanding Tool-Integrated Reasoning, arXiv 2508.19201.
    Settings: delta −2, k 0.7.
    Deviation: p is the first token of the first turn with a call."""
    credit = EarlyToolBonus(Standardise(), delta, k)
    return Recipe(advantage=credit, gate=Clip(low, high), aggregate=Mean(TOKEN), admission=Spread())


@declares(Kind.OBJECTIVE)
def mini_o3(low: float = 0.2, high: float = 0.3) -> Recipe:
    """Mini-o3: over-turn masking; episodes cut by a limit count in the baseline of their group, their tokens not in the loss.

    Aᵢ = (Rᵢ − mean)/(std + ε) over all of the group;  J = mean over the tokens of finished episodes of
    min(ρA, clip(ρ, 1−low, 1+high)A);  groups with equal rewards are replaced by others

    Paper: Mini-o3: Scaling Up Reasoning Patterns and Interaction Turns for Visual Search, arXiv 2509.07969.
    Settings: low 0.2, high 0.3, G 16, 6 turns in training (--max-turns 6) and up to 32 at test, no KL, no entropy bonus.
    Deviation: an episode whose last turn has no end is unfinished, too; the released code has a flag of its own for
    those, which its command leaves off."""
    return Recipe(
        advantage=Standardise(),
        gate=Clip(low, high),
        aggregate=Mean(TOKEN),
        keep=Finished(),
        admission=Spread(),
        control=Passes(minibatches=4),
    )


@declares(Kind.OBJECTIVE)
@suggests(tools=("python",))
def retool(clip: float = 0.2, gamma: float = 1.0, lam: float = 1.0, value_clip: float = 0.5) -> Recipe:
    """ReTool: PPO over rollouts that run code while they reason, after a supervised start; what a tool returns is not trained on.

    The objective of ppo. Context, and with it what the interpreter answers, is in no loss of any method.

    Paper: ReTool: Reinforcement Learning for Strategic Tool Use in LLMs, arXiv 2504.11536.
    Settings: reward +1 or −1 by the final answer, 400 steps, the interpreter `python` beside --data. The value clip is ppo's.
    Deviation: the start imitates the environment's demonstrator, or --demos, not curated reasoning with code."""
    return replace(ppo(clip, gamma, lam, value_clip), requires=frozenset({"tools"}))


@declares(Kind.OBJECTIVE)
@suggests(tools=("python",))
def tapo(low: float = 0.2, high: float = 0.28, limit: int = 192, cache: int = 64) -> Recipe:
    """TAPO: DAPO over rollouts that search and run code while they reason; what a tool returns is not trained on.

    The objective of dapo. Context, and with it what tools answer, is in no loss of any method.

    Paper: Tool-Augmented Policy Optimization: Synergizing Reasoning and Adaptive Tool Use, arXiv 2510.07038.
    Settings: those of dapo, the interpreter `python` beside --data; search is a tool of your own (--tools python,my.py:search).
    Deviation: no search is built in; limit and cache are scaled to short answers."""
    return replace(dapo(low, high, limit, cache, None), requires=frozenset({"tools"}))


def answer_gain(batch: Batch, eps: float = 1e-6) -> Field:
    """Each turn's increase of the gold answer's log-probability, standardised among turns of equal index; 0 for a last turn
    and for a turn without peers."""
    score, tree = batch[Signal.ANSWER_LOGP], batch.tree
    final = Field(tree, TURN, is_last(batch, TURN))
    gain = where(final, 0.0, shift_turns(score, 1, 0.0) - score)
    peers = Partition.by(tree, TURN, batch.group, tree.index(TURN, TRAJECTORY), final)
    return where(final, 0.0, (gain - gain.mean(peers)) / (gain.std(peers) + eps))


class InformationClip(Gate):
    """Clip to [1 − low·c, 1 + high·c], c = 1 + β(2σ(z) − 1): turns that inform about the answer get a wider window.

    z is the standardised increase of the gold answer's log-probability; the answering turn has c = 1."""

    reads = frozenset({Signal.ANSWER_LOGP})
    beta: float = 0.3
    low: float = 0.2
    high: float = 0.2

    def plan(self, view: StepView) -> dict[object, Field]:
        scale = 1 + self.beta * (2 * answer_gain(view.batch).map(torch.sigmoid) - 1)
        return {self: where(Field(scale.tree, TURN, is_last(view.batch, TURN)), 1.0, scale)}

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        c = view[self].to(rho.x.dtype)
        return clipped(rho, adv, 1 - self.low * c, 1 + self.high * c)


class InformationGain(Term):
    """Dₖ = 1/√(n−k) Σ_{j≥k} γ^{j−k} zⱼ: the discounted information that turns from k on give about the gold answer.

    zⱼ is the increase of the answer's log-probability, standardised among turns of equal index; 0 for the last turn."""

    reads = frozenset({Signal.ANSWER_LOGP})
    compares_peers = True
    gamma: float = 1.0
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        z, tree = answer_gain(batch, self.eps), batch.tree
        remaining = tree.size(TURN, TRAJECTORY) - 1 - tree.index(TURN, TRAJECTORY)  # turns before the answer
        total = z.map(lambda x: returns.discounted(x, self.gamma, is_last(batch, TURN)))
        return where(remaining > 0, total / remaining.to(z.x.dtype).clamp(low=1) ** 0.5, 0.0)


def a2tgpo(alpha: float = 0.3, beta: float = 0.3, gamma: float = 1.0, low: float = 0.2, high: float = 0.2) -> Recipe:
    """A2TGPO: turn-level information gain about the gold answer as extra advantage, and as the width of the turn's clip.

    Aₖ = A + α Dₖ, Dₖ = 1/√(n−k) Σ_{j≥k} γ^{j−k} zⱼ;  turn ratio, clip 1 ± eps·(1 + β(2σ(zₖ) − 1))

    Paper: Agentic Turn-Group Policy Optimization with Adaptive Turn-level Clipping, arXiv 2605.06200.
    Settings: alpha 0.3, beta 0.3, gamma 1.
    Deviation: the likelihood is the mean log-probability of the answer's tokens."""
    return Recipe(
        advantage=Standardise() + alpha * InformationGain(gamma),
        ratio=PerToken(Importance(TURN)),
        gate=InformationClip(beta, low, high),
        aggregate=Mean(TOKEN),
        control=Passes(minibatches=4),
    )


@declares(Kind.OBJECTIVE)
def scale_rl(cap: float = 5.0, solved: float = 0.9) -> Recipe:
    """ScaleRL: capped importance weights, prompt-level means, batch-level std, zero-variance filtering, no solved tasks.

    ∇J = mean over tasks of token means of sg[min(ρ, cap)] A ∇ log π,  A = (R − mean)/std of the batch

    Paper: The Art of Scaling Reinforcement Learning Compute for LLMs, arXiv 2510.13786.
    Settings: cap 5, tasks solved at 0.9 are not sampled again, 48 tasks of 16, staleness up to 8.
    Deviation: no forced interruption of long reasoning; staleness is a setting of the run. Its curve fit is in
    `turnwise.maths.scaling`."""
    return Recipe(
        advantage=DivideByBatchStd(Standardise(scale=False)),
        gate=CappedWeight(cap),
        aggregate=Mean(GROUP),
        keep=InformativeGroups(),
        sampler=Unsolved(solved),
    )
