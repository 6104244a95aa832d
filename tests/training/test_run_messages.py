"""Small runs with one fault each: what the console, messages.jsonl and the summary say of it."""

from __future__ import annotations

import json

import pytest

from turnwise.cli.display import measures, show_summary
from turnwise.core.records import Group, Stop, Task, Trajectory, Turn
from turnwise.errors import EnvironmentFault
from turnwise.observe.trackers import read_rows
from turnwise.training.api import train
from turnwise.training.step_records import describe

SMALL = {
    "method": "grpo", "hidden": 32, "layers": 1, "vocabulary": 300, "cold_steps": 2, "cold_batch": 8, "steps": 3, "groups": 2,
    "group_size": 3, "eval_tasks": 4, "trackers": (), "threads": 1, "name": "run", "eval_every": 2,
}  # fmt: skip


def run(tmp_path, env, **settings):
    """(summary, warnings while it ran) of a small run."""
    heard = []
    listen = lambda event, facts: heard.append(facts) if event == "message" else None  # noqa: E731
    summary = train(listen, env=f"support.paying:{env}", out=str(tmp_path), **{**SMALL, **settings})
    warnings = [facts["text"] for facts in heard if facts["level"] == "warning"]
    kept = [row for row in read_rows(tmp_path / "run" / "messages.jsonl") if row["level"] == "warning"]
    assert [row["text"] for row in kept] == warnings == [message["text"] for message in summary["messages"]]
    return summary, warnings


def test_rewards_are_reported_everywhere(tmp_path, capsys):
    summary, _ = run(tmp_path, "Paying", eval_samples=2)
    before, after = summary["success_before"], summary["success_after"]
    json.dumps(summary, allow_nan=False)
    assert before["success"] is None and "reward" in after and set(after["rewards"]) == {"digit", "short"}
    rows = measures(before, after)
    assert not [name for name in rows if name.startswith("success")]
    assert list(rows)[:5] == [
        "reward",
        "reward, difficulty 1",
        "reward, difficulty 2",
        "reward: digit",
        "reward: short",
    ]
    steps = read_rows(tmp_path / "run" / "metrics.jsonl")
    trained = [row for row in steps if "loss" in row]
    assert all(row["reward/mean"] == row["reward"] and "reward/digit" in row for row in trained)
    (evaluated,) = [row for row in steps if "eval/reward" in row]
    assert evaluated["step"] == 2 and "eval/reward/digit" in evaluated and "eval/success" not in evaluated
    show_summary(summary)
    shown = capsys.readouterr().out
    assert "reward: digit" in shown and "say what is a success" in shown and "## Before RL: reward" in shown


@pytest.mark.parametrize(
    ("env", "settings", "words"),
    [
        ("Flat", {}, "no group had two different rewards in three steps (mean reward 0.5)"),
        (
            "Paying",
            {"max_tokens": 1, "cold_steps": 0},
            "of the turns were cut at 1 tokens; write a larger --max-tokens",
        ),
        ("Sometimes", {"eval_tasks": 0}, "ValueError: an even length"),
        ("Excessive", {"cold_steps": 8, "cold_lr": 0.01}, "e+30"),
    ],
)
def test_a_fault_is_told_while_it_happens(tmp_path, env, settings, words):
    _, warnings = run(tmp_path, env, **settings)
    assert any(words in text for text in warnings), warnings


def test_an_evaluation_that_nobody_could_play_stops_the_run(tmp_path):
    with pytest.raises(EnvironmentFault, match=r"no result: 4 of 4 episodes failed: ValueError: an even length; .* resume "):
        run(tmp_path, "Sometimes")


def test_a_batch_says_which_limit_cut_and_how_long_a_turn_took():
    turn = {"stop": Stop.LENGTH, "seconds_generating": 0.2, "seconds_acting": 2.0}
    cut, full = Turn((1,), (2, 3), **turn), Turn((1,), (2,), **turn)
    task = Task("x", 0)
    members = (Trajectory("a", task, (cut, cut)), Trajectory("b", task, (cut, full)))
    found = describe([Group("g", task, members)], 0, max_tokens=2)
    assert found["truncated/turns_by_max_tokens"] == 0.75 and found["truncated/episodes_by_context"] == 0.5
    # an agent may ask for less than the run allows: then neither limit has cut the answer
    by_agent = describe([Group("g", task, members)], 0, max_tokens=2, context=100)
    assert by_agent["truncated/episodes_by_context"] == 0.0
    assert describe([Group("g", task, members)], 0, max_tokens=2, context=5)["truncated/episodes_by_context"] == 0.5
    assert (found["seconds/turn_sampled"], found["seconds/turn_answered"]) == (0.2, 2.0)
    assert found["answers/distinct"] == 1.0 and found["tokens_per_turn"] == 1.75


def test_a_reward_beyond_float32_is_refused_with_its_size(tmp_path, monkeypatch):
    from support.paying import Paying

    monkeypatch.setattr(Paying, "pay", lambda self, text: 1e300)
    with pytest.raises(EnvironmentFault, match=r"1e\+300.*float32"):
        run(tmp_path, "Paying")
