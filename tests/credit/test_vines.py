"""Polychromic PPO: the credit of vines in sets against its oracle, its identities, and the groups that its strategy grows."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import records
from oracles import vines as oracle
from oracles.records import Trajectory, Turn
from support import forests
from support.drawn import CLIP, CRITIC, WEIGHT, between
from support.segment_helpers import close, credit, slopes
from support.untrained import Untrained

from turnwise import recipes
from turnwise.algebra.value import GAE
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.records import Status
from turnwise.core.signals import Signal
from turnwise.errors import RecipeError, SettingError
from turnwise.recipes.experience import piece
from turnwise.recipes.families.segment_credit import VineSetAdvantage, draw_sets, same_start
from turnwise.rollout.strategies import Independent
from turnwise.rollout.strategies.tree import Vines

SEEDS = st.integers(0, 10**6)
some = settings(deadline=None, max_examples=25)
DRAWN = {
    "size": st.integers(1, 4), "sets": st.integers(1, 5), "window": st.integers(0, 3), "bottom": between(-0.6, -0.1),
    "top": between(0.7, 2.0), "beta": WEIGHT, "clip": CLIP,
    **{key: CRITIC[key] for key in ("gamma", "lam", "value_clip", "value_weight")},
}  # fmt: skip


def vine_groups(seed: int):
    """Random groups of trunks, vines of a few of their states, and forks of vines; few different signatures."""
    dice = random.Random(f"vines {seed}")
    groups = forests.forest(seed, deep=dice.random() < 0.5)
    for group in groups:
        parents = [i for i, branch in enumerate(group) if branch.parent is None]
        for i in parents:
            at = (dice.randrange(len(group[i].own.turns)), 0)
            for _ in range(dice.randint(0, 6)):
                row = forests.forest(dice.randrange(10**6), groups=1)[0][0].own
                group.append(forests.Branch(row, i, at))
        for branch in group:
            branch.own.facts["key"] = dice.randint(0, 2)
            for turn in branch.own.turns:
                for token in turn.tokens:
                    token.old_value = dice.gauss(0.0, 0.5)
                    token.value = torch.tensor(
                        token.old_value + dice.gauss(0.0, 0.4), dtype=torch.float64, requires_grad=True
                    )
    return groups


def described(groups):
    """The batch, and the same records with their path returns for the oracle."""
    reference, batch, policy = forests.owned(groups)
    for group in groups:
        for i, branch in enumerate(group):
            branch.own.facts["path"] = forests.outcome(group, i)
    keys = [branch.own.facts["key"] for group in groups for branch in group]
    facts = {"key": Field(batch.tree, TRAJECTORY, torch.tensor(keys, dtype=torch.float64))}
    return reference, replace(batch, facts=facts), policy


def drawn_sets(groups, batch, size, sets) -> oracle.Sets:
    """What the piece draws, by group and state, as positions in the group."""
    chosen = draw_sets(batch, same_start(batch), size, sets)
    found, start = [], 0
    for group in groups:
        states: dict = {}
        for i, branch in enumerate(group):
            if branch.parent is not None:
                members = states.setdefault((branch.parent, branch.at), [[] for _ in range(sets)])
                for number in range(sets):
                    members[number] += [i] if chosen[number][start + i] else []
        found.append(states)
        start += len(group)
    return found


@some
@given(seed=SEEDS, hyper=st.fixed_dictionaries(DRAWN))
def test_oracle(seed, hyper):
    groups = vine_groups(seed)
    reference, batch, policy = described(groups)
    sets = drawn_sets(groups, batch, hyper["size"], hyper["sets"])
    for states, group in zip(sets, groups):  # every set has its size, or all vines of its state
        count = Counter((b.parent, b.at) for b in group if b.parent is not None)
        for state, drawn in states.items():
            assert all(len(members) == min(hyper["size"], count[state]) for members in drawn)
    expected = oracle.polychromic_ppo(reference, sets, **{k: v for k, v in hyper.items() if k not in ("size", "sets")})
    recipe = recipes.build("polychromic_ppo", **hyper)
    close(credit(recipe, batch), expected.advantage)
    if expected.advantage:
        loss, found = slopes(recipe.objective, batch, policy)
        assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-9, abs=1e-9)
        for signal, name in ((Signal.LOGP, "logp"), (Signal.VALUE, "value")):
            close(found[signal], records.gradients(reference, expected.loss, name))


@some
@given(seed=SEEDS)
def test_without_vines_it_is_gae(seed):
    """Card: p = 0 → PPO."""
    groups = [[replace(b, parent=None, at=(0, 0)) for b in group] for group in vine_groups(seed)]
    _, batch, _ = described(groups)
    close(credit(recipes.build("polychromic_ppo"), batch), GAE()(batch).x)


def one_state(returns, keys, turns=1):
    """A trunk of two turns, and vines of its second."""
    row = lambda count: Trajectory([Turn([records.token(-1.0)], 0.0) for _ in range(count)])  # noqa: E731
    group = [forests.Branch(row(2))]
    group[0].own.facts["key"] = 9
    for value, key in zip(returns, keys):
        own = row(turns)
        own.turns[-1].reward = value
        own.facts["key"] = key
        group.append(forests.Branch(own, 0, (1, 0)))
    return described([group])[1]


def test_by_hand():
    """All four vines form the one set: f − baseline is 0. Two sets of the whole: 0 as well."""
    batch = one_state([1, 0, 0, 1], [0, 1, 2, 3])
    found, counted = VineSetAdvantage(size=4, sets=3).set_credit(batch)
    assert found.x.tolist() == [0.0] * 5 and counted.x.tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("returns, keys", [([0, 0, 0, 0, 0, 0], range(6)), ([1, 1, 1, 1, 1, 1], [3] * 6)])
def test_failures_and_equal_vines_earn_nothing(returns, keys):
    """Card: f = 0 if all fail or all are identical."""
    found, _ = VineSetAdvantage(size=3, sets=6).set_credit(one_state(returns, keys))
    assert not found.x.any()


def test_a_set_of_one_is_its_return():
    """d = 1: sets of one compare returns with the mean of those that were drawn."""
    batch = one_state([1, 0, 1, 0, 0, 0, 1, 1], range(8))
    drawn = draw_sets(batch, same_start(batch), 1, 5)
    picked = [int(members[1:].nonzero()[0]) for members in drawn]
    returns = [1, 0, 1, 0, 0, 0, 1, 1]
    baseline = sum(returns[i] for i in picked) / 5
    found, counted = VineSetAdvantage(size=1, sets=5).set_credit(batch)
    for i in range(8):
        assert counted.x[1 + i] == (i in picked)
        assert found.x[1 + i].item() == pytest.approx(returns[i] - baseline if i in picked else 0.0)


def test_members_of_one_set_share_one_advantage_and_sets_have_mean_zero():
    batch = one_state([1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 2, 3])
    drawn = draw_sets(batch, same_start(batch), 3, 2)
    found, _ = VineSetAdvantage(size=3, sets=2).set_credit(batch)
    only_first, only_second = drawn[0] & ~drawn[1], drawn[1] & ~drawn[0]
    for alone in (only_first[1:], only_second[1:]):
        assert len(set(found.x[1:][alone].tolist())) <= 1
    if only_first[1:].any() and only_second[1:].any():
        assert found.x[1:][only_first[1:]][0] == pytest.approx(-found.x[1:][only_second[1:]][0].item())


def test_the_window_ends():
    batch = one_state([1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 2, 3], turns=4)
    term = VineSetAdvantage(size=3, sets=4, window=1)
    found, plain, (credit_, counted) = term(batch).at(TOKEN), GAE()(batch), term.set_credit(batch)
    turn = batch.tree.index(TURN, TRAJECTORY).at(TOKEN).x
    inside = counted.at(TOKEN).x & (turn <= 1)
    assert inside.any() and (~inside).any()
    torch.testing.assert_close(found.x[inside].double(), credit_.at(TOKEN).x[inside].double())
    torch.testing.assert_close(found.x[~inside].double(), plain.x[~inside].double())


def test_every_vine_is_drawn_equally_often():
    batch = one_state([1] * 8, range(8))
    counts = torch.stack(draw_sets(batch, same_start(batch), 4, 4000))[:, 1:].double().mean(0)
    assert (counts - 0.5).abs().max() < 0.05


# -------------------------------------------------------------------- the strategy


@pytest.fixture(scope="module")
def untrained():
    return Untrained("keydoor")


def shape(group):
    return [(t.id, t.fork, [tuple(turn.tokens) for turn in t.turns]) for t in group.trajectories]


def test_the_group_is_a_trunk_and_vines_of_evenly_spaced_states(untrained):
    group = untrained.grow(Vines(trunks=1, states=2, vines=3), size=7)
    trunk, *vines = group.trajectories
    turns = len(trunk.turns)
    assert trunk.fork is None and trunk.status != Status.FAILED
    assert [(v.fork.parent, v.fork.turn) for v in vines] == [(trunk.id, k * turns // 3) for k in (1, 1, 1, 2, 2, 2)]
    assert shape(group) == shape(untrained.grow(Vines(1, 2, 3), size=7))  # deterministic
    measured, recorded = untrained.logp(group)
    torch.testing.assert_close(measured, recorded, rtol=1e-4, atol=1e-4)


def test_sessions_that_are_left_start_at_the_prompt(untrained):
    group = untrained.grow(Vines(1, 1, 2), size=6)
    assert [t.fork is None for t in group.trajectories] == [True, False, False, True, True, True]


def test_no_states_is_plain_sampling(untrained):
    tokens = lambda g: [[tuple(turn.tokens) for turn in t.turns] for t in g.trajectories]  # noqa: E731
    assert tokens(untrained.grow(Vines(trunks=6, states=0))) == tokens(untrained.grow(Independent()))


def test_wrong_numbers_are_refused():
    with pytest.raises(RecipeError, match="write --group-size 17 or more"):
        Vines().check_group_size(8)
    with pytest.raises(SettingError, match="vines is 0; write a number >= 1"):
        piece("strategy", "vines,vines=0")
    with pytest.raises(RecipeError, match="sets is 0; write a number >= 1"):
        VineSetAdvantage(sets=0)
    with pytest.raises(RecipeError, match="window is -1"):
        VineSetAdvantage(window=-1)
    with pytest.raises(RecipeError, match="write a number < top"):
        VineSetAdvantage(bottom=1.0)
