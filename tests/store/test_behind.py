"""A ledger that is written later says the same as one that is written at once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.errors import RecordError
from turnwise.store import Ledger
from turnwise.store.write_behind import Behind


def group(n: int) -> Group:
    task = Task("toy", n)
    return Group(f"g{n}", task, (Trajectory(f"g{n}/0", task, (Turn((1,), (n % 50,), (-1.0,)),)),))


def arrows(ledger: Ledger | Behind, kinds: list[int]) -> None:
    for n, kind in enumerate(kinds):
        ledger.issue(f"g{n}", Task("toy", n), 0, 0)
        if kind > 0:
            ledger.finish(group(n), 0)
        if kind == 2:
            ledger.train([f"g{n}"], 1)
        if kind == 3:
            ledger.drop(f"g{n}", "dull", 1)
        if kind == 4:
            ledger.mix(group(n).trajectories, 1)
            ledger.drain()


@given(st.lists(st.integers(0, 4), max_size=8))
def test_the_same_book_in_the_end(kinds):
    with tempfile.TemporaryDirectory() as folder:
        books = []
        for name in ("now", "later"):
            with Ledger(Path(folder) / f"{name}.sqlite") as ledger:
                if name == "now":
                    arrows(ledger, kinds)
                else:
                    with Behind(ledger) as behind:
                        arrows(behind, kinds)
                books.append((ledger.balance(), ledger.groups(), ledger.mixed(), ledger.pending()))
        assert books[0] == books[1]


def test_it_waits_until_somebody_looks(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger, Behind(ledger) as behind:
        behind.issue("g1", Task("toy", 1), 0, 0)
        behind.finish(group(1), 0)
        assert not ledger.groups()
        assert behind.trajectory("g1/0") == group(1).trajectories[0]
        behind.train(iter(["g1"]), 0)  # an iterator would be empty by then
        behind.seal(1)
        assert ledger.balance() == behind.balance() and ledger.balance().trained == 1


def test_what_fails_stays_owed_and_is_said_again(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        behind = Behind(ledger)
        behind.train(["nobody"], 0)
        behind.issue("g1", Task("toy", 1), 0, 0)
        for _ in range(2):
            with pytest.raises(RecordError, match="never issued"):
                behind.drain()
        assert not ledger.groups()


def test_a_run_that_fails_keeps_its_own_fault_and_what_it_can_of_its_records(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        with pytest.raises(ZeroDivisionError), Behind(ledger) as behind:
            behind.issue("g1", Task("toy", 1), 0, 0)
            behind.train(["nobody"], 0)
            raise ZeroDivisionError
        assert [entry.group_id for entry in ledger.groups()] == ["g1"]
        with pytest.raises(RecordError), Behind(ledger) as behind:
            behind.train(["nobody"], 0)
