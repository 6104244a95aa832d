"""Every column of a batch is declared: a name that is no column and no signal is refused."""

from __future__ import annotations

import pytest
from support.batches import records_of

from turnwise.core.batch import pack
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN
from turnwise.core.signals import Signal
from turnwise.errors import SignalError


@pytest.fixture
def batch():
    return pack(records_of([[[2, 1], [3]]], 0))


def test_declared_keys_are_stored_under_their_member(batch):
    ones, piece = batch.tree.full(TOKEN, 1.0), object()
    columns = {"reference": ones, (Column.PENALTY_WEIGHT, 0): ones, piece: ones, (piece, "mean"): ones}
    made = batch.put(columns, weight=ones)
    assert all(
        made[key] is ones
        for key in (Column.WEIGHT, Signal.REFERENCE, (Column.PENALTY_WEIGHT, 0), piece, (piece, "mean"))
    )
    assert [type(key) for key in made.columns if isinstance(key, str)] == [Signal, Column]


@pytest.mark.parametrize("key", ["wieght", ("told", 0), "silent"])
def test_an_undeclared_name_raises(batch, key):
    with pytest.raises(SignalError, match=r"declare it in core/columns\.py"):
        batch.put({key: batch.tree.full(TOKEN, 1.0)})
    with pytest.raises(SignalError, match="weight"):
        batch.put(wieght=batch.tree.full(TOKEN, 1.0))
