"""A process that dies without a word is told on resume: when its last step was, and what is rolled back."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from turnwise.core.records import Task
from turnwise.errors import StoreError
from turnwise.store.lock import ProcessLock
from turnwise.store.resume import IssuedGroup, ResumePlan
from turnwise.store.rundir import RunDir
from turnwise.training import api
from turnwise.training.resume import resume_messages

NOTHING = ResumePlan((), (), ())
GROUP = IssuedGroup("g1", Task("guess", 1), 3, 3)
SMALL = {
    "env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 2, "cold_batch": 4,
    "steps": 200, "groups": 2, "group_size": 2, "max_tokens": 8, "context": 160, "eval_tasks": 0, "checkpoint_every": 3,
    "trackers": (),
}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    return RunDir.create(tmp_path, "run")


def log(run_dir, *steps):
    run_dir.metrics.write_text("".join(json.dumps({"step": n, "time": 1_700_000_000.0 + n}) + "\n" for n in steps))


def test_a_released_lock_names_nobody_and_one_left_by_a_dead_process_names_it(tmp_path):
    path = tmp_path / "run.lock"
    with ProcessLock(path) as first:
        assert first.left_by == ""
    assert path.read_text() == ""
    code = f"import os, pathlib; from turnwise.store.lock import *; lock = ProcessLock(pathlib.Path({str(path)!r})); os._exit(0)"
    dead = subprocess.Popen([sys.executable, "-c", code])
    assert dead.wait() == 0
    with ProcessLock(path) as lock:
        assert lock.left_by == str(dead.pid)
    with ProcessLock(path) as lock:
        assert lock.left_by == "", "told once: this process ended by itself"


def test_a_forked_child_does_not_empty_the_lock_of_its_parent(tmp_path):
    with ProcessLock(tmp_path / "run.lock") as lock:
        child = os.fork()
        if child == 0:
            lock.release()
            os._exit(0)
        os.waitpid(child, 0)
        assert (tmp_path / "run.lock").read_text().strip() == str(os.getpid())


def test_a_run_in_use_is_refused_before_anything_is_loaded(run_dir):
    with ProcessLock(run_dir.lock), pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        ProcessLock(run_dir.lock)


def test_a_first_start_and_an_orderly_stop_tell_nothing(run_dir):
    assert list(resume_messages(run_dir, "", 0, NOTHING)) == []
    log(run_dir, 1, 2, 3)
    assert list(resume_messages(run_dir, "", 3, NOTHING)) == []


def test_a_death_after_a_checkpoint_tells_the_last_step_and_what_is_rolled_back(run_dir):
    log(run_dir, 1, 2, 3, 4, 5)
    death, rollback = resume_messages(run_dir, "4711", 3, ResumePlan((GROUP,), (), (GROUP, GROUP)))
    assert "did not end by itself: its process 4711" in death
    assert "its last step was 5, at 2023-11-1" in death
    assert rollback == (
        "it continues from the checkpoint of step 3; steps 4 to 5 are taken again, and 3 groups of rollouts are rolled back"
    )


def test_a_death_before_the_first_step_begins_again(run_dir):
    death, rollback = resume_messages(run_dir, "4711", 0, NOTHING)
    assert death.endswith("it had not finished a step")
    assert rollback == (
        "it begins again: it has no checkpoint; no step is lost, and no group of rollouts is rolled back"
    )


def test_a_death_between_checkpoint_and_next_step_loses_nothing(run_dir):
    log(run_dir, 1, 2, 3)
    assert "no step is lost, and 1 group of rollouts is rolled back" in list(
        resume_messages(run_dir, "4711", 3, ResumePlan((GROUP,), (), ()))
    )[1]  # fmt: skip


def test_an_error_that_loses_a_step_tells_the_rollback_only(run_dir):
    log(run_dir, 1, 2, 3, 4)
    assert list(resume_messages(run_dir, "", 3, NOTHING)) == [
        "it continues from the checkpoint of step 3; step 4 is taken again, and no group of rollouts is rolled back"
    ]


@pytest.mark.parametrize("line", ['{"step": "x"}', '{"step": null}', '{"step": 4'])
def test_a_damaged_metrics_file_does_not_stop_the_message(run_dir, line):
    log(run_dir, 1)
    with run_dir.metrics.open("a") as file:
        file.write(line)
    assert "its last step was 1," in next(resume_messages(run_dir, "4711", 1, NOTHING))


@pytest.mark.slow
def test_a_killed_run_tells_so_once(tmp_path):
    forks = multiprocessing.get_context("forkserver")
    process = forks.Process(target=api.train, kwargs={"method": "grpo", "out": str(tmp_path), "name": "run", **SMALL})
    process.start()
    metrics, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
    while time.monotonic() < end and (not metrics.is_file() or metrics.read_text().count("\n") < 4):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    done = len(metrics.read_text().splitlines())
    texts = []
    listen = lambda event, facts: texts.append(facts["text"]) if event == "message" else None  # noqa: E731
    api.resume(tmp_path / "run", listen, steps=done + 1)
    told = [text for text in texts if "did not end by itself" in text]
    assert len(told) == 1 and f"its process {process.pid}" in told[0] and f"its last step was {done}, at" in told[0]
    where = [
        int(found[1]) for text in texts if (found := re.match(r"it continues from the checkpoint of step (\d+);", text))
    ]
    assert len(where) == 1 and 3 <= where[0] <= done, "of step 3, or of a later one on a slow machine"
    recorded = (tmp_path / "run" / "messages.jsonl").read_text()
    assert "did not end by itself" in recorded
    assert (tmp_path / "run" / "run.lock").read_text() == "", "the resumed process ended by itself"
