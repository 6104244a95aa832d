"""Dealing a batch to ranks: every trajectory once, every rank as often as the others, and loads that are even."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from support.batches import COUNTS, records_of

from turnwise.core.batch import pack, shared_prefix_lengths
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.engines.sharded.sharded_learner import deal, rows_of_ranks, stripped


@given(COUNTS, st.integers(1, 5), st.integers(1, 64), st.booleans())
@example([[[0], [0], [2], [0, 0]]], 1, 8, False)  # a prefix that two trajectories share is read once
def test_every_trajectory_is_dealt_once_and_rounds_are_full(counts, ranks, positions, padded):
    batch = pack(records_of(counts))
    rounds = deal(batch, ranks, positions, padded)
    assert all(len(shares) == ranks for shares in rounds)
    used = [share for shares in rounds for share in shares if share.used]
    assert sorted(row for share in used for row in share.rows(TRAJECTORY).tolist()) == list(range(len(batch)))
    assert sorted(row for share in used for row in share.rows(TOKEN).tolist()) == list(range(batch.tree.count(TOKEN)))
    for share in used:  # a micro-batch is as large as allowed, or one trajectory
        sequences = share.batch.sequences
        read_once = 0 if padded else int(shared_prefix_lengths(sequences.ids, sequences.start).sum())
        assert sequences.ids.numel() - read_once <= positions or len(share.batch) == 1


@given(COUNTS, st.integers(1, 5))
def test_loads_differ_by_at_most_one_trajectory_or_a_tenth(counts, ranks):
    batch = pack(records_of(counts))
    cost = batch.positions_per_trajectory().tolist()
    loads = [sum(cost[row] for row in rows) for rows in rows_of_ranks(batch, ranks)]
    assert max(loads) <= max(1.1 * sum(loads) / ranks, min(loads) + max(cost))


def test_other_ranks_receive_no_column_of_the_step():
    batch = pack(records_of([[[2], [3]]]))
    kept = (Column.CANDIDATE, 0)
    batch = batch.put({kept: batch.token, Column.ADVANTAGE: batch.behaviour})
    assert set(stripped(batch).columns) == {kept}
