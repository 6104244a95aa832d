"""Turn-level critics: twin Q and V of whole utterances, and regression of a turn's log-ratio onto its advantage. Knows
no network."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.algebra.factor import Factor
from turnwise.algebra.gate import Gate
from turnwise.algebra.mask import Mask
from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import number
from turnwise.core.signals import TURN_CRITIC, TURN_CRITIC_TARGET, Signal
from turnwise.credit.fact import Fact
from turnwise.credit.peers import shift_turns
from turnwise.credit.selectors import Selector
from turnwise.maths.lazy_torch import torch

# ------------------------------------------------------------------- utterances


def utterance_advantage(view: MicroBatchView) -> Field:
    """A = min Q − min V of each turn. Detached."""
    q, q_twin, v, v_twin = (view[s].detach() for s in TURN_CRITIC)
    return q.minimum(q_twin) - v.minimum(v_twin)


@dataclass(frozen=True)
class UtteranceAdvantage(Factor):
    """min(Q, Q′) − min(V, V′) of the turn under the present critics; ``baseline`` subtracts the token-level value."""

    baseline: bool = False

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({*TURN_CRITIC, Signal.VALUE} if self.baseline else TURN_CRITIC)

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        a = utterance_advantage(view)
        return a - view[Signal.VALUE].detach() if self.baseline else a.at(TOKEN)


@dataclass(frozen=True)
class UtteranceCriticError(Penalty):
    """Σ over both critics of (Q − r − γ V̄(s′))² + (V − Q̄(s, a))², bars: target networks.

    The value after the last turn is 0. One cost per turn; turns without tokens have none. V learns from fresh turns alone: the
    action of a replayed turn is an older policy's."""

    reads = frozenset({*TURN_CRITIC, *TURN_CRITIC_TARGET})

    gamma: float = number(0.9, least=0, most=1)

    def __call__(self, view: MicroBatchView) -> Field:
        q, q_twin, v, v_twin = (view[s] for s in TURN_CRITIC)
        slow_q, slow_q_twin, slow_v, slow_v_twin = (view.batch[s] for s in TURN_CRITIC_TARGET)
        reward = view.batch.reward.sum(TURN)
        target = lambda after: reward + self.gamma * shift_turns(after, 1, 0.0)  # noqa: E731
        of_q = (q - target(slow_v)) ** 2 + (q_twin - target(slow_v_twin)) ** 2
        of_v = (v - slow_q) ** 2 + (v_twin - slow_q_twin) ** 2
        return of_q + where(view.batch.replayed, 0.0, of_v)


@dataclass(frozen=True)
class UtteranceQError(Penalty):
    """Σ over both critics of (Q − r − γ V̄(s′))²; the value after the last turn is 0. One cost per turn that an environment
    answered: give it ``rows=RecordedActions()``."""

    reads = frozenset({Signal.Q, Signal.SECOND_Q, Signal.TARGET_V, Signal.TARGET_SECOND_V})

    gamma: float = number(0.9, least=0, most=1)

    def __call__(self, view: MicroBatchView) -> Field:
        reward = view.batch.reward.sum(TURN)
        target = lambda slow: reward + self.gamma * shift_turns(view.batch[slow], 1, 0.0)  # noqa: E731
        one = (view[Signal.Q] - target(Signal.TARGET_V)) ** 2
        return one + (view[Signal.SECOND_Q] - target(Signal.TARGET_SECOND_V)) ** 2


@dataclass(frozen=True)
class UtteranceVError(Penalty):
    """Σ over both critics of (V − Q̄(s, a))², a the turn of the present policy: give it ``rows=PresentActions(...)``."""

    reads = frozenset({Signal.V, Signal.SECOND_V, Signal.TARGET_Q, Signal.TARGET_SECOND_Q})

    def __call__(self, view: MicroBatchView) -> Field:
        one = (view[Signal.V] - view.batch[Signal.TARGET_Q]) ** 2
        return one + (view[Signal.SECOND_V] - view.batch[Signal.TARGET_SECOND_Q]) ** 2


@dataclass(frozen=True)
class PresentActions(Selector):
    """Turns of the present policy: with ``fresh`` those sampled again at the states of a step (fact ``fresh``), replayed ones
    included; with 0 those of the step's own rollouts."""

    fresh: int = 1

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"fact fresh"}) if self.fresh else frozenset()

    def select(self, batch: Batch) -> Field:
        return sampled_again(batch) if self.fresh else ~(batch.replayed | batch.expert)


@dataclass(frozen=True)
class RecordedActions(Selector):
    """Turns that an environment answered: all but those that were sampled again."""

    def select(self, batch: Batch) -> Field:
        return ~sampled_again(batch)


def sampled_again(batch: Batch) -> Field:
    """Trajectories with the fact ``fresh``: one turn that no environment answered."""
    return Fact("fresh", missing=0.0)(batch) > 0


@dataclass(frozen=True)
class TokenBaselineError(Penalty):
    """(A − b)²: trains the token-level value b on the utterance advantage of its turn."""

    reads = frozenset({*TURN_CRITIC, Signal.VALUE})

    def __call__(self, view: MicroBatchView) -> Field:
        return (utterance_advantage(view) - view[Signal.VALUE]) ** 2


# ------------------------------------------------------------------------ steps


@dataclass(frozen=True)
class TurnValueDifference(Term):
    """A = V(after) − V(before) of each turn, V the critic's estimate before its first token; after the last turn V is
    the return.

    A turn without tokens is no step: the turn before it continues with what follows. ``probability``: V is the sigmoid of the
    estimate. At TURN."""

    reads = frozenset({Signal.OLD_VALUE})

    probability: bool = False

    def __call__(self, batch: Batch) -> Field:
        tree, value = batch.tree, batch[Signal.OLD_VALUE]
        value = value.map(torch.sigmoid) if self.probability else value
        outcome = batch.reward.sum(TRAJECTORY).to(value.x.dtype).at(TURN)
        tokens = tree.size(TOKEN, TURN)
        first = where(tree.index(TOKEN, TURN) < 1, value, 0.0).sum(TURN)
        steps = (tokens.x > 0).nonzero().squeeze(1)  # turns with tokens; those of a trajectory are adjacent
        owner = tree.parents[1][steps]
        follows = torch.nn.functional.pad(owner[1:], (0, 1), value=-1) == owner
        after = torch.where(follows, torch.roll(first.x[steps], -1), outcome.x[steps])
        difference = torch.zeros_like(first.x).index_copy(0, steps, after - first.x[steps])
        return Field(tree, TURN, difference)


@dataclass(frozen=True)
class ZeroGate(Gate):
    """w = 0: the policy-gradient term vanishes; a penalty reads the advantage instead."""

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        return rho.map(torch.zeros_like)


@dataclass(frozen=True)
class AdvantageRegressionError(Penalty):
    """(A/β − Σ over the turn of log π − log π_ref)²: 0 where π ∝ π_ref exp(A/β). One cost per turn."""

    reads = frozenset({Signal.REFERENCE})

    beta: float = number(0.1, above=0)

    def __call__(self, view: MicroBatchView) -> Field:
        log_ratio = (view.logp - view[Signal.REFERENCE]).sum(TURN)
        return (view[Column.ADVANTAGE].to(log_ratio.x.dtype) / self.beta - log_ratio) ** 2


@dataclass(frozen=True)
class StatesWithSpread(Mask):
    """Turns in states whose advantages span at least ``min_spread``, over all turns with tokens that the group took
    there."""

    min_spread: float = number(0.0, least=0)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"state"}) if self.min_spread else frozenset()

    def __call__(self, rho: Field, adv: Field, view: MicroBatchView) -> Field:
        batch, tree = view.batch, view.batch.tree
        a, has_tokens = view[Column.ADVANTAGE].at(TURN), (tree.size(TOKEN, TURN) > 0).to(torch.int64)
        peers = Partition.by(tree, TURN, batch.group, batch.state, has_tokens)
        return a.max(peers) - a.min(peers) >= self.min_spread


__all__ = [
    "AdvantageRegressionError", "PresentActions", "RecordedActions", "StatesWithSpread", "TokenBaselineError",
    "TurnValueDifference", "UtteranceAdvantage", "UtteranceCriticError", "UtteranceQError", "UtteranceVError", "ZeroGate",
    "sampled_again", "utterance_advantage",
]  # fmt: skip
