"""What verl is told of each method, and the estimators, without verl."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from turnwise import recipes
from turnwise.integrations import padded, verl_advantages, verl_support

PAGE = Path(__file__).parents[2] / "docs" / "verl.md"
UIDS = np.array(["a", "b", "a", "b"], dtype=object)
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
REWARDS = torch.tensor([[0.0, 0, 0, 1], [0.5, 0, 0, 0], [0, 0, 0, -1], [0, 2, 0, 0]])


def test_reasons_say_what_is_missing():
    out = verl_support.unsupported_methods()
    assert "gradient norm" in out["vcpo"] and "gold answer" in out["a2tgpo"] and "Hellinger" in out["dgpo"]
    assert "layer" in out["alp"] and "LastTurnFirst" in out["see_upo"] and "drops trajectories" in out["red_drop"]
    assert "curvature" in out["capo"] and "rollout_correction" in out["tis"] and "remembers" in out["r2vpo"]
    assert "adv_estimator=gae" in out["ppo"] and "adv_estimator=gae" not in out["ppo_max"]
    assert "grpo" not in out and "rloo" not in out


def test_the_page_tells_of_every_method():
    table, left = PAGE.read_text().split("Advantages: `turnwise/<name>`")
    reasons, silent = verl_support.unsupported_methods(), []
    for name in verl_support.METHODS:
        why = reasons.get(name, "")
        row = f"| `{verl_support.mode(recipes.build(name))}`" if "loss: it" not in why else ""
        if row and not any(line.startswith(row) and f" `{name}` " in line for line in table.splitlines()):
            silent.append((name, row))
        rows = [line for line in left.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1]]
        for part in ("loss", "advantage"):
            said = any(f"({part}" in r or "(both)" in r or f"`{name}`'s {part} too" in r for r in rows)
            silent += [(name, part)] if said != (f"{part}: it" in why) else []
    assert silent == []


@pytest.mark.parametrize(
    "name", [n for n in verl_support.METHODS if not verl_support.advantage_unsupported_reasons(recipes.build(n))]
)
def test_estimators_are_finite_and_silent_off_the_mask(name):
    adv, returns = verl_advantages.estimator(name, verl_advantages.credit_from_config(name, {}))(REWARDS, MASK, UIDS)
    assert adv.isfinite().all() and returns.isfinite().all() and adv.abs().sum() > 0
    assert (adv[MASK == 0] == 0).all() and (returns[MASK == 0] == 0).all()


def test_rloo_by_hand():
    adv, returns = verl_advantages.estimator("rloo", verl_advantages.credit_from_config("rloo", {}))(
        REWARDS, MASK, UIDS
    )
    assert adv[:, 0].tolist() == [2.0, -1.5, -2.0, 1.5]
    assert returns[3].tolist() == [2, 2, 0, 0]


def test_what_verl_adds_itself_is_taken_out():
    assert verl_support.without_verl_terms(recipes.build("grpo")).penalties == ()
    assert repr(verl_support.without_verl_terms(recipes.build("reinforce_pp")).reward) == "EnvironmentReward()"
    assert "algorithm.kl_ctrl.kl_coef=0.01" in verl_support.settings(recipes.build("reinforce_pp"))
    assert "actor_rollout_ref.actor.kl_loss_type=k3" in verl_support.settings(recipes.build("grpo"))
    assert "algorithm.filter_groups.enable=True" in verl_support.settings(recipes.build("dapo", limit=9, cache=2))


@pytest.mark.parametrize("name", ["rloo_kl", "reinforce_pp"])
def test_a_kl_that_verl_put_into_the_rewards_is_ours(name):
    """verl takes β (log π_old − log π_ref) off each token's reward before it asks an estimator."""
    recipe = recipes.build(name, beta=0.3)
    old, reference = (torch.randn(MASK.shape, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    group = torch.tensor([0, 1, 0, 1])
    expected = padded.advantages(recipe, REWARDS.sum(1), MASK, group, proximal=old, reference=reference)
    taken = REWARDS - verl_support.kl_in_reward(recipe) * (old - reference) * MASK
    adv, _ = verl_advantages.estimator(name, verl_advantages.credit_from_config(name, {"beta": 0.3}))(taken, MASK, UIDS)
    torch.testing.assert_close(adv, expected)
