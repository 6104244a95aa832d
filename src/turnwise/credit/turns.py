"""Turn-level credit: returns over the turns of an episode, and baselines from other turns. Knows no environment and no
method."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.algebra.aggregate import Aggregate, items
from turnwise.algebra.mask import Mask
from turnwise.algebra.peers import PeerSpec, resolve_peers
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.term import Term
from turnwise.algebra.value import is_last, token_reward
from turnwise.core.batch import Batch
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import choice, number
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.credit.peers import shift_turns
from turnwise.maths import returns
from turnwise.maths.lazy_torch import torch

# ---------------------------------------------------------------------- values


@dataclass(frozen=True)
class SumToGo(Term):
    """Sₖ = xₖ + γ Sₖ₊₁ over the turns (or tokens) of a trajectory, for any term x at that level."""

    term: Term
    gamma: float = number(1.0, least=0, most=1)

    def __call__(self, batch: Batch) -> Field:
        value = self.term(batch)
        return value.map(lambda x: returns.discounted(x, self.gamma, is_last(batch, value.level)))


@dataclass(frozen=True)
class AgentReturnToGo(Term):
    """Gₖ = Σ rⱼ over this turn and the later turns of the same agent. At TURN."""

    def __call__(self, batch: Batch) -> Field:
        same_agent = Partition.by(batch.tree, TURN, batch.tree.ancestor(TURN, TRAJECTORY), batch.agent)
        return batch.reward.sum(TURN).running_sum(same_agent, reverse=True)


@dataclass(frozen=True)
class ReturnUntilMismatch(Term):
    """Gₖ = rₖ + γ eₖ eₖ₊₁ Gₖ₊₁, e = ``match`` of the turn: later rewards count only up to the first mismatch. At TURN."""

    match: Term
    gamma: float = number(0.5, least=0, most=1)

    def __call__(self, batch: Batch) -> Field:
        matched = (self.match(batch) > 0.5).to(torch.float64)
        carry = self.gamma * matched * shift_turns(matched, 1, 0.0)
        return batch.reward.sum(TURN).map(lambda r: returns.backward_recurrence(r, carry.x))


@dataclass(frozen=True)
class OldValue(Term):
    """The critic's estimate when the batch was collected. At TOKEN."""

    reads = frozenset({Signal.OLD_VALUE})

    def __call__(self, batch: Batch) -> Field:
        return batch[Signal.OLD_VALUE]


@dataclass(frozen=True)
class BiLevelGAE(Term):
    """Bi-level GAE: first over turns at their last tokens with ``turn_gamma``, then inside each turn with ``gamma``,
    where the last token's reward is the turn's return A + v. Turns without tokens are skipped. At TOKEN."""

    reads = frozenset({Signal.OLD_VALUE})

    gamma: float = number(1.0, least=0, most=1)
    lam: float = number(0.95, least=0, most=1)
    turn_gamma: float = number(0.95, least=0, most=1)

    def __call__(self, batch: Batch) -> Field:
        tree, v = batch.tree, batch[Signal.OLD_VALUE]
        turn_end = (tree.size(TOKEN, TURN).at(TOKEN) - tree.index(TOKEN, TURN) <= 1).x
        last_tokens = turn_end.nonzero().squeeze(1)
        r = token_reward(batch).x.to(v.x.dtype)
        turn_advantage = returns.gae(
            r[last_tokens], v.x[last_tokens], self.turn_gamma, self.lam, is_last(batch, TOKEN)[last_tokens]
        )
        turn_return = r.index_copy(0, last_tokens, turn_advantage + v.x[last_tokens])
        return v.map(lambda x: returns.gae(turn_return, x, self.gamma, self.lam, turn_end))


# ------------------------------------------------------------------ comparisons

ABSENT = ("out", "outcome", "nothing")


@dataclass(frozen=True)
class LeaveOneOutAtTurn(Term):
    """Aₖ = vₖ − mean of vₖ over the *other* trajectories of the task at the same turn index; without others the
    baseline is 0.

    Turns that are not ``valid`` get 0 and join no baseline. ``absent`` decides about episodes that end before turn k:

        out       left out: late turns are compared with long episodes only, the longest with nothing
        outcome   counted with their total return: a late turn is still compared with the whole task
        nothing   counted with 0, as they earn nothing more: for rewards paid turn by turn

    In each case the baseline is independent of the trajectory it is for, so the gradient stays unbiased."""

    compares_peers = True

    value: Term
    absent: str = choice(*ABSENT, default="out")
    valid: Term = field(default_factory=lambda: Fact("valid", TURN, missing=1.0))

    def __call__(self, batch: Batch) -> Field:
        v, tree = self.value(batch), batch.tree
        peers = batch.same("index")
        is_valid = (self.valid(batch) > 0.5).to(v.x.dtype)
        others, n = (is_valid * v).sum(peers) - is_valid * v, is_valid.sum(peers) - is_valid
        if self.absent != "out":
            outcome = batch.reward.sum(TRAJECTORY)
            ended = tree.size(TRAJECTORY, GROUP) - outcome.peer_count(peers)
            ended_return = outcome.sum(GROUP) - outcome.sum(peers)
            others, n = others + (ended_return if self.absent == "outcome" else 0.0), n + ended
        return is_valid * (v - where(n > 0, others / n.clamp(low=1.0), 0.0))


@dataclass(frozen=True)
class OnMarkedTurns(Term):
    """``term`` on the turns with ``mark`` > 0.5, 0 on the others."""

    mark: Term
    term: Term

    def __call__(self, batch: Batch) -> Field:
        return where(self.mark(batch) > 0.5, self.term(batch), 0.0)


@dataclass(frozen=True)
class FallbackWithoutPeers(Term):
    """``term``; ``fallback`` for an item without other peers."""

    term: Term
    fallback: Term
    peers: PeerSpec = GROUP

    def __call__(self, batch: Batch) -> Field:
        a, fallback = self.term(batch), self.fallback(batch)
        return where(fallback.peer_count(resolve_peers(self.peers, batch)) > 1, a, fallback)


# ------------------------------------------------------------- masks, averages


@dataclass(frozen=True)
class MarkedTurns(Mask):
    """Tokens of turns with ``mark`` > 0.5."""

    mark: Term

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return self.mark(view.batch) > 0.5


@dataclass(frozen=True)
class GroupStdAbove(Mask):
    """Groups whose returns have a std above ``threshold``."""

    threshold: float = 0.3

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return view.batch.reward.sum(TRAJECTORY).std(GROUP) > self.threshold


@dataclass(frozen=True)
class MeanOfTurnMeans(Aggregate):
    """Mean over the tokens of each turn, then over the turns of each trajectory, then over the trajectories."""

    def __call__(self, kept: Field) -> Field:
        tokens = kept.sum(TURN)
        turns = where(tokens > 0, 1.0, 0.0).sum(TRAJECTORY)
        return kept / (items(kept.sum(TRAJECTORY)) * turns.clamp(low=1) * tokens.clamp(low=1))


__all__ = [
    "AgentReturnToGo", "BiLevelGAE", "FallbackWithoutPeers", "GroupStdAbove", "LeaveOneOutAtTurn", "MarkedTurns",
    "MeanOfTurnMeans", "OldValue", "OnMarkedTurns", "ReturnUntilMismatch", "SumToGo",
]  # fmt: skip
