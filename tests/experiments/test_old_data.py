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
    assert "| grpo | 90% | – | – | – | – |" in lines and "| bapo | – | – | – | – | – |" in lines


def test_whole_seeds_come_first_and_rows_are_not_made_again(tmp_path):
    results = tmp_path / "rows.jsonl"
    results.write_text(json.dumps(row()) + "\n" + json.dumps(row(lag=1, error="out of time")) + "\n")
    options = argparse.Namespace(
        results=results, env="calculator", methods=["grpo"], lags=[0, 1], seeds=[0, 1], ages=False, out=str(tmp_path),
        lr=1e-3, steps=16,
    )  # fmt: skip
    keys = [job.key for job in staleness.jobs(options, 0.0)]
    assert keys == [
        "calculator-start-0",
        ("late", "grpo", 1, 0),
        "calculator-start-1",
        *(("late", "grpo", k, 1) for k in (0, 1)),
    ]


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
