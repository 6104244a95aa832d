"""Rows that were changed are seen, rows of a method that changed are stale, and a verdict is arithmetic."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from experiments.evidence import claims, rows
from experiments.evidence.command import Evidence
from experiments.evidence.play import Player, repeated
from turnwise.cli.main import main
from turnwise.errors import SettingError

ROOT = Path(__file__).parents[2]

CLAIMS = """
[bed.small]
env = "calculator"
steps = 2
groups = 2
group_size = 2
eval_tasks = 4
cold_steps = 2
hidden = 32
layers = 1
vocabulary = 320
cold_demos = 24
cold_batch = 8
seconds = 1
[claim.A]
paper = "p"
says = "s"
bed = "small"
arms = ["rloo", "grpo clip=0.1 lr=1e-3"]
metric = "success"
seeds = SEEDS
least = 0.1
direction = "DIRECTION"
"""


def claim(tmp_path: Path, seeds: int = 4, direction: str = "higher") -> claims.Claim:
    path = tmp_path / "claims.toml"
    path.write_text(CLAIMS.replace("SEEDS", str(seeds)).replace("DIRECTION", direction))
    return claims.load(path)["A"]


def row(run: claims.Run, successes: list[float], acted: float = 0.5) -> rows.Row:
    curve = [[n, 10.0 * n, 100.0 * n, value] for n, value in enumerate(successes)]
    after = {"success": successes[-1], "tool_calls": 1.0, "tasks": 10, "turns": 2.0, "tokens_per_turn": 5.0}
    measured = {
        "measure": "success",
        "before": {"success": successes[0]},
        "after": after,
        "curve": curve,
        "acted": {"advantage": acted},
        "late": {},
    }
    return {"run": run.name, "bed": run.bed, **run.asked, "measured": measured}


def verdict(made: claims.Claim, left: list[float], right: list[float], acted: float = 0.5) -> claims.Verdict:
    sides = dict(zip(made.arms, (left, right)))
    return claims.judge(made, {run.name: row(run, [0.1, sides[arm][seed]], acted) for (arm, seed), run in made.runs.items()})


def test_the_projects_claims_name_what_exists_and_can_be_built():
    made = claims.load(ROOT / "experiments/evidence/claims.toml")
    assert len(made) >= 25
    named = {str(run.settings["method"]): run for each in made.values() for run in each.runs.values()}
    assert not {
        name: text for name, run in named.items() if isinstance(text := rows.described(run.settings)["numbers"], str)
    }


def test_arms_share_settings_and_cold_starts_and_differ_where_they_say(tmp_path):
    made = claim(tmp_path)
    left, right = (made.runs[arm, 1] for arm in made.arms)
    assert left.start == right.start and left.start["seed"] == 1 and left.start != made.runs[made.arms[0], 2].start
    assert right.settings["method_options"] == {"clip": 0.1} and right.settings["lr"] == 1e-3
    assert {**left.settings, "method": ""} == {
        **{k: v for k, v in right.settings.items() if k not in ("lr", "method_options")}, "method": ""
    }  # fmt: skip
    assert left.name == claim(tmp_path).runs[made.arms[0], 1].name != right.name


@pytest.mark.parametrize(
    ("old", "new", "answer"),
    [('"rloo"', '"rlo"', "rloo"), ("lr=1e-3", "lrr=1e-3", "lr"), ('"success"', '"succes"', "success"),
     ('bed = "small"', 'bed = "smal"', "small"), ("least = 0.1", "leest = 0.1", "leest"), ("seeds = 4", "seeds = 1", "seeds"),
     ("[claim.A]", "[claim.A", "no TOML")],
)  # fmt: skip
def test_a_wrong_word_in_the_claims_is_refused_with_what_to_write(tmp_path, old, new, answer):
    claim(tmp_path)
    path = tmp_path / "claims.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SettingError, match=answer):
        claims.load(path)


def test_a_verdict_is_the_interval_of_paired_differences(tmp_path):
    higher, equal, lower = (claim(tmp_path, 4, direction) for direction in ("higher", "equal", "lower"))
    good, bad = [0.8, 0.9, 0.85, 0.84], [0.5, 0.62, 0.54, 0.57]
    assert verdict(higher, good, bad).word == "holds" and verdict(lower, good, bad).word == "fails"
    assert verdict(higher, bad, good).word == "fails" and verdict(lower, bad, good).word == "holds"
    assert verdict(higher, [0.5, 0.9, 0.1, 0.7], [0.6, 0.2, 0.5, 0.4]).word == "cannot tell"
    near = [0.81, 0.9, 0.84, 0.84]
    assert verdict(equal, good, near).word == "holds" and verdict(equal, good, bad).word == "fails"
    assert verdict(higher, good, near).word == "fails"  # an effect of 0.1 is excluded
    assert verdict(higher, good, bad, acted=0.0).word == "does not apply"
    assert claims.judge(higher, {}).word == "not run"
    difference = verdict(higher, good, bad).against[0].difference
    assert difference.mean == pytest.approx(0.29) and difference.high - difference.mean == pytest.approx(
        3.182446 * 0.0182574 / 2, rel=1e-4
    )


def test_metrics_of_a_row(tmp_path):
    made = row(next(iter(claim(tmp_path).runs.values())), [0.1, 0.5, 0.9, 0.6, 0.8])
    number = lambda name: claims.metric_of(name)[0](made)  # noqa: E731
    assert number("success") == 0.8 and number("average") == pytest.approx(0.7) and number("fall") == pytest.approx(0.3)
    assert number("episodes@65") == 30 and number("episodes@99") == 40  # the mean of three; never: all of its own
    assert number("calls") == pytest.approx(1 / 0.8) and number("tokens") == pytest.approx(12.5)


def test_a_ratio_is_compared_by_its_logarithm(tmp_path):
    (tmp_path / "claims.toml").write_text(
        CLAIMS.replace("SEEDS", "3").replace("DIRECTION", "lower").replace('"success"', '"calls"')
    )
    made = claims.load(tmp_path / "claims.toml")["A"]
    told = verdict(made, [0.8, 0.82, 0.8], [0.4, 0.4, 0.42])
    assert told.word == "holds" and math.exp(told.against[0].difference.mean) == pytest.approx(0.505, abs=0.01)


def test_the_smallest_visible_difference_shrinks_with_seeds():
    assert claims.detectable(0.1, 5) == pytest.approx((2.776445 + 0.940965) * 0.1 / math.sqrt(5), rel=1e-4)
    assert claims.detectable(0.1, 20) < claims.detectable(0.1, 5)


def sealed(tmp_path: Path, change=lambda row: None) -> Path:
    run = claim(tmp_path).runs["rloo", 0]
    made = {**row(run, [0.1, 0.4]), "method": rows.described(run.settings)}
    change(made)
    path = tmp_path / "rows" / "rows.jsonl"
    rows.append(path, made)
    return path


def check(tmp_path: Path, capsys) -> tuple[int, str]:
    status = main(["evidence", "check", "--file", str(tmp_path / "claims.toml"), "--rows", str(tmp_path / "rows")])
    return status, capsys.readouterr().out


def test_a_row_that_was_changed_is_seen(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = sealed(tmp_path)
    assert check(tmp_path, capsys) == (0, "1 rows: 0 tampered with, 0 stale\n")
    path.write_text(path.read_text().replace('"success": 0.4', '"success": 0.9'))
    status, out = check(tmp_path, capsys)
    assert status == 1 and "rows.jsonl:1: tampered with" in out


@pytest.mark.parametrize(
    ("part", "name", "value", "answer"),
    [("slots", "aggregate", "Mean(TURN)", "aggregate was Mean"), ("resolved", "max_tokens", 9, "max_tokens was 9"),
     ("numbers", None, [0.1, 0.2, 0.3], "other numbers")],
)  # fmt: skip
def test_a_row_of_another_method_is_stale(tmp_path, capsys, monkeypatch, part, name, value, answer):
    monkeypatch.chdir(ROOT)
    sealed(
        tmp_path,
        lambda row: row["method"].update({part: value if name is None else {**row["method"][part], name: value}}),
    )
    status, out = check(tmp_path, capsys)
    assert status == 1 and "stale" in out and answer in out


def test_a_row_that_holds_rewards_in_place_of_success_counts_nowhere(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = sealed(tmp_path, lambda row: row["measured"].update(measure="reward"))
    assert "holds rewards where others hold success" in check(tmp_path, capsys)[1]
    assert not Evidence.of(tmp_path / "claims.toml", path, "all").sound


def test_where_two_measurements_differ():
    left = {"curve": [[0, 0.1], [1, 0.5]], "weights": "a"}
    assert rows.difference(left, json.loads(json.dumps(left))) == ""
    assert rows.difference(left, {**left, "curve": [[0, 0.1], [1, 0.25]]}) == "curve[1][1] was 0.5, is 0.25"
    assert rows.difference(left, {**left, "more": 1}) == "more was None, is 1"


def test_a_line_that_was_cut_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"run": 1}\n{"run": ')
    with pytest.raises(SettingError, match=r"rows.jsonl line 2"):
        rows.read(tmp_path)


@pytest.mark.thorough
def test_a_row_can_be_played_and_comes_out_again_to_the_last_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    made = claim(tmp_path, seeds=2)
    player = Player(tmp_path / "out", 2, time.monotonic() + 300)
    runs = [run for (_, seed), run in made.runs.items() if seed == 0]
    assert all("measured" in each for each in player.play(runs, tmp_path / "rows.jsonl"))
    written = rows.read(tmp_path / "rows.jsonl")
    assert {each["run"] for each in written} == {run.name for run in runs} and len(written) == 2
    fresh = Player(tmp_path / "again", 1, time.monotonic() + 300)
    assert repeated(written[0], fresh) == ""
    written[0]["measured"]["late"]["entropy"] += 1e-12
    assert repeated(written[0], fresh).startswith("late.entropy was")
    assert not list((tmp_path / "out" / "runs").glob("*"))  # a run leaves its row alone


def test_nothing_begins_that_cannot_end_in_time(tmp_path):
    player = Player(tmp_path / "out", 1, time.monotonic() - 1)
    assert player.play(list(claim(tmp_path).runs.values()), tmp_path / "rows.jsonl") == []
    assert not (tmp_path / "rows.jsonl").exists()
