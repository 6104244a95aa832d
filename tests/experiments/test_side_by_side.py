"""Runs side by side: what a row keeps of a run, the tables, and the falling penalty of self-play."""

from __future__ import annotations

import importlib
import itertools
import json
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def experiment(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def weight(recipe, step):
    """The summed weight of all penalties at a step."""
    found = [penalty.weight for penalty in recipe.penalties]
    return sum(w.at(step) for w in found)


@pytest.mark.parametrize("steps", [120, 600])
def test_the_penalty_of_self_play_falls_to_its_end(experiment, steps):
    recipe = experiment("kuhn_poker").self_play(hold=0.7, start=0.3, end=0.05, steps=steps)
    along = [weight(recipe, step) for step in range(steps + 1)]
    assert (
        along[0] == pytest.approx(1.0) and along[steps // 4] == pytest.approx(0.3) and along[-1] == pytest.approx(0.05)
    )
    assert all(later <= earlier for earlier, later in itertools.pairwise(along))


def test_self_play_without_a_penalty_has_none(experiment):
    assert experiment("kuhn_poker").self_play(start=0.0, end=0.0).penalties == ()


def test_a_run_that_fails_is_a_row_with_its_reason(experiment, tmp_path):
    row = experiment("parallel_runs").finished({"env": "nonesuch"}, "run", str(tmp_path), 60.0)
    assert row["before"] == row["after"] == {} and row["curve"] == [] and "nonesuch" in row["error"]


def test_what_others_need_is_made_first_and_once(experiment):
    processes, begun = experiment("processes"), []
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
    assert processes.schedule([processes.Job("a", lambda done: 1)], 1, time.monotonic() - 1) == {}


def test_a_curve_counts_tokens_up_to_each_evaluation(experiment, tmp_path):
    rows = [{"step": 1, "tokens": 5.0}, {"step": 2, "tokens": 7.0, "eval/success": 0.5}, {"step": 3, "tokens": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert experiment("parallel_runs").curve(tmp_path, "eval/success") == [[2, 12.0, 0.5]]


def test_editing_and_window_are_compared_at_equal_tokens(experiment):
    module = experiment("context_editing")
    before = {"success": 0.1}
    rows = [
        {"arm": "editing", "settings": {"seed": 0}, "before": before, "after": {"success": 0.9},
         "curve": [[1, 100.0, 0.4], [2, 200.0, 0.8], [3, 300.0, 0.9]]},
        {"arm": "window", "settings": {"seed": 0}, "before": before, "after": {"success": 0.3},
         "curve": [[1, 120.0, 0.2], [2, 240.0, 0.3]]},
    ]  # fmt: skip
    assert module.success_at(rows[0], 240.0) == 0.8
    assert "| 0 | 240 | 10.0% | 80.0% | 10.0% | 30.0% |" in module.table(rows)
