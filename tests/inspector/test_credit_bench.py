"""The truth about credit: values and gradients that a reader can compute by hand, the two ends of the scale, forks against it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from turnwise.checks.synthetic import random_groups
from turnwise.cli.main import main
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN, TURN
from turnwise.core.protocols import Step
from turnwise.core.records import Task
from turnwise.environments.base import LimitedEpisode, user_message
from turnwise.inspector import credit_bench as bench
from turnwise.inspector.credit_bench import RANDOM, TRUE, Scorer, Turns, World
from turnwise.rollout.renderer import Renderer
from turnwise.training import build
from turnwise.training.plan import EnvSpec, resolve_settings

LIKELY = {"a": 0.75, "b": 0.25}  # of each answer, in every state


class Pair(LimitedEpisode):
    """Two letters; "ab" earns 1, and "bb" earns 3."""

    max_turns = 2

    def begin(self, seed):
        self.said = ""
        return [user_message("begin")]

    def act(self, action):
        self.said += action.text
        return Step([user_message(f"so far {self.said}")], {"ab": 1.0, "bb": 3.0}.get(self.said, 0.0))

    def state_key(self):
        return self.said


class Players(Pair):
    """The same by two players: the second is paid what the first loses."""

    agents = ("first", "second")

    @property
    def agent(self):
        return self.agents[len(self.said) % 2]

    def act(self, action):
        step = super().act(action)
        return Step(step.messages, step.reward, info={"paid": {"first": -step.reward}})


class Letters:
    """A policy of which everything is known."""

    def __init__(self, renderer):
        self.listed = {tuple(renderer.encode_turn(text)): p for text, p in LIKELY.items()}

    def answers(self, prompts):
        return [self.listed for _ in prompts]


def world_of(env_class):
    renderer = Renderer(build.byte_tokenizer())
    settings = resolve_settings({"env": "guess", "context": 200}, env_class)
    policy = Letters(renderer)
    world = World(EnvSpec(settings, env_class), Task("pair", 0), policy, renderer, 99)
    return world, dict(zip(LIKELY, policy.listed))


def test_values_are_computed_from_every_state():
    """V = ¾·¼·1 + ¼·¼·3 = 0.375; after "a" it is ¼, after "b" it is ¾."""
    world, ids = world_of(Pair)
    start = world.root.key
    assert len(world.places) == 3
    assert world.value(world.root, 2, "agent") == pytest.approx(0.375)
    assert world.advantage(start, ids["a"], 2) == pytest.approx(0.25 - 0.375)
    assert world.advantage(start, ids["b"], 2) == pytest.approx(0.75 - 0.375)
    after_b = world.root.answers[ids["b"]][2].key
    assert world.advantage(after_b, ids["b"], 1) == pytest.approx(3 - 0.75)
    assert math.isnan(world.advantage(start, (1, 2, 3), 2))


def test_the_exact_gradient_weighs_visits_probability_and_advantage():
    """After "b", which is visited ¼ of the time, "b" has probability ¼ and A = 2¼. Weights of a state sum to zero."""
    world, ids = world_of(Pair)
    weights, after_b = world.gradient(), world.root.answers[ids["b"]][2].key
    assert weights[after_b[0], ids["b"]] == pytest.approx(0.25 * 0.25 * 2.25)
    assert weights[after_b[0], ids["a"]] == pytest.approx(0.25 * 0.75 * -0.75)
    assert sum(weights.values()) == pytest.approx(0.0)


def test_players_that_earn_apart_are_credited_with_their_own():
    world, ids = world_of(Players)
    after_b = world.root.answers[ids["b"]][2].key
    assert world.advantage(world.root.key, ids["b"], 2) == pytest.approx(-(0.75 - 0.375))
    assert world.advantage(after_b, ids["b"], 1) == pytest.approx(3 - 0.75)


# ------------------------------------------------------------------ the two ends


def synthetic_scorer(noise=0.0, tasks=12, batches=3):
    """Random batches with a truth that depends on the cell alone; ``noise`` of each of its two estimates."""
    lot = np.random.default_rng(0)
    packed = [pack(random_groups([[[2, 3, 1]] * 8] * tasks, seed)) for seed in range(batches)]
    turns = packed[0].tree.count(TURN)
    task = np.tile(np.arange(tasks).repeat(turns // tasks), batches)
    cell = np.concatenate([lot.integers(0, 40, turns) for _ in range(batches)]) + 40 * task
    truth = lot.standard_normal(40 * tasks)[cell]
    halves = truth + noise * lot.standard_normal((2, len(truth)))
    every = np.ones(len(truth), bool)
    draw = torch.Generator().manual_seed(0)
    real = lambda *size: torch.randn(*size, generator=draw, dtype=torch.float64)  # noqa: E731
    slopes = [(real(b.tree.count(TOKEN), 6), real(b.tree.count(TOKEN), 5)) for b in packed]
    turns = Turns(task, np.arange(batches).repeat(turns), cell, halves, every, every)
    return Scorer(turns, packed, slopes, None, tasks), truth, lot


def score(scorer, values):
    return scorer([scorer.of_tokens(b, values) for b in range(len(scorer.batches))])


def test_true_credit_scores_one_and_random_credit_nothing():
    scorer, truth, lot = synthetic_scorer()
    best, worst = score(scorer, truth), score(scorer, lot.standard_normal(len(truth)))
    assert best["correlation"] == pytest.approx([1, 1, 1]) and best["gradient"] == pytest.approx([1, 1, 1])
    assert (
        best["sign"] == [0, 0, 0]
        and best["luck"] == pytest.approx([0, 0, 0])
        and best["bias"] == pytest.approx([0, 0, 0], abs=1e-9)
    )
    assert worst["correlation"][1] < 0 < worst["correlation"][2] and worst["gradient"][1] < 0 < worst["gradient"][2]
    assert worst["sign"][1] < 0.5 < worst["sign"][2] and worst["luck"][1] < 1 < worst["luck"][2]


def test_luck_and_bias_are_told_apart():
    """Noise on the truth is luck alone; a function of the state that is not the truth is bias alone."""
    scorer, truth, lot = synthetic_scorer()
    lucky = score(scorer, truth + lot.standard_normal(len(truth)))
    other = lot.standard_normal(40 * 12)[scorer.turns.cell]
    biased = score(scorer, truth + other)
    assert lucky["luck"][0] == pytest.approx(0.5, abs=0.05) and lucky["bias"][0] == pytest.approx(0, abs=0.05)
    assert biased["luck"][0] == pytest.approx(0, abs=1e-9) and biased["bias"][0] == pytest.approx(0.5, abs=0.1)


def test_luck_of_few_groups_is_not_more_than_all():
    """Numbers drawn for whole groups are luck alone: with eight groups the mean estimate is near 1, where the square of the mean
    would make it 1.24."""
    scorer, _, lot = synthetic_scorer(tasks=4, batches=2)
    group = scorer.turns.task * 2 + scorer.turns.batch
    rows = [score(scorer, lot.standard_normal(8)[group])["luck"][0] for _ in range(60)]
    assert np.mean(rows) == pytest.approx(1, abs=0.15)


def test_scores_do_not_depend_on_the_scale_of_a_credit():
    scorer, truth, _ = synthetic_scorer()
    assert all(
        score(scorer, 7.0 * truth)[name] == pytest.approx(value, abs=1e-9)
        for name, value in score(scorer, truth).items()
    )


def test_noise_of_the_forks_does_not_lower_the_score_of_the_truth():
    """Two estimates with independent errors: their product has the right mean."""
    scorer, truth, _ = synthetic_scorer(noise=1.0)
    assert score(scorer, truth)["correlation"][0] == pytest.approx(1.0, abs=0.05)


def test_a_credit_of_zero_counts_half():
    scorer, truth, _ = synthetic_scorer()
    assert score(scorer, 0.0 * truth)["sign"][0] == 0.5 and math.isnan(score(scorer, 0.0 * truth)["correlation"][0])


# --------------------------------------------------------------------- as a user


def test_what_is_no_environment_is_refused(capsys):
    assert main(["credit-bench", "nowhere"]) == 2 and "nowhere" in capsys.readouterr().err
    assert main(["credit-bench", "guess", "--method", "grp"]) == 2 and "grpo" in capsys.readouterr().err
    assert main(["credit-bench", "guess", "--forks", "1"]) == 2 and "--forks" in capsys.readouterr().err


SMALL = ["--difficulty", "1", "--cold-steps", "100", "--seed", "3"]  # a policy that wavers more has answers beyond counting


@pytest.mark.thorough
def test_the_command_scores_methods_and_names_those_that_it_cannot(capsys, tmp_path):
    methods = "grpo,gigpo,ppo,dpo"
    argv = [
        "credit-bench",
        "guess",
        "--method",
        methods,
        "--tasks",
        "4",
        "--batches",
        "2",
        *SMALL,
        "--out",
        str(tmp_path),
    ]
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in report["rows"]}
    assert {TRUE, RANDOM, *methods.split(",")} == set(rows)
    assert rows[TRUE]["correlation"] == pytest.approx([1, 1, 1]) and rows[TRUE]["sign"][0] == 0
    assert rows["grpo"]["correlation"][0] > 0.1 and "critic" in rows["ppo"]["note"] and rows["dpo"]["note"]
    assert json.loads((tmp_path / "credit-guess.json").read_text())["rows"] == report["rows"]
    assert report["known"] > 0.98 and report["unlisted"] < 0.02 and report["commit"]


@pytest.mark.thorough
def test_forks_agree_with_the_enumerated_truth():
    """Intervals of 95 %: those of at least 94 % of the turns hold the exact advantage, and the means agree."""
    settings = resolve_settings({"env": "guess", "difficulty": (1,), "cold_steps": 100, "seed": 3})
    made = bench.start("guess", settings, None, 6)
    points = {}
    groups = [made.batch(0, points)]
    worlds = made.worlds(4000)
    rows = bench.sampled_turns(groups, points, worlds)
    exact, (halves, bounds) = bench.exact_truth(rows, worlds), bench.forked_truth(rows, made, 64)
    known = np.isfinite(exact)
    covered = ((bounds[0] <= exact) & (exact <= bounds[1]))[known].mean()
    error = (halves.mean(0) - exact)[known]
    print(f"{known.sum()} turns, {covered:.1%} within their intervals, mean error {error.mean():+.4f}")
    assert known.mean() > 0.98 and covered >= 0.94
    assert abs(error.mean()) < 4 * error.std() / math.sqrt(known.sum() / 8)
