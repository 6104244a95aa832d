"""The policy check of asynchronous runs: a sample after each publication, since the batch holds older tokens only."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.learner import policy_check
from turnwise.engines.learner.policy_check import (
    DIALOGUES,
    PROMPT,
    AsynchronousPolicyCheck,
    PolicyCheck,
    PolicyMismatchReport,
    beginnings,
)
from turnwise.errors import PolicyMismatch
from turnwise.training import api

SMALL = {
    "method": "grpo", "env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 4,
    "cold_batch": 8, "steps": 7, "groups": 2, "group_size": 3, "max_tokens": 12, "context": 200, "eval_tasks": 0, "trackers": (),
    "threads": 1, "quiet": True,
}  # fmt: skip
TASK = Task("guess", seed=0)


@pytest.mark.parametrize("staleness, listed", [("1", False), ("2,drop", False), ("1", True)])
def test_every_step_of_an_asynchronous_run_is_checked(staleness, listed, tmp_path, monkeypatch):
    """``listed``: the generator names the ids that it kept with every token, so the check samples from few."""
    monkeypatch.setattr(LocalGenerator, "lists_kept_ids", listed, raising=False)
    api.train(**SMALL, staleness=staleness, out=str(tmp_path), name="x")
    rows = [json.loads(line) for line in (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == SMALL["steps"] and max(row["staleness/oldest"] for row in rows) > 0
    checks = [row.get("policy_check") for row in rows]
    assert [step for step, mean in enumerate(checks, 1) if mean is None or not mean < 1e-4] == []


def test_weights_that_do_not_arrive_stop_an_asynchronous_run(monkeypatch, tmp_path):
    load = LocalGenerator._load

    def spoil(self, weights, version):
        load(self, {name: 1.5 * w for name, w in weights.items()} if version == 4 else weights, version)

    monkeypatch.setattr(LocalGenerator, "_load", spoil)
    with pytest.raises(PolicyMismatch, match="disagree on the tokens of version 4: log-probabilities differ by"):
        api.train(**SMALL, staleness=2, out=str(tmp_path), name="x")


def test_a_synchronous_run_samples_nothing_for_its_check(monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr(policy_check, "sample", lambda *_: opened.append(1))
    api.train(**{**SMALL, "steps": 2}, out=str(tmp_path), name="x")
    assert not opened


def test_a_sample_continues_what_dialogues_of_different_groups_had_read():
    def group(name, context):
        first, last = Turn(context, (7, 8)), Turn((9,), (10, 11, 12))
        return Group(name, TASK, tuple(Trajectory(f"{name}{i}", TASK, (first, last)) for i in range(6)))

    short, long = [1, 2], list(range(3 * PROMPT))
    chosen = beginnings([group("a", short), group("b", long)])
    assert chosen[:2] == [[1, 2, 7, 8, 9], long[:PROMPT]] and len(chosen) == DIALOGUES
    unsampled = Trajectory("c", TASK, (Turn((1, 2), ()),))
    assert beginnings([Group("c", TASK, (unsampled,))]) == beginnings([]) == []


class Silent:
    """A generator whose dialogues never answer."""

    def __init__(self):
        self.closed = 0

    def open(self, seed):
        return SimpleNamespace(generate=lambda *_: asyncio.get_running_loop().create_future(), close=self.close)

    def close(self):
        self.closed += 1


def test_an_update_waits_once_for_a_sample_that_is_late():
    check, generator = AsynchronousPolicyCheck(patience=0.01), Silent()
    groups = [Group("a", TASK, (Trajectory("a", TASK, (Turn((1, 2), (3,)),)),))]

    async def late() -> None:
        check.published(generator, groups, 1)
        assert await asyncio.to_thread(check._take_sample) == [] and check.patience == 0
        while not generator.closed:
            await asyncio.sleep(0)
        check.published(generator, groups, 2)
        assert check._take_sample() == [], "in the event loop's own thread nothing could arrive"

    asyncio.run(late())
    assert generator.closed <= 2


def test_few_tokens_are_not_judged_alone(monkeypatch):
    fresh, learner = [Trajectory("a", TASK, (Turn((1,), (2,), (-1.0,), version=(3,)),))], SimpleNamespace(version=3)
    reports = iter([PolicyMismatchReport(30, 0.0, 0.0), *[PolicyMismatchReport(20, 1.0, 1.0)] * 3])
    monkeypatch.setattr(policy_check, "same_policy", lambda *_: next(reports))
    monkeypatch.setattr(AsynchronousPolicyCheck, "_take_sample", lambda self: fresh)
    monkeypatch.setattr(PolicyCheck, "prepare", lambda self, learner, batch: (batch, {}))
    check = AsynchronousPolicyCheck(0.6)
    assert [check.prepare(learner, None)[1]["policy_check"] for _ in range(2)] == [0.0, pytest.approx(20 / 50)]
    assert check.prepare(learner, None)[1]["policy_check"] == pytest.approx(40 / 70)
    with pytest.raises(PolicyMismatch, match=r"differ by 0\.67"):
        check.prepare(learner, None)
