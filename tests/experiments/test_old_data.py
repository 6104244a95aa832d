"""The experiment on old data: what its table says of a run, which runs are left, and the arithmetic of its calculator."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "experiments"))

import staleness
from worlds import Arithmetic, SignedCalculator

from turnwise.core.protocols import Action
from turnwise.environments.base import text_action


def row(method="grpo", lag=0, seed=0, after=0.9, curve=(), **more):
    about = {"env": "calculator", "kind": "late", "method": method, "lag": lag, "seed": seed}
    about |= {"lr": 1e-3, "steps": 16 * (len(curve) + 1)}
    between = [[16 * n, 100.0 * n, value] for n, value in enumerate(curve, 1)]
    return {**about, "before": {"success": 0.3}, "after": {"success": after}, "curve": between, "age": [0, 0], **more}


@pytest.mark.parametrize(
    ("values", "most"),
    [([0.3, 0.5, 0.9], 0.0), ([0.9, 0.5, 0.95], 0.4), ([0.3, 0.9, 0.2, 0.95, 0.7], 0.7), ([0.4], 0.0)],
)
def test_a_fall_is_the_largest_drop_from_the_best_so_far(values, most):
    assert staleness.fall(values) == pytest.approx(most)


def test_a_cell_has_mean_interval_and_the_runs_that_fell():
    rows = [row(seed=0, after=0.8, curve=[0.9, 0.5]), row(seed=1, after=1.0, curve=[0.9, 0.95])]
    half = 12.706 * math.sqrt(0.02) / math.sqrt(2)
    assert staleness.cell(rows) == f"90% ± {100 * half:.0f}, 1 of 2 fell"
    assert staleness.cell([]) == "–"


def test_an_evaluation_without_an_answer_counts_as_zero():
    lost = row(after=None, curve=[0.9, 0.8])
    lost["curve"].pop()
    assert staleness.points(lost) == [0.3, 0.9, 0.0, 0.0] and staleness.cell([lost]) == "0%, fell"


def test_rows_that_failed_count_nowhere():
    lines = staleness.table([row(), row(method="bapo", error="out of time", after=0.1)], "calculator")
    assert any(line.startswith("| grpo |") and line.endswith("| 90% | – | – | – | – |") for line in lines)
    assert any(line.startswith("| bapo |") and line.endswith("| – | – | – | – | – |") for line in lines)


def options(path, *rows, **more):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"env": "calculator", "methods": ["grpo"], "lags": [0, 1], "seeds": [0, 1], "ages": False, "steps": 16}
    return argparse.Namespace(results=path, out=str(path.parent), **{**given, **more})


def tuning(rate, after, lag=0, **more):
    return row(lag=lag, seed=staleness.TUNING_SEED, after=after, kind="tuning", lr=rate, **more)


def test_whole_seeds_come_first_and_rows_are_not_made_again(tmp_path):
    tuned = [tuning(rate, 0.9, lag) for rate in staleness.RATES for lag in staleness.TUNING_LAGS]
    chosen = options(tmp_path / "rows.jsonl", *tuned, row(), row(lag=1, error="out of time"))
    keys = [job.key for job in staleness.jobs(chosen, 0.0)]
    late = [("late", "grpo", 1, 0, 0.0), *(("late", "grpo", k, 1, 0.0) for k in (0, 1))]
    assert keys == [("start", 0), ("start", 1), *late]


def test_a_method_is_tuned_before_its_runs(tmp_path):
    found = {job.key: job for job in staleness.jobs(options(tmp_path / "rows.jsonl"), 0.0)}
    tuned = {key for key in found if key[0] == "tuning"}
    assert {(key[2], key[4]) for key in tuned} == {
        (lag, rate) for rate in staleness.RATES for lag in staleness.TUNING_LAGS
    }
    assert set(found["late", "grpo", 1, 0, 0.0].after) == {("start", 0), *tuned}
    assert found["tuning", "grpo", 0, staleness.TUNING_SEED, staleness.RATES[0]].after == (
        ("start", staleness.TUNING_SEED),
    )


def test_the_rate_of_the_best_mean_success_is_taken(tmp_path):
    low, middle, high = staleness.RATES
    rows = [
        tuning(low, 0.8),
        tuning(low, 0.8, 16),
        tuning(middle, 0.9),
        tuning(middle, 0.9, 16),
        tuning(high, 1.0),
        tuning(high, 0.1, 16),
    ]
    assert staleness.best_rate(rows, "calculator", "grpo") == middle
    assert staleness.best_rate([*rows, tuning(low, 1.0, error="out of time")], "calculator", "grpo") == middle
    equal = [tuning(low, 0.9, curve=[0.9]), tuning(middle, 0.9, curve=[0.4])]
    assert staleness.best_rate(equal, "calculator", "grpo") == low


@pytest.mark.parametrize(
    ("code", "output", "ok"),
    [
        ("a=12;b=7", "", True),
        ("t=a*b;t", "84", True),
        ("(a+b)*2-1", "37", True),
        ("a/8", "1.5", True),
        ("-a", "-12", True),
        ("t=a*;t", "SyntaxError", False),
        ("t=a*z;t", "NameError: name 'z' is not defined", False),
        ("a/0", "ZeroDivisionError", False),
        ("print(a)", "TypeError", False),
        ("a**9999999", "TypeError", False),
    ],
)
def test_arithmetic_of_one_process(code, output, ok):
    interpreter = Arithmetic()
    asyncio.run(interpreter.arun("a=12;b=7"))
    result = asyncio.run(interpreter.arun(code))
    assert result.ok == ok and result.output.startswith(output) and bool(result.output) == bool(output)


def test_its_calculator_rewards_one_and_minus_one():
    async def played(right):
        env = SignedCalculator(difficulty=2)
        env.reset(3)
        while True:
            action: Action = env.oracle() if right else text_action("answer: 1")
            step = await env.step(action)
            if step.terminated:
                return step.reward, step.info["success"]

    assert asyncio.run(played(True)) == (1.0, True)
    assert asyncio.run(played(False)) == (-1.0, False)
