"""How often a mechanism acts: shares that are counted by hand here, and none for what equals the base method."""

import asyncio
from dataclasses import replace

import pytest
import torch
from support.batches import records_of

import turnwise
from turnwise import recipes
from turnwise.algebra.control import Passes
from turnwise.algebra.gate import Clip
from turnwise.algebra.penalty import WeightedPenalty
from turnwise.algebra.ratio import Importance
from turnwise.core.batch import pack
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.records import Group, Task, Trajectory
from turnwise.core.signals import Signal
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.inspector.queries import RunReader
from turnwise.models.tiny import tiny_model
from turnwise.observe.mechanism import SLOTS, mechanism
from turnwise.recipes.catalogue import changed_slots
from turnwise.recipes.experience import samplers
from turnwise.recipes.recipe import Recipe
from turnwise.tasks.task_source import TaskStream
from turnwise.training.loop import update_policy
from turnwise.training.meter import RolloutMeter, SlotMeter

SHAPE = [[[3, 2], [4], [1, 2], [2]], [[2], [3, 1], [1]], [[2, 2], [5]], [[1], [1, 1], [2], [3], [1]]]
PLAIN = replace(recipes.build("grpo"), penalties=())


def measured(recipe, logs=None, groups=None, signals=None):
    """``acted/`` of one update in one micro-batch. ``logs``: by token, how far log π has moved since it was sampled."""
    objective = recipe.objective
    meter = SlotMeter(recipe, objective)
    watched = meter.watch(objective)
    given = pack(groups or records_of(SHAPE, seed=3))
    credited = objective.credit(given.put(signals(given) if signals else {}))
    behaviour = (given.behaviour + given.mass).x.double()
    logp = behaviour + (torch.zeros_like(behaviour) if logs is None else torch.as_tensor(logs, dtype=torch.float64))
    live = {Signal.LOGP: Field(given.tree, TOKEN, logp.requires_grad_())}
    planned = watched.plan(credited.put({Signal.LOGP: live[Signal.LOGP].detach()}))
    loss = watched(planned, live)
    loss.loss.backward()
    assert loss.stats  # counted when they are asked for, after the backward pass
    found = meter.credit(given, credited) | meter.update({})
    return {name.removeprefix("acted/"): value for name, value in found.items()}, credited


def test_the_base_method_has_no_meter():
    assert changed_slots(recipes.build("grpo")) == frozenset() and measured(PLAIN)[0] == {}
    assert mechanism([{"loss": 1.0}]) == ""


def test_what_a_method_leaves_out_is_not_its_mechanism():
    assert changed_slots(recipes.build("reinforce")) == {"advantage", "aggregate"}
    assert changed_slots(recipes.build("gspo")) == {"ratio", "gate"}
    assert changed_slots(recipes.build("dapo")) == {"gate", "aggregate", "reward", "admission"}
    more = replace(recipes.build("grpo"), control=Passes(epochs=3), budget=recipes.build("grpo").budget.of(2, 4))
    assert changed_slots(more) == frozenset()  # the run's own choice


def test_a_gate_acts_where_its_bound_is_passed_and_the_base_bound_is_not():
    """Clip(0.2, 0.28) against Clip(0.2, 0.2): tokens with 1.2 < ρ <= 1.28 and a positive advantage."""
    recipe = replace(PLAIN, gate=Clip(0.2, 0.28))
    count = pack(records_of(SHAPE, seed=3)).tree.count(TOKEN)
    assert measured(recipe)[0] == {"gate": 0.0}
    logs = 0.22 * (torch.arange(count) % 3 - 1)
    found, credited = measured(recipe, logs)
    adv = credited[Column.ADVANTAGE].at(TOKEN).x
    expected = ((logs.exp() > 1.2) & (logs.exp() <= 1.28) & (adv > 0)).double().mean()
    assert 0 < expected < 0.5 and found["gate"] == pytest.approx(float(expected))


def test_a_trajectory_ratio_acts_only_once_the_policy_has_moved():
    recipe = replace(PLAIN, ratio=Importance(TRAJECTORY))
    assert measured(recipe)[0]["ratio"] == 0.0
    count = pack(records_of(SHAPE, seed=3)).tree.count(TOKEN)
    even = measured(recipe, torch.full((count,), 0.05))[0]
    assert even["ratio"] == 0.0  # where all tokens moved alike, both ratios are the same
    assert measured(recipe, 0.1 * (-1.0) ** torch.arange(count))[0]["ratio"] > 0.3


def test_credit_is_compared_after_both_have_one_norm():
    scaled = replace(PLAIN, advantage=3.0 * PLAIN.advantage)
    found, _ = measured(scaled)
    assert found["advantage"] == 0.0 and found["advantage/turned"] == pytest.approx(0.0, abs=1e-9)
    found, credited = measured(replace(recipes.build("rloo"), aggregate=recipes.build("grpo").aggregate))
    base = recipes.build("grpo").advantage(credited).at(TOKEN).x.double()
    own = credited[Column.ADVANTAGE].at(TOKEN).x.double()
    cosine = float(own @ base / own.norm() / base.norm())
    assert found["advantage"] > 0 and found["advantage/turned"] == pytest.approx(1 - cosine)


def test_without_spread_nothing_is_said_of_credit_and_gates():
    flat = [Group(g.id, g.task, tuple(replace(t, turns=tuple(replace(u, reward=0.0) for u in t.turns))
            for t in g.trajectories)) for g in records_of(SHAPE, seed=3)]  # fmt: skip
    recipe = replace(recipes.build("rloo"), gate=Clip(0.1, 0.1), ratio=Importance(TRAJECTORY))
    assert measured(recipe, groups=flat)[0].keys() == {"aggregate"}


def test_shaped_rewards_are_counted_by_trajectory():
    recipe = recipes.build("dapo", limit=4, cache=2)  # a penalty for more than 2 tokens
    groups = records_of(SHAPE, seed=3)
    long = [t.sampled > 2 for g in groups for t in g.trajectories]
    assert measured(recipe, groups=groups)[0]["reward"] == pytest.approx(sum(long) / len(long))
    assert measured(recipes.build("dapo"), groups=groups)[0]["reward"] == 0.0


def test_a_penalty_acts_where_it_pulls():
    base = recipes.build("grpo").penalties[0]
    recipe = replace(recipes.build("grpo"), penalties=(WeightedPenalty(0.5, base.penalty),))
    reference = lambda batch, d: {Signal.REFERENCE: (batch.behaviour + batch.mass).to(torch.float64) + d}  # noqa: E731
    same = measured(recipe, signals=lambda b: reference(b, 0.0))[0]
    assert same["penalties"] == 0.0 and same["penalties/gradient"] == 0.0
    other = measured(recipe, signals=lambda b: reference(b, 0.5))[0]
    assert other["penalties"] == pytest.approx(1.0) and 0.0 < other["penalties/gradient"] < 1.0


def test_metrics_of_an_update_hold_the_shares_and_the_weights_do_not_depend_on_them(monkeypatch):
    groups, weights = records_of(SHAPE, seed=3), []
    for watched in (True, False):
        recipe: Recipe = replace(recipes.build("gspo"), control=Passes(minibatches=2))
        model = tiny_model(vocabulary=16, seed=0, hidden=32, layers=1, context=64)
        learner = LocalLearner(model, LearnerSettings(lr=1e-2, positions=32))
        if not watched:
            monkeypatch.setattr(SlotMeter, "watch", lambda self, objective: objective)
        metrics = update_policy(learner, recipe, groups, 0)
        assert ("acted/ratio" in metrics) == watched
        weights.append(torch.cat([p.detach().flatten() for p in learner.model.parameters()]))
    assert torch.equal(*weights)


# ------------------------------------------------------------------- rollouts


def test_rollouts_are_counted_by_what_changed_them():
    meter = RolloutMeter(frozenset({"strategy", "guidance"}))
    task = Task("nim", 0)

    async def play(key, task, session, **more):
        return Trajectory(key, task, ())

    noted = meter.noting("0", play)
    for key, more in {"a": {}, "b": {"fork_points": []}, "c": {"fork_from": 1}, "d": {"support": "s"},
                      "e": {"temperature_scale": 0.0}, "f": {"with_hint": False}}.items():  # fmt: skip
        asyncio.run(noted(key, task, None, **more))
    kept = ("a", "b", "c", "d", "f")  # e was a baseline
    meter.finished(Group("0", task, tuple(Trajectory(key, task, ()) for key in kept)))
    assert meter.metrics() == {"acted/guidance": 1 / 6, "acted/strategy": 2 / 6}
    assert meter.metrics() == {} and meter.plays == {}
    assert RolloutMeter(frozenset({"sampler"})).noting("0", play) is play


def drawn(sampler, waves, count, solve):
    """Shares of draws that act, wave by wave; tasks of even seeds are solved if ``solve``."""
    tasks = TaskStream("calculator", "train", (1,), 0)
    recipe = replace(recipes.build("grpo"), sampler=sampler)
    meter, live, shares = RolloutMeter.of(recipe, tasks), sampler.open(tasks), []
    for _ in range(waves):
        live.begin_wave(count)
        draws = [live.next() for _ in range(count)]
        meter.drawn(draws)
        shares.append(meter.metrics()["acted/sampler"])
        for _, task in draws:
            rows = [Trajectory(f"{task.key}.{i}", task, (), success=bool(solve)) for i in range(4)]
            live.observe(Group(task.key, task, tuple(rows)))
    return shares, meter, tasks, recipe


def test_a_cycle_acts_from_its_second_pass_on():
    assert drawn(samplers.cycle(pool=8), 4, 4, True)[0] == [0.0, 0.0, 1.0, 1.0]


def test_a_sampler_that_learns_acts_when_it_has_learned():
    shares, meter, tasks, recipe = drawn(samplers.vade(pool=8), 6, 4, True)
    assert shares[0] == 0.0 and sum(shares) > 1.0
    again = RolloutMeter.of(recipe, tasks)
    again.load_state_dict(meter.state_dict())
    assert again.state_dict() == meter.state_dict()


def test_every_slot_of_a_recipe_has_words():
    assert set(SLOTS) == set(recipes.build("grpo").slots())
    told = mechanism([{"acted/strategy": 0.31, "acted/gate": 0.0, "acted/advantage": 0.64}, {"acted/gate": 0.0}])
    assert told == "the strategy changed 31 % of the rollouts, credit differs on 64 % of the tokens, never: gate"


@pytest.mark.thorough
def test_a_run_says_how_often_its_mechanism_acted(tmp_path):
    small = {"env": "calculator", "groups": 3, "group_size": 4, "cold_steps": 2, "eval_tasks": 0, "layers": 1}
    more = {"max_tokens": 12, "trackers": (), "quiet": True, "out": str(tmp_path)}
    summary = turnwise.train(method="dr_grpo", steps=2, sampler="cycle,pool=3", budget="rollout_gdro", **small, **more)
    with RunReader(summary["run"]) as run:
        rows = [row.values for row in run.metrics()]
    assert rows[0]["acted/sampler"] == 0.0 and rows[-1]["acted/sampler"] == 1.0
    assert summary["mechanism"] == mechanism(rows) and "by the sampler's rule" in summary["mechanism"]
