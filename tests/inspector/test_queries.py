"""Typed reads of a run directory: groups, trajectories, flow, tasks, metrics, of a finished and of an unfinished run."""

import json

import pytest

from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.errors import StoreError
from turnwise.inspector.queries import RunReader
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import RunDir


def group(name: str, seed: int, rewards: tuple[float, ...]) -> Group:
    task = Task("calculator", seed)
    turn = lambda reward: Turn((1, 2), (3, 4, 5), (-1.0, -2.0, -3.0), reward=reward)  # noqa: E731
    members = [Trajectory(f"{name}.{i}", task, (turn(r),), success=r > 0) for i, r in enumerate(rewards)]
    return Group(name, task, tuple(members))


@pytest.fixture
def run(tmp_path):
    folder = RunDir.create(tmp_path, "first", {"method": "grpo", "env": "calculator"})
    with SqliteLedger(folder.ledger) as ledger:
        for step in range(2):
            good, flat = group(f"{2 * step}", 7, (0.0, 1.0)), group(f"{2 * step + 1}", 8, (1.0, 1.0))
            for each in (good, flat):
                ledger.issue(each.id, each.task, step, step)
                ledger.finish(each, step)
            ledger.train([good.id], step)
            ledger.drop(flat.id, "no spread", step)
        ledger.issue("4", Task("calculator", 9), 2, 2)
    rows = [{"step": s, "time": 10.0 + s, "reward": 0.5, "success": None} for s in (1, 2)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "rew')
    with RunReader(folder.path) as reader:
        yield reader


def test_steps_are_numbered_as_in_the_metrics(run):
    assert run.steps() == [1, 2]
    assert [(g.id, g.step) for g in run.groups(state="trained")] == [("0", 1), ("2", 2)]
    assert [g.id for g in run.groups(step=2, state="trained")] == ["2"]
    assert [(row.step, row["reward"], row["success"]) for row in run.metrics()] == [(1, 0.5, None), (2, 0.5, None)]


def test_groups_and_trajectories(run):
    first = run.groups(step=1)[0]
    assert (first.trajectories, first.tokens, first.reward, first.reward_low, first.reward_high) == (
        2,
        6,
        0.5,
        0.0,
        1.0,
    )
    assert first.success == 0.5
    assert run.group("0").trajectories[1].turns[0].tokens == (3, 4, 5)
    assert [t.id for t in run.trajectories(step=2)] == ["2.0", "2.1", "3.0", "3.1"]
    assert [t.id for t in run.trajectories(order="t.reward DESC", limit=1)] == ["0.1"]
    assert run.trajectory_row("2.1").success is True
    assert run.count_trajectories() == (8, 24)


def test_every_group_is_somewhere(run):
    rows = run.flow()
    assert sum(row.groups for row in rows) == run.database.group_counts().issued == 5
    assert [(r.step, r.reason, r.without_spread) for r in rows if r.state == "dropped"] == [
        (1, "no spread", 1),
        (2, "no spread", 1),
    ]
    assert run.database.group_counts().reasons == {"no spread": 2}


def test_tasks_by_step(run):
    rows = [(r.task, r.step, r.trajectories, r.successes) for r in run.task_rows()]
    assert rows[:2] == [("calculator/train/1/7", 1, 2, 1), ("calculator/train/1/7", 2, 2, 1)]


def test_what_is_missing_is_said(run):
    for wrong in (
        lambda: run.group("nope"),
        lambda: run.trajectory("nope"),
        lambda: run.trajectory_row("nope"),
        lambda: run.group_row("nope"),
        lambda: run.trajectories(order="1; DROP TABLE groups"),
    ):
        with pytest.raises(StoreError):
            wrong()
    assert run.token_columns(1) == ()
    assert run.summary is None and run.evaluation("before") is None


def test_nothing_is_written(run):
    before = {p.name: p.stat().st_mtime_ns for p in run.path.iterdir() if not p.name.endswith(("-shm", "-wal"))}
    run.flow(), run.groups(), run.trajectories()
    assert before == {p.name: p.stat().st_mtime_ns for p in run.path.iterdir() if not p.name.endswith(("-shm", "-wal"))}
