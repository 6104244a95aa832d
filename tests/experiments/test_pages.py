"""Pages of results say what their rows say, and counts in the documentation are those of the code."""

from __future__ import annotations

import random
import re
import time
import tomllib
from pathlib import Path

import pytest

from experiments.evidence import claims, pages, rows
from experiments.evidence.command import Evidence
from experiments.evidence.play import Player, run_of
from turnwise import recipes
from turnwise.integrations import method_support
from turnwise.integrations.trl_arguments import MEASURED
from turnwise.recipes.catalogue import kind
from turnwise.recipes.recipe import Kind

ROOT = Path(__file__).parents[2]


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_the_pages_of_evidence_are_made_from_rows_that_nobody_changed():
    places = ROOT / "experiments/evidence"
    known = rows.read(places)
    assert not [row["place"] for row in known if row[rows.SEAL] != rows.seal(row)], "a row was changed"
    evidence = Evidence.of(places / "claims.toml", places, "all")
    made = pages.pages(evidence.claims, evidence.ended, claims.beds(places / "claims.toml"), places / "limits.toml")
    assert made == {name: text_of(f"evidence/{name}") for name in made}, (
        "rows were added, or a method changed and its rows are stale: run `turnwise evidence table --write docs/evidence`"
    )


def test_every_limit_is_held_by_a_test():
    limits = tomllib.loads((ROOT / "experiments/evidence/limits.toml").read_text(encoding="utf-8"))["limit"]
    assert len(limits) > 30
    for each in limits:
        path, _, name = each["test"].partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), each
        assert each["method"] in recipes.METHODS, each


@pytest.mark.thorough
def test_rows_drawn_at_random_come_out_again(monkeypatch, capsys, tmp_path):
    """Equal to the last bit on the same kind of processor with the same versions; elsewhere the same method."""
    monkeypatch.chdir(ROOT)
    known = rows.read(ROOT / "experiments/evidence")
    here, able = rows.provenance(), [row for row in known if "measured" in row and row["cost"]["cpu_seconds"] < 40]
    for row in random.sample(able, min(2, len(able))):
        again = Player(tmp_path, 1, time.monotonic() + 600).one(run_of(row))
        assert "error" not in again, again["error"]
        if all(row[part] == here[part] for part in ("versions", "machine")):
            assert rows.difference(row["measured"], again["measured"]) == "", row["run"]
        assert again["method"]["slots"] == row["method"]["slots"]


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
