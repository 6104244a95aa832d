"""The ledger: transitions, counts, round trip, resume, readers beside a writer."""

import multiprocessing
import os
import sqlite3
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnwise.core.records import Fork, Group, Origin, Status, Stop, Task, Trajectory, Turn
from turnwise.errors import RecordError, StoreError
from turnwise.inspector.queries import RunReader
from turnwise.store import database
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import RunDir
from turnwise.store.trajectory_codec import decode, encode


def task(seed: int) -> Task:
    return Task("calculator", seed)


def group(name: str, seed: int = 0, size: int = 2, tokens: int = 3) -> Group:
    logp = tuple(np.linspace(-3, -0.1, tokens).astype(np.float32).tolist())
    turn = Turn((1, 2), tuple(range(tokens)), logp, (0.0,) * tokens, (seed,) * tokens, reward=0.5)
    members = tuple(Trajectory(f"{name}/{i}", task(seed), (turn, turn), success=i == 0) for i in range(size))
    return Group(name, task(seed), members)


@pytest.fixture
def ledger(tmp_path):
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        yield ledger


def test_transitions_and_counts(ledger):
    for i in range(4):
        ledger.issue(f"g{i}", task(i), step=0, version=0)
    assert [issued.group_id for issued in ledger.in_flight()] == ["g0", "g1", "g2", "g3"]
    for i in range(3):
        ledger.finish(group(f"g{i}", i), 0)
    assert ledger.pending() == tuple(group(f"g{i}", i) for i in range(3))
    ledger.train(["g0"], step=0)
    ledger.drop("g1", "no spread", 0)
    counts = ledger.group_counts()
    assert (
        counts.issued,
        counts.in_flight,
        counts.finished,
        counts.trained,
        counts.dropped,
    ) == (4, 1, 1, 1, 1)
    assert counts.reasons == {"no spread": 1}


def test_illegal_transitions_raise_and_change_nothing(ledger):
    ledger.issue("g0", task(0), 0, 0)
    ledger.issue("g1", task(1), 0, 0)
    ledger.finish(group("g1", 1), 0)
    for illegal in (
        lambda: ledger.train(["g0"], 0),
        lambda: ledger.train(["g1", "g0"], 0),  # all or none
        lambda: ledger.train(["g1", "g1"], 0),
        lambda: ledger.finish(group("g1", 1), 0),
        lambda: ledger.finish(group("g0", 7), 0),
        lambda: ledger.finish(group("never", 0), 0),
        lambda: ledger.issue("g0", task(0), 0, 0),
        lambda: ledger.drop("g0", "", 0),
    ):
        with pytest.raises(RecordError):
            illegal()
    assert (ledger.group_counts().in_flight, ledger.group_counts().finished) == (1, 1)
    ledger.train(["g1"], 0)
    with pytest.raises(RecordError, match="it is trained"):
        ledger.drop("g1", "late", 0)


def test_balance_notices_a_missing_row(ledger, tmp_path):
    ledger.issue("g0", task(0), 0, 0)
    ledger.issue("g1", task(0), 0, 0)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as other:
        other.execute("DELETE FROM groups WHERE id = 'g0'")
    with pytest.raises(StoreError, match="is inconsistent"):
        ledger.group_counts()


def test_resume_follows_the_snapshot(tmp_path):
    """What the checkpoint knew stays, what it had in flight comes back, what it never heard of is forgotten."""
    path = tmp_path / "ledger.sqlite"
    with SqliteLedger(path) as ledger:
        for name in ("old", "kept", "late", "flying", "refused"):
            ledger.issue(name, task(1), 1, 1)
        ledger.finish(group("old", 1), 0)
        ledger.train(["old"], 1)
        ledger.finish(group("kept", 1), 0)
        ledger.seal(2)  # the checkpoint is taken here
        ledger.issue("new", task(2), 2, 2)
        ledger.train(["kept"], 2)
        ledger.finish(group("late", 1), 0)
        ledger.drop("refused", "too long", 0)
        ledger.finish(group("new", 2), 0)
        ledger.train(["late", "new"], 3)
        ledger.seal(4)  # killed before the second checkpoint was renamed
    for _ in range(2):  # twice from the same checkpoint: the same answer
        with SqliteLedger(path) as ledger:
            resumed = ledger.resume(2)
            assert [g.id for g in resumed.pending] == ["kept"]
            assert resumed.pending[0] == group("kept", 1)
            assert [i.group_id for i in resumed.to_reissue] == ["late", "flying", "refused"]
            assert "new" in [i.group_id for i in resumed.rolled_back]
            assert ledger.group_counts().trained == 1
            for issued in resumed.to_reissue:  # the old ids may be used again
                ledger.issue(issued.group_id, issued.task, 2, 2)
            ledger.issue("new", task(2), 2, 2)  # and the sampler draws the forgotten one
            ledger.group_counts()
    with SqliteLedger(path) as ledger:
        assert ledger.resume(0).to_reissue == ()
        assert ledger.group_counts().trained == 0


def test_a_checkpoint_of_an_abandoned_past_is_refused(ledger):
    ledger.seal(1)
    ledger.seal(2)
    ledger.resume(1)
    with pytest.raises(StoreError, match="abandoned"):
        ledger.resume(2)
    ledger.resume(1)
    ledger.seal(2)
    ledger.resume(2)
    ledger.resume(0)
    ledger.resume(0)


def test_a_step_is_sealed_once(ledger):
    ledger.seal(1)
    ledger.seal(1)  # the disk was full, say, and nothing has happened since
    ledger.issue("g", task(0), 1, 1)
    with pytest.raises(RecordError, match="already sealed"):
        ledger.seal(1)
    ledger.resume(1)
    ledger.seal(2)


def test_resume_without_keeping_finished_groups_rolls_them_out_again(ledger):
    ledger.issue("g", task(0), 0, 0)
    ledger.finish(group("g"), 0)
    ledger.seal(1)
    resumed = ledger.resume(1, keep_finished=False)
    assert resumed.pending == () and [i.group_id for i in resumed.to_reissue] == ["g"]
    assert ledger.group_counts().reasons == {"interrupted": 1}


def test_a_ledger_behind_its_checkpoint_trains_nothing_twice(ledger):
    """Power was lost: the checkpoint is on the disk, the ledger's last words are not."""
    ledger.issue("g", task(0), 0, 0)
    ledger.finish(group("g"), 0)
    ledger.seal(1)
    resumed = ledger.resume(3)
    assert resumed.pending == () and [i.task for i in resumed.to_reissue] == [task(0)]


def test_an_old_ledger_wants_resume_first(tmp_path):
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        ledger.issue("g", task(0), 0, 0)
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        with pytest.raises(StoreError, match="resume"):
            ledger.issue("h", task(0), 0, 0)
        ledger.resume(0)
        ledger.issue("h", task(0), 0, 0)


def test_prune_keeps_counts_and_texts(ledger):
    for i in range(3):
        ledger.issue(f"g{i}", task(i), i, i)
        ledger.finish(group(f"g{i}", i), 0)
        ledger.train([f"g{i}"], i)
    assert ledger.prune(before=2) == 4 and ledger.prune(before=2) == 0
    pruned, whole = ledger.trajectory("g0/0"), ledger.trajectory("g2/0")
    assert pruned.sampled == 0 and pruned.reward == 1.0 and len(pruned.turns) == 2
    assert whole == group("g2", 2).trajectories[0]
    assert ledger.group_counts().trained == 3


def test_a_pruned_group_that_is_needed_again_is_rolled_out_afresh(ledger):
    ledger.issue("g", task(0), 0, 0)
    ledger.finish(group("g"), 0)
    ledger.seal(1)
    ledger.train(["g"], 1)
    ledger.prune(before=9)  # too eager: the checkpoint of step 1 is still kept
    assert [i.group_id for i in ledger.resume(1).to_reissue] == ["g"]


def test_step_0_cannot_be_sealed(ledger):
    """A seal of step 0 without its checkpoint could not be told from a run that never had one."""
    ledger.issue("g", task(0), 0, 0)
    with pytest.raises(RecordError, match="step 0"):
        ledger.seal(0)


def test_queries_for_a_viewer(ledger):
    ledger.issue("g0", task(0), 0, 0)
    ledger.issue("g1", task(1), 0, 0)
    broken = Trajectory("g1/0", task(1), (), status=Status.FAILED, reason="timeout \udce2")
    ledger.finish(group("g0"), 0)
    ledger.finish(Group("g1", task(1), (broken,)), 0)
    ledger.train(["g0"], 4)
    (entry,) = ledger.groups(4)
    assert (entry.group_id, entry.state, entry.reward, entry.success) == ("g0", "trained", 1.0, 0.5)
    assert entry.trajectories == ("g0/0", "g0/1")
    assert [e.group_id for e in ledger.groups(0)] == ["g1"] and len(ledger.groups()) == 2
    assert ledger.failures() == {"timeout \ufffd": 1}
    assert ledger.trajectory("g1/0") == broken and ledger.group("g0") == group("g0")
    with pytest.raises(StoreError, match="no trajectory"):
        ledger.trajectory("nope")


# ------------------------------------------------------------------ openers


def test_two_openers_in_one_process(ledger):
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        SqliteLedger(ledger.path)
    ledger.issue("g", task(0), 0, 0)
    with SqliteLedger(ledger.path, readonly=True) as reader:  # a viewer beside the run
        assert reader.group_counts().in_flight == 1
        with pytest.raises(StoreError, match="read-only"):
            reader.issue("h", task(0), 0, 0)


@pytest.mark.thorough
def test_two_openers_in_two_processes(ledger):
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    child = context.Process(target=open_and_tell, args=(ledger.path, theirs))
    child.start()
    assert ours.poll(60) and f"in use by process {os.getpid()}" in ours.recv()
    child.join()


def open_and_tell(path, pipe):
    try:
        SqliteLedger(path)
    except StoreError as error:
        pipe.send(str(error))


def test_damaged_foreign_and_future_files(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match="damaged"):
        SqliteLedger(path)
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE mine (x)")
    with pytest.raises(StoreError, match="not a Turnwise ledger"):
        SqliteLedger(path)
    path.unlink()
    SqliteLedger(path).close()
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="format 99"):
        SqliteLedger(path)
    with pytest.raises(StoreError, match="no ledger"):
        SqliteLedger(tmp_path / "none.sqlite", readonly=True)


@pytest.mark.parametrize("moment", ["CREATE_SCRIPT", "_prepare"])
def test_a_ledger_killed_at_its_birth_is_none_or_whole(tmp_path, monkeypatch, moment):
    def killed(*_):
        raise KeyboardInterrupt

    path = tmp_path / "ledger.sqlite"
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, StoreError)):
        patch.setattr(database, moment, killed if moment == "_prepare" else f"{database.TABLES} BROKEN")
        SqliteLedger(path)
    assert path.exists() == (moment == "_prepare") and not list(tmp_path.glob(".*"))
    if path.exists():
        with SqliteLedger(path, readonly=True) as ledger:
            assert ledger.group_counts().issued == 0
    SqliteLedger(path).close()


def test_an_empty_file_becomes_a_ledger(tmp_path):
    """What older versions left when they were killed at a ledger's birth."""
    path = tmp_path / "ledger.sqlite"
    path.touch()
    with SqliteLedger(path) as ledger:
        assert ledger.group_counts().issued == 0


# --------------------------------------------------------------- round trip

words = st.text(max_size=8)
reals = st.floats(allow_nan=False) | st.floats(width=32, allow_nan=False)


@st.composite
def turns(draw):
    size = draw(st.integers(0, 4))
    same = {"min_size": size, "max_size": size}
    ids = st.integers(0, 300) | st.integers(0, 2**40)
    return Turn(
        context=tuple(draw(st.lists(ids, max_size=4))),
        tokens=tuple(draw(st.lists(ids, **same))),
        logp=tuple(draw(st.just([]) | st.lists(reals, **same))),
        mass=tuple(draw(st.just([]) | st.lists(st.just(0.0), **same))),
        version=tuple(draw(st.just([]) | st.lists(st.integers(-1, 70000), **same))),
        reward=draw(reals),
        agent=draw(words),
        state=draw(st.none() | words),
        restart=draw(st.booleans()),
        stop=draw(st.sampled_from(Stop)),
        temperature=draw(st.floats(0, 2)),
        tool_calls=draw(st.integers(0, 3)),
        seconds_acting=draw(st.floats(0, 9)),
    )


@st.composite
def trajectories(draw, name="t"):
    plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
    message = st.dictionaries(words, st.recursive(plain, lambda x: st.lists(x, max_size=2), max_leaves=3), max_size=2)
    return Trajectory(
        id=name,
        task=Task(draw(words), draw(st.integers(0, 2**64)), draw(words), draw(st.integers(0, 9))),
        turns=tuple(draw(st.lists(turns(), max_size=3))),
        rewards=draw(st.dictionaries(words, reals, max_size=2)),
        status=draw(st.sampled_from(Status)),
        reason=draw(words),
        origin=draw(st.sampled_from(Origin)),
        guidance=draw(words),
        success=draw(st.none() | st.booleans()),
        messages=tuple(draw(st.lists(message, max_size=2))),
    )


@given(trajectories())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_records_come_back_exactly(trajectory):
    assert decode(*encode(trajectory)) == trajectory


@pytest.mark.parametrize("text", ["evil.py:World", "[" * 100_000, "[]", '{"facts": 1}', "{}", ""])
def test_a_record_that_somebody_damaged_is_named(tmp_path, text):
    folder = RunDir.create(tmp_path, "first", {})
    with SqliteLedger(folder.ledger) as ledger, RunReader(folder.path) as run:
        ledger.issue("g0", task(0), 0, 0)
        ledger.finish(group("g0"), 0)
        with ledger.transaction() as db:
            db.execute("UPDATE trajectories SET record = ? WHERE id = 'g0/1'", (text,))
        reads = [lambda: ledger.trajectory("g0/1"), lambda: ledger.group("g0"), ledger.pending]
        reads += [lambda: run.group("g0"), lambda: run.stored_trajectories(["g0/0", "g0/1"])]
        for read in [*reads, *[ledger.episode_facts] * (text != "{}")]:
            with pytest.raises(StoreError, match="record of the trajectory 'g0/1' in the ledger is damaged"):
                read()
        with ledger.transaction() as db:
            db.execute("UPDATE groups SET task = 'evil'")
        for read in (ledger.groups, ledger.pending):
            with pytest.raises(StoreError, match="the task 'evil' of a group in the ledger is damaged"):
                read()


def test_nan_infinity_forks_and_numpy_come_back(ledger):
    nan = float("nan")
    parent = Trajectory("p", task(0), (Turn((), (1,), (nan,), (float("-inf"),), reward=float("inf")),))
    turn = Turn(np.array([1]), np.array([5, 6]), np.array([-1.5, -0.1], np.float32), reward=np.float32(0.25))
    child = Trajectory("c", task(0), (turn,), {"x": np.float32(0.5)}, fork=Fork("p", 0, 1))
    ledger.issue("g", task(0), 0, 0)
    ledger.finish(Group("g", task(0), (parent, child)), 0)
    back_parent, back_child = ledger.group("g").trajectories
    assert np.isnan(back_parent.turns[0].logp[0]) and back_parent.turns[0].mass == (float("-inf"),)
    assert back_parent.reward == float("inf") and back_child.fork == Fork("p", 0, 1)
    assert np.float32(back_child.turns[0].logp[1]) == np.float32(-0.1)
    assert back_child.turns[0].tokens == (5, 6) and back_child.reward == 0.25 and back_child.rewards == {"x": 0.5}


def test_a_thousand_trajectories_are_stored_in_well_under_a_second(ledger):
    groups = [group(f"g{i}", i, size=8, tokens=50) for i in range(125)]  # two turns: 100 tokens
    start = time.process_time()  # not the clock on the wall: other processes share the cores
    for each in groups:
        ledger.issue(each.id, each.task, 0, 0)
        ledger.finish(each, 0)
    stored = time.process_time() - start
    assert ledger.pending() == tuple(groups)
    print(f"1,000 trajectories of 100 tokens: stored in {stored:.3f} s")
    assert stored < 2.0  # measured about 0.2 s
