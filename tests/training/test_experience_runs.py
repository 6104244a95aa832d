"""Runs with named samplers, budgets, strategies, guidance and replay: they resume bit for bit, compose, and refuse nonsense."""

from __future__ import annotations

import json

import pytest
from support import resumed

from turnwise.errors import SettingError
from turnwise.training import api

SMALL = {**resumed.SMALL, "method": "dr_grpo"}
KINDS = [
    {"sampler": "vade,pool=16", "budget": "rollout_gdro", "guidance": "ghpo"},
    {"sampler": "mmr1,pool=16", "budget": "xrpo,first=2", "replay": "spear"},
    {"sampler": "fg_expo,pool=8", "budget": "v0", "guidance": "pope,tries=2"},
    {"sampler": "pivot,pool=8", "budget": "dart", "guidance": "scaf,warmup=0"},
    {"sampler": "prompt_gdro,pool=8", "strategy": "arpo,trunks=2", "budget": "turn_control,calibrate=4"},
    {"strategy": "spo_tree,factors=2/2,segment=2", "guidance": "prefix"},
    {"strategy": "latr,look=2", "guidance": "guide"},
    {"strategy": "scope,diagnosis=verifier", "guidance": "adhint"},
    {"strategy": "r3l,diagnosis=verifier", "guidance": "xrpo"},
]


@pytest.mark.slow
@pytest.mark.parametrize("named", KINDS, ids=lambda named: "+".join(v.split(",")[0] for v in named.values()))
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, named):
    """A run of four steps, and one of two that is extended to four: every belief comes out of the checkpoint."""
    rows, _ = resumed.run_whole_and_halves(tmp_path, {"method": "dr_grpo", **named})
    own = ("tasks_", "difficulty/", "budget/", "guidance/", "rollouts/", "replay/", "mixed/", "tree/", "groups/")
    resumed.assert_same(tmp_path, own)
    resumed.assert_pays(rows)
    if "replay" in named:
        assert rows[resumed.STOP - 1]["replay/stored"] > 0 and rows[resumed.STOP]["mixed/replay"] > 0
    if "guidance" in named:
        assert any(name.startswith("guidance/") for row in rows for name in row)


@pytest.mark.parametrize("setting", ["sampler", "budget", "strategy", "guidance", "replay"])
def test_a_wrong_name_is_refused_with_the_nearest(setting, tmp_path):
    with pytest.raises(SettingError, match=f"no {setting} 'nonsense'"):
        api.train(**SMALL, **{setting: "nonsense"}, out=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "env, named, why",
    [("countdown", {"strategy": "arpo"}, "later turns"), ("nim", {"guidance": "guide"}, "hint"),
     ("keydoor", {"strategy": "wordings"}, "wordings")],
)  # fmt: skip
def test_what_the_environment_cannot_do_is_refused_with_the_reason(env, named, why, tmp_path):
    with pytest.raises(SettingError, match=why):
        api.train(**{**SMALL, "env": env}, **named, out=str(tmp_path))


@pytest.mark.parametrize(
    "named", [{"guidance": "xrpo"}, {"guidance": "ghpo"}, {"budget": "dart"}, {"strategy": "arpo"}]
)
def test_what_an_agent_of_its_own_cannot_take_is_refused(named, tmp_path):
    async def agent(task, client):
        return 0.0

    with pytest.raises(SettingError, match="leave --agent out"):
        api.train(**SMALL, **named, agent=agent, out=str(tmp_path))


def test_metrics_tell_what_sampler_guidance_and_trees_did(tmp_path):
    chosen = {"sampler": "vade,pool=8", "guidance": "ghpo", "strategy": "spo_tree,factors=2/2,segment=2"}
    api.train(**{**SMALL, "steps": 2}, **chosen, out=str(tmp_path), name="m")
    rows = [json.loads(line) for line in (tmp_path / "m" / "metrics.jsonl").read_text().splitlines()]
    names = set().union(*rows)
    assert {"tasks_frontier", "difficulty/0.0", "rollouts/difficulty_1", "groups/zero_variance"} <= names
    assert any(name.startswith("guidance/") for name in names)
