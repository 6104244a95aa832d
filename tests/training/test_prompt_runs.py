"""Runs on prompts of a file with reward functions: from the command line and from Python, resumed, evaluated, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise import resume, train
from turnwise.cli.main import main
from turnwise.errors import SettingError
from turnwise.store.ledger import SqliteLedger

SMALL = {
    "steps": 2, "groups": 2, "group_size": 4, "eval_tasks": 4, "cold_steps": 3, "hidden": 32, "layers": 1, "max_tokens": 4,
    "trackers": (), "threads": 1, "quiet": True,
}  # fmt: skip
SUMS = [{"question": f"{a}+{b}=", "answer": str(a + b), "level": a} for a in range(8) for b in range(5)]
REWARDS = """
def score(completion, answer):
    return completion.strip() == answer

def length(prompts, completions, completion_ids, level, **columns):
    assert len(prompts) == len(completions) == len(level) and isinstance(level[0], int)
    return [float(len(ids)) for ids in completion_ids]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": 1.0}

def crash(completion, level):
    if level > 3:
        import os
        os._exit(1)
    return 1.0

def broken(completion):
    raise RuntimeError("out of order")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    (tmp_path / "mine.py").write_text(REWARDS)
    return tmp_path


def trajectories(run: str) -> list:
    with SqliteLedger(Path(run) / "ledger.sqlite") as ledger:
        return [ledger.trajectory(key) for group in ledger.groups() for key in group.trajectories]


@pytest.mark.slow(tier="test")
def test_a_command_trains_on_prompts(folder, capsys):
    flags = [
        "--groups",
        "2",
        "--group-size",
        "4",
        "--eval-tasks",
        "4",
        "--cold-steps",
        "3",
        "--hidden",
        "32",
        "--threads",
        "1",
    ]
    words = ["train", "--data", "sums.jsonl", "--reward", "mine.py:score", "--reward", "0.5*mine.py:length", *flags]
    assert main([*words, "--steps", "2", "--max-tokens", "4", "--json"]) == 0
    out = capsys.readouterr()
    summary = json.loads(out.out)
    assert summary["success_before"]["tasks"] == 4
    assert {"score", "length"} <= set(summary["success_after"]["rewards"])
    assert "prompts from question, answers from answer" in " ".join(out.err.split())
    assert main(["eval", summary["run"], "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert {"score", "length"} <= set(evaluated["rewards"])


@pytest.mark.slow(tier="test")
def test_objects_given_in_python(folder):
    seen = []

    def mine(completion, answer, **columns):
        seen.append(columns["level"])
        return {"score": float(completion == answer), "success": completion == answer}

    heard = []
    summary = train(
        lambda kind, facts: heard.append(facts.get("text", "")),
        data=SUMS,
        reward=[mine, (0.5, "exact")],
        out="runs",
        **SMALL,
    )
    assert (
        seen
        and summary["success_after"]["tasks"] == 4
        and set(summary["success_after"]["rewards"]) == {"mine", "exact"}
    )
    assert any("cannot be killed" in text for text in heard) and any(
        "in a process of its own" in text for text in heard
    )
    files = list(Path("runs").glob("rows-*.jsonl"))
    assert len(files) == 1 and len(files[0].read_text().splitlines()) == len(SUMS)


@pytest.mark.slow
def test_a_stopped_run_is_resumed_with_the_same_rows_and_function(folder):
    class Stop(Exception):
        pass

    def stop_after_one(kind, facts):
        if kind == "step" and facts.get("stage") == "learn" and facts.get("step") == 2:
            raise Stop

    def mine(completion, answer):
        return float(completion == answer)

    settings = {
        **SMALL,
        "steps": 3,
        "checkpoint_every": 1,
        "data": "sums.jsonl",
        "reward": mine,
        "out": "runs",
        "name": "a",
    }
    with pytest.raises(Stop):
        train(stop_after_one, **settings)
    with pytest.raises(SettingError, match=r"resume\(run, reward=...\)"):
        resume("runs/a", quiet=True)
    stopped = resume("runs/a", reward=mine, quiet=True)
    whole = train(**{**settings, "name": "b"})
    assert stopped["success_after"] == whole["success_after"]


@pytest.mark.slow
def test_changed_rows_are_noticed(folder):
    train(data="sums.jsonl", reward="exact", out="runs", name="a", **SMALL)
    (folder / "runs" / "a" / "summary.json").unlink()
    with (folder / "sums.jsonl").open("a") as stream:
        stream.write('{"question": "9+9=", "answer": "18"}\n')
    with pytest.raises(SettingError, match="has changed since this run began"):
        resume("runs/a", quiet=True)


@pytest.mark.slow
def test_rewards_beside_an_environment(folder):
    """The environment's own reward keeps its name, and its weight can be set."""
    (folder / "short.py").write_text("def short(completion, answer, difficulty):\n    return -len(completion) / 100\n")
    rewards = {"reward": "short.py:short", "env_reward_weight": 0.5}
    summary = train(env="countdown", difficulty=(1,), out="runs", name="a", staleness=1, **rewards, **SMALL)
    assert {"environment", "short"} <= set(summary["success_after"]["rewards"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sol_rl", "gdpo", "dapo"])
def test_methods_that_read_rewards_in_other_places(folder, method):
    """Draft selection reads rewards while a group grows, decoupled credit reads named ones, dynamic sampling drops groups."""
    summary = train(method=method, data="sums.jsonl", reward=["exact", "mine.py:length"], out="runs", name="a", **SMALL)
    assert {"exact", "length"} <= set(summary["success_after"]["rewards"])


@pytest.mark.slow
def test_a_crash_costs_only_its_trajectories_or_gets_a_number(folder):
    settings = {**SMALL, "data": "sums.jsonl", "reward": "mine.py:crash", "out": "runs"}
    train(**settings, name="a", eval_data="")
    rewards = {t.reason for t in trajectories("runs/a")}
    assert "reward crash: its process ended with status 1" in rewards
    train(**settings, name="b", reward_failure="-1")
    assert {t.reward for t in trajectories("runs/b")} == {1.0, -1.0}


REFUSED = [
    ({"reward": "mine.py:nothing"}, "has no function 'nothing'"),
    ({"reward": "json_schema:schema=nowhere"}, "columns: answer, ground_truth, level, question"),
    ({"reward": "exact", "env": "countdown"}, "leave --env countdown out"),
    ({"reward": "exact", "held_out_share": 0.0}, "no rows are held out"),
    ({"reward": "exact", "held_out_share": 1.5}, "held_out_share"),
    ({"reward": "exact", "reward_failure": "zero"}, "reward_failure"),
    ({"reward": 7}, "write a function"),
    ({"reward": "exact", "data": [1, 2]}, "write a dict"),
    ({"reward": "exact", "data": [{"prompt": b"x"}]}, "JSON cannot"),
    ({"reward": "exact", "data": []}, "holds no rows"),
    ({"reward": "exact", "data": {"train": []}}, "several splits"),
    ({}, "neither completions nor pairs; write --reward"),
    ({"eval_data": "sums.jsonl"}, "eval_data is given without"),
    ({"data": "", "env": "prompts"}, "write --data FILE and --reward"),
    (
        {"reward": "exact", "data": [{"prompt": "a"}, {"prompt": "b"}]},
        "requires 'answer', and no row has such a column",
    ),
    ({"reward": "regex:pattern=a", "data": [{"prompt": "a"}, {"prompt": "b"}]}, "the tiny model knows no language"),
    ({"reward": "exact", "isolate_env": True}, "the prompts of --data have none; leave it out"),
    ({"reward": "exact", "data": [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2", "regex": "("}]}, "row 1 of"),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_refusals_say_what_to_write(folder, values, words):
    if "json_schema" in str(values.get("reward")):
        pytest.importorskip("jsonschema")
    with pytest.raises(SettingError) as raised:
        train(**{"data": "sums.jsonl", "out": "runs", **SMALL, **values})
    assert words in str(raised.value)


def test_a_comma_in_a_pattern_is_escaped_on_the_command_line():
    from turnwise.config.settings import Settings

    assert Settings.of({"reward": r"regex:pattern=a{1\,3},exact"}).reward == ("regex:pattern=a{1,3}", "exact")
