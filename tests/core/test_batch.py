"""Packing: what the model reads, what was sampled, forks, restarts, micro-batches, padded tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import COUNTS, records_of

from turnwise.core.batch import even_runs, pack, shared_prefix_lengths
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.records import Fork, Group, Status, Task, Trajectory, Turn
from turnwise.engines.learner.layouts import SharedPrefixes
from turnwise.errors import RecordError, SignalError
from turnwise.integrations.padded import from_padded, to_padded

TASK = Task("test", 1)


def turn(context, tokens, **more):
    return Turn(tuple(context), tuple(tokens), tuple(-0.1 for _ in tokens), version=tuple(0 for _ in tokens), **more)


A = Trajectory("a", TASK, (turn([1, 2], [3, 4]), turn([5], [6], reward=1.0)))
FORKED = Trajectory("b", TASK, (turn([7], [8, 9], reward=0.5),), fork=Fork("a", turn=0, token=1))
RESTARTED = Trajectory("c", TASK, (turn([1, 2], [3]), turn([9, 9, 9], [6], restart=True)))


def read(batch, k):
    """The sequences of trajectory k."""
    s = batch.sequences
    return [s.ids[s.start[i] : s.start[i + 1]].tolist() for i in range(len(s.trajectory)) if s.trajectory[i] == k]


def test_pack_by_hand():
    batch = pack([Group("g", TASK, (A, FORKED)), Group("h", TASK, (RESTARTED,))])
    assert read(batch, 0) == [[1, 2, 3, 4, 5, 6]]
    assert read(batch, 1) == [[1, 2, 3, 7, 8, 9]]  # the shared prefix is read, not owned
    assert read(batch, 2) == [[1, 2, 3], [9, 9, 9, 6]]  # one trajectory, two sequences
    assert batch.token.x.tolist() == [3, 4, 6, 8, 9, 3, 6]
    assert batch.reward.sum(TRAJECTORY).x.tolist() == [1.0, 0.5, 0.0]


def test_a_fork_of_a_fork_reads_both_prefixes():
    grandchild = Trajectory("d", TASK, (turn([20], [21]),), fork=Fork("b", turn=0, token=2))
    batch = pack([Group("g", TASK, (A, FORKED, grandchild))])
    assert read(batch, 2) == [[1, 2, 3, 7, 8, 9, 20, 21]]


@settings(deadline=None, max_examples=50)
@given(counts=COUNTS, seed=st.integers(0, 10**6), cut=st.integers(1, 30))
def test_sampled_tokens_are_found_in_what_the_model_reads(counts, seed, cut):
    """Law: each sampled token stands at its packed position, whole or cut, and nothing is lost or doubled."""
    batch = pack(records_of(counts, seed))
    assert torch.equal(batch.sequences.ids[batch.sequences.sampled_at], batch.token.x)
    parts = list(batch.split(cut))
    for part in parts:
        assert torch.equal(part.sequences.ids[part.sequences.sampled_at], part.token.x)
        for k, key in enumerate(part.trajectory_ids):
            assert read(part, k) == read(batch, batch.trajectory_ids.index(key))
        assert (part.sequences.positions()[part.sequences.start[:-1]] == 0).all()
        assert len(part) == 1 or int(part.positions_per_trajectory().sum()) <= cut
    assert sorted(key for part in parts for key in part.trajectory_ids) == sorted(batch.trajectory_ids)


@given(count=st.integers(1, 200), each=st.integers(1, 40), limit=st.integers(1, 400))
def test_micro_batches_of_equals_are_even(count, each, limit):
    """Law: as few as can be, and none has two more than another."""
    sizes = [len(part) for part in even_runs(range(count), [each] * count, [each] * count, limit)]
    assert len(sizes) == -(-count // max(1, limit // each)) and max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=200)
@given(
    costs=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 90)), min_size=1, max_size=40),
    limit=st.integers(1, 300),
)
def test_micro_batches_are_few(costs, limit):
    """Law: no other runs of neighbours are fewer that leave room for the longest shared beginning; without any, none at all."""
    beside, alone = [own for own, _ in costs], [own + shared for own, shared in costs]
    runs = even_runs(range(len(costs)), alone, beside, limit)
    assert [k for run in runs for k in run] == list(range(len(costs)))
    cost = lambda run: alone[run[0]] + sum(beside[k] for k in run[1:])  # noqa: E731
    assert all(len(run) == 1 or cost(run) <= limit for run in runs)
    fewest, less = [0], limit - max(shared for _, shared in costs)  # of the first n items
    for n in range(1, len(costs) + 1):
        fits = [m for m in range(n) if m == n - 1 or cost(range(m, n)) <= less]
        fewest.append(1 + min(fewest[m] for m in fits))
    assert len(runs) <= fewest[-1]


@settings(deadline=None, max_examples=50)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=6)), min_size=1, max_size=5
    ),
    cut=st.integers(1, 60),
)
def test_a_beginning_that_siblings_share_counts_once(groups, cut):
    """Law: what a model has to read of a micro-batch fits; and if it fits into one, it is one."""
    made = []
    for g, (prompt, answers) in enumerate(groups):
        context = [100 * g + k for k in range(prompt)]
        turns = [turn(context, [1000 * (10 * g + i) + k for k in range(n)]) for i, n in enumerate(answers)]
        made.append(Group(str(g), TASK, tuple(Trajectory(f"{g}.{i}", TASK, (t,)) for i, t in enumerate(turns))))
    batch = pack(made)
    again = [0 if i == 0 else prompt for prompt, answers in groups for i in range(len(answers))]
    assert shared_prefix_lengths(batch.sequences.ids, batch.sequences.start).tolist() == again
    parts = list(batch.split(cut, padded=False))
    for part in parts:
        s = part.sequences
        assert len(part) == 1 or len(SharedPrefixes.of(s.ids, s.start).computed) <= cut
    assert [key for part in parts for key in part.trajectory_ids] == list(batch.trajectory_ids)
    if len(SharedPrefixes.of(batch.sequences.ids, batch.sequences.start).computed) <= cut:
        assert len(parts) == 1


@settings(deadline=None, max_examples=60)
@given(
    talks=st.lists(
        st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.booleans()), max_size=4),
        min_size=1, max_size=9,
    ),
    cut=st.integers(1, 40),
)  # fmt: skip
def test_what_is_read_once_counts_once(talks, cut):
    """Law: however trajectories share their beginnings, restart or say nothing, what a model reads of a micro-batch fits."""
    every = [tuple(turn(ids, [2], restart=restart) for ids, restart in talk) for talk in talks]
    batch = pack([Group("g", TASK, tuple(Trajectory(str(k), TASK, turns) for k, turns in enumerate(every)))])
    parts = list(batch.split(cut, padded=False))
    for part in parts:
        s = part.sequences
        assert len(part) == 1 or len(SharedPrefixes.of(s.ids, s.start).computed) <= cut
    assert [key for part in parts for key in part.trajectory_ids] == list(batch.trajectory_ids)


@settings(deadline=None, max_examples=50)
@given(counts=COUNTS, seed=st.integers(0, 10**6), ends=st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_neighbours_are_cut_out_as_they_would_be_picked_out(counts, seed, ends):
    batch = pack(records_of(counts, seed))
    first, last = sorted(e % len(batch) for e in ends)
    run = list(range(first, last + 1))
    around = [*run[::2], *run[1::2]]
    back = sorted(range(len(run)), key=lambda i: around[i])
    whole, picked = batch.select(run), batch.select(around).select(back)
    assert (
        whole.tree.sizes == picked.tree.sizes
        and whole.trajectory_ids == picked.trajectory_ids
        and whole.task_keys == picked.task_keys
    )
    for a, b in zip(whole.tree.parents, picked.tree.parents):
        assert a.tolist() == b.tolist()
    for name in ("ids", "start", "trajectory", "sampled_at"):
        assert getattr(whole.sequences, name).tolist() == getattr(picked.sequences, name).tolist()
    for name, value in vars(whole).items():
        if isinstance(value, Field):
            torch.testing.assert_close(value.x, getattr(picked, name).x, equal_nan=True)


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=3), min_size=1, max_size=5
    )
)
def test_padded_round_trip(rows):
    """Law: (B, L) tensors in, fields, (B, L) tensors out; context and padding never matter."""
    length = max(sum(c + n for c, n in row) for row in rows) + 2
    mask = torch.zeros(len(rows), length)
    for b, row in enumerate(rows):
        at = 0
        for context, sampled in row:
            mask[b, at + context : at + context + sampled] = 1
            at += context + sampled
    ids, logp = torch.randint(0, 99, mask.shape), -torch.rand(mask.shape)
    batch = from_padded(
        ids, mask, logp=logp, reward=torch.arange(len(rows)).float(), group=torch.arange(len(rows)) // 2, extra=logp * 2
    )
    assert torch.equal(to_padded(batch.behaviour, mask), logp * mask)
    assert torch.equal(to_padded(batch["extra"], mask), logp * 2 * mask)
    assert torch.equal(batch.tree.size(TOKEN, TRAJECTORY).x, mask.sum(1).long())
    assert torch.equal(batch.reward.sum(TRAJECTORY).x, torch.arange(len(rows)).float())
    turns = ((mask[:, 1:] == 1) & (mask[:, :-1] == 0)).sum(1)
    assert torch.equal(batch.tree.size(TURN, TRAJECTORY).x, turns.clamp(min=1))  # a silent row has one empty turn


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: pack([Group("g", TASK, (A.failed("the tool broke"),))]), "the tool broke"),
        (lambda: pack([Group("g", TASK, (Trajectory("x", TASK, (turn([], [1]),)),))]), "without a prompt"),
        (lambda: pack([Group("g", TASK, (Trajectory("x", TASK, (Turn((1,), (2,)),)),))]), "without log-probabilities"),
        (
            lambda: pack([Group("g", TASK, (A, Trajectory("x", TASK, (turn([1], [2]),), fork=Fork("a", 9))))]),
            "no such position",
        ),
        (lambda: Group("g", TASK, (FORKED,)), "not in group"),
        (lambda: Group("g", TASK, (A, A)), "same id"),
        (lambda: Turn((1,), (2, 3), (0.1,)), "2 tokens but 1 values of logp"),
    ],
)
def test_records_that_do_not_hold_together(make, words):
    with pytest.raises(RecordError, match=words):
        make()


def test_a_missing_signal_is_named():
    with pytest.raises(SignalError, match="must declare it"):
        pack([Group("g", TASK, (A,))])["reference"]
    assert Status.FAILED != Status.TRUNCATED
