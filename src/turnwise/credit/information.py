"""Information gain of a turn: about the gold answer, or in the policy's own next turn. Does not know how the signals
are measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.algebra.ratio import behaviour
from turnwise.algebra.term import Term
from turnwise.algebra.value import is_last
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, where
from turnwise.core.limits import number
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.credit.peers import shift_turns
from turnwise.maths.lazy_torch import torch


@dataclass(frozen=True)
class AnswerProbabilityGain(Term):
    """rₖ = pₖ₊₁ − pₖ, the increase of the gold answer's probability p (geometric mean of its tokens) by turn k; the
    last turn earns ``weight`` · R instead. At TURN."""

    reads = frozenset({Signal.ANSWER_LOGP})
    requires = frozenset({"answer"})

    weight: float = number(1.0, least=0)

    def __call__(self, batch: Batch) -> Field:
        p = batch[Signal.ANSWER_LOGP].exp()
        last = Field(batch.tree, TURN, is_last(batch, TURN))
        return where(last, self.weight * batch.reward.sum(TRAJECTORY), shift_turns(p, 1, 0.0) - p)


@dataclass(frozen=True)
class FeedbackInformationGain(Term):
    """Iₖ = mean over the tokens of turn k + 1 of log μ(y) − log π(y | feedback to turn k masked): how much the
    environment's feedback to turn k changed the next turn. Credited to turn k. At TOKEN.

    ``shared``: divided by the number of tokens of turn k. Exactly 0 where there was no feedback, none of it was masked,
    or no token follows."""

    reads = frozenset({Signal.LOGP_WITHOUT_FEEDBACK})
    requires = frozenset({"feedback"})

    shared: bool = True
    answered: Term = field(default_factory=lambda: Fact("feedback", TURN, missing=1.0))

    def __call__(self, batch: Batch) -> Field:
        log_ratio = (behaviour(batch) - batch[Signal.LOGP_WITHOUT_FEEDBACK]).mean(TURN)  # 0 for a turn without tokens
        log_ratio = where(
            feedback_was_masked(batch), log_ratio, 0.0
        )  # identical text: only rounding differs between the two passes
        gain = where(self.answered(batch) > 0.5, shift_turns(log_ratio, 1, 0.0), 0.0)
        return gain.at(TOKEN) / batch.tree.size(TOKEN, TURN) if self.shared else gain.at(TOKEN)


def feedback_was_masked(batch: Batch) -> Field:
    """Turns for which any context token since the last sampled one was masked; all turns where no masked context was
    recorded. At TURN."""
    sequences, tree = batch.sequences, batch.tree
    if sequences.masked_ids is None:
        return tree.full(TURN, True, torch.bool)
    changed = torch.zeros(tree.count(TURN), dtype=torch.bool, device=tree.device)
    place = (sequences.masked_ids != sequences.ids).nonzero().squeeze(1)
    token = torch.searchsorted(sequences.sampled_at, place)  # the first token sampled after it
    place, token = place[token < sequences.sampled_at.numel()], token[token < sequences.sampled_at.numel()]
    inside = lambda at: torch.searchsorted(sequences.start, at, right=True)  # noqa: E731
    token = token[inside(place) == inside(sequences.sampled_at[token])]
    changed[tree.parents[0][token]] = True
    return Field(tree, TURN, changed)


@dataclass(frozen=True)
class StandardiseNonZero(Term):
    """(v − mean)/(std + ε) over the values of a group that are not 0; zeros stay 0."""

    compares_peers = True

    value: Term
    eps: float = 1e-6

    def __call__(self, batch: Batch) -> Field:
        v = self.value(batch)
        present = v.abs() > 0
        peers = Partition.by(batch.tree, v.level, batch.group, present)
        return where(present, (v - v.mean(peers)) / (v.std(peers) + self.eps), 0.0)


@dataclass(frozen=True)
class LimitStd(Term):
    """c · term, c = min(1, max(std of ``reference``, 1)/std of ``term``) over all tokens of the batch."""

    term: Term
    reference: Term

    def __call__(self, batch: Batch) -> Field:
        a, limit = self.term(batch), self.reference(batch).at(TOKEN)
        std = a.at(TOKEN).std(BATCH)
        c = where(std > 0, limit.std(BATCH).clamp(low=1.0) / where(std > 0, std, 1.0), 1.0)
        return c.clamp(high=1.0) * a


@dataclass(frozen=True)
class LowSpreadGate(Term):
    """g · term, g = σ(−std of R in the group / temperature): ½ where returns are equal, near 0 where they differ."""

    term: Term
    temperature: float = number(0.05, above=0)

    def __call__(self, batch: Batch) -> Field:
        spread = batch.reward.sum(TRAJECTORY).std(GROUP)
        return (-1.0 / self.temperature * spread).map(torch.sigmoid) * self.term(batch)


@dataclass(frozen=True)
class ExponentialDecay(Term):
    """exp(−rate · t) · term, t batches so far."""

    term: Term
    rate: float = number(0.0, least=0)

    def __call__(self, batch: Batch) -> Field:
        return (-self.rate * batch[Column.BATCH_INDEX]).exp() * self.term(batch)


__all__ = [
    "AnswerProbabilityGain", "ExponentialDecay", "FeedbackInformationGain", "LimitStd", "LowSpreadGate",
    "StandardiseNonZero", "feedback_was_masked",
]  # fmt: skip
