"""Checkpoints between those of ``--checkpoint-every``: a kill costs seconds, they cost little, nothing else changes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from turnwise.store.checkpoint import checkpoints
from turnwise.training import api, loop
from turnwise.training.loop import COST_SHARE, LOST_SECONDS, CheckpointSchedule

SMALL = {
    "env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 2, "cold_batch": 4,
    "steps": 7, "groups": 2, "group_size": 2, "max_tokens": 8, "context": 160, "eval_tasks": 2, "eval_every": 3,
    "checkpoint_every": 5, "keep_checkpoints": 2, "trackers": (), "threads": 1,
}  # fmt: skip
NEVER = 10**9


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def steps_saved(seconds, cost, steps, every=NEVER):
    """Run ``steps`` steps of the given seconds with a schedule; (step, age before writing) of every checkpoint."""
    clock, written = Clock(), []
    schedule = CheckpointSchedule(every, clock)
    schedule.begin()
    last = 0.0
    for done in range(1, steps + 1):
        clock.now += seconds
        if schedule.due(done):
            written.append((done, clock.now - last))
            schedule.write(done, lambda _: setattr(clock, "now", clock.now + cost))
            last = clock.now
    return written, clock.now, schedule


@given(seconds=st.floats(0.01, 60.0), steps=st.integers(1, 200))
def test_cheap_checkpoints_bound_what_a_kill_loses_by_nine_seconds_or_one_step(seconds, steps):
    written, end, _ = steps_saved(seconds, 0.0, steps)
    ages = [age for _, age in written] + [end - sum(age for _, age in written)]
    assert max(ages) <= max(LOST_SECONDS, seconds) + 1e-6


@given(seconds=st.floats(0.01, 60.0), cost=st.floats(0.0, 600.0), steps=st.integers(1, 300))
def test_after_the_first_one_checkpoints_take_a_small_share_of_the_time(seconds, cost, steps):
    written, _, _ = steps_saved(seconds, cost, steps)
    assert cost * max(0, len(written) - 1) <= COST_SHARE * seconds * steps + 1e-6


@given(seconds=st.floats(0.01, 60.0), cost=st.floats(0.0, 600.0), every=st.integers(1, 9))
def test_every_n_steps_there_is_one_whatever_it_costs(seconds, cost, every):
    written, _, _ = steps_saved(seconds, cost, 30, every)
    assert set(range(every, 31, every)) <= {step for step, _ in written}


def test_an_expensive_checkpoint_waits_until_its_cost_allows_it():
    written, _, schedule = steps_saved(5.0, 2.0, 30)
    assert [step for step, _ in written] == [1, 9, 17, 25], "2 s are 5 % of 40 s"
    assert schedule.facts() == {"written": 4, "seconds_each": 2.0}


def test_the_time_of_an_evaluation_is_not_that_of_a_step():
    clock = Clock()
    schedule = CheckpointSchedule(NEVER, clock)
    schedule.begin()
    clock.now = 1.0
    assert not schedule.due(1)
    clock.now = 8.5
    schedule.pause()
    clock.now = 8.6
    assert not schedule.due(2), "steps take 0.1 s here"
    clock.now = 8.95
    assert schedule.due(3)


@pytest.mark.slow
def test_a_run_with_a_checkpoint_after_each_step_is_the_same_run_and_keeps_as_many(tmp_path, monkeypatch):
    kept, save = [], CheckpointSchedule.write

    def write(self, done, then):
        save(self, done, then)
        kept.append(len(checkpoints(tmp_path / "often" / "checkpoints")))

    summaries = {}
    for name, seconds in (("seldom", float("inf")), ("often", 0.0)):
        monkeypatch.setattr(loop, "LOST_SECONDS", seconds)
        monkeypatch.setattr(loop, "COST_SHARE", float("inf"))
        if name == "often":
            monkeypatch.setattr(CheckpointSchedule, "write", write)
        summaries[name] = api.train(method="grpo", out=str(tmp_path), name=name, **SMALL)
    assert summaries["seldom"]["checkpoints"]["written"] == 2  # steps 5 and 7
    assert summaries["often"]["checkpoints"]["written"] == 7
    assert max(kept) == 2, "--keep-checkpoints"
    assert kept[5:] == [2, 2], "the one in between replaces its predecessor, not that of step 5"
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in summaries]
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[0])
    rows = [
        [
            {k: v for k, v in json.loads(line).items() if not k.startswith(("seconds", "time", "tokens_per"))}
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in summaries
    ]
    assert rows[0] == rows[1] and len(rows[0]) >= 7
