"""Comparisons: error rate in simulation, laws of the interval, finished runs, live runs with a stubbed trainer, nonsense."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.settings import Settings
from turnwise.errors import SettingError
from turnwise.inspector.compare import arms
from turnwise.inspector.compare.arms import ArmRunner, BudgetSpent, Likeness, arms_of
from turnwise.inspector.compare.comparison import (
    BETTER,
    CANNOT_TELL,
    WORSE,
    RunOutcome,
    compare_outcomes,
    compare_runs,
    paired_difference,
    read_outcome,
    student_t,
)
from turnwise.inspector.compare.live import compare_live, grid_variants, method_variants
from turnwise.inspector.compare.search import CONFIRMATIONS, cost, default_space, rungs, runnable, search
from turnwise.inspector.compare.sequential import evidence, half_width, holm, power, seeds_needed
from turnwise.store.atomic import write_sealed
from turnwise.store.rundir import RunDir

PATH = Path(__file__).parents[2] / "experiments" / "compare_error_rate.py"
spec = importlib.util.spec_from_file_location("compare_error_rate", PATH)
simulation = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = simulation
spec.loader.exec_module(simulation)
DEFAULTS = Settings().as_dict()


def write_run(folder, method, seed, success, tokens=1000.0, evaluated=None):
    name = f"{method}-{seed}"
    run = RunDir.create(folder, name, {**DEFAULTS, "method": method, "seed": seed}, "recipe", seed)
    rows = [{"step": n + 1, "time": 0.0, "groups": 1.0, "tokens": tokens / 2} for n in range(2)]
    rows += [{"step": 1, "time": 0.0, "eval/success": evaluated}] if evaluated is not None else []
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda r: r["step"])))
    for when, value in (("before", 0.1), ("after", success)):
        write_sealed(run.path / f"evaluation_{when}.json", {"summary": {"success": value, "tasks": 100}, "rows": []})
    return run.path


def test_identical_methods_are_rarely_called_different_and_large_gaps_are_found():
    rng = np.random.default_rng(0)
    ties = [simulation.compared(["a", "b"], simulation.simulated("normal", {}, rng), 8)[0] for _ in range(300)]
    noise = 3 * math.sqrt(0.05 * 0.95 / 300)  # of a rate that is measured 300 times
    assert sum(map(bool, ties)) / 300 <= 0.05 + noise
    gaps = [simulation.compared(["a", "b"], simulation.simulated("normal", {"a": 0.3}, rng), 8)[0] for _ in range(40)]
    assert sum(claims == {("a", "b")} for claims in gaps) >= 36


@pytest.mark.thorough
def test_a_thousand_comparisons_and_searches_claim_no_more_falsely_than_they_state():
    rows = simulation.comparison_rows(1000, seed=7) + simulation.search_rows(1000, seed=7)
    noise = 3 * math.sqrt(0.05 * 0.95 / 1000)
    assert [row for row in rows if row["false"] > 0.05 + noise] == []
    seen = {(row["noise"], row["planted"]): row["seen"] for row in rows if row["what"] == "search"}
    assert seen["normal", "winner +0.2"] > 0.9 and seen["measured", "winner +0.2"] > 0.7


values = st.lists(st.floats(-1, 1), min_size=2, max_size=8)


@given(values, values)
def test_exchanging_the_sides_mirrors_the_interval(left, right):
    n = min(len(left), len(right))
    a, b = paired_difference(left[:n], right[:n], 0.05), paired_difference(right[:n], left[:n], 0.05)
    assert math.isclose(a.mean, -b.mean, abs_tol=1e-12) and a.wins == pytest.approx(1 - b.wins)
    assert {a.verdict, b.verdict} in ({CANNOT_TELL}, {BETTER, WORSE})


def test_the_interval_is_students():
    found = paired_difference([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], 0.05)
    assert found.mean == 2.0 and found.high - found.mean == pytest.approx(4.302652729 / math.sqrt(3))


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=12), st.floats(0.001, 0.2))
def test_the_interval_holds_the_means_that_the_evidence_does_not_refuse(differences, alpha):
    d = paired_difference(differences, [0.0] * len(differences), alpha, sequential=True)
    if math.isfinite(d.low) and d.high - d.low > 1e-6:
        at_bounds = [evidence([x - bound for x in differences]) for bound in (d.low, d.high)]
        assert at_bounds == pytest.approx([1 / alpha] * 2, rel=1e-3)
    assert (
        (evidence(differences) > 1 / alpha) == (d.verdict != CANNOT_TELL) or math.isinf(d.low) or d.high - d.low < 1e-6
    )


def test_the_evidence_has_mean_one_where_nothing_differs():
    """An e-value, whatever the spread: its mean is 1 or less, here within four standard errors."""
    rng = np.random.default_rng(1)
    for spread in (0.01, 3.0):
        values = np.array([min(evidence(rng.normal(0, spread, 6)), 1e3) for _ in range(4000)])
        assert values.mean() <= 1 + 4 * values.std() / math.sqrt(len(values))


def test_no_verdict_before_four_seeds_at_five_percent():
    assert [math.isfinite(half_width(n, 0.05)) for n in (2, 3, 4, 5)] == [False, False, True, True]
    assert evidence([0.3]) == evidence([0.3, 0.3]) == 1.0  # no spread, so nothing is known


def test_holm_gives_later_statements_what_decided_ones_free():
    assert holm([100.0, 1.0, 70.0, 30.0], 0.05) == pytest.approx([0.0125, 0.025, 0.05 / 3, 0.025])
    assert holm([1.0, 2.0], 0.05) == [0.025, 0.025]


def test_power_grows_with_seeds_and_says_what_is_needed():
    shares = power(0.2, 0.1, 12, 0.05)
    assert list(shares) == sorted(shares) and shares[2] == 0.0 and shares[-1] > 0.95
    assert power(0.0, 0.1, 12, 0.05)[-1] <= 0.05
    needed = seeds_needed(0.2, 0.1, 0.05)
    assert shares[needed - 1] >= 0.8 > shares[needed - 2] and seeds_needed(0.001, 0.1, 0.05) is None


def test_finished_runs_are_compared_by_seed(tmp_path):
    paths = [write_run(tmp_path, "grpo", s, 0.4 + 0.01 * s) for s in range(4)]
    paths += [write_run(tmp_path, "gspo", s, 0.7 + 0.012 * s) for s in range(4)]
    comparison = compare_runs(paths)
    assert comparison.pairs[0].difference.verdict == WORSE and "gspo" in comparison.text()
    json.dumps(comparison.as_dict(), allow_nan=False)
    comparison.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_runs_of_one_method_are_called_by_the_settings_in_which_they_differ(tmp_path):
    paths = []
    for agent, success in (("a.py:one", 0.2), ("a.py:two", 0.9)):
        for seed in (0, 1):
            paths.append(write_run(tmp_path / agent[-3:], "grpo", seed, success + 0.01 * seed))
            file = paths[-1] / "run.json"
            record = json.loads(file.read_text())
            file.write_text(json.dumps({**record, "settings": {**record["settings"], "agent": agent}}))
    assert set(compare_runs(paths).values) == {"grpo agent=a.py:one", "grpo agent=a.py:two"}
    with pytest.raises(SettingError, match="all runs are grpo"):
        compare_runs(paths[:2])


def test_one_seed_cannot_tell(tmp_path):
    comparison = compare_runs([write_run(tmp_path, "grpo", 0, 0.1), write_run(tmp_path, "gspo", 0, 0.9)])
    assert comparison.pairs[0].difference.verdict == CANNOT_TELL and "at least 2" in comparison.text()


def test_a_longer_run_is_read_at_the_tokens_of_the_shorter(tmp_path):
    short = read_outcome(write_run(tmp_path, "grpo", 0, 0.5, tokens=1000))
    long = read_outcome(write_run(tmp_path, "gspo", 0, 0.9, tokens=2000, evaluated=0.5))
    assert long.at(1000) == 0.5 and long.at(1500) == pytest.approx(0.7) and long.at(5000) == 0.9
    assert "1000 to 2000 tokens" in compare_outcomes([short, long]).text()


ENDS = {"grpo": 0.3, "gspo": 0.8, "sapo": 0.8}


@pytest.fixture
def stubbed(monkeypatch):
    """Runs of 30 s that need no time: what they end at stands in ENDS; settings of all of them."""
    trained = []

    def train_run(values, start, listen, deadline):
        trained.append(dict(values))
        success = ENDS[values["method"]] + 0.01 * (values["seed"] % 3) * (1 if values["method"] == "grpo" else 0.5)
        path = write_run(Path(values["out"]) / "made", values["method"], values["seed"], success)
        path.rename(Path(values["out"]) / values["name"])
        (Path(values["out"]) / values["name"] / "summary.json").write_text("{}")

    monkeypatch.setattr(arms, "train_run", train_run)
    monkeypatch.setattr(ArmRunner, "probe", lambda self, steps: 10.0 + 0.2 * steps)
    monkeypatch.setattr(ArmRunner, "common_batches", lambda self: [])
    monkeypatch.setattr(ArmRunner, "gradients", lambda self, batches: {})
    return trained


def live(folder, methods=("grpo", "gspo"), **more):
    return compare_live(
        method_variants(methods), {"env": "guess", "eval_tasks": 100}, folder, **{"minutes": 30.0, **more}
    )


def test_live_runs_stop_when_it_can_tell(tmp_path, stubbed):
    report = live(tmp_path / "c", seeds=8)
    assert report.comparison.pairs[0].difference.verdict == WORSE and len(stubbed) < 16
    assert {row["seed"] for row in stubbed} == set(range(len(stubbed) // 2))
    assert len({row["steps"] for row in stubbed}) == 1 and stubbed[0]["steps"] == 100
    json.dumps(report.as_dict(), allow_nan=False)
    again = live(tmp_path / "c", seeds=8)  # everything stands there already
    assert again.comparison == report.comparison and len(stubbed) == len({(r["method"], r["seed"]) for r in stubbed})
    assert live(tmp_path / "c", ("grpo", "sapo"), seeds=8).folder == str(tmp_path / "c-2")


def test_runs_are_as_short_as_the_minutes_ask_and_nothing_is_trained_where_no_verdict_is_possible(tmp_path, stubbed):
    assert live(tmp_path / "short", minutes=2.5, seeds=4, anyway=True).forecasts[0].steps < 40
    stubbed.clear()
    report = live(tmp_path / "none", minutes=1.0)
    assert not stubbed and "nothing more was trained" in report.text() and report.comparison is None
    with pytest.raises(SettingError, match="nothing to plot"):
        report.plot(tmp_path / "x.png")


def test_arms_with_one_update_are_named_and_not_trained(tmp_path, stubbed, monkeypatch):
    same = [Likeness("gspo", "sapo", 0.9999, 0.9998, True)]
    monkeypatch.setattr("turnwise.inspector.compare.live.likenesses", lambda arms, gradients: same)
    assert "the same update" in live(tmp_path / "c", ("gspo", "sapo")).text() and not stubbed
    report = live(tmp_path / "d", ("grpo", "gspo", "sapo"))
    pair = next(p for p in report.comparison.pairs if {p.left, p.right} == {"gspo", "sapo"})
    assert pair.alike and report.comparison.decided  # nobody waits for a pair that cannot be told apart


def test_the_deadline_ends_a_comparison_with_what_it_has(tmp_path, stubbed, monkeypatch):
    trained = arms.train_run

    def late(values, *rest):
        if values["seed"] == 2:
            raise BudgetSpent
        trained(values, *rest)

    monkeypatch.setattr(arms, "train_run", late)
    report = live(tmp_path / "c")
    assert "goes on where it stopped" in report.stopped and report.comparison.pairs[0].difference.pairs == 2


@pytest.mark.parametrize(
    ("methods", "more", "words"),
    [
        (["grpo"], {}, "nothing to be compared"),
        (["grpo", "grpo"], {}, "one and the same"),
        (["grpo", "gspo"], {"minutes": 0.0}, "minutes is 0"),
        (["grpo", "gspo"], {"minutes": math.nan}, "minutes is nan"),
        (["grpo", "gspo"], {"alpha": 1.5}, "alpha is 1.5"),
        (["grpo", "gspo"], {"seeds": 1}, "at least 2"),
    ],
)
def test_nonsense_is_refused_before_anything_is_trained(methods, more, words, tmp_path, stubbed):
    with pytest.raises(SettingError, match=words):
        live(tmp_path / "c", methods, **more)
    assert not stubbed and not (tmp_path / "c").exists()


def test_arms_that_cannot_run_here_are_refused_with_their_label():
    with pytest.raises(SettingError, match="gigpo"):
        arms_of(method_variants(["grpo", "gigpo"]), {"env": "countdown"})


def test_rows_of_real_runs_are_compared_and_searched(tmp_path):
    rng = np.random.default_rng(0)
    rows = [{"arm": arm, "seed": n, "ends": [0.2, level + rng.normal(0, 0.05)], "tokens": 4000}
            for n in range(80) for arm, level in (("equal", 0.6), ("still", 0.2))]  # fmt: skip
    (tmp_path / "rows-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {(row["what"], row.get("planted")): row for row in simulation.real_rows(str(tmp_path), 20, 10)}
    assert (
        table["real comparison", "ties"]["false"] <= 0.2 and table["real comparison", "b does not learn"]["seen"] > 0.9
    )
    assert table["real search", "ties"]["false"] <= 0.2 and table["real search", "only arm3 learns"]["seen"] > 0.9


# ----------------------------------------------------------------- search


def test_rungs_halve_and_the_plan_counts_its_runs():
    assert list(rungs(16)) == [(16, 1), (8, 1), (4, 2), (2, 4)] and list(rungs(1)) == []
    assert cost(4) == ((4 + 1) + (2 + 1) + 2 * CONFIRMATIONS, 2 + CONFIRMATIONS)


@pytest.fixture
def drawn(stubbed, monkeypatch):
    """Runs whose end is a function of the method, a little noise by seed, and of what a test sets."""
    ends = {"grpo": 0.4, "dr_grpo": 0.42, "ppo": 0.7, "opo": 0.41, "gpg": 0.3}

    def train_run(values, start, listen, deadline):
        stubbed.append(dict(values))
        noise = 0.02 * math.sin(7 * values["seed"] + len(values["method"]))
        path = write_run(Path(values["out"]) / "made", values["method"], values["seed"], ends[values["method"]] + noise)
        path.rename(Path(values["out"]) / values["name"])
        (Path(values["out"]) / values["name"] / "summary.json").write_text("{}")

    monkeypatch.setattr(arms, "train_run", train_run)
    return ends


def find(folder, **more):
    return search(
        method_variants(["grpo", "dr_grpo", "ppo", "opo", "gpg"]), {"env": "guess"}, folder, **{"minutes": 60.0, **more}
    )


def test_a_search_finds_a_planted_winner_and_confirms_it_on_seeds_that_it_has_not_seen(tmp_path, drawn, stubbed):
    report = find(tmp_path / "s")
    assert report.verdict.startswith("ppo beats grpo") and report.arms[0]["label"] == "ppo"
    searched = set(map(int, report.arms[0]["ends"]))
    assert searched and not searched & set(report.confirmation.values["ppo"])
    assert {row["label"] for row in report.arms} == {"dr_grpo", "ppo", "opo", "gpg"}  # everything tried
    written = json.loads((tmp_path / "s/search.json").read_text())
    assert written["verdict"] == report.verdict and report.verdict in (tmp_path / "s/search.txt").read_text()
    count = len(stubbed)
    assert find(tmp_path / "s").verdict == report.verdict and len(stubbed) == count  # read, not trained again


def test_nothing_beats_the_base_is_an_answer(tmp_path, drawn):
    drawn.update(grpo=0.9)
    report = find(tmp_path / "s")
    assert report.verdict == "nothing beats the base" and report.confirmation is None
    drawn.update(dict.fromkeys(drawn, 0.5))
    report = find(tmp_path / "t")
    assert report.verdict == "nothing beats the base" and len(report.arms) == 4


def test_a_search_that_runs_out_of_time_says_so_and_goes_on_later(tmp_path, drawn, stubbed, monkeypatch):
    train, left = arms.train_run, [3]

    def late(values, *rest):
        left[0] -= 1
        if left[0] < 0:
            raise BudgetSpent
        train(values, *rest)

    monkeypatch.setattr(arms, "train_run", late)
    report = find(tmp_path / "s")
    assert "goes on where it stopped" in report.text() and len(report.arms) == 2
    left[0] = 10**6
    assert find(tmp_path / "s").verdict.startswith("ppo beats grpo")


def test_arms_without_time_and_arms_that_cannot_run_are_named(tmp_path, drawn):
    report = find(tmp_path / "s", minutes=5.0)
    assert any("no time" in reason for reason in report.left_out.values())
    space = [*method_variants(["grpo", "ppo", "dpo"]), ("again", {"method": "ppo"})]
    chosen, refused = runnable(space, {"env": "guess"})
    assert (
        [arm.label for arm in chosen] == ["grpo", "ppo"] and refused["again"] == "the same as ppo" and "dpo" in refused
    )
    with pytest.raises(SettingError, match="no arm to try"):
        search(method_variants(["grpo", "dpo"]), {"env": "guess"}, tmp_path / "n", 5.0)
    with pytest.raises(SettingError, match="minutes is -1"):
        find(tmp_path / "n", minutes=-1.0)


def test_the_default_space_has_a_dozen_arms_that_run_here():
    chosen, refused = runnable(default_space("grpo", {}), {"env": "calculator"})
    assert 12 <= len(chosen) <= 24 and not refused and chosen[0].label == "grpo"


def test_a_grid_is_every_combination():
    labels = [label for label, _ in grid_variants({"lr": ["1e-4", "3e-4"], "group_size": ["4", "8"]})]
    assert len(labels) == 4 and labels[0] == "lr=1e-4 group_size=4"


def test_nonsense_is_refused(tmp_path):
    outcome = RunOutcome("x", "grpo", 0, 10, "success", ((0.0, 0.1), (10.0, 0.2)))
    with pytest.raises(SettingError, match="at least two"):
        compare_outcomes([outcome])
    with pytest.raises(SettingError, match="seed 0"):
        compare_outcomes([outcome, outcome, RunOutcome("y", "gspo", 0, 10, "success", ((0.0, 0.1), (10.0, 0.2)))])
    with pytest.raises(SettingError, match="grid is empty"):
        grid_variants({})


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("task", ["countdown", "chain_sum"])
def test_it_reproduces_the_projects_table(task):
    """The runs of docs/results.md that sampled as many tokens as each other: the same means, in percent."""
    rows = [json.loads(line) for line in (ROOT / "experiments/results/smollm2.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["task"] == task and row["curve"][-1][0] == 150]
    outcomes = []
    for row in rows:
        curve = [(row["tokens"] * step / 150, value) for step, value in row["curve"][:-1]]
        curve.append((row["tokens"], row["after"][0]))
        outcomes.append(RunOutcome("", row["method"], row["seed"], 100, "success", tuple(curve)))
    comparison = compare_outcomes(outcomes)
    cells = [
        line.split(" | ")
        for line in (ROOT / "docs/results.md").read_text().splitlines()
        if line.startswith(f"| {task} |")
    ]
    printed = {cell[1]: float(cell[5].partition("%")[0]) for cell in cells if cell[2:4] == ["3", "150"]}
    means = {label: 100 * sum(by_seed.values()) / len(by_seed) for label, by_seed in comparison.values.items()}
    assert len(printed) >= 3 and means == pytest.approx(printed, abs=0.7)  # rounded, and read at the smallest budget
    assert not comparison.decided  # three seeds


def test_quantiles_of_student_are_those_of_the_tables():
    """Of the t distribution with 1, 2, 5, 10 and 30 degrees of freedom: the values that every book prints."""
    printed = {1: (6.314, 63.657), 2: (2.920, 9.925), 5: (2.015, 4.032), 10: (1.812, 3.169), 30: (1.697, 2.750)}
    for freedom, values in printed.items():
        assert [round(student_t(p, freedom), 3) for p in (0.95, 0.995)] == list(values)
