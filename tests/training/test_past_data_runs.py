"""Whole small runs with buffers of past batches, a reset reference, replayed turns for critics, a memory of cases and groups of
other runs, on a game that pays: stopped and resumed, they end with the same weights as without a stop."""

from __future__ import annotations

import pytest
from support.resumed import SMALL, STOP, assert_pays, assert_same, run_whole_and_halves

from turnwise.training import api

RUNS = {
    "remix": {"method": "remix", "method_options": {"reset": 3, "weight": 0.1}},
    "memory": {"method": "dr_grpo", "replay": "remix,share=0.5,window=3", "guidance": "memento,cases=1"},
    "archer": {"method": "archer", "method_options": {"warm": 1, "passes": 2}, "seed": 1},
    "digirl": {"method": "digirl", "method_options": {"share": 0.5}},
    "digi_q": {"method": "digi_q", "method_options": {"warm": 1, "passes": 2, "least": 0.0}},
    "oapl": {"method": "oapl", "method_options": {"beta": 0.1}},
    "dart": {"method": "dart", "method_options": {"pool": 4}},
    "successes": {"method": "arpo_gui", "method_options": {"pool": 4}},
}
OWN = ("replay/", "mixed/", "guidance/", "dropped/", "budget/", "source/", "tree/")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, name):
    rows, halves = run_whole_and_halves(tmp_path, RUNS[name])
    assert_same(tmp_path, OWN)
    assert_pays(rows)
    assert halves[STOP - 1]["replay/stored"] > 0 and halves[STOP]["replay/stored"] > 0, "an empty buffer shows nothing"
    if name not in ("dart", "successes"):  # these replay only where all of a group fails
        assert halves[STOP]["mixed/replay"] > 0, "the first step after the restart draws from the stored buffer"
    if name == "remix":
        assert "mixed/replay" not in rows[3], "its replay ends with the reset"
    if name == "memory":
        assert halves[STOP - 1]["guidance/cases"] > 0 and halves[STOP]["guidance/trained_episodes"] > 0


@pytest.mark.slow
def test_a_resumed_run_sees_the_same_groups_of_other_runs(tmp_path):
    pool = tmp_path / "pool"
    swarm = {"method": "swarm", "method_options": {"folder": str(pool), "foreign": 2}}
    api.train(**{**SMALL, **swarm, "seed": 7}, out=str(tmp_path), name="other")
    same_tokens = {"model": str(tmp_path / "other" / "initial")}
    rows, halves = run_whole_and_halves(tmp_path, {**swarm, **same_tokens}, pool)
    assert_same(tmp_path, OWN)
    assert_pays(rows)
    assert halves[STOP - 1]["mixed/replay"] > 0 and halves[STOP]["mixed/replay"] > 0
