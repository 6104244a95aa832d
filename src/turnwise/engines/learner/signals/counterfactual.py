"""Log-probabilities of counterfactual sequences: the gold answer given at each turn, and each turn without its observation.

Legend: L packed positions, U turns, A queried turns.

Each query is a sequence of its own: the history of one turn, continued or modified. Queries of one trajectory share prefixes,
which are computed once. Knows ids; does not know how they are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.core.batch import Batch, Sequences
from turnwise.core.kept_sets import KeptSets
from turnwise.core.levels import TOKEN, TURN, Field, Tree
from turnwise.errors import SignalError

Score = Callable[[Batch], Field]


@dataclass(frozen=True, eq=False)
class _Turns:
    """Turns with tokens, and their positions in the packed ids. All [A]."""

    index: Tensor  # among all turns
    token: Tensor  # index of the first token
    count: Tensor  # number of tokens
    begin: Tensor  # position where the sequence starts
    first: Tensor  # position of the first token

    @classmethod
    def of(cls, batch: Batch) -> _Turns:
        s, count = batch.sequences, batch.tree.size(TOKEN, TURN).x
        index = (count > 0).nonzero().squeeze(1)
        token = (count.cumsum(0) - count)[index]
        first = s.sampled_at[token]
        return cls(index, token, count[index], s.start[torch.searchsorted(s.start, first, right=True) - 1], first)

    def select(self, rows: Tensor) -> _Turns:
        return _Turns(*(x[rows] for x in (self.index, self.token, self.count, self.begin, self.first)))

    def chunks(self, positions: int) -> Iterator[_Turns]:
        """Consecutive turns in chunks of about ``positions`` ids. Affects memory, never the result."""
        chunk = (self.first + self.count - self.begin).cumsum(0) // max(1, positions)
        for n in chunk.unique().tolist():
            yield self.select((chunk == n).nonzero().squeeze(1))


def spans(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """The integers start, start + 1 ... of all spans concatenated, and the span of each."""
    owner = torch.repeat_interleave(length)
    inside = torch.arange(owner.numel(), device=start.device) - (length.cumsum(0) - length)[owner]
    return start[owner] + inside, owner


def answer_logp(batch: Batch, score: Score, positions: int) -> Field:
    """Mean log-probability of the gold answer in place of each turn's own tokens. 0 for turns without tokens."""
    if not batch.answers or not all(batch.answers):
        raise SignalError(
            "this method needs the log-probability of the gold answer, but the environment has no answer for some task; "
            "give the environment an answer(), or use a method that does not need it"
        )
    device, ids = batch.tree.device, batch.sequences.ids
    length = torch.tensor([len(a) for a in batch.answers], device=device)
    gold = torch.tensor([i for answer in batch.answers for i in answer], device=device)
    out = torch.zeros(batch.tree.count(TURN), device=device)
    for turns in _Turns.of(batch).chunks(positions):
        trajectory = batch.tree.parents[1][turns.index]
        history, answer = turns.first - turns.begin, length[trajectory]
        source, owner = spans(turns.begin, history + answer)
        gold_ids, _ = spans((length.cumsum(0) - length)[trajectory], answer)
        scored = source >= turns.first[owner]
        packed = ids[source.clamp(max=ids.numel() - 1)].masked_scatter(scored, gold[gold_ids])
        logp = score(_query_batch(batch, turns.index, packed, history + answer, scored, owner)).mean(TURN)
        out[turns.index] = logp.x.to(out.dtype)
    return Field(batch.tree, TURN, out)


def logp_without_feedback(batch: Batch, logp: Field, score: Score, positions: int) -> Field:
    """log π(yₜ) with the ids between this turn and the previously sampled token masked; earlier context stays unchanged. Equals
    ``logp`` where nothing is masked."""
    s = batch.sequences
    if s.masked_ids is None or not s.sampled_at.numel():
        return logp
    here = torch.arange(s.ids.numel(), device=s.ids.device)
    after_last = torch.zeros_like(here).index_copy(0, s.sampled_at, s.sampled_at + 1).cummax(0).values
    # [L] the position after the last token sampled before each position, or the start of its sequence
    observation = torch.maximum(here - s.positions(), torch.cat([after_last.new_zeros(1), after_last[:-1]]))
    turns = _Turns.of(batch)
    changes = torch.cat([s.start[:1], (s.masked_ids != s.ids).cumsum(0)])
    turns = turns.select((changes[turns.first] > changes[observation[turns.first]]).nonzero().squeeze(1))
    out = logp.x.clone()
    for chunk in turns.chunks(positions):
        length = chunk.first + chunk.count - chunk.begin
        source, owner = spans(chunk.begin, length)
        scored = source >= chunk.first[owner]
        masked = (source >= observation[chunk.first][owner]) & ~scored
        packed = torch.where(masked, s.masked_ids[source], s.ids[source])
        tokens, _ = spans(chunk.token, chunk.count)
        query = _query_batch(batch, chunk.index, packed, length, scored, owner, s.kept and s.kept.select(tokens))
        out[tokens] = score(query).x.to(out.dtype)
    return Field(batch.tree, TOKEN, out)


def _query_batch(
    batch: Batch,
    turns: Tensor,
    ids: Tensor,
    length: Tensor,
    scored: Tensor,
    owner: Tensor,
    sets: KeptSets | None = None,
) -> Batch:
    """A batch whose sampled tokens are the ``scored`` ids: one sequence, turn and trajectory per queried turn."""
    each = torch.arange(turns.numel(), device=ids.device)
    tree = Tree(owner[scored], each, torch.zeros_like(each), 1)
    at = scored.nonzero().squeeze(1)
    sequences = Sequences(ids, torch.cat([length.new_zeros(1), length.cumsum(0)]), each, at, kept=sets)
    token, temperature = Field(tree, TOKEN, ids[at]), Field(tree, TURN, batch.temperature.x[turns])
    return replace(batch, tree=tree, sequences=sequences, token=token, temperature=temperature, columns={}, answers=())
