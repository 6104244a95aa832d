"""Groups with given outcomes, for tests of samplers, budgets and guidance."""

from __future__ import annotations

from turnwise.core.records import Group, Status, Task, Trajectory, Turn


def episode(key: str, task: Task, success: bool, turns: int = 1, tokens=(2, 3), **other) -> Trajectory:
    reward = float(success)
    made = [Turn((1,), tuple(tokens), (-0.5,) * len(tokens), version=(0,) * len(tokens)) for _ in range(turns - 1)]
    last = Turn((1,), tuple(tokens), (-0.5,) * len(tokens), version=(0,) * len(tokens), reward=reward)
    return Trajectory(key, task, (*made, last), status=Status.FINISHED, success=success, **other)


def group_of(task: Task, results, number: int = 0, turns: int = 1) -> Group:
    return Group(
        str(number), task, tuple(episode(f"{number}.{i}", task, bool(r), turns) for i, r in enumerate(results))
    )
