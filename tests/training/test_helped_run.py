"""Runs that ask a helper: they act, repeat and resume bit for bit, count what they asked, and refuse what cannot work."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.chat_servers import ChatStub, free_address, serving, text
from turnwise.engines.remote import chat_server
from turnwise.errors import ServerFault, SettingError
from turnwise.training import api

SMALL = {
    "method": "r3l", "env": "keydoor", "hidden": 32, "layers": 1, "cold_steps": 10, "cold_batch": 8, "steps": 3, "groups": 2,
    "group_size": 4, "eval_tasks": 2, "checkpoint_every": 1, "trackers": (), "threads": 1, "max_turns": 4, "strategy": "r3l",
}  # fmt: skip
ADVICE = """
import json


def reflect(question):
    steps = question.count("message of: assistant, step")
    return json.dumps({
        "trajectory_summary": "it went astray", "root_cause_analysis": "a wrong turn", "trajectory_outcome": "failure",
        "improvement_suggestion": "another way", "retry_from_step": steps // 2,
    })


def score(question):
    steps = question.count("message of: assistant, step")
    return json.dumps({"scores": [1] * (steps - 1) + [0], "correction": "another way"})


def hint(question):
    return json.dumps({"hints": ["a", "b", "c", "d"]})


number = 7
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(chat_server.RetryPolicy, "wait", lambda *_: 0.001)


@pytest.fixture
def advice(tmp_path) -> str:
    (tmp_path / "advice.py").write_text(ADVICE)
    return f"{tmp_path / 'advice.py'}:reflect"


def train(tmp_path: Path, helper: str, name: str = "run", **more):
    return api.train(quiet=True, **{**SMALL, "out": str(tmp_path), "name": name, "helper": helper, **more})


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def same_weights(one: Path, two: Path) -> bool:
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (one, two))
    return all((ours[name] == theirs[name]).all() for name in theirs)


@pytest.mark.slow
def test_a_function_reflects_and_the_meter_shows_it(tmp_path, advice):
    summary = train(tmp_path, advice)
    rows = [row for row in metrics(tmp_path / "run") if "helper/calls" in row]
    assert len(rows) == 3 and all(row["helper/calls"] + row["helper/cached"] == 4 for row in rows)  # every attempt
    assert all(row["acted/strategy"] == 0.5 for row in rows), "half of a group are retries"
    asked = summary["asked"]["helper"]
    assert asked["questions"] == asked["calls"] == sum(row["helper/calls"] for row in rows) and asked["failed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "slot", "more"),
    [
        ("score", "strategy", {"strategy": "scope", "max_turns": 3}),
        ("hint", "guidance", {"strategy": "independent", "guidance": "guide", "env": "guess", "difficulty": (3,)}),
    ],
)
def test_verdicts_on_steps_and_hints_act(tmp_path, advice, function, slot, more):
    """``guess`` has no hints of its own."""
    train(tmp_path, advice.replace("reflect", function), method="dr_grpo", **more)
    rows = [row for row in metrics(tmp_path / "run") if f"acted/{slot}" in row]
    assert len(rows) == 3 and all(row[f"acted/{slot}"] > 0 and row["helper/failed"] == 0 for row in rows)
    assert sum(row["helper/calls"] for row in rows) > 0


@pytest.mark.slow
def test_a_server_that_dies_stops_the_run_which_resumes_without_asking_twice(tmp_path, advice):
    scope: dict = {}
    exec(ADVICE, scope)
    asked, limit = [], 10**6

    def respond(body):
        if len(asked) >= limit:
            return 503, {"error": {"message": "out of memory"}}
        asked.append(body["messages"][1]["content"])
        return text(scope["reflect"](asked[-1]))

    with serving(ChatStub(respond)) as url:
        train(tmp_path, url, "whole")
        whole, limit = len(asked), len(asked) + 6
        asked_whole = asked[:]
        asked.clear()
        limit = 6
        with pytest.raises(ServerFault) as stopped:
            train(tmp_path, url, "stopped")
        run = tmp_path / "stopped"
        assert "out of memory" in str(stopped.value) and f"turnwise resume {run}" in str(stopped.value)
        limit = 10**6
        api.resume(run, quiet=True)
    assert sorted(asked) == sorted(asked_whole) and len(asked) == whole, "nothing is asked twice"
    assert same_weights(run, tmp_path / "whole")


@pytest.mark.slow
def test_the_policy_reflects_with_the_weights_of_each_step_and_repeats(tmp_path):
    for name in ("one", "two"):
        summary = train(tmp_path, "policy", name)
    assert same_weights(tmp_path / "one", tmp_path / "two")
    with sqlite3.connect(tmp_path / "one" / "answers.sqlite") as kept:
        names = {row[0].split("/")[1] for row in kept.execute("SELECT question FROM answers")}
    assert names == {"policy@0", "policy@1", "policy@2"}
    asked = summary["asked"]["helper"]
    assert asked["failed"] == asked["questions"], "the tiny model writes no JSON"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"helper": ""}, "r3l learns from a helper; write --helper policy"),
        ({"helper": "policy", "strategy": "independent"}, "does not learn from helper; leave --helper out"),
        ({"helper": "nowhere.py:f"}, "there is no file nowhere.py"),
        ({"helper": "localhost:1"}, "http://localhost:8000/v1"),
        ({"helper": "first_error:x"}, "write --judge first_error:FOLDER"),
        (
            {"helper": "http://127.0.0.1:8/v1", "judge": "http://127.0.0.1:9/v1", "judge_key_env": "KEY"},
            "are those of one server, and the judge is at http://127.0.0.1:9/v1",
        ),
    ],
)
def test_what_cannot_help_is_refused(tmp_path, settings, says):
    with pytest.raises(SettingError, match=says):
        train(tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_no_function_and_an_address_where_nobody_listens(tmp_path, advice):
    with pytest.raises(SettingError, match="has no function 'reflects'; did you mean 'reflect'"):
        train(tmp_path, f"{advice}s")
    with pytest.raises(SettingError, match="has no function 'number'"):
        train(tmp_path, advice.replace("reflect", "number"))
    with pytest.raises(SettingError, match=r"--helper.*no connection"):
        train(tmp_path, free_address())
