"""Critics of steps: utterances judged by twin critics, and steps whose log-ratio is regressed to their advantage."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnwise.algebra.factor import Factor
from turnwise.algebra.gate import Gate
from turnwise.algebra.mask import Mask
from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import Now, check
from turnwise.algebra.term import Term
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.signals import SLOW, UTTERANCE, Signal
from turnwise.credit.voters import neighbour

# ------------------------------------------------------------------- utterances


def judged(now: Now) -> Field:
    """A = min Q − min V of each turn: what was said against the state it was said in. Detached."""
    q, q_twin, v, v_twin = (now[s].detach() for s in UTTERANCE)
    return q.minimum(q_twin) - v.minimum(v_twin)


@dataclass(frozen=True)
class Judged(Factor):
    """min(Q, Q') − min(V, V') of the turn, by the critics as they are now; ``baseline`` subtracts the token's own estimate."""

    baseline: bool = False

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({*UTTERANCE, Signal.VALUE} if self.baseline else UTTERANCE)

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        a = judged(now)
        return a - now[Signal.VALUE].detach() if self.baseline else a.at(TOKEN)


@dataclass(frozen=True)
class UtteranceError(Penalty):
    """Σ over both critics of (Q − r − γ V̄(s'))² + (V − Q̄(s, a))², bars: their slowly following copies.

    After the last turn nothing more is worth anything. One cost for each turn; turns without tokens said nothing."""

    gamma: float = 0.9

    def __post_init__(self) -> None:
        check(0 <= self.gamma <= 1, f"gamma is {self.gamma}; write a number in [0, 1]")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({*UTTERANCE, *SLOW})

    def __call__(self, now: Now) -> Field:
        q, q_twin, v, v_twin = (now[s] for s in UTTERANCE)
        slow_q, slow_q_twin, slow_v, slow_v_twin = (now.batch[s] for s in SLOW)
        reward = now.batch.reward.sum(TURN)
        goal = lambda after: reward + self.gamma * neighbour(after, 1, 0.0)  # noqa: E731
        left = (q - goal(slow_v)) ** 2 + (v - slow_q) ** 2
        return left + (q_twin - goal(slow_v_twin)) ** 2 + (v_twin - slow_q_twin) ** 2


@dataclass(frozen=True)
class BaselineError(Penalty):
    """(A − b)²: the token's estimate b learns what its turn is judged to be worth."""

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({*UTTERANCE, Signal.VALUE})

    def __call__(self, now: Now) -> Field:
        return (judged(now) - now[Signal.VALUE]) ** 2


# ------------------------------------------------------------------------ steps


@dataclass(frozen=True)
class ValueRise(Term):
    """A = V(after) − V(before) of each turn, V the critic's estimate before its first token; at the end V is the outcome.

    A turn without tokens is no step: what follows it is what follows the turn before. At TURN."""

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.OLD_VALUE})

    def __call__(self, batch: Batch) -> Field:
        tree, value = batch.tree, batch[Signal.OLD_VALUE]
        outcome = batch.reward.sum(TRAJECTORY).to(value.x.dtype).at(TURN)
        said = tree.size(TOKEN, TURN)
        first = where(tree.index(TOKEN, TURN) < 1, value, 0.0).sum(TURN)
        steps = (said.x > 0).nonzero().squeeze(1)  # turns with tokens; those of a trajectory lie together
        owner = tree.parents[1][steps]
        follows = torch.nn.functional.pad(owner[1:], (0, 1), value=-1) == owner
        after = torch.where(follows, torch.roll(first.x[steps], -1), outcome.x[steps])
        rise = torch.zeros_like(first.x).index_copy(0, steps, after - first.x[steps])
        return Field(tree, TURN, rise)


@dataclass(frozen=True)
class Closed(Gate):
    """w = 0: the advantage moves nothing by itself; a penalty reads it."""

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        return rho.map(torch.zeros_like)


@dataclass(frozen=True)
class AdvantageError(Penalty):
    """(A/β − Σ over the turn of log π − log π_ref)²: where it is 0, π is proportional to π_ref exp(A/β). One for each turn."""

    beta: float = 0.1

    def __post_init__(self) -> None:
        check(self.beta > 0, f"beta is {self.beta}; write a positive number")

    @property
    def reads(self) -> frozenset[Signal]:
        return frozenset({Signal.REFERENCE})

    def __call__(self, now: Now) -> Field:
        drift = (now.logp - now[Signal.REFERENCE]).sum(TURN)
        return (now["advantage"].to(drift.x.dtype) / self.beta - drift) ** 2


@dataclass(frozen=True)
class VariedStates(Mask):
    """Turns of states whose advantages lie at least ``least`` apart, over all turns with tokens that a group took there."""

    least: float = 0.0

    def __post_init__(self) -> None:
        check(self.least >= 0, f"least is {self.least}; write a number >= 0")

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"state"}) if self.least else frozenset()

    def __call__(self, rho: Field, adv: Field, now: Now) -> Field:
        batch, tree = now.batch, now.batch.tree
        a, said = now["advantage"].at(TURN), (tree.size(TOKEN, TURN) > 0).to(torch.int64)
        peers = Partition.by(tree, TURN, batch.group, batch.state, said)
        return a.max(peers) - a.min(peers) >= self.least


__all__ = [
    "AdvantageError", "BaselineError", "Closed", "Judged", "UtteranceError", "ValueRise", "VariedStates", "judged",
]  # fmt: skip
