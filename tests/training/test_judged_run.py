"""Runs whose reward comes from a judge: they learn, stop in words when it is gone, resume without asking twice."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.chat_servers import ChatStub, free_address, serving, text
from tests.support.judged import judge
from turnwise.cli.main import main
from turnwise.engines.remote import chat_server
from turnwise.errors import EnvironmentFault, ServerFault, SettingError
from turnwise.training import api
from turnwise.training.evaluation import evaluate_policy

ENV = "tests.support.judged:Unpaid"
SMALL = {
    "env": ENV, "hidden": 32, "layers": 1, "vocabulary": 300, "cold_steps": 20, "cold_batch": 8, "steps": 3, "groups": 2,
    "group_size": 4, "eval_tasks": 4, "checkpoint_every": 1, "trackers": (), "threads": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(chat_server.RetryPolicy, "wait", lambda *_: 0.001)


def train(tmp_path: Path, url: str, name: str = "run", **more):
    return api.train(quiet=True, **{**SMALL, "out": str(tmp_path), "name": name, "judge": url, **more})


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path):
    return load_file(run / "model" / "model.safetensors")


@pytest.mark.slow(tier="test")
@pytest.mark.parametrize("mode", ["each", "group"])
def test_a_run_learns_from_its_judge_alone(tmp_path, mode):
    stub = ChatStub(judge)
    with serving(stub) as url:
        more = {"steps": 12, "groups": 4, "group_size": 8, "eval_tasks": 40, "lr": 3e-3, "hidden": 64, "cold_steps": 60}
        summary = train(tmp_path, url, judge_mode=mode, **more)
    before, after = (summary[when]["rewards"]["judge"]["mean"] for when in ("success_before", "success_after"))
    assert before < 0.6 and after > before + 0.1
    rows = [row for row in metrics(tmp_path / "run") if "judge/calls" in row]
    assert sum(row["judge/failed"] for row in rows) == 0
    if mode == "each":  # ten digits: most were asked about before
        assert sum(row["judge/cached"] for row in rows) > sum(row["judge/calls"] for row in rows)


@pytest.mark.slow
def test_a_judge_that_dies_stops_the_run_which_resumes_without_asking_twice(tmp_path):
    with serving(ChatStub(judge)) as url:
        whole = train(tmp_path, url, "whole", judge_mode="group")
    asked: list[str] = []
    limit = 9

    def dying(body):
        if len(asked) >= limit:
            return 503, {"error": {"message": "out of memory"}}
        asked.append(body["messages"][1]["content"])
        return judge(body)

    stub = ChatStub(dying)
    with serving(stub) as url:
        with pytest.raises(ServerFault) as stopped:
            train(tmp_path, url, "stopped", judge_mode="group")
        run = tmp_path / "stopped"
        said = str(stopped.value)
        assert "out of memory" in said and f"turnwise resume {run}" in said and not (run / "summary.json").exists()
        with sqlite3.connect(run / "answers.sqlite") as kept:
            (questions,) = kept.execute("SELECT COUNT(*) FROM answers").fetchone()
        assert questions == limit - 1  # all but the probe, which belongs to no run
        limit = 10**6
        summary = api.resume(run, quiet=True)
    assert len(asked) == len(set(asked)) + asked[1:].count(asked[0])  # nothing but the probe may be asked again
    assert summary["success_after"] == whole["success_after"]
    ours, theirs = weights(run), weights(tmp_path / "whole")
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_a_judge_that_is_not_there_is_refused_before_anything_is_written(tmp_path, capsys):
    with pytest.raises(SettingError, match=r"--judge.*no connection"):
        train(tmp_path, free_address())
    assert main(["train", "--env", ENV, "--judge", free_address(), "--out", str(tmp_path)]) == 2
    assert "no connection" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (text("It was fine."), "no answer in 2 attempts: the reply is not JSON: 'It was fine.'"),
        ((401, {"error": {"message": "who are you?"}}), "who are you?.*--judge-key-env"),
        ((404, {"error": {"message": "no such model"}}), "no model 'x'.*known: m"),
    ],
)
def test_a_judge_that_does_not_judge_is_refused_at_the_door(tmp_path, reply, says):
    with serving(ChatStub(lambda body: reply)) as url, pytest.raises(SettingError, match=says):
        train(tmp_path, url, judge_model="x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"judge": "localhost:1"}, "http://localhost:8000/v1"),
        ({"judge_mode": "groups"}, "did you mean 'group'"),
        ({"judge_seconds": 0}, "judge_seconds"),
        ({"judge_weight": float("nan")}, "judge_weight"),
        ({"judge_rubric": "nowhere.md"}, "cannot be read"),
        ({"judge_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
    ],
)
def test_wrong_settings(tmp_path, settings, says):
    with pytest.raises(SettingError, match=says):
        train(tmp_path, "http://127.0.0.1:9/v1", **settings)


def test_an_evaluation_is_judged_too():
    with serving(ChatStub(judge)) as url:
        more = {"env": ENV, "judge": url, "judge_weight": 0.5, "eval_tasks": 3}
        result = evaluate_policy("", "oracle", "held_out", more)
    assert result["rewards"]["judge"]["mean"] == pytest.approx(0.9) and result["reward"] == pytest.approx(0.45)


def test_a_judge_that_turns_to_prose_fails_episodes_with_the_reason():
    answers = iter([*range(10**6)])
    stub = ChatStub(lambda body: judge(body) if next(answers) < 1 else text("Well done!"))
    refused = pytest.raises(EnvironmentFault, match=r"of 6 episodes failed: .*the judge gave no answer in 2 attempts")
    with serving(stub) as url, refused:
        evaluate_policy("", "random", "held_out", {"env": ENV, "judge": url, "eval_tasks": 6})


def test_the_policy_can_only_judge_what_plays_here(capsys):
    assert main(["eval", "--player", "oracle", "--env", ENV, "--judge", "policy"]) == 2
    assert "no local model" in capsys.readouterr().err


# ------------------------------------------------------------- the policy as judge


@pytest.fixture
def lenient(monkeypatch):
    """The tiny model writes no JSON: any reply is a verdict here, with a score that depends on its text."""
    from turnwise.rewards import judge as prompts
    from turnwise.rollout import scoring

    monkeypatch.setattr(scoring, "REPLY_TOKENS", 6)
    monkeypatch.setattr(scoring, "TOKENS_PER_VERDICT", 0)
    monkeypatch.setattr(prompts, "json_of", lambda reply: {"reason": reply, "score": sum(map(ord, reply)) % 11 / 10})


@pytest.mark.slow
def test_a_policy_that_judges_itself_repeats_bit_for_bit(tmp_path, lenient):
    more = {"context": 3000, "steps": 2, "eval_tasks": 2, "cold_steps": 5, "hidden": 16}
    for name in ("one", "two"):
        train(tmp_path, "policy", name, **more)
    ours, theirs = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    with sqlite3.connect(tmp_path / "one" / "answers.sqlite") as kept:
        asked = {row[0].split("/")[1] for row in kept.execute("SELECT question FROM answers")}
    assert asked == {"policy@0", "policy@1", "policy@2"}  # its weights of each step


def test_a_policy_whose_context_is_too_short_to_judge_fails_episodes_in_words(tmp_path):
    from turnwise.errors import EnvironmentFault

    with pytest.raises(EnvironmentFault, match=r"the judge refused to answer: the policy reads 64 tokens"):
        train(tmp_path, "policy", cold_steps=2, eval_tasks=0, groups=16, group_size=2)
