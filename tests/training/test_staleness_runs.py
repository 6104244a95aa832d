"""Whole runs that wait for late groups, drop them or train on them later: the ledger accounts for every group."""

from __future__ import annotations

import asyncio
import json

import pytest

from turnwise.core.protocols import Step
from turnwise.environments.base import user_message
from turnwise.environments.builtin.calculator import Calculator
from turnwise.store.ledger import SqliteLedger
from turnwise.training import api

SMALL = {
    "method": "grpo", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 4, "cold_batch": 8,
    "steps": 8, "groups": 2, "group_size": 3, "max_tokens": 12, "context": 200, "eval_tasks": 0, "trackers": (), "threads": 1,
    "quiet": True,
}  # fmt: skip
SECONDS = 2.0


class SlowTasks(Calculator):
    """The calculator, whose first answer takes long in every fourth task."""

    def reset(self, seed):
        self.seconds = SECONDS if seed % 4 == 1 else 0.0
        return super().reset(seed)

    async def step(self, action):
        seconds, self.seconds = self.seconds, 0.0
        await asyncio.sleep(seconds)
        return await super().step(action)


class OneWaitsForAnother(Calculator):
    """Always two turns. The first episode's first answer comes only after another episode has taken its second turn."""

    def reset(self, seed):
        self.steps, self.first = 0, self.split == "train" and type(self).another is None
        if self.first:
            type(self).another = asyncio.Event()
        return super().reset(seed)

    async def step(self, action):
        self.steps += 1
        if self.first:
            type(self).waited |= not self.another.is_set()
            await self.another.wait()
        elif self.steps == 2:
            self.another.set()
        return Step([user_message("on")], float(len(action.text) % 2), terminated=self.steps == 2)


def counts_and_metrics(run):
    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        counts = ledger.group_counts()
    return counts, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


LATE = [pytest.param(value, marks=pytest.mark.thorough) for value in ("1,drop", "1,keep")]


@pytest.mark.parametrize("staleness", ["2,wait", *LATE])
def test_every_group_is_trained_on_or_dropped_with_a_reason(staleness, tmp_path):
    api.train(**{**SMALL, "env": SlowTasks, "staleness": staleness}, out=str(tmp_path), name="x")
    counts, rows = counts_and_metrics(tmp_path / "x")
    oldest = max(row["staleness/oldest"] for row in rows)
    assert counts.trained == SMALL["steps"] * SMALL["groups"]
    assert counts.issued == counts.trained + counts.dropped and not counts.in_flight + counts.finished
    late = "older than staleness 1 allows"
    if staleness == "1,drop":
        assert counts.reasons[late] == counts.dropped >= 1 and oldest <= 1
        assert rows[-1][f"dropped/{late}"] == counts.dropped
    else:
        assert counts.dropped == 0
        assert oldest <= 2 if staleness == "2,wait" else oldest > 1
    recorded = json.loads((tmp_path / "x" / "run.json").read_text())["settings"]["staleness"]
    assert recorded == (2 if staleness == "2,wait" else staleness)
    messages = (tmp_path / "x" / "messages.jsonl").read_text()
    assert ("corrects for their age by ratio Importance" in messages) == (staleness == "1,keep")


@pytest.mark.slow
def test_dialogues_of_a_continuous_run_do_not_wait_for_the_tools_of_others(tmp_path):
    """A reproducible run would wait for the first episode's answer until its patience ends, and warn."""
    OneWaitsForAnother.another, OneWaitsForAnother.waited = None, False
    values = {**SMALL, "env": OneWaitsForAnother, "steps": 3, "staleness": "0,continuous", "cold_steps": 0}
    api.train(**values, out=str(tmp_path), name="x")
    counts, rows = counts_and_metrics(tmp_path / "x")
    assert OneWaitsForAnother.waited and counts.trained == counts.issued == 6
    assert all(row["staleness/oldest"] == 0 and row["policy_check"] < 1e-3 for row in rows)
    messages = (tmp_path / "x" / "messages.jsonl").read_text()
    assert "a repeated run may differ" in messages and "going on without them" not in messages
    summary = api.resume(tmp_path / "x", steps=5)
    assert summary["groups"]["trained"] == 10 and summary["groups"]["in_flight"] == summary["groups"]["finished"] == 0


@pytest.mark.slow
def test_a_run_that_keeps_old_groups_warns_where_nothing_corrects(tmp_path):
    values = {**SMALL, "method": "reinforce", "steps": 1, "staleness": "3,keep"}
    summary = api.train(**values, out=str(tmp_path), name="x")
    text = (tmp_path / "x" / "messages.jsonl").read_text()
    assert "nothing in the loss compares" in text and "--staleness 3,drop" in text
    assert "staleness is 3, and the run has 1 step: it issues at most 2 groups at once" in text
    assert summary["groups"]["issued"] == 2


@pytest.mark.slow
def test_an_extended_run_owes_nothing(tmp_path):
    values = {**SMALL, "steps": 3, "staleness": "2,drop"}
    summary = api.train(**values, out=str(tmp_path), name="x")
    assert summary["groups"]["issued"] == summary["groups"]["trained"] == 6
    summary = api.resume(tmp_path / "x", steps=5)
    assert summary["groups"]["trained"] == 10 and summary["groups"]["in_flight"] == summary["groups"]["finished"] == 0


@pytest.mark.slow
def test_a_staleness_of_a_million_opens_what_the_run_needs(tmp_path):
    summary = api.train(**{**SMALL, "steps": 1, "groups": 1, "staleness": 1_000_000}, out=str(tmp_path), name="x")
    assert summary["groups"]["issued"] == summary["groups"]["trained"] == 1
