"""Replay and bisect on real tiny runs: a step is taken again bit for bit; a difference is named where it begins."""

from __future__ import annotations

import json
import math
import shutil

import pytest
from support.finished_runs import SMALL

from turnwise.errors import SettingError
from turnwise.inspector.replay.divergence import RunRecord, bisect_runs
from turnwise.inspector.replay.replay import replay_step
from turnwise.training import api

pytestmark = pytest.mark.slow(tier="test")


@pytest.fixture(scope="module")
def run(finished):
    return finished("grpo")


@pytest.fixture(scope="module")
def hotter(tmp_path_factory):
    """The same run at another temperature."""
    out = tmp_path_factory.mktemp("runs")
    api.train(method="grpo", out=str(out), name="b", **{**SMALL, "temperature": 0.7})
    return out / "b"


def test_a_step_is_replayed_bit_for_bit_and_the_run_stays_as_it_is(run):
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and "sqlite" not in p.name}
    report = replay_step(run, 3)
    assert report.ok and report.weights_equal and report.divergence is None
    assert report.began in (0, 2) and "bit for bit" in report.text()
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and "sqlite" not in p.name} == files
    json.dumps(report.as_dict())


def test_another_method_takes_the_same_step_from_the_same_weights(run, tmp_path):
    report = replay_step(run, 2, "ppo", until=3, keep=tmp_path / "kept")
    assert report.ok and report.other_method == "ppo" and report.last_step == 3
    assert math.isnan(report.cosine) or -1 - 1e-9 <= report.cosine <= 1 + 1e-9
    kept = RunRecord.read(tmp_path / "kept")
    assert sorted(kept.metrics) == [1, 2, 3]
    same = [(g.task, [t.turns[0].tokens for t in g.trajectories]) for g in RunRecord.read(run).groups(2)]
    assert [(g.task, [t.turns[0].tokens for t in g.trajectories]) for g in kept.groups(2)] == same


def test_runs_part_where_their_settings_act(run, hotter):
    result = bisect_runs(run, hotter)
    first = result.divergence
    assert first.step == 1 and first.task and first.token == 0 and first.turn == 0 and first.field in ("logp", "tokens")
    assert result.causes == {"temperature": (1.0, 0.7)} and "part at step 1" in result.text()
    assert bisect_runs(run, run).divergence is None


def test_a_changed_metric_of_a_copy_is_found(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    rows[1]["grad_norm"] = (rows[1]["grad_norm"] or 0.0) + 1e-7
    rows[2]["seconds"] = 99.0
    (copy / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = bisect_runs(run, copy).divergence
    assert (found.step, found.field) == (2, "grad_norm")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((9,), "steps 1 to 3"), ((0,), "steps 1 to 3"), ((2, "grop"), "grpo"), ((2, "", 3), "--until belongs"),
     ((2, "gspo", 9), "from 2 to 3")],
)  # fmt: skip
def test_nonsense_is_refused(run, arguments, words):
    with pytest.raises(SettingError, match=words):
        replay_step(run, *arguments)
