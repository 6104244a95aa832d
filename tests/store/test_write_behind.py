"""A write-behind ledger ends with the same contents as one that writes immediately."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.errors import RecordError
from turnwise.store.ledger import SqliteLedger, WriteBehindLedger


def group(n: int) -> Group:
    task = Task("toy", n)
    return Group(f"g{n}", task, (Trajectory(f"g{n}/0", task, (Turn((1,), (n % 50,), (-1.0,)),)),))


def transitions(ledger: SqliteLedger | WriteBehindLedger, kinds: list[int]) -> None:
    for n, kind in enumerate(kinds):
        ledger.issue(f"g{n}", Task("toy", n), 0, 0)
        if kind > 0:
            ledger.finish(group(n), 0)
        if kind == 2:
            ledger.train([f"g{n}"], 1)
        if kind == 3:
            ledger.drop(f"g{n}", "dull", 1)
        if kind == 4:
            ledger.record_mixed(group(n).trajectories, 1)
            ledger.flush()


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=8))
def test_same_contents_in_the_end(kinds):
    with tempfile.TemporaryDirectory() as folder:
        contents = []
        for name in ("now", "later"):
            with SqliteLedger(Path(folder) / f"{name}.sqlite") as ledger:
                if name == "now":
                    transitions(ledger, kinds)
                else:
                    with WriteBehindLedger(ledger) as behind:
                        transitions(behind, kinds)
                contents.append((ledger.group_counts(), ledger.groups(), ledger.mixed(), ledger.pending()))
        assert contents[0] == contents[1]


def test_writes_are_deferred_until_a_read(tmp_path):
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger, WriteBehindLedger(ledger) as behind:
        behind.issue("g1", Task("toy", 1), 0, 0)
        behind.finish(group(1), 0)
        assert not ledger.groups()
        assert behind.trajectory("g1/0") == group(1).trajectories[0]
        behind.train(iter(["g1"]), 0)  # an iterator would be empty by then
        behind.seal(1)
        assert ledger.group_counts() == behind.group_counts() and ledger.group_counts().trained == 1


def test_a_failed_write_stays_queued_and_raises_again(tmp_path):
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        behind = WriteBehindLedger(ledger)
        behind.train(["nobody"], 0)
        behind.issue("g1", Task("toy", 1), 0, 0)
        for _ in range(2):
            with pytest.raises(RecordError, match="never issued"):
                behind.flush()
        assert not ledger.groups()


def test_a_failing_run_raises_its_own_error_and_writes_what_it_can(tmp_path):
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        with pytest.raises(ZeroDivisionError), WriteBehindLedger(ledger) as behind:
            behind.issue("g1", Task("toy", 1), 0, 0)
            behind.train(["nobody"], 0)
            raise ZeroDivisionError
        assert [entry.group_id for entry in ledger.groups()] == ["g1"]
        with pytest.raises(RecordError), WriteBehindLedger(ledger) as behind:
            behind.train(["nobody"], 0)
