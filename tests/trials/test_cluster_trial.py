"""Kills on a Ray cluster: the proof from the ledger sees what is wrong, and a short trial finds nothing."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from trials import cluster
from trials.outcome import Results, faults
from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.store.ledger import SqliteLedger

ALL = [(step, number) for step in range(cluster.STEPS) for number in range(cluster.GROUPS)]


def write_run(folder, trained=ALL, age=0, logged=cluster.STEPS, failed=0):
    """A finished run whose tokens are ``age`` versions old when they are trained on."""
    with SqliteLedger(folder / "ledger.sqlite") as ledger:
        for step, number in trained:
            key, task = str(step * cluster.GROUPS + number), Task("guess", number)
            turn = Turn((1,), (2, 3), (-1.0, -1.0), version=(step - age, step))
            ledger.issue(key, task, step, step)
            ledger.finish(Group(key, task, (Trajectory(f"{key}/0", task, (turn,)),)), step)
            ledger.train([key], step)
    rows = [json.dumps({"step": step + 1}) for step in range(logged)]
    (folder / "metrics.jsonl").write_text("\n".join(rows))
    (folder / "summary.json").write_text(json.dumps({"success_after": {"failed": failed}}))
    return folder


def test_accounts_that_add_up_are_accepted(tmp_path):
    fault, facts = cluster.audit(write_run(tmp_path, age=cluster.STALENESS))
    assert not fault
    assert facts["issued"] == facts["trained"] == len(ALL) and facts["oldest"] == cluster.STALENESS
    assert facts["tokens"] == 2 * len(ALL)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"age": cluster.STALENESS + 1}, "versions old"),
        ({"age": -1}, "versions old"),
        ({"trained": ALL[:-1]}, "groups trained on by step"),
        ({"logged": cluster.STEPS - 1}, "steps logged"),
        ({"failed": 3}, "3 episodes of the final evaluation failed"),
    ],
)
def test_accounts_with_a_fault_are_not(values, told, tmp_path):
    assert told in cluster.audit(write_run(tmp_path, **values))[0]


def test_a_draw_that_was_undone_and_never_issued_again_is_seen(tmp_path):
    run = write_run(tmp_path)
    with sqlite3.connect(run / "ledger.sqlite") as database:
        database.execute("UPDATE groups SET id = '7~3' WHERE id = '5'")  # 7 has two accounts, 5 has none
    assert "[7]" in cluster.audit(run)[0]


@pytest.mark.parametrize("after_the_last_step", [False, True])
def test_an_undone_draw_is_owed_while_steps_follow(after_the_last_step, tmp_path):
    run = write_run(tmp_path)
    with sqlite3.connect(
        run / "ledger.sqlite"
    ) as database:  # draw 5 is undone, and a later one was trained in its place
        (end,) = database.execute("SELECT max(trained_at) FROM groups").fetchone()
        database.execute("UPDATE groups SET id = '1000' WHERE id = '5'")
        database.execute(
            "INSERT INTO groups (id, task, version, state, step, reason, void, issued_at, dropped_at)"
            " SELECT '5', task, 0, 'dropped', 0, 'interrupted', 1, 0, ? FROM groups LIMIT 1",
            (end + 1 if after_the_last_step else 10,),
        )
        database.execute("UPDATE facts SET value = value + 1 WHERE name = 'issued'")
    fault, facts = cluster.audit(run)
    assert facts["reissued"] == 1
    assert fault == ("" if after_the_last_step else "the draws [5] were undone and never issued again")


def test_success_agrees_within_intervals():
    assert cluster.agree((0.5, [0.4, 0.6]), (0.58, [0.5, 0.66]))
    assert not cluster.agree((0.2, [0.1, 0.3]), (0.6, [0.5, 0.7]))


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")
def test_a_few_kills_lose_nothing():
    results = Results(None)
    cluster.trial(3, 3.0, results, print)
    assert sum(outcome.count for outcome in results.outcomes.values()) >= 1
    assert not faults(results.outcomes.values())
