"""What a few steps say about a whole run: its time with and without staleness, and the memory of all its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turnwise.config.settings import Settings
from turnwise.training.dry_run import (
    STEPS,
    ChildMemory,
    descendants,
    describe,
    dry_run,
    estimate,
    memory_figures,
    process_bytes,
)

MIB = 1 << 20


def asynchronous(steps, ahead, latency, update):
    """Seconds of each step where every rollout takes ``latency``, and ``ahead`` + 1 steps of groups are in flight."""
    ready, ends, seconds = [latency] * (ahead + 1), 0.0, []
    for step in range(steps):
        began = ends
        collected = max(ends, ready[step])
        ready.append(collected + latency)  # issued in place of the groups that are trained on now
        ends = collected + update
        seconds.append(ends - began)
    return seconds


def test_the_time_of_a_run_from_three_steps():
    summary = {"seconds": {"evaluate before": 1.0, "evaluate after": 3.0}}
    expected = estimate(Settings(steps=100, eval_tasks=16), summary, [9.0, 2.0, 4.0], tasks=8)
    assert (expected["seconds_per_step"], expected["seconds_of_evaluations"]) == (3.0, 8.0)
    assert expected["seconds_of_run"] == 15.0 + 97 * 3.0 + 8.0
    assert "3.00 s a step, 5 min for 100 steps" in describe(expected | memory_figures(0))


def test_evaluations_during_a_run_and_checkpoints_count():
    summary = {"seconds": {"evaluate before": 2.0, "evaluate after": 2.0}, "checkpoints": {"seconds_each": 0.5}}
    expected = estimate(Settings(steps=100, eval_tasks=8, eval_every=25), summary, [1.0] * 3, tasks=8)
    assert expected["seconds_of_evaluations"] == 2.0 * (2 + 3), "before, after steps 25, 50 and 75, after"
    assert expected["seconds_of_run"] == pytest.approx(100 + 10 + 6 * 0.5)


@example(ahead=6, latency=14.0, update=1.0, steps=22)
@given(ahead=st.integers(0, 8), latency=st.floats(0.1, 30.0), update=st.floats(0.1, 3.0), steps=st.integers(1, 150))
def test_the_estimate_of_a_simulated_run_is_within_a_tenth_whatever_the_staleness(ahead, latency, update, steps):
    taken = min(steps, STEPS * (ahead + 1))
    real = asynchronous(steps, ahead, latency, update)
    settings = Settings(steps=steps, eval_tasks=0, staleness=ahead)
    expected = estimate(settings, {}, real[:taken], tasks=0)
    wait = max(
        0.0, latency - ahead * update
    )  # of one step in ahead + 1: the run may end just before one, or just after
    assert expected["seconds_of_run"] == pytest.approx(sum(real), rel=0.1, abs=wait)


def test_steps_on_the_first_wave_are_not_counted():
    seconds = asynchronous(15, 4, 10.0, 0.1)
    assert sum(seconds[1:3]) < 1.0, "what was counted before"
    asked = Settings(steps=15, eval_tasks=0, staleness=4)
    each = estimate(asked, {}, seconds, 0)["seconds_per_step"]
    assert 5 * each == pytest.approx(10.1, rel=0.05)


def test_a_dry_run_takes_steps_for_its_staleness_and_evaluates_in_full_up_to_a_limit():
    given_settings = {}

    def train(listen, **settings):
        given_settings.update(settings)
        for _ in range(settings["steps"]):
            listen("step", {"stage": "learn", "seconds": 2.0})
        return {"seconds": {"evaluate before": 4.0, "evaluate after": 4.0}}

    report = dry_run(train, lambda *_: None, {"steps": 50, "eval_tasks": 200, "eval_every": 5, "staleness": 2})
    assert (given_settings["steps"], given_settings["eval_tasks"], given_settings["eval_every"]) == (9, 128, 0)
    assert report["estimate"]["seconds_of_run"] == pytest.approx(100 + 4.0 * 11 * 200 / 128)
    dry_run(train, lambda *_: None, {"steps": 4, "eval_tasks": 20, "staleness": 50})
    assert (given_settings["steps"], given_settings["eval_tasks"]) == (4, 20)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_processes_below_this_one_is_counted():
    code = "import time; kept = bytearray(b'x') * (64 << 20); print(flush=True); time.sleep(60)"
    with ChildMemory(0.01) as children:
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        try:
            child.stdout.readline()
            assert child.pid in descendants(os.getpid())
            assert 64 * MIB < process_bytes(child.pid) < 128 * MIB
            end = time.monotonic() + 30
            while children.peak < 64 * MIB and time.monotonic() < end:
                time.sleep(0.01)
        finally:
            child.kill()
            child.communicate()
    assert children.peak > 64 * MIB
    figures = memory_figures(children.peak)
    assert figures["peak_memory_gib"] > figures["child_memory_gib"] > 64 / 1024
    assert "of it in processes that the run starts" in describe(estimate(Settings(), {}, [1.0], 0) | figures)
    assert process_bytes(child.pid) == 0, "it has ended"
