"""Levels and fields: hand-checked numbers, then laws over random ragged trees."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import COUNTS

from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition, Tree, where
from turnwise.core.transfer import copy_packed, to_device_packed
from turnwise.errors import LevelError

TREE = Tree.ragged([[[2, 1], [3, 0]], [[1]]])  # 7 tokens, 5 turns (one empty), 3 trajectories, 2 groups
X = TREE.field(TOKEN, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def values(field: Field) -> list[float]:
    return field.x.tolist()


def test_gather_by_hand():
    assert values(X.sum(TURN)) == [1, 2, 12, 0, 6]
    assert values(X.mean(TURN)) == [0.5, 2, 4, 0, 6]  # an empty turn has mean 0
    assert values(X.min(TRAJECTORY)) == [0, 3, 6]
    assert values(X.max(GROUP)) == [5, 6]
    assert values(X.median(GROUP)) == [2.5, 6]
    assert values(X.std(TRAJECTORY)) == [1, 1, 0]  # a lone item has no spread
    assert X.sum(BATCH).item == 21
    assert values(X.peer_count(GROUP)) == [6, 1]


def test_spread_and_arithmetic_across_levels():
    assert values(X.mean(TRAJECTORY).at(TOKEN)) == [1, 1, 1, 4, 4, 4, 6]
    assert values(X - X.mean(TRAJECTORY)) == [-1, 0, 1, -1, 0, 1, 0]
    assert (X.mean(GROUP) * X.mean(TURN)).level == TURN
    assert values(2 - X.mean(TRAJECTORY)) == [1, -2, -4]
    assert values(where(X > 2.0, X.mean(TRAJECTORY), 0.0)) == [0, 0, 0, 4, 4, 4, 6]


def test_leave_one_out_and_running_sum():
    rewards = TREE.field(TRAJECTORY, [1.0, 3.0, 5.0])
    assert values(rewards.leave_one_out(GROUP)) == [3, 1, 0]  # a lone peer is compared with 0
    assert values(X.running_sum(TRAJECTORY)) == [0, 1, 3, 3, 7, 12, 6]
    assert values(X.running_sum(TRAJECTORY, reverse=True)) == [3, 3, 2, 12, 9, 5, 6]


def test_sizes_and_indices():
    assert values(TREE.size(TOKEN, TURN)) == [2, 1, 3, 0, 1]
    assert values(TREE.index(TURN, TRAJECTORY)) == [0, 1, 0, 1, 0]
    assert values(TREE.size(TRAJECTORY, GROUP)) == [2, 1]


def test_partitions():
    peers = Partition.by(TREE, TURN, TREE.field(GROUP, [0, 1]), TREE.index(TURN, TRAJECTORY))  # k-th turns of a group
    assert values(TREE.field(TURN, [1.0, 2.0, 3.0, 4.0, 9.0]).mean(peers)) == [2, 3, 2, 3, 9]


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: X.sum(GROUP).at(BATCH), "reduce it"),
        (lambda: X + Tree.ragged([[[1]]]).field(TOKEN, [1.0]), "different trees"),
        (lambda: TREE.field(TURN, [1.0, 2.0]), "needs shape"),
        (lambda: TREE.ancestor(TURN, TOKEN), "no ancestor"),
        (lambda: X.item, "BATCH"),
        (lambda: Tree(torch.tensor([5]), torch.tensor([0]), torch.tensor([0]), 1), "point outside"),
        (lambda: Tree(torch.tensor([0.0]), torch.tensor([0]), torch.tensor([0]), 1), "int64"),
        (lambda: Partition.by(TREE, TURN), "at least one key"),
    ],
)
def test_mistakes_are_refused(wrong, words):
    with pytest.raises(LevelError, match=words):
        wrong()


REDUCTIONS = {
    "sum": (sum, 0.0),
    "mean": (statistics.fmean, 0.0),
    "min": (min, 0.0),
    "max": (max, 0.0),
    "median": (statistics.median, 0.0),
    "std": (lambda v: statistics.stdev(v) if len(v) > 1 else 0.0, 0.0),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@settings(deadline=None, max_examples=40)
@given(counts=COUNTS, seed=st.integers(0, 10**6), level=st.sampled_from([TURN, TRAJECTORY, GROUP, BATCH]))
def test_reductions_equal_python(name, counts, seed, level):
    tree = Tree.ragged(counts)
    x = torch.randn(tree.count(TOKEN), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found = getattr(Field(tree, TOKEN, x), name)(level)
    function, empty = REDUCTIONS[name]
    owner = tree.ancestor(TOKEN, level).tolist()
    for item in range(tree.count(level)):
        mine = [v for v, o in zip(x.tolist(), owner) if o == item]
        assert found.x[item].item() == pytest.approx(function(mine) if mine else empty, abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(counts=COUNTS, seed=st.integers(0, 10**6), data=st.data())
def test_reductions_do_not_depend_on_packing_order(counts, seed, data):
    """Law: permuting trajectories permutes the answers."""
    tree = Tree.ragged(counts)
    x = torch.randn(tree.count(TOKEN), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    order = torch.tensor(data.draw(st.permutations(range(tree.count(TRAJECTORY)))))
    moved, kept = tree.select(order)
    for name in REDUCTIONS:
        for level in (TURN, TRAJECTORY, GROUP):
            before = getattr(Field(tree, TOKEN, x), name)(level).x[kept[level]]
            after = getattr(Field(moved, TOKEN, x[kept[0]]), name)(level).x
            torch.testing.assert_close(after, before)
    torch.testing.assert_close(
        Field(moved, TOKEN, x[kept[0]]).running_sum(TRAJECTORY).x,
        Field(tree, TOKEN, x).running_sum(TRAJECTORY).x[kept[0]],
    )


@settings(deadline=None, max_examples=30)
@given(counts=COUNTS, seed=st.integers(0, 10**6))
def test_gradients_flow_through_gathers(counts, seed):
    tree = Tree.ragged(counts)
    x = torch.randn(
        tree.count(TOKEN), dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True
    )
    if not x.numel():
        return
    f = Field(tree, TOKEN, x)
    loss = ((f - f.mean(TURN)) * f.sum(TRAJECTORY) + f.max(GROUP) + f.running_sum(TRAJECTORY)).x.sum()
    assert torch.autograd.grad(loss, x)[0].isfinite().all()


def test_unsorted_labels_give_the_same_as_sorted():
    label = torch.tensor([1, 0, 1, 0, 2])
    tree = Tree(label, torch.tensor([0, 0, 0]), torch.tensor([0]), 1)
    f = tree.field(TOKEN, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert values(f.running_sum(TURN)) == [1, 2, 4, 6, 5]
    assert values(tree.index(TOKEN, TURN)) == [0, 0, 1, 1, 0]
    assert values(f.median(TURN)) == [3, 2, 5]


def test_tensors_that_travel_together_arrive_as_they_were():
    """As one buffer, whatever their kinds and sizes; to a GPU it is pinned, here it is plain memory."""
    given_ = [
        torch.arange(7), torch.tensor([True, False, True]), torch.zeros(0, dtype=torch.float64), torch.randn(3, 5),
        torch.randn(9).to(torch.bfloat16), torch.arange(10)[::3], torch.tensor([1.5], dtype=torch.float64),
    ]  # fmt: skip
    sent = copy_packed(given_, lambda size: torch.empty(size, dtype=torch.uint8), "cpu")
    for there, here in zip(sent, given_):
        assert there.dtype == here.dtype and there.shape == here.shape and torch.equal(there, here)
    assert len({x.untyped_storage().data_ptr() for x in sent}) == 1
    assert [torch.equal(a, b) for a, b in zip(to_device_packed(given_, "cpu"), given_)] == [True] * len(given_)
