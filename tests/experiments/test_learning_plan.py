"""The plan of learning runs: every method has a place that can tell it what it asks, and a plan is run in a sensible order."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from turnwise.training import refusals
from turnwise.training.plan import RunPlan, resolve_settings

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import learning_plan
import learning_report
import processes


@pytest.mark.parametrize("method", learning_plan.METHODS)
def test_every_method_has_a_place_that_tells_what_it_asks(method):
    run = learning_plan.plan_run(method)
    assert run.why and {word for word in run.needs if word != "cold"} <= {*learning_plan.INPUTS}
    difficulty = {"difficulty": (int(run.settings["difficulty"]),)} if "difficulty" in run.settings else {}
    settings = resolve_settings(
        {"method": method, "env": run.env, **difficulty, **dict.fromkeys(run.flags, "something")}
    )
    refusals.refuse(RunPlan(settings), refusals.REQUIREMENTS)


def test_what_others_need_is_made_first_and_once():
    begun = []
    note = lambda name: lambda done: begun.append((name, dict(done)))  # noqa: E731
    jobs = [
        processes.Job("short", note("short"), ("start",), 1),
        processes.Job("long", note("long"), ("start",), 9),
        processes.Job("late", note("late"), ("teacher",), 99),
        processes.Job("teacher", note("teacher"), ("start",), 0),
        processes.Job("start", note("start")),
    ]
    processes.schedule(jobs, 1, time.monotonic() + 60)
    assert [name for name, _ in begun] == ["start", "teacher", "late", "long", "short"]
    assert all(set(job.after) <= set(done) for job in jobs for name, done in begun if name == job.key)


def test_nothing_begins_after_the_time_is_up():
    assert processes.schedule([processes.Job("a", lambda done: 1)], 1, time.monotonic() - 1) == {}


def test_rows_become_a_table_and_a_missing_file_does_not_hurt(tmp_path):
    steps = int(learning_plan.plan_run("gigpo").settings["steps"])
    common = {"seed": 0, "env": "keydoor", "steps": steps, "set": {}, "why": "states"}
    good = {**common, "method": "gigpo", "before": 0.1, "after": 0.9, "interval": [0.8, 0.95]}
    failed, mended = (
        {**common, "method": "hgpo", "error": "x"},
        {**good, "method": "hgpo", "after": 0.1, "interval": [0.0, 0.2]},
    )
    text = learning_report.whole_page([good, failed, mended])
    assert re.search(
        rf"\| gigpo \| keydoor \| {steps} \| states \| 10% \| 90% \| \+80 \[\+\d+, \+\d+\] \| yes \|", text
    )
    assert (
        "1 of 2 methods that were run learn in every seed; not `hgpo`." in text and "Not run yet: `bilevel_gae`" in text
    )
    old = learning_report.whole_page([good, {**good, "steps": 2, "after": 0.1, "interval": [0.0, 0.2]}])
    assert "keydoor (given up) | 2 |" in old and "1 of 1 methods" in old
    assert processes.read([tmp_path / "none.jsonl"]) == [] and "0 of 0" in learning_report.whole_page([])


def test_changed_pairs_are_still_pairs():
    said = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
    rows = [
        {"prompt": [{"role": "user", "content": str(n)}], "chosen": said("<tool_call>"), "rejected": said("guess"),
         "reward_chosen": 1.0, "reward_rejected": 0.0, "task": f"calculator/train/{n % 3 + 1}/{n}"}
        for n in range(60)
    ]  # fmt: skip
    swapped = [after for before, after in zip(rows, learning_plan.flipped(rows)) if after != before]
    assert 0 < len(swapped) < 20 and all(
        row["reward_chosen"] == 0.0 and row["chosen"] == said("guess") for row in swapped
    )
    made = learning_plan.families(rows)
    assert {row.get("gap") for row in made} == {2.0, None} and sum("within" in row for row in made) == 20
