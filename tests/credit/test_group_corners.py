"""Corner cases of group-, reward- and baseline-level credit: who is alone, alike, missing, cut off or untold."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.group_helpers import NAN, credit, group, named, one, packed, rich, same
from support.proven import GROUPS

from turnwise import recipes
from turnwise.core.levels import TRAJECTORY, TURN, Field
from turnwise.credit.fact import SameFact, action_hash, last_turn_fact, named_reward
from turnwise.errors import SignalError
from turnwise.recipes.families.group_credit import BundledRollouts, SetAdvantage, TailRisk, WeightedRewards

LONE = {"probe_baseline", "mssr", "copo", "gdpo"}  # need no siblings, or compare over the batch as well
ALIKE = {"risk_po": {"bundle": 1}}


@pytest.mark.parametrize("name", sorted(set(GROUPS) - LONE - {"public_baseline"}))
def test_a_group_of_one_gets_nothing(name):
    found = credit(name, [group([1.0, 0.0]), [one(1.0, count=2)], group([1.0, 0.5])], **ALIKE.get(name, {}))
    assert not found[2:4].any()


@pytest.mark.parametrize(
    "name", ["mc_grpo", "bnpo", "gdpo", "dvao", "canon", "stratified_grpo", "dgpo_difficulty", "adora", "xrpo", "pipo"]
)
def test_equal_rewards_teach_nothing(name):
    equal = [group([0.7] * 4), group([0.7] * 4)]
    assert credit(name, equal).abs().max() < 1e-9


def test_ties_go_by_number():
    """The same group in another order: the same one leaves the loss."""
    rows = [one(r, lot=0.1 * i + 0.05) for i, r in enumerate([1, 0, 0, 1, 0])]
    weights = []
    for members in (rows, rows[::-1]):
        objective = recipes.build("mc_grpo").objective
        weights.append(objective.plan(objective.credit(packed([members])[0]))["weight"].sum(TRAJECTORY).x.tolist())
    assert weights[0] == weights[1][::-1] and weights[0].count(0.0) == 1


def test_a_missing_reward_counts_as_nothing():
    whole, missing = [named(r1=[1, 0, 0, 1], r2=[0, 0, 1, 1])], [named(r1=[1, 0, 0, 1], r2=[0, NAN, 1, 1])]
    del missing[0][0].facts["rewards"]["r2"]
    for name in ("gdpo", "dvao"):
        same(credit(name, missing), credit(name, whole))
    batch, _ = packed(missing)
    assert named_reward(batch, "r2").x.tolist() == [0, 0, 1, 1]
    with pytest.raises(SignalError, match="r3"):
        named_reward(batch, "r3")
    assert len(WeightedRewards()(replace(batch, reward_components={}))) == 1  # nothing is named: the outcome
    with pytest.raises(ValueError, match="1 weights for 2"):
        recipes.build("gdpo", rewards=("a", "b"), weights=(1.0,))


def test_an_unknown_verdict_is_not_a_success():
    batch, _ = packed([group([1, 1, 0], logp=[-0.5, -0.3, -0.2], success=[True, False, False])])
    unknown = Field(batch.tree, TRAJECTORY, torch.tensor([1.0, NAN, 0.0], dtype=torch.float64))
    for name, hyper in (("capo_calibration", {}), ("risk_po", {"share": "score", "bundle": 1})):
        build = lambda: recipes.build(name, **hyper).objective  # noqa: B023, E731
        left, right = build().credit(replace(batch, success=unknown)), build().credit(batch)
        same(left["advantage"].x, right["advantage"].x)


def test_who_is_alike_without_being_told():
    batch, _ = packed(rich(2))
    tree = batch.tree
    said = torch.randint(0, 2, (tree.count(TURN),), generator=torch.Generator().manual_seed(0))
    batch = replace(batch, action=Field(tree, TURN, said))
    owner = tree.parents[1].tolist()
    sequences = [tuple(a for a, o in zip(said.tolist(), owner) if o == k) for k in range(len(batch))]
    numbers = action_hash(batch).x.tolist()
    assert all((a == b) == (x == y) for a, x in zip(sequences, numbers) for b, y in zip(sequences, numbers))
    assert SetAdvantage(2, SameFact("nothing"))(batch).x.isfinite().all()
    told = torch.full((tree.count(TURN),), NAN, dtype=torch.float64)
    told[0] = 3.0
    last = last_turn_fact(Field(tree, TURN, told)).x
    assert last[owner[0]] == 3.0 and last.isnan().sum() == len(batch) - 1


def test_sheets_do_not_depend_on_the_packing():
    batch, _ = packed(rich(3))
    order = list(range(len(batch)))
    random.Random(0).shuffle(order)
    moved = batch.select(order)
    left, right = BundledRollouts.draw(batch, 2), BundledRollouts.draw(moved, 2)
    assert sorted(left.score.tolist()) == pytest.approx(sorted(right.score.tolist()))
    same(TailRisk(mode="batch")(moved).x, TailRisk(mode="batch")(batch).x[order])


def test_strata_by_turns_and_agents():
    batch, _ = packed(rich(5))
    counts = batch.tree.size(TURN, TRAJECTORY).x.tolist()
    found = recipes.build("stratified_grpo", by="turns", alpha=1.0).objective.credit(batch)["advantage"].x
    for i, (n, g) in enumerate(zip(counts, batch.tree.parents[2].tolist())):
        if sum(m == n and h == g for m, h in zip(counts, batch.tree.parents[2].tolist())) == 1:
            assert found[i] == 0
    bare = replace(batch, facts={})  # without the fact, each agent is a function of its own
    told = replace(batch, facts={"function": batch.agent.to(torch.float64)})
    build = recipes.build("public_baseline").advantage
    same(build(bare).x, build(told).x)


def test_groups_are_damped_by_length():
    def weight(g, **hyper):
        return float(credit("adora", [g], **hyper)[0] / credit("grpo", [g])[0])

    cut = group([1, 0, 0], count=[3, 2, 9], truncated=[False, False, True])
    none_right, all_right = group([0.0, 0.2], count=[1, 2]), group([1.0, 0.8], count=[1, 2])
    assert weight(group([1, 1, 0, 0], count=[1, 5, 3, 4])) == pytest.approx(1.0)
    assert weight(group([1, 1, 0, 0], count=[1, 2, 3, 4])) == pytest.approx(0.1)
    assert weight(cut) == pytest.approx(1.0)  # the truncated one does not count
    assert weight(none_right) == pytest.approx(0.1) and weight(all_right) == pytest.approx(1.0)
    assert weight(none_right, lenient=True) == pytest.approx(1.0)
    assert weight(all_right, lenient=True) == pytest.approx(0.1)
    assert weight(group([0.0, 0.2], truncated=[True, True])) == pytest.approx(0.1)
    assert weight(group([1.0, 0.0]), threshold=1.01) == pytest.approx(0.1)
