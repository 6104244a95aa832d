"""Segments, trees, tools and shaped outcomes: numbers worked out by hand, and what the methods reduce to."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import credit_segments as oracle
from oracles import records
from oracles.records import Trajectory, Turn, token
from support import forests
from support.batches import from_oracle
from support.segment_helpers import asked, credit, criticised, kept, made, slopes, told

from turnwise import recipes
from turnwise.algebra.advantage import Standardise
from turnwise.algebra.gate import Clip
from turnwise.algebra.ratio import Importance
from turnwise.algebra.term import Term
from turnwise.algebra.value import Constant
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.records import Group
from turnwise.core.records import Trajectory as Episode
from turnwise.core.signals import TURN_CRITIC, Signal
from turnwise.credit.fact import Fact
from turnwise.credit.tracker import SuccessTracker
from turnwise.recipes.families.reward_shaping import (
    CappedBonus,
    DriftSinceVisit,
    RetentionByDrift,
    ShapleyInformationGain,
    ToolEfficiencyReward,
)
from turnwise.recipes.families.segment_credit import ForkTree, MeanOverPaths, PathReturn
from turnwise.tasks.samplers import UncertaintySampler
from turnwise.tasks.task_source import TaskStream

SEEDS = st.integers(0, 10**6)
few = settings(deadline=None, max_examples=10)


def near(numbers, tolerance: float = 1e-9):
    return pytest.approx(numbers, abs=tolerance, rel=tolerance)


def row(reward: float, lengths=(1,), **more) -> Trajectory:
    turns = [Turn([token(-1.0) for _ in range(n)], 0.0) for n in lengths]
    turns[-1].reward = reward
    return Trajectory(turns, **more)


def packed(*rows: Trajectory):
    for at, one in enumerate(rows):
        one.lot = (at + 1) / 64
    return from_oracle([list(rows)])


@dataclass(frozen=True)
class Given(Term):
    """Numbers of trajectories."""

    values: tuple[float, ...]

    def __call__(self, batch):
        return batch.tree.field(TRAJECTORY, self.values, torch.float64)


# ------------------------------------------------------------------------- trees


@few
@given(seed=SEEDS)
def test_spo_chain_of_single_tokens_is_vine_ppo_and_telescopes(seed):
    """Completions at every token: each gets V(next) − V(here), and they sum up to R − V(prompt)."""
    reference = records.random_batch(seed, tokenless=False)
    values, groups = {}, []
    for g, group in enumerate(reference):
        branches = [forests.Branch(one) for one in group]
        for i, one in enumerate(group):
            for t, turn in enumerate(one.turns):
                for j in range(len(turn.tokens)):
                    worth = values[g, i, t, j] = ((7 * i + 3 * t + j) % 5) / 4
                    earned = sum(x.reward for x in one.turns[:t])
                    branches.append(forests.Branch(Trajectory([Turn([], worth - earned)]), i, (t, j)))
        begun = [forests.outcome(branches, i) for i in range(len(branches)) if not forests.beginning(branches, i)]
        for i, one in enumerate(group):
            values[g, i, 0, 0] = (sum(begun) - records.total(one)) / max(1, len(begun) - 1)
        groups.append(branches)
    _, batch, _ = forests.owned(groups)
    found = dict(zip(forests.natural(groups), credit(recipes.build("spo_chain"), batch).tolist()))
    for g, group in enumerate(reference):
        for i, one in enumerate(group):
            places = [(t, j) for t, turn in enumerate(one.turns) for j in range(len(turn.tokens))]
            chain = [*(values[g, i, *place] for place in places), records.total(one)]
            for place, here, after in zip(places, chain, chain[1:]):
                assert found[g, (i, *place)] == near(after - here)
            assert sum(found[g, (i, *place)] for place in places) == near(chain[-1] - chain[0])


def test_spo_chain_of_one_segment_is_reinforce_with_a_sampled_baseline():
    one, branches = row(1.0, (3, 2)), []
    branches = [forests.Branch(one), *(forests.Branch(row(r), 0) for r in (0.0, 0.5, 1.0))]
    _, batch, _ = forests.owned([branches])
    assert credit(recipes.build("spo_chain"), batch)[:5].tolist() == near([0.5] * 5)
    assert (
        credit(recipes.build("spo_chain"), packed(row(1.0, (3,)))[0]).tolist() == [0.0] * 3
    )  # nobody told of the prompt


def tree_by_hand():
    """Two ways from the prompt, each forking once: outcomes 1, 0 and 1, 1."""
    rows = [row(r, (1, 1)) for r in (1.0, 1.0)] + [row(0.0), row(1.0)]
    branches = [forests.Branch(rows[0]), forests.Branch(rows[1])]
    branches += [forests.Branch(rows[2], 0, (1, 0)), forests.Branch(rows[3], 1, (1, 0))]
    return forests.owned([branches])


def test_spo_tree_by_hand():
    _, batch, _ = tree_by_hand()
    assert credit(recipes.build("spo_tree"), batch).tolist() == near([-0.25, 0.5, 0.25, 0.0, -0.5, 0.0])
    assert kept(recipes.build("spo_tree"), batch).tolist() == [1, 1, 1, 0, 1, 0]  # A = 0 is dropped
    root = 0.5**0.5
    scaled = credit(recipes.build("spo_tree", scale=True), batch).tolist()
    assert scaled == near([-root, root, root, 0.0, -root, 0.0], 1e-6)
    assert PathReturn()(batch).x.tolist() == [1.0, 1.0, 0.0, 1.0]


def test_arpo_by_hand():
    """What two branches share gets their mean, or with copies their sum; the branches their own."""
    _, batch, _ = tree_by_hand()
    given = Given((1.0, 2.0, 3.0, 5.0))
    assert MeanOverPaths(given)(batch).x.tolist() == [2.0, 1.0, 3.5, 2.0, 3.0, 5.0]
    assert MeanOverPaths(given, copies=True)(batch).x.tolist() == [4.0, 1.0, 7.0, 2.0, 3.0, 5.0]


@few
@given(seed=SEEDS)
def test_without_forks(seed):
    """No branch: ARPO is GRPO, SPO-tree is centred, SPO-chain is RLOO, R3L masks nothing."""
    batch, _ = from_oracle(made(seed))
    grpo = credit(recipes.build("grpo"), batch)
    torch.testing.assert_close(credit(recipes.build("arpo"), batch), grpo)
    centred = Standardise(scale=False)(batch).at(TOKEN).x
    torch.testing.assert_close(credit(recipes.build("spo_tree"), batch), centred)
    several = batch.tree.size(TRAJECTORY, GROUP).at(TOKEN).x > 1
    rloo = torch.where(several, credit(recipes.build("rloo"), batch), 0.0)
    torch.testing.assert_close(credit(recipes.build("spo_chain"), batch), rloo)
    plain = recipes.build("r3l", alpha=1.0, best=math.inf)
    torch.testing.assert_close(credit(plain, batch), centred)
    soft = recipes.build("r3l", alpha=1.0, best=math.inf, tau=1e6)
    torch.testing.assert_close(credit(soft, batch), centred, rtol=0, atol=1e-5)
    assert kept(plain, batch).all()


def test_a_parent_that_is_gone():
    """Who left a trajectory that is not in the batch begins at the prompt."""
    _, batch, _ = tree_by_hand()
    left = batch.select([0, 2, 3])
    assert ForkTree(left).recorded_parent.tolist() == [-1, 0, -1]
    assert torch.isfinite(credit(recipes.build("spo_tree"), left)).all()


def test_r3l_golden():
    batch, _ = packed(*(row(r) for r in (1.0, 0.5, 0.0, 0.0)))
    assert credit(recipes.build("r3l"), batch).tolist() == near([1.0, 0.375, -0.375, -0.375])
    assert credit(recipes.build("r3l", perfect=3.0), batch).tolist() == near([3.0, 0.375, -0.375, -0.375])
    assert credit(recipes.build("r3l"), packed(row(1.0))[0]).tolist() == [1.0]
    base, retry, other = row(0.0, (1, 1, 1)), row(0.5, (1,)), row(0.25)
    _, batch, _ = forests.owned([[forests.Branch(base), forests.Branch(retry, 0, (1, 0)), forests.Branch(other)]])
    assert kept(recipes.build("r3l"), batch).tolist() == [0, 1, 1, 1, 1]
    assert credit(recipes.build("r3l"), batch)[1:].tolist() == near([-0.25, -0.25, 0.75, 0.0])


# ------------------------------------------------------------------ turns, segments


def test_ipa_golden():
    batch, _ = packed(row(1.0, (1, 1, 1)))
    assert credit(recipes.build("ipa"), batch).tolist() == near([0.9025, 0.95, 1.0])


@few
@given(seed=SEEDS)
def test_ipa_reduces(seed):
    """γ = 1: equal credit. One turn: TOPR with the geometric mean of the ratio."""
    batch, _ = from_oracle(made(seed))
    equal = credit(recipes.build("ipa", gamma=1.0), batch)
    torch.testing.assert_close(equal, credit(recipes.build("reinforce"), batch))
    single = [[one for one in group if len(one.turns) == 1] or [row(-1.0)] for group in made(seed)]
    for one in records.tokens(single):
        one.proximal = one.behaviour
    batch, policy = from_oracle(single)
    _, left = slopes(recipes.build("ipa").objective, batch, policy)
    topr = replace(recipes.build("topr"), ratio=Importance(TRAJECTORY))
    _, right = slopes(topr.objective, batch, policy)
    torch.testing.assert_close(left[Signal.LOGP], right[Signal.LOGP])


@few
@given(seed=SEEDS)
def test_dcpo_without_memory_is_grpo(seed):
    batch, _ = from_oracle(made(seed))
    batch = told(batch, memory=(TURN, [0.0] * batch.tree.count(TURN)))
    for recipe in (recipes.build("dcpo"), recipes.build("dcpo", segments=1)):
        torch.testing.assert_close(credit(recipe, batch), credit(recipes.build("grpo"), batch))
        assert kept(recipe, batch).all()


# ------------------------------------------------------------------------- critics


@few
@given(seed=SEEDS)
def test_archer_with_the_outcome_as_critic_is_reinforce(seed):
    """One turn each, Q = R, V = 0; with γ = 0 the critics learn the reward."""
    reference = [[one for one in group if len(one.turns) == 1] or [row(-1.0)] for group in made(seed)]
    for one in records.trajectories(reference):
        r = records.total(one)
        one.turns[0].facts.update(q=(r, r + 1), v=(0.0, 0.5), slow_q=(0.0, 0.0), slow_v=(9.0, 9.0))
    batch, policy = criticised(reference)
    _, found = slopes(recipes.build("archer", gamma=0.0, fresh=0).objective, batch, policy)
    plain = {s: f for s, f in policy.items() if s not in TURN_CRITIC}
    _, expected = slopes(recipes.build("reinforce").objective, batch, plain)
    torch.testing.assert_close(found[Signal.LOGP], expected[Signal.LOGP])
    assert found[Signal.Q].abs().max() < 1e-12 and found[Signal.SECOND_Q].abs().max() > 0


@few
@given(seed=SEEDS)
def test_direct_advantage_keeps_the_reference_where_nothing_is_to_gain(seed):
    reference = made(seed)
    for one in records.trajectories(reference):
        for turn in one.turns:
            turn.reward = 0.5 if turn is one.turns[-1] else 0.0
        for token_ in records.sampled(one):
            token_.old_value, token_.reference = 0.0, token_.logp.item()  # V = 0.5
    batch, policy = from_oracle(reference)
    recipe = recipes.build("direct_advantage", value_weight=0.0, warm=0, every=0)
    loss, found = slopes(recipe.objective, batch, policy)
    assert loss.item() == near(0.0) and found[Signal.LOGP].abs().max() < 1e-9


# ----------------------------------------------------------------- between the steps


def visit(objective, batch) -> float:
    """Credit a batch; what its first task is then thought to be worth."""
    objective.credit(batch)
    tracker = next(p for p in objective.advantage.parts if isinstance(p, SuccessTracker))
    a, b = objective.memory.of(tracker)["tasks"]["task 0"]
    return a / (a + b)


def test_spo_single_golden():
    batch, _ = packed(row(1.0, success=True))
    tracker = SuccessTracker(keep=RetentionByDrift(Fact("drift")))
    objective = replace(recipes.build("spo_single"), advantage=tracker).objective
    first = tracker.memory_columns(
        tracker.initial_state(), told(batch, tries=(TRAJECTORY, [8.0]), solved=(TRAJECTORY, [6.0]))
    )
    assert [first[tracker, k].x.item() for k in "ab"] == near([5.7778, 2.2222], 1e-4)
    first = tracker.memory_columns(tracker.initial_state(), batch)
    assert [first[tracker, k].x.item() for k in "ab"] == [4.0, 4.0]
    assert visit(objective, told(batch, drift=(TRAJECTORY, [0.06]))) == near(0.5625)
    assert objective.memory.of(tracker)["tasks"] == {"task 0": near([4.5, 3.5])}


def test_a_tracker_that_forgets_nothing_counts_and_one_that_forgets_has_a_window():
    good, bad = packed(row(1.0, success=True))[0], packed(row(0.0))[0]
    for keep, strength in ((1.0, 2.0), (0.875, 8.0)):
        tracker = SuccessTracker(keep=Constant(keep), strength=strength)
        objective = replace(recipes.build("spo_single"), advantage=tracker).objective
        for batch in (good, bad, good, good):
            last = visit(objective, batch)
        a, b = objective.memory.of(tracker)["tasks"]["task 0"]
        if keep == 1:
            assert last == near((3 + 1) / (4 + 2))  # Beta(1, 1) and three of four
        else:
            assert a + b == near(1 / (1 - keep))  # the window


def test_a_tracker_reads_before_it_writes_and_survives_json():
    batch, _ = packed(row(1.0, success=True))
    objective = recipes.build("spo_single").objective
    tracker = next(p for p in objective.advantage.parts if isinstance(p, SuccessTracker))
    batch = batch.put(dict.fromkeys((Signal.PROXIMAL, Signal.PREVIOUS), batch.behaviour))
    seen = [objective.credit(batch)[tracker, "a"].x.item() for _ in range(3)]
    assert seen[0] == 4.0 and seen[1] == near(0.96 * 4 + 1) and seen[2] > seen[1]
    assert json.loads(json.dumps(objective.memory.state_dict())) == objective.memory.state_dict()


def test_two_groups_of_one_task_are_one_visit():
    rows = [row(1.0, success=True), row(0.0), row(1.0, success=True)]
    for at, one in enumerate(rows):
        one.lot = at / 8
    batch, _ = from_oracle([rows[:1], rows[1:]])
    batch = replace(batch, task_keys=("same", "same"))
    tracker = SuccessTracker(keep=Constant(0.5))
    objective = replace(recipes.build("spo_single"), advantage=tracker).objective
    objective.credit(batch)
    assert objective.memory.of(tracker)["tasks"] == {"same": [4.0, 3.0]}


def test_the_drift_since_the_last_visit_adds_up():
    batch, _ = packed(row(1.0, (2,)))
    drift = DriftSinceVisit()
    objective = replace(recipes.build("spo_single"), advantage=drift).objective
    moved = lambda by: {Signal.PROXIMAL: batch.behaviour, Signal.PREVIOUS: batch.behaviour + by}  # noqa: E731
    said = []
    for by, task in ((0.3, "a"), (0.1, "b"), (-0.2, "c"), (0.05, "a"), (0.4, "a")):
        said.append(objective.credit(replace(batch.put(moved(by)), task_keys=(task,)))["advantage"].x.item())
    assert said == near([0.0, 0.0, 0.0, 0.35, 0.4])


def test_unsure_tasks_come_more_often():
    rule = UncertaintySampler(pool=8, round=4)
    assert rule.weight(4, 4) == near(oracle.spo_priority(4, 4)) and rule.weight(5, 1) == near(oracle.spo_priority(5, 1))
    tasks = TaskStream("countdown")
    live = rule.open(tasks)
    for place in range(8):  # the first two now and then, the others always
        task = tasks.draw(place)
        for at in range(40):
            good = at % 2 == 0 if place < 2 else True
            live.observe(Group("g", task, (Episode("t", task, (), success=good),)))
    drawn = [live.next()[1] for _ in range(400)]
    assert all(len({t.key for t in drawn[k : k + 4]}) == 4 for k in range(0, 400, 4))  # without replacement
    often = [sum(t == tasks.draw(place) for t in drawn) for place in range(8)]
    assert min(often[:2]) > max(often[2:])
    again = rule.open(tasks)
    again.load_state_dict(json.loads(json.dumps(live.state_dict())))
    assert [again.next() for _ in range(9)] == [live.next() for _ in range(9)]


@few
@given(seed=SEEDS)
def test_spear_without_replay_and_bonus_is_its_base(seed):
    """Weight 0 and the bonus over: centred rewards, a wide clip, sums over a constant length, of fresh rows alone."""
    reference = made(seed)
    rows = list(records.trajectories(reference))
    for at, one in enumerate(rows):
        one.facts["origin"] = "replay" if at % 4 == 1 else "policy"
    batch, policy = from_oracle(reference)
    objective = recipes.build("spear", gamma=0.0).objective
    objective.memory.clock = 200
    _, found = slopes(objective, batch, policy)
    fresh = [at for at, one in enumerate(rows) if one.facts["origin"] == "policy"]
    places = batch.put(row=Field(batch.tree, TOKEN, torch.arange(batch.tree.count(TOKEN)))).select(fresh)
    mine = {Signal.LOGP: Field(places.tree, TOKEN, policy[Signal.LOGP].x[places["row"].x])}
    base = replace(recipes.build("dr_grpo", length=64.0), gate=Clip(0.2, 0.28)).objective
    loss = base(base.plan(base.credit(places)), mine).loss
    expected = torch.autograd.grad(loss, policy[Signal.LOGP].x)[0]
    torch.testing.assert_close(found[Signal.LOGP], expected)


def test_spear_drops_what_today_beats():
    old, rows = row(0.5), [row(1.0), row(0.2)]
    old.facts["origin"] = "replay"
    for reward, stays in ((0.7, True), (0.5, False)):
        old.turns[0].reward = reward
        batch, _ = packed(old, *rows)
        objective = recipes.build("spear").objective
        planned = objective.plan(objective.credit(batch))
        assert planned[objective.penalties[0].rows].x.tolist() == [stays, False, False]  # the median is 0.6


# ------------------------------------------------------------------ hidden states


def test_a_bonus_by_hand():
    batch, _ = packed(row(0.0), row(0.0), row(0.0))
    shaped = lambda phi, kappa: CappedBonus(Given((1.0, -1.0, 0.0)), Constant(phi), kappa)(batch).x.tolist()  # noqa: E731
    assert shaped(0.8, 2.0) == near([1.5, -0.5, 0.0])
    assert shaped(-0.8, 2.0) == [1.0, -1.0, 0.0] and shaped(0.8, math.inf) == [1.0, -1.0, 0.0]


@few
@given(seed=SEEDS)
def test_rlfr_without_scores_is_grpo(seed):
    batch, _ = from_oracle(made(seed))
    grpo = credit(recipes.build("grpo"), batch)
    flat = batch.put({Signal.FLOW_DEVIATION: batch.tree.full(TOKEN, 0.3, torch.float64)})
    torch.testing.assert_close(credit(recipes.build("rlfr"), flat), grpo)
    noise = batch.put({Signal.FLOW_DEVIATION: batch.uniform_draws()})
    torch.testing.assert_close(credit(recipes.build("rlfr", coef=0.0), noise), grpo)


def test_rlfr_by_hand():
    batch, _ = packed(row(1.0, (4,)))
    batch = batch.put({Signal.FLOW_DEVIATION: batch.tree.field(TOKEN, [0.0, 1.0, 0.5, 0.8], torch.float64)})
    assert credit(recipes.build("rlfr"), batch).tolist() == near([-0.018, -0.018, -0.008, -0.008])
    assert credit(recipes.build("rlfr", top=1), batch).tolist() == near([-0.01, -0.01, 0.0, 0.0])


# ---------------------------------------------------------------- shaped outcomes


def test_gcpo_by_hand():
    rows = [row(r) for r in (1.0, 0.0, 0.0, 0.0)]
    for one, acted in zip(rows, (1, 1, 0, 0)):
        one.facts["action"] = float(acted)
    batch, _ = packed(*rows)
    value = recipes.build("gcpo").advantage.value
    assert value(batch).x.tolist() == near([2 + 1 / 1024, 1 + 1 / 1024, 1 / 1024, 1 / 1024])
    torch.testing.assert_close(
        credit(recipes.build("gcpo", threshold=0.5), batch), credit(recipes.build("grpo"), batch)
    )
    for one in rows:
        one.facts["action"] = 1 - one.facts["action"]
    assert value(packed(*rows)[0]).x.tolist() == near([1 + 1 / 1024, 1 / 1024, -1 + 1 / 1024, -1 + 1 / 1024])
    for one in rows:
        one.facts["action"] = 1.0
    assert value(packed(*rows)[0]).x.tolist() == near([1 + 1 / 1024, *[1 / 1024] * 3])


@few
@given(seed=SEEDS)
def test_gcpo_with_no_contrast_and_no_length_is_grpo(seed):
    batch, _ = from_oracle(made(seed))
    plain = recipes.build("gcpo", threshold=99.0, length=0.0, form=0.0)
    torch.testing.assert_close(credit(plain, batch), credit(recipes.build("grpo"), batch))


@few
@given(seed=SEEDS)
def test_uncovered_information(seed):
    """Each piece once: no more than all of it. All worth alike: the share that was uncovered."""
    reference = made(seed)
    batch, _ = from_oracle(reference)
    fresh = ShapleyInformationGain(first_time_only=True)(asked(reference, batch)).sum(TRAJECTORY)
    assert fresh.x.max() <= 1 + 1e-12
    for one in records.trajectories(reference):
        one.facts["shapley"] = [0.7] * len(one.facts["shapley"])
    found = ShapleyInformationGain()(asked(reference, batch)).x.tolist()
    expected = [
        len(turn.facts["uncovered"]) / len(one.facts["shapley"]) * (turn.facts["kind"] == "question")
        for one in records.trajectories(reference)
        for turn in one.turns
    ]
    assert found == near(expected)


def test_fapo_turns_by_itself():
    """A flawed success at 0 helps while the mean of the group is below 0, and hurts above."""
    rows = [row(0.0, success=True), row(0.0, success=True), row(0.0), row(0.0)]
    for one, error in zip(rows, (-1, 2, 2, -1)):
        one.facts["error"] = error
    recipe = recipes.build("fapo")
    assert recipe.advantage.value(packed(*rows)[0]).x.tolist() == [1.0, 0.0, -1.0, -1.0]
    assert credit(recipe, packed(*rows)[0])[1] > 0
    rows[2].success, rows[2].facts["error"] = True, -1
    assert credit(recipe, packed(*rows)[0])[1] < 0
    for penalty, flawed in ((0.0, 1.0), (2.0, -1.0)):
        assert recipes.build("fapo", penalty=penalty).advantage.value(packed(*rows)[0]).x[1] == flawed


def thrift(calls, fewest=None, **hyper):
    rows = [row(0.0, success=True) for _ in calls]
    for one, m in zip(rows, calls):
        one.turns[0].tool_calls = m
    batch, _ = packed(*rows)
    term = ToolEfficiencyReward(**hyper)
    known = {"task 0": min(calls) if fewest is None else fewest}
    return term(batch.put(term.memory_columns({"tasks": known}, batch))).x.tolist()


def test_otc_golden():
    assert thrift(range(5), 0) == near([1, 0.8660, 0.7071, 0.5878, 0.5], 5e-5)
    assert thrift(range(5), 3, cosine_only=True) == near([1, 0.8660, 0.7071, 0.5878, 0.5], 5e-5)
    assert thrift(range(6), 2) == near([0, 0.8660, 1, 0.9511, 0.8660, 0.7818], 5e-5)
    assert [thrift([m], m)[0] for m in range(5)] == near([1.0] * 5)
    assert thrift([10**9], 3) == near([0.0], 1e-6)
    assert thrift([5], 0, slack=1e12) == near([1.0])


def test_otc_remembers_the_fewest():
    rows = [row(0.0, success=True), row(0.0)]
    rows[0].turns[0].tool_calls = 3
    recipe = recipes.build("otc")
    objective = recipe.objective
    said = []
    for calls in (3, 2, 5):
        rows[0].turns[0].tool_calls = calls
        objective.credit(packed(*rows)[0])
        said.append(objective.memory.of(recipe.advantage.value)["tasks"]["task 0"])
    assert said == [3.0, 2.0, 2.0]


def test_information_by_hand():
    batch, _ = packed(*(row(0.0, (4,)) for _ in range(3)))
    said = lambda *texts: replace(batch, token=batch.tree.field(TOKEN, [ord(c) for t in texts for c in t], torch.int64))  # noqa: E731
    same = said("abca", "abca", "abca")
    assert credit(recipes.build("information_consistency"), same).tolist() == near([0.0] * 12)
    richer = credit(recipes.build("information_consistency", stable=0.0), said("abcd", "abca", "abca"))
    assert richer[0] > 0 > richer[4]
