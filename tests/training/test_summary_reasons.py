"""Transcripts say what the named rewards were and why the judge scored an episode as it did."""

from __future__ import annotations

import contextlib

from turnwise.config.settings import Settings
from turnwise.rewards.judge import AnswerCache, Verdict
from turnwise.store.rundir import RunDir
from turnwise.training.rewards import CACHE
from turnwise.training.summary import RunSummary

BEFORE = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "5"}]
AFTER = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]


def row(messages, reward, **more):
    return {"task": "x", "success": None, "reward": reward, "messages": messages, **more}


def written(tmp_path, before, after):
    RunSummary(RunDir(tmp_path), Settings(), {"rows": [before]}, {"rows": [after]})._transcripts()
    return (tmp_path / "transcripts.md").read_text()


def test_the_judges_reasons_and_named_rewards_stand_under_each_transcript(tmp_path):
    with contextlib.closing(AnswerCache(tmp_path / CACHE)) as cache:
        cache.record("g/0", BEFORE, Verdict(0.0, "five is\n# wrong"))
        cache.record("g/1", AFTER, Verdict(1.0, "four is right"))
    said = written(
        tmp_path, row(BEFORE, 0.0, rewards={"judge": 0.0}), row(AFTER, 1.0, rewards={"judge": 1.0, "short": 0.5})
    )
    first, second = said.split("## After RL")
    assert "- reward judge: 0\n" in first and "the judge: five is" in first and "\n# wrong" not in first
    assert "- reward judge: 1\n- reward short: 0.5\n- the judge: four is right" in second


def test_without_judge_and_named_rewards_nothing_is_added(tmp_path):
    said = written(tmp_path, row(BEFORE, 0.0), row(AFTER, 1.0))
    assert "reward judge" not in said and "the judge" not in said and not (tmp_path / CACHE).exists()
