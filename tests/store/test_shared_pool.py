"""A pool that several runs write and read: bounded, one tokenizer, the same again after a restart; and two real runs."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import records, selection
from support.batches import from_oracle

from turnwise import recipes
from turnwise.core.records import Fork, Group, Origin, Task, Trajectory, Turn
from turnwise.data.replay import ReplaySources, SharedExperience
from turnwise.errors import RecipeError, StoreError
from turnwise.store import shared_pool
from turnwise.store.shared_pool import SharedPool


def group(key: str, *rewards: float) -> Group:
    task = Task("test", 1)
    turns = [Turn((1, 2), (3, 4), (-0.5, -0.25), version=(0, 0), reward=r) for r in rewards]
    return Group(key, task, tuple(Trajectory(f"{key}.{i}", task, (turn,)) for i, turn in enumerate(turns)))


def opener(folder, tokenizer="a"):
    return lambda _, capacity: SharedPool(folder, capacity, tokenizer)


def shared(folder, name, foreign=2, capacity=8, tokenizer="a"):
    return SharedExperience(str(folder), foreign, name, capacity).open(
        ReplaySources(None, None, 7, opener(folder, tokenizer))
    )


def test_others_groups_are_mixed_in_with_ids_of_their_own(tmp_path):
    one, two = shared(tmp_path, "one"), shared(tmp_path, "two")
    forked = group("0", 1.0, 0.0)
    first, second = forked.trajectories
    forked = replace(forked, trajectories=(first, replace(second, fork=Fork("0.0", 0, 1))))
    one.observe([forked, group("1", 0.0, 0.0)], {}, 0)
    fresh = [group("0", 1.0, 0.5)]
    mixed = two.mix(fresh, 0)
    assert mixed[:1] == fresh and [g.id for g in mixed[1:]] == ["one/0"]  # no reward, no signal
    foreign = mixed[1].trajectories
    assert [t.id for t in foreign] == ["one/0.0", "one/0.1"] and foreign[1].fork.parent == "one/0.0"
    assert all(t.origin == Origin.REPLAY for t in foreign) and foreign[0].turns == forked.trajectories[0].turns
    assert one.mix(fresh, 1) == fresh  # its own do not come back
    assert shared(tmp_path, "three", tokenizer="b").mix(fresh, 0) == fresh  # ids of another tokenizer
    assert two.metrics()["replay/foreign"] == 1 and two.metrics()["replay/pool_groups"] == 2
    assert shared(tmp_path, "three", tokenizer="b").metrics()["replay/pool_other_tokenizer"] == 2


@settings(deadline=None, max_examples=20)
@given(foreign=st.integers(0, 3), capacity=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_bounds_hold_and_a_step_taken_again_sees_the_same(foreign, capacity, seed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    writer, reader = shared(folder, "writer", foreign, capacity), shared(folder, "reader", foreign, capacity)
    seen = {}
    for step in range(6):
        writer.observe([group(f"{step}-{k}", 1.0, float(k)) for k in range(1 + (seed + step) % 3)], {}, step)
        mixed = reader.mix([], step)
        assert len(mixed) == min(foreign, reader.available) and reader.available <= capacity
        assert len({g.id for g in mixed}) == len(mixed)
        seen[step] = mixed
        reader.observe([group(f"r{step}", 1.0)], {}, step)
    again = shared(folder, "reader", foreign, capacity)
    again.load_state_dict(json.loads(json.dumps(reader.state_dict())))
    for step in (4, 5):  # the steps after the last checkpoint
        assert again.mix([], step) == seen[step]


def test_old_groups_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_pool, "LEAST", 3)
    pool = SharedPool(tmp_path, 1, "a")
    for step in range(9):
        pool.write("one", step, [group(str(step), 1.0)])
    assert pool.counts()["groups"] == max(3, shared_pool.BEHIND)
    assert [g.id for _, g in pool.read("two", 0)] == ["8"]
    rows = sqlite3.connect(tmp_path / "pool.sqlite").execute("SELECT count(*) FROM trajectories").fetchone()
    assert rows == (max(3, shared_pool.BEHIND),)


def test_the_first_version_of_a_group_stays(tmp_path):
    one, two = shared(tmp_path, "one"), shared(tmp_path, "two")
    one.observe([group("0", 1.0)], {}, 0)
    one.observe([group("0", 0.5)], {}, 0)
    assert [t.reward for g in two.mix([], 0) for t in g.trajectories] == [1.0]


def test_another_file_is_refused_in_words(tmp_path):
    sqlite3.connect(tmp_path / "pool.sqlite").execute("CREATE TABLE other (x)").connection.commit()
    with pytest.raises(StoreError, match="a folder of its own"):
        SharedPool(tmp_path, 4, "a")
    with pytest.raises(RecipeError, match="folder=PATH"):
        SharedExperience("")
    with pytest.raises(RecipeError, match="foreign is -1; write a number >= 0"):
        SharedExperience("x", -1)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), clip=st.floats(0.05, 0.5))
def test_the_loss_of_foreign_groups(seed, clip):
    """The oracle with some groups of other runs: their ratio is to the own policy at the start of the batch."""
    reference = records.random_batch(seed)
    for one in reference[seed % len(reference)]:
        one.facts["origin"] = "replay"
    batch, policy = from_oracle(reference)
    objective = recipes.build("swarm", clip=clip).objective
    loss = objective(objective.plan(objective.credit(batch)), policy).loss
    torch.testing.assert_close(loss, selection.swarm(reference, clip).loss, rtol=1e-9, atol=1e-9)
