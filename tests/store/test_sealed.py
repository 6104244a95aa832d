"""What a run resumes from is noticed when it is cut or changed: JSON results, and the ledger of a checkpoint."""

from __future__ import annotations

import json
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.errors import StoreError
from turnwise.store.atomic import check_digest, read_sealed, write_sealed
from turnwise.store.ledger import SqliteLedger

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(value=st.dictionaries(st.text(max_size=5).filter(lambda key: key != "sha256"), JSON, max_size=4))
def test_what_is_written_is_read(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("sealed") / "x.json"
    write_sealed(path, value)
    assert read_sealed(path) == value


def test_a_lone_surrogate_does_not_break_the_digest(tmp_path):
    write_sealed(tmp_path / "x.json", {"text": "a\ud800b"})
    assert read_sealed(tmp_path / "x.json")["text"].startswith("a")


def test_a_cut_file(tmp_path):
    path = tmp_path / "evaluation_before.json"
    write_sealed(path, {"summary": {"success": 0.5}, "rows": [1, 2, 3]})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StoreError, match="cut off"):
        read_sealed(path)


def test_a_changed_file(tmp_path):
    path = tmp_path / "evaluation_before.json"
    write_sealed(path, {"summary": {"success": 0.5}})
    path.write_text(path.read_text().replace("0.5", "0.9"))
    with pytest.raises(StoreError, match="was changed"):
        read_sealed(path)


def test_a_file_without_its_digest_is_a_changed_one(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"summary": 3}))
    with pytest.raises(StoreError, match="was changed"):
        read_sealed(tmp_path / "x.json")


def test_an_empty_ledger_beside_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"")
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        with pytest.raises(StoreError, match="the ledger is empty, and the run has a checkpoint of step 4"):
            ledger.resume(4)
        ledger.resume(0)  # no checkpoint: a run that was killed before its first group


# ------------------------------------------------------------------ ledger


def group(n: int) -> Group:
    task = Task("calculator", n)
    turn = Turn(context=(1, 2), tokens=(3,), logp=(-0.5,), version=(0,), mass=(0.0,))
    return Group(f"g{n}", task, (Trajectory(f"g{n}.0", task, (turn,), {"outcome": 1.0}),))


def play(ledger: SqliteLedger, numbers: range, step: int) -> None:
    for n in numbers:
        ledger.issue(f"g{n}", Task("calculator", n), step, step)
        ledger.finish(group(n), step)
    ledger.train([f"g{n}" for n in numbers], step)


def test_later_steps_and_a_rollback_do_not_change_the_digest(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with SqliteLedger(path) as ledger:
        play(ledger, range(3), 0)
        assert ledger.digest(1) is None
        ledger.issue("g9", Task("calculator", 9), 0, 0)
        ledger.seal(1)
        sealed = ledger.digest(1)
        ledger.finish(group(9), 1)
        play(ledger, range(3, 6), 1)
        ledger.seal(2)
        assert ledger.digest(1) == sealed != ledger.digest(2)
    with SqliteLedger(path) as ledger:
        ledger.resume(1)
        assert ledger.digest(1) == sealed
        play(ledger, range(3, 5), 1)
        assert ledger.digest(1) == sealed


@pytest.mark.parametrize(
    "edit",
    [
        "DELETE FROM trajectories WHERE id = 'g1.0'",
        "UPDATE trajectories SET reward = 5 WHERE id = 'g1.0'",
        "UPDATE groups SET trained_at = NULL, state = 'finished' WHERE id = 'g2'",
        "UPDATE groups SET task = '[\"calculator\",7,\"train\",1]' WHERE id = 'g0'",
    ],
)
def test_an_edited_ledger_is_refused(tmp_path, edit):
    path = tmp_path / "ledger.sqlite"
    with SqliteLedger(path) as ledger:
        play(ledger, range(3), 0)
        ledger.seal(1)
        sealed = ledger.digest(1)
    with sqlite3.connect(path) as db:
        db.execute(edit)
    db.close()
    with SqliteLedger(path) as ledger, pytest.raises(StoreError, match="is not the file"):
        check_digest(path, sealed, ledger.digest(1))


def test_without_a_digest_there_is_nothing_to_compare(tmp_path):
    check_digest(tmp_path, None, "a")
    check_digest(tmp_path, "a", None)
