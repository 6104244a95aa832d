"""What was never said: the gold answer at each turn, and each turn had the environment said nothing just before it.

Legend: L packed positions, U turns, A turns asked about.

Each question is a sequence of its own: the past of one turn, changed or continued. Those of one trajectory share their
beginnings, which are read once. Knows ids; how they are scored it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.core.batch import Batch, Sequences
from turnwise.core.levels import TOKEN, TURN, Field, Tree
from turnwise.errors import SignalError

Score = Callable[[Batch], Field]


@dataclass(frozen=True, eq=False)
class _Turns:
    """The turns with tokens, where they stand in the packed ids. All [A]."""

    number: Tensor  # among all turns
    token: Tensor  # number of its first token
    count: Tensor  # of its tokens
    begin: Tensor  # where its sequence begins
    here: Tensor  # its first sampled token

    @classmethod
    def of(cls, batch: Batch) -> _Turns:
        s, count = batch.sequences, batch.tree.size(TOKEN, TURN).x
        number = (count > 0).nonzero().squeeze(1)
        token = (count.cumsum(0) - count)[number]
        here = s.at[token]
        return cls(number, token, count[number], s.start[torch.searchsorted(s.start, here, right=True) - 1], here)

    def only(self, chosen: Tensor) -> _Turns:
        return _Turns(*(x[chosen] for x in (self.number, self.token, self.count, self.begin, self.here)))

    def chunks(self, positions: int) -> Iterator[_Turns]:
        """Neighbours together, each lot of about so many positions: memory, never the result."""
        lot = (self.here + self.count - self.begin).cumsum(0) // max(1, positions)
        for n in lot.unique().tolist():
            yield self.only((lot == n).nonzero().squeeze(1))


def spans(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers start, start + 1 ... of each span end to end, and which span each is of."""
    owner = torch.repeat_interleave(length)
    inside = torch.arange(owner.numel(), device=start.device) - (length.cumsum(0) - length)[owner]
    return start[owner] + inside, owner


def answers(batch: Batch, score: Score, positions: int) -> Field:
    """Mean log-probability of the gold answer at each turn, were it said instead of what was. 0 for turns without tokens."""
    if not batch.answers or not all(batch.answers):
        raise SignalError(
            "the likelihood of the gold answer was asked for, but the environment tells none for some task; "
            "give the environment an answer(), or take a method that does not need it"
        )
    device, ids = batch.tree.device, batch.sequences.ids
    length = torch.tensor([len(a) for a in batch.answers], device=device)
    gold = torch.tensor([i for answer in batch.answers for i in answer], device=device)
    found = torch.zeros(batch.tree.count(TURN), device=device)
    for turns in _Turns.of(batch).chunks(positions):
        whose = batch.tree.parents[1][turns.number]
        past, tail = turns.here - turns.begin, length[whose]
        source, owner = spans(turns.begin, past + tail)
        said, _ = spans((length.cumsum(0) - length)[whose], tail)
        sampled = source >= turns.here[owner]
        packed = ids[source.clamp(max=ids.numel() - 1)].masked_scatter(sampled, gold[said])
        scores = score(_questions(batch, turns.number, packed, past + tail, sampled, owner)).mean(TURN)
        found[turns.number] = scores.x.to(found.dtype)
    return Field(batch.tree, TURN, found)


def blind(batch: Batch, plain: Field, score: Score, positions: int) -> Field:
    """log π(yₜ) with what stands between this turn and the tokens sampled before it replaced by its blind ids; all earlier
    contexts stay as they were. Where nothing is replaced: the plain log-probability."""
    s = batch.sequences
    if s.blind is None or not s.at.numel():
        return plain
    turns, heard = _Turns.of(batch), _heard_from(s)
    other = torch.cat([s.start[:1], (s.blind != s.ids).cumsum(0)])
    turns = turns.only((other[turns.here] > other[heard[turns.here]]).nonzero().squeeze(1))
    found = plain.x.clone()
    for some in turns.chunks(positions):
        length = some.here + some.count - some.begin
        source, owner = spans(some.begin, length)
        sampled = source >= some.here[owner]
        hidden = (source >= heard[some.here][owner]) & ~sampled
        packed = torch.where(hidden, s.blind[source], s.ids[source])
        tokens, _ = spans(some.token, some.count)
        found[tokens] = score(_questions(batch, some.number, packed, length, sampled, owner)).x.to(found.dtype)
    return Field(batch.tree, TOKEN, found)


def _heard_from(s: Sequences) -> Tensor:
    """For each position the first one behind the last token sampled before it, or where its sequence begins, [L]."""
    here = torch.arange(s.ids.numel(), device=s.ids.device)
    behind = torch.zeros_like(here).index_copy(0, s.at, s.at + 1).cummax(0).values
    return torch.maximum(here - s.positions(), torch.cat([behind.new_zeros(1), behind[:-1]]))


def _questions(batch: Batch, turns: Tensor, ids: Tensor, length: Tensor, sampled: Tensor, owner: Tensor) -> Batch:
    """A batch whose sampled tokens are those marked: one sequence, turn and trajectory for each turn asked about."""
    each = torch.arange(turns.numel(), device=ids.device)
    tree = Tree(owner[sampled], each, torch.zeros_like(each), 1)
    at = sampled.nonzero().squeeze(1)
    sequences = Sequences(ids, torch.cat([length.new_zeros(1), length.cumsum(0)]), each, at)
    temperature = Field(tree, TURN, batch.temperature.x[turns])
    return replace(
        batch,
        tree=tree,
        sequences=sequences,
        token=Field(tree, TOKEN, ids[at]),
        temperature=temperature,
        columns={},
        answers=(),
    )
