"""What-if on a stored step equals training that step with the other method: same weights, same draws, same gradient."""

from __future__ import annotations

import numpy as np
import pytest

from turnwise.core.protocols import Step
from turnwise.environments.base import Environment, text_action, user_message
from turnwise.inspector.factors.stored_step import StoredStep
from turnwise.inspector.queries import RunReader
from turnwise.training import api


class Letters(Environment):
    """Pays every text by its letters, so that siblings always differ."""

    max_turns = 1

    def reset(self, seed):
        return [user_message(f"write {seed}")]

    def step(self, action):
        reward = sum(map(ord, action.text)) % 17 / 17
        return Step([], reward, terminated=True, info={"success": reward > 0.5})

    def oracle(self):
        return text_action("abc")

    def random_action(self, rng):
        return text_action("".join(rng.choices("abcdef", k=rng.randint(1, 6))))


OTHERS = ("dr_grpo", "gspo", "cispo", "rloo", "sapo", "gmpo", "vespo")
SMALL = {
    "env": Letters, "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 4, "cold_batch": 8,
    "steps": 1,
    "groups": 3, "group_size": 4, "max_tokens": 12, "context": 160, "eval_tasks": 0, "trackers": (), "threads": 1,
    "keep_tokens": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One step of each method, from the same seed."""
    out = tmp_path_factory.mktemp("what_if")
    for method in ("grpo", *OTHERS):
        api.train(method=method, out=str(out), name=method, quiet=True, epochs=1, minibatches=1, **SMALL)
    return out


def applied(run: RunReader) -> dict[str, np.ndarray]:
    """What the only update of step 1 did to each token."""
    update = run.token_columns(1)[0]
    return {one: -update.of(one)["slope"] for one in update.trajectories}


@pytest.mark.slow
@pytest.mark.parametrize("method", OTHERS)
def test_what_if_equals_one_step_of_training(runs, method):
    with RunReader(runs / "grpo") as base, RunReader(runs / method) as other:
        stored = StoredStep(base, 1)
        assumed = stored.factors(method)
        really = applied(other)
        ids = assumed.batch.trajectory_ids
        assert all(base.trajectory(one).ids() == other.trajectory(one).ids() for one in ids)
        expected = np.concatenate([really[one] for one in ids])
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(assumed.factors.total.numpy(), expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
def test_a_run_with_a_greedy_rollout_is_recomputed(tmp_path):
    """ReMax trains on a part of what it sampled; its baseline comes from the rollout that it does not train on."""
    api.train(method="remax", out=str(tmp_path), name="remax", quiet=True, epochs=1, minibatches=1, **SMALL)
    with RunReader(tmp_path / "remax") as run:
        recomputed, really = StoredStep(run, 1).factors(), applied(run)
        expected = np.concatenate([really[one] for one in recomputed.batch.trajectory_ids])
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(recomputed.factors.total.numpy(), expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
def test_the_methods_differ_so_that_the_test_above_can_fail(runs):
    with RunReader(runs / "grpo") as base, RunReader(runs / "dr_grpo") as other:
        one, two = applied(base), applied(other)
        assert max(np.abs(one[key] - two[key]).max() for key in one) > 1e-3 * max(np.abs(x).max() for x in two.values())
