"""Pages of results say what their rows say, and counts in the documentation are those of the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from turnwise import recipes
from turnwise.integrations import method_support
from turnwise.integrations.trl_arguments import MEASURED
from turnwise.recipes.catalogue import kind
from turnwise.recipes.recipe import Kind

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import credit_efficiency
import learning_change
import learning_report
import processes

ROOT = Path(__file__).parents[2]
ROWS = [ROOT / f"experiments/results/{name}.jsonl" for name in ("learning", "offpolicy", "methods")]


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_the_pages_of_learning_are_made_from_their_rows():
    rows = processes.read(ROWS)
    assert text_of("learning.md") == learning_report.page(rows), "run `make learning`"
    assert text_of("learning-all.md") == learning_report.whole_page(rows), "run `make learning`"


def test_the_tables_of_credit_are_made_from_their_rows():
    page = text_of("results-credit.md")
    assert page.count("<!-- rows ") == 5
    assert page == credit_efficiency.with_tables(page), (
        "run experiments/credit_efficiency.py --write docs/results-credit.md"
    )


def test_a_change_has_the_error_of_both_evaluations():
    row = {"before": 0.32, "after": 0.45, "interval": [0.3561, 0.5476]}  # 100 tasks
    assert learning_change.tasks_of(0.45, (0.3561, 0.5476)) == 100
    found = learning_change.change(row)
    assert found.value == pytest.approx(0.13) and found.low < 0 < found.high  # though 0.3561 lies above 0.32
    assert not learning_report.learns([row]) and learning_report.learns([{**row, "before_interval": [0.31, 0.33]}])


def test_several_seeds_are_narrower_than_one():
    row = {"before": 0.3, "after": 0.6, "interval": [0.5, 0.69], "before_interval": [0.22, 0.4]}
    one, four = learning_change.mean_change([row]), learning_change.mean_change([row] * 4)
    assert one == learning_change.change(row)
    assert four.value - four.low == pytest.approx((one.value - one.low) / 2)


def test_the_page_of_trl_counts_the_methods_that_fit():
    fit = [name for name in recipes.METHODS if not method_support.unsupported_reasons(recipes.build(name), MEASURED)]
    objectives = [name for name in fit if kind(name) is Kind.OBJECTIVE]
    credit = [name for name in fit if kind(name) is Kind.CREDIT]
    data = [name for name in fit if kind(name) is Kind.DATA]
    assert sorted(fit) == sorted(objectives + credit + data)
    page = text_of("trl.md")
    lines = re.findall(r"^\| (\d+) (objectives|credit methods|data method): (.*?) \|", page, re.M)
    told = {what: (int(count), rest) for count, what, rest in lines}
    assert told["objectives"][0] == len(objectives)
    assert told["credit methods"][0] == len(credit)
    assert re.findall(r"`(\w+)`", told["credit methods"][1]) == credit
    assert re.findall(r"`(\w+)`", told["data method"][1]) == data
    refused = [name for name in recipes.METHODS if kind(name) is Kind.OBJECTIVE and name not in fit]
    rows = [line for line in page.splitlines() if line.startswith("| `") and "| no: " in line]
    named = {name for line in rows for name in re.findall(r"`(\w+)`", line)}
    assert set(refused) <= named, "an objective that TRL cannot run is not named"
    assert not named & set(fit)
