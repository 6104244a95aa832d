"""An evaluation that was due when a run was stopped is made when it is resumed, once, with the same result."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from turnwise.observe.trackers import read_rows
from turnwise.training import api
from turnwise.training.interrupt import RunStopped

SMALL = {
    "method": "grpo", "env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 2,
    "cold_batch": 4, "steps": 5, "groups": 2, "group_size": 3, "max_tokens": 12, "context": 160, "eval_tasks": 3,
    "eval_every": 2, "checkpoint_every": 100, "trackers": (), "threads": 1,
}  # fmt: skip


def stop_at(step):
    """A listener that interrupts the run during a step."""

    def listen(event, facts):
        if event == "step" and facts["stage"] == "learn" and facts["step"] == step:
            os.kill(os.getpid(), signal.SIGINT)

    return listen


def evaluations(path):
    rows = read_rows(path / "metrics.jsonl")
    return [(row["step"], row["eval/reward"]) for row in rows if "eval/reward" in row]


@pytest.mark.slow
def test_an_evaluation_due_at_the_step_of_an_interrupt_is_made_up(tmp_path):
    whole, cut = ({**SMALL, "out": str(tmp_path), "name": name} for name in ("whole", "cut"))
    api.train(lambda *_: None, **whole)
    with pytest.raises(RunStopped):
        api.train(stop_at(2), **cut)
    assert evaluations(tmp_path / "cut") == []
    with pytest.raises(RunStopped):
        api.resume(tmp_path / "cut", stop_at(3))
    assert [step for step, _ in evaluations(tmp_path / "cut")] == [2]
    api.resume(tmp_path / "cut", lambda *_: None)
    assert evaluations(tmp_path / "cut") == evaluations(tmp_path / "whole")
    assert [step for step, _ in evaluations(tmp_path / "cut")] == [2, 4]


def test_an_evaluation_that_was_made_is_not_repeated(tmp_path):
    settings = {**SMALL, "checkpoint_every": 2, "keep_checkpoints": 3, "out": str(tmp_path), "name": "run"}
    with pytest.raises(RunStopped):
        api.train(stop_at(3), **settings)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000003")  # as if it had been killed before
    api.resume(tmp_path / "run", lambda *_: None)
    assert [step for step, _ in evaluations(tmp_path / "run")] == [2, 4]
