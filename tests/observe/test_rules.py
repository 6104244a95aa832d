"""Messages of a run: each condition is told once, with its number and the setting to change."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from turnwise.observe.rules import STEP_RULES, RunHealth, RunLimits
from turnwise.observe.trackers import MessageLog

LIMITS = RunLimits(max_tokens=12, context=192, group_size=8, temperature=0.9, lr=3e-4, mismatch_tolerance=1e-3)
FINE = {
    "groups": 4.0, "trajectories": 32.0, "answers/distinct": 0.9, "groups/zero_variance": 0.25, "advantage/size": 0.5,
    "grad_norm": 0.1, "skipped": 0.0, "policy_check": 1e-7, "reward": 0.5, "reward_max_abs": 1.0,
    "truncated/turns_by_max_tokens": 0.1, "seconds/turn_answered": 0.01, "seconds/turn_sampled": 0.2,
}  # fmt: skip
EXAMPLES = {  # condition: the metrics that hold in it, and what its message must contain
    "turns cut by max_tokens": ({"truncated/turns_by_max_tokens": 0.62}, ("62%", "12 tokens", "--max-tokens")),
    "episodes cut by context": ({"truncated/episodes_by_context": 0.4}, ("40%", "192", "--context")),
    "episodes cut by max_turns": ({"truncated/episodes_by_max_turns": 0.8}, ("80%", "--max-turns")),
    "identical answers": ({"answers/distinct": 4 / 32}, ("identical", "--temperature (now 0.9)")),
    "no spread of rewards": (
        {"groups/zero_variance": 1.0, "advantage/size": 0.0, "grad_norm": 0.0},
        ("mean reward 0.5", "--difficulty", "--group-size (now 8)"),
    ),
    "zero gradient": ({"grad_norm": 0.0, "clip_share": 1.0}, ("exactly zero", "100%")),
    "unread tool calls": ({"tool_calls/unread": 0.5}, ("0.5 tool calls", "--tool-syntax")),
    "refused calls": ({"agent/refused/turn_limit": 0.5}, ("0.5 calls", "turn_limit", "--max-turns")),
    "overruled fields": ({"agent/overruled/top_p": 2.0, "agent/overruled/seed": 2.0}, ("top_p, seed", "overrules")),
    "skipped optimiser steps": (
        {"skipped": 1.0, "reward_max_abs": 1e30, "grad_norm": math.nan},
        ("1 optimiser step", "1e+30", "--lr (now 0.0003)"),
    ),
    "slow environment": ({"seconds/turn_answered": 2.0}, ("2 s per turn", "0.2 s", "--staleness 1")),
    "mechanism never acted": (
        {"acted/strategy": 0.0, "acted/gate": 0.0, "acted/advantage": 0.4},
        ("strategy, gate did nothing", "strategy needs episodes of several turns", "--minibatches 4"),
    ),
    "no group to train on": ({"groups": 0.0, "trajectories": 0.0}, ("no group", "--max-draws", "3 × zero variance")),
}


def told(health, metrics, steps=12):
    return [message for _ in range(steps) for message in health.observe({**FINE, **metrics})]


def test_a_method_that_did_nothing_is_named_after_three_steps_however_few_of_them_had_credit():
    health = RunHealth(LIMITS, slots=frozenset({"gate"}))
    assert told(health, {"acted/gate": 0.0}, steps=1) == told(health, {}, steps=1) == []
    [message] = told(health, {}, steps=1)
    assert "the method's gate did nothing yet" in message.text
    [message] = told(RunHealth(LIMITS, slots=frozenset({"gate", "group"})), {}, steps=5)
    assert "gate did nothing yet" in message.text and "no trajectory had credit, so nothing could be measured" in message.text
    health = RunHealth(LIMITS, slots=frozenset({"gate", "advantage"}))
    assert told(health, {"acted/gate": 0.2}, steps=1) == told(health, {"acted/advantage": 0.0}, steps=9) == []


def test_a_run_that_learns_is_told_nothing():
    assert told(RunHealth(LIMITS), {}) == []
    assert told(RunHealth(LIMITS), {"success": math.nan, "trajectories": "odd", "grad_norm": None}) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_condition_is_told_once_with_its_number_and_a_setting(name):
    metrics, words = EXAMPLES[name]
    messages = told(RunHealth(LIMITS, {"zero variance": 3}), metrics)
    if name != "skipped optimiser steps":  # that number grows from step to step
        assert [m.name for m in messages] == [name]
    assert messages[0].name == name and all(word in messages[0].text for word in words), messages[0].text


def test_every_condition_has_an_example():
    of_their_own = {"failed episodes", "growing mismatch"}
    assert {c.name for c in STEP_RULES} == {*EXAMPLES, *of_their_own}


def test_failed_episodes_are_counted_by_reason_and_told_again_when_they_are_ten_times_as_many():
    dropped = {"trajectory: no answer within 30 s": 2, "trajectory: ValueError: x": 1, "zero variance": 5}
    health = RunHealth(LIMITS, dropped)
    (first,) = told(health, {})
    assert (
        first.text == "3 episodes failed and were not trained on, 32 were: 2 × no answer within 30 s; 1 × ValueError: x"
    )
    dropped["trajectory: ValueError: x"] = 20
    assert told(health, {}) == []
    dropped["trajectory: ValueError: x"] = 28
    assert [m.value for m in told(health, {})] == [30.0]


def test_a_mismatch_is_told_when_it_has_grown():
    health = RunHealth(LIMITS)
    assert told(health, {"policy_check": 1e-4}) == []
    (message,) = told(health, {"policy_check": 5e-4})
    assert (
        "differ by 0.0005" in message.text
        and "0.0001 at the start" in message.text
        and "stops at 0.001" in message.text
    )
    assert told(RunHealth(LIMITS), {"policy_check": 5e-4}) == [], "large from the start: a matter of precision"


def test_patience_counts_steps_in_a_row():
    health, flat = RunHealth(LIMITS), EXAMPLES["no spread of rewards"][0]
    assert told(health, flat, 2) == told(health, {}, 1) == told(health, flat, 2) == []
    assert len(told(health, flat, 1)) == 1


def test_groups_of_one_have_no_spread_by_nature():
    single = {"trajectories": 4.0, "answers/distinct": 1.0, "groups/zero_variance": 1.0, "advantage/size": 0.0}
    assert told(RunHealth(LIMITS), single) == []


def test_worse_is_told_again_and_a_resumed_run_remembers():
    health = RunHealth(LIMITS)
    assert [m.value for share in (0.55, 0.6, 0.9, 0.95) for m in told(health, {"truncated/turns_by_max_tokens": share})] == [
        0.55, 0.9,
    ]  # fmt: skip
    assert told(RunHealth(LIMITS, last_values={"turns cut by max_tokens": 0.7}), {"truncated/turns_by_max_tokens": 0.8}) == []


# ---------------------------------------------------------------- messages.jsonl


def test_messages_are_kept_once_and_passed_on(tmp_path):
    heard = []
    log = MessageLog(tmp_path / "messages.jsonl", lambda event, facts: heard.append(event))
    log("message", {"level": "info", "text": "CPU threads: 1"})
    log("step", {"stage": "learn", "step": 3, "total": 9})
    for _ in range(2):
        log("message", {"level": "warning", "text": "cut", "name": "turns cut by max_tokens", "value": 0.6})
    assert heard == ["message", "step", "message", "message"]
    rows = [json.loads(line) for line in (tmp_path / "messages.jsonl").read_text().splitlines()]
    assert [(row["step"], row["text"]) for row in rows] == [(0, "CPU threads: 1"), (3, "cut")]
    assert log.last_values == {"turns cut by max_tokens": 0.6} and log.warnings == [{"step": 3, "text": "cut"}]


def test_a_resumed_run_forgets_the_messages_of_steps_it_takes_again(tmp_path):
    path = tmp_path / "messages.jsonl"
    log = MessageLog(path, lambda event, facts: None)
    for step in (2, 5):
        log("step", {"stage": "learn", "step": step})
        log("message", {"level": "warning", "text": f"at {step}", "name": f"c{step}", "value": 1.0})
    again = MessageLog(path, lambda event, facts: None, start=4)
    assert again.last_values == {"c2": 1.0}
    again("message", {"level": "warning", "text": "at 2"})
    assert path.read_text().count("at 2") == 1 and "at 5" not in path.read_text()


def test_every_condition_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "howto-watch.md").read_text(encoding="utf-8")
    names = [line.split(" | ")[0][2:] for line in page.splitlines() if line.startswith("| ")]
    first = names.index(STEP_RULES[0].name)
    assert names[first : first + len(STEP_RULES)] == [c.name for c in STEP_RULES]
