"""What a run keeps of each token: the numbers the update used, weights unchanged by keeping them, and the factors of a stored
step give the gradient that the step applied."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.batches import records_of

import turnwise
from turnwise import recipes
from turnwise.algebra.control import Passes
from turnwise.core.signals import Signal
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.inspector.factors.stored_step import StoredStep
from turnwise.inspector.queries import RunReader
from turnwise.models.tiny import tiny_model
from turnwise.training.loop import update_policy
from turnwise.training.step_records import TokenRecorder

SMALL = {
    "env": "calculator", "steps": 2, "groups": 3, "group_size": 4, "cold_steps": 2, "eval_tasks": 0, "layers": 1,
    "max_tokens": 12, "trackers": (),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that differ in whether tokens are kept."""
    folder = tmp_path_factory.mktemp("runs")
    for name, keep in (("kept", 5), ("without", 0)):
        turnwise.train(method="grpo", out=str(folder), name=name, keep_tokens=keep, minibatches=2, **SMALL)
    return folder


def test_keeping_tokens_does_not_change_the_weights(runs):
    one, other = (load_file(runs / name / "model" / "model.safetensors") for name in ("kept", "without"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    with RunReader(runs / "without") as run:
        assert run.kept_steps() == []


# ------------------------------------------------------------ how far tokens moved


MODEL = {"vocabulary": 16, "seed": 0, "hidden": 32, "layers": 1, "context": 64}


def one_step(again):
    """A learner after one step with two mini-batches on groups of different rewards, and what was recorded of it."""
    recipe = replace(recipes.build("grpo"), control=Passes(minibatches=2))
    groups = records_of([[[3, 2], [4], [1, 2]], [[2], [3, 1]], [[2, 2], [5]]], seed=3, asks=recipe.requirements)
    learner = LocalLearner(tiny_model(**MODEL), LearnerSettings(lr=1e-2, positions=32))
    recorder = None if again is None else TokenRecorder(0, groups, again)
    metrics = update_policy(learner, recipe, groups, 0, recorder=recorder)
    return learner, groups, [] if recorder is None else recorder.columns(), metrics


def test_measuring_tokens_again_does_not_change_the_weights():
    states = [one_step(again)[0].state_dict() for again in (None, 0, 512)]
    for state in states[1:]:
        assert state["scalars"] == states[0]["scalars"]
        assert all(torch.equal(t, state["tensors"][name]) for name, t in states[0]["tensors"].items())


def test_movement_is_measured_under_the_weights_after_the_step():
    """A stock forward pass of the model that the step leaves behind gives the same log-probabilities."""
    learner, groups, updates, metrics = one_step(512)
    assert metrics["seconds/measured_after"] > 0
    trajectories = {t.id: t for group in groups for t in group.trajectories}
    moved, stock = 0.0, tiny_model(**MODEL).eval()
    stock.load_state_dict(dict(learner.weights()), strict=False)  # a tied head is not listed twice
    for update in updates:
        for name in (one for one in update.trajectories if np.isfinite(update.of(one)["after"]).all()):
            ids, after = [], []
            for turn in trajectories[name].turns:
                ids = [*([] if turn.restart else ids), *turn.context, *turn.tokens]
                with torch.no_grad():
                    logp = stock(torch.tensor([ids])).logits[0].log_softmax(-1)
                after += [float(logp[at - 1, ids[at]]) for at in range(len(ids) - len(turn.tokens), len(ids))]
            assert np.allclose(update.of(name)["after"], after, atol=1e-5)
            moved = max(moved, float(np.abs(after - update.of(name)["logp"]).max()))
    assert moved > 0.01


@pytest.mark.parametrize("again, groups", [(0, 0), (1, 1), (512, 2)])
def test_whole_groups_are_measured_up_to_a_number_of_tokens(again, groups):
    """Two of the three groups have different rewards; the third has no gradient."""
    _, sampled, updates, metrics = one_step(again)
    measured = set()
    for update in updates:
        for name in update.trajectories:
            finite = np.isfinite(update.of(name).get("after", [np.nan]))
            assert finite.all() or not finite.any()
            measured |= {name} if finite.all() else set()
    assert ("seconds/measured_after" in metrics) == (again > 0)
    whole = [group for group in sampled if measured & {t.id for t in group.trajectories}]
    assert len(whole) == groups and measured == {t.id for group in whole for t in group.trajectories}


def test_each_sampled_token_is_kept_once(runs):
    with RunReader(runs / "kept") as run:
        assert run.kept_steps() == [1, 2]
        for step in (1, 2):
            updates = run.token_columns(step)
            assert len(updates) == 2  # mini-batches
            groups = [run.group(row.id) for row in run.groups(step=step, state="trained")]
            trained = [t for group in groups for t in group.trajectories]
            sizes = {one: size for u in updates for one, size in zip(u.trajectories, u.sizes)}
            assert sizes == {t.id: t.sampled for t in trained}
            assert [one for _, members in updates[0].groups for one in members] == [t.id for t in trained]


def test_the_first_update_reads_what_was_sampled(runs):
    with RunReader(runs / "kept") as run:
        update = run.token_columns(1)[0]
        for one in update.trajectories:
            sampled = np.concatenate([np.array(turn.logp) for turn in run.trajectory(one).turns])
            assert np.allclose(update.of(one)["logp"], sampled, atol=1e-4)
        assert set(update.columns) >= {"advantage", "weight", "slope", "gate", "logp", "entropy"}


def test_recomputed_factors_are_the_gradient_of_the_step(runs):
    with RunReader(runs / "kept") as run:
        for step in (1, 2):
            for number in range(len(run.token_columns(step))):
                stored = StoredStep(run, step, number)
                found = stored.factors()
                slope = stored.column(found.batch, "slope").x.double()
                scale = float(slope.abs().max())
                assert torch.allclose(-found.factors.total, slope, rtol=0, atol=1e-5 * max(scale, 1e-6))
                advantage = stored.column(found.batch, "advantage").x.double()
                assert torch.allclose(found.factors.advantage, advantage, atol=1e-6)


def test_what_another_method_would_have_done(runs):
    with RunReader(runs / "kept") as run:
        stored = StoredStep(run, 1)
        other = stored.factors("gspo")
        assert other.factors.total.shape == stored.factors().factors.total.shape
        with pytest.raises(turnwise.errors.SettingError, match="value"):
            stored.factors("ppo")
        assert Signal.LOGP in other.batch.columns


def test_a_pruned_step_is_named(runs):
    with RunReader(runs / "kept") as run, pytest.raises(turnwise.errors.StoreError, match="steps 1 to 2"):
        StoredStep(run, 9)
