"""Each rule of the doctor has a run that triggers it and one that does not; planted faults are named first."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from turnwise.errors import SettingError, StoreError
from turnwise.inspector.doctor import diagnose
from turnwise.observe.rules import NOTE, OVERRULED, REFUSED, RULES

PATH = Path(__file__).parents[2] / "experiments" / "doctor_faults.py"
spec = importlib.util.spec_from_file_location("doctor_faults", PATH)
faults = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = faults
spec.loader.exec_module(faults)

EXTRA = {  # rules that no planted fault of the experiment names first
    "rewards out of scale": faults.metric("reward_max_abs", 5e4),
    "gradient clipped hard": faults.metric("grad_norm", 300.0),
    "tasks too hard": faults.every(groups__all_fail=0.9, success=0.02, reward=0.02),
    "most groups dropped": faults.fields(groups=10, dropped=30),
    "few distinct answers": faults.metric("answers/distinct", 0.25),
    "answers grow longer without gain": faults.every(tokens_per_turn=lambda t: 10 + 50 * t, success=0.3, reward=0.3),
    "held-out success lower than in training": faults.fields(after={"success": 0.3, "interval": [0.2, 0.4]}),
    "held-out success fell": faults.fields(after={"success": 0.1, "interval": [0.05, 0.17]}),
    "only pushed down": faults.metric("gradient_share/positive_advantage", 0.01),
    "learner takes the time": faults.every(seconds__learn=1.9, seconds=2.0),
    "publishing takes the time": faults.every(seconds__publish=1.5, seconds=2.0),
    "mechanism never acted": faults.metric("acted/strategy", 0.0),
    "refused calls": faults.metric(f"{REFUSED}context_overflow", 0.5),
    "overruled fields": faults.metric(f"{OVERRULED}temperature", 1.0),
    "solved": faults.every(success=lambda t: 0.5 if t < 0.5 else 1.0, reward=lambda t: 0.5 if t < 0.5 else 1.0,
        groups__zero_variance=lambda t: float(t >= 0.5), advantage__size=0.0, grad_norm=lambda t: float(t < 0.5)),
    "not finished": faults.fields(finished=False),
    "no measurable learning": faults.STUCK,
}
TRIGGERS = dict(faults.FAULTS.values()) | EXTRA


def found(tmp_path, plan, name="run"):
    return [f.rule for f in diagnose(faults.write_run(tmp_path / name, plan)).findings]


def test_every_rule_has_a_name_of_its_own_and_a_run_that_triggers_it():
    names = [rule.name for rule in RULES]
    assert set(TRIGGERS) == set(names) and len(set(names)) == len(names) >= 25


@pytest.fixture(scope="module")
def found_on_healthy(tmp_path_factory):
    return found(tmp_path_factory.mktemp("healthy"), faults.healthy(3))


@pytest.mark.parametrize("rule", sorted(TRIGGERS))
def test_a_rule_applies_to_its_fault_and_not_to_a_healthy_run(rule, tmp_path, found_on_healthy):
    plan = faults.healthy(3)
    TRIGGERS[rule](plan)
    assert rule in found(tmp_path, plan) and rule not in found_on_healthy


@pytest.mark.slow
def test_planted_faults_are_named_first_and_healthy_runs_raise_no_alarm(tmp_path):
    result = faults.measure(tmp_path)
    assert result["faults"] >= 30 and result["named_first"] >= 27
    assert result["healthy"] == 10 and result["false_alarms"] <= 1


def test_a_finding_shows_evidence_and_what_to_change(tmp_path):
    plan = faults.healthy(1)
    faults.FAULTS["lr 0"][1](plan)
    diagnosis = diagnose(faults.write_run(tmp_path / "run", plan))
    text = diagnosis.text()
    assert "learning rate zero" in text and "change: --lr" in text and "evidence: lr 0 → 0" in text
    assert json.loads(json.dumps(diagnosis.as_dict()))["findings"][0]["rule"] == "learning rate zero"


def test_a_solved_run_is_called_solved(tmp_path):
    """Every trajectory of its last steps succeeds, with the same answer: no gradient, and nothing wrong."""
    plan = faults.healthy(3)
    TRIGGERS["solved"](plan)
    plan.after = {"success": 1.0, "interval": [0.97, 1.0]}
    for row in plan.rows[len(plan.rows) // 2 :]:
        row.update({"answers/distinct": row["groups"] / row["trajectories"], "entropy": 1e-4, "advantage/size": 0.0})
    diagnosis = diagnose(faults.write_run(tmp_path / "run", plan))
    assert "the run is solved" in diagnosis.text() and "change: nothing" in diagnosis.text()
    assert not {f.rule for f in diagnosis.alarms} & {"no spread of rewards", "identical answers", "entropy collapse"}


def test_a_run_that_solves_its_held_out_tasks_is_solved_though_its_answers_are_alike(tmp_path):
    plan = faults.healthy(3)
    faults.metric("answers/distinct", 0.28)(plan)
    plan.after = {"success": 0.985, "interval": [0.957, 0.995]}
    diagnosis = diagnose(faults.write_run(tmp_path / "run", plan))
    assert "the run is solved" in diagnosis.text() and "98.5% of the held-out tasks succeed" in diagnosis.text()
    plan.after = {"success": 1.0, "interval": [0.51, 1.0]}  # four of four
    assert "solved" not in found(tmp_path, plan, "few")


def test_without_a_gradient_nothing_is_pushed_down(tmp_path):
    plan = faults.healthy(3)
    faults.also(faults.every(reward=1.0, groups__zero_variance=1.0, advantage__size=0.0, grad_norm=0.0,
                             gradient_share__positive_advantage=0.0))(plan)  # fmt: skip
    assert "only pushed down" not in found(tmp_path, plan)


def test_a_reward_that_never_differs_is_not_solved(tmp_path):
    plan = faults.healthy(3)
    faults.also(faults.every(reward=1.0, groups__zero_variance=1.0, advantage__size=0.0, grad_norm=0.0))(plan)
    for row in plan.rows:
        row.pop("success")
    assert "solved" not in found(tmp_path, plan) and "no spread of rewards" in found(tmp_path, plan, "again")


def test_notes_are_no_alarm(tmp_path):
    plan = faults.healthy(1)
    plan.finished = False
    diagnosis = diagnose(faults.write_run(tmp_path / "run", plan))
    assert [f.severity for f in diagnosis.findings] == [NOTE] and not diagnosis.alarms


def test_a_run_without_steps_and_a_missing_run_are_refused(tmp_path):
    plan = faults.healthy(1)
    plan.rows.clear()
    with pytest.raises(SettingError, match="not taken a step"):
        diagnose(faults.write_run(tmp_path / "run", plan))
    with pytest.raises(StoreError, match="no run"):
        diagnose(tmp_path / "missing")


def test_groups_dropped_for_their_age_are_no_matter_of_difficulty(tmp_path):
    plan = faults.healthy(1)
    faults.FAULTS["slow episodes"][1](plan)
    rules = {f.rule: f for f in diagnose(faults.write_run(tmp_path / "run", plan)).findings}
    assert "most groups dropped" not in rules
    finding = rules["groups too old"]
    assert "--staleness N,wait" in finding.setting and "--difficulty" not in finding.setting
    assert "90 × older than staleness 2 allows" in finding.text


@pytest.mark.parametrize(
    "reason, told", [("older than staleness 2 allows", "--staleness N,wait"), ("no spread", "--difficulty")]
)
def test_a_step_without_groups_says_what_to_change_by_why_they_were_dropped(tmp_path, reason, told):
    plan = faults.healthy(1)
    for row in plan.rows[::3]:
        row.update({"groups": 0.0, f"dropped/{reason}": 9.0, "dropped/another": 2.0})
    findings = {f.rule: f for f in diagnose(faults.write_run(tmp_path / "run", plan)).findings}
    setting = findings["no group to train on"].setting
    assert told in setting and ("--difficulty" in setting) == (told == "--difficulty")
