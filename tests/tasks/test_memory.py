"""What is remembered of a task is of use only if the task comes back: every method that remembers by task sees to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.batches import records_of

from turnwise import recipes
from turnwise.algebra.objective import Objective
from turnwise.core.batch import Batch, pack
from turnwise.core.records import Task
from turnwise.core.signals import level_of
from turnwise.tasks.task_source import TaskStream

STEPS = 50  # a short run
REMEMBERING = [
    name
    for name in recipes.METHODS
    if any("tasks" in (piece.initial_state() or {}) for piece in recipes.build(name).advantage.parts)
]


def drawn(name: str, count: int, **hyper: int) -> list[Task]:
    sampler = recipes.build(name, **hyper).sampler.open(TaskStream("test"))
    return [sampler.next()[1] for _ in range(count)]


def credited(objective: Objective, tasks: list[Task], seed: int) -> Batch:
    """Episodes of these tasks, credited; every signal is 0.1 everywhere."""
    groups = records_of([[[2, 1], [1, 3], [2]]] * len(tasks), seed)
    groups = [
        replace(g, task=task, trajectories=tuple(replace(t, task=task) for t in g.trajectories))
        for g, task in zip(groups, tasks)
    ]
    batch = pack(groups)
    return objective.credit(batch.put({s: batch.tree.full(level_of(s), 0.1) for s in objective.signals_before_batch}))


def test_some_methods_remember_by_task():
    assert {"spo_single", "mssr", "otc"} <= set(REMEMBERING)


@pytest.mark.parametrize("name", REMEMBERING)
def test_in_a_short_run_most_tasks_come_back(name):
    budget = recipes.build(name).budget
    keys = [task.key for task in drawn(name, STEPS * budget.groups)]
    assert len(set(keys)) < len(keys) / 2


@pytest.mark.parametrize("name", ["otc", "mssr"])
def test_the_second_pass_reads_what_the_first_one_wrote(name):
    tasks, pool = drawn(name, 8, pool=4), 4
    assert {t.key for t in tasks[:pool]} == {t.key for t in tasks[pool:]}
    recipe = recipes.build(name, pool=pool)
    known, fresh = recipe.objective, recipe.objective
    credited(known, tasks[:pool], seed=1)
    later = credited(known, tasks[pool:], seed=2)["advantage"].x
    assert not torch.equal(later, credited(fresh, tasks[pool:], seed=2)["advantage"].x)


def test_of_a_task_only_its_own_past_is_remembered():
    tasks, recipe = drawn("otc", 4), recipes.build("otc")
    strangers = [replace(task, seed=task.seed + 1) for task in tasks]
    known, fresh = recipe.objective, recipe.objective
    credited(known, tasks, seed=1)
    said = [credited(objective, strangers, seed=2)["advantage"].x for objective in (known, fresh)]
    assert torch.equal(*said)
