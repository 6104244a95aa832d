"""What a run keeps of each token: the numbers the update used, weights unchanged by keeping them, and the factors of a stored
step give the gradient that the step applied."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import turnwise
from turnwise.core.signals import Signal
from turnwise.inspector.factors.stored_step import StoredStep
from turnwise.inspector.queries import RunReader

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
                slope = stored._column(found.batch, "slope").x.double()
                scale = float(slope.abs().max())
                assert torch.allclose(-found.factors.total, slope, rtol=0, atol=1e-5 * max(scale, 1e-6))
                advantage = stored._column(found.batch, "advantage").x.double()
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
