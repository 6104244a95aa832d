"""Credit by turns, states and what a turn tells: what the pieces reduce to, and numbers worked out by hand."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import credit_turns as oracle
from oracles import objectives, records
from support.batches import COUNTS, records_of
from support.turn_helpers import converted, credit, critic, enrich_plain, made, near, one_turn, path, value

from turnwise import recipes
from turnwise.algebra.advantage import Standardise, Whiten
from turnwise.algebra.reward import EnvironmentReward, NegativeReferenceKL, OnLastToken
from turnwise.algebra.term import Term
from turnwise.algebra.value import GAE, LambdaReturn, Measured, ReturnToGo
from turnwise.core.batch import pack
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition
from turnwise.core.signals import Signal
from turnwise.credit.fact import Fact
from turnwise.recipes.families.turn_credit import (
    AnswerProbabilityGain,
    BiLevelGAE,
    FeedbackInformationGain,
    HierarchyOfGroups,
    LowSpreadGate,
    RandomGroups,
    ReturnUntilMismatch,
    SameRecentStates,
    SameTransition,
    feedback_was_masked,
)

SEEDS = st.integers(0, 10**6)


# --------------------------------------------------------------------- critics


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS, gamma=st.floats(0, 1), lam=st.floats(0, 1), beta=st.floats(0, 1), whiten=st.booleans())
def test_gae_with_and_without_a_kl_in_the_reward(seed, gamma, lam, beta, whiten):
    reference = made(seed)
    batch, _ = converted(reference)
    batch = batch.put({Signal.PROXIMAL: batch.behaviour})
    reward = OnLastToken() + beta * NegativeReferenceKL()
    plain = GAE(gamma, lam)
    objective = recipes.build("ppo").objective
    objective = replace(objective, advantage=Whiten(plain) if whiten else plain, reward=reward)
    credited = objective.credit(batch)
    theirs = oracle.gae_tokens(reference, gamma, lam, beta, whiten)
    assert credited["advantage"].x.tolist() == near(theirs.advantage, 1e-7)
    assert LambdaReturn(gamma, lam)(credited).x.tolist() == near(theirs.extra["returns"])


def test_token_gae_with_whitening_is_ppo():
    reference = made(3)
    assert credit("ppo", reference, gamma=0.9) == near(oracle.gae_tokens(reference, gamma=0.9).advantage)


def test_gae_golden():
    reference = critic([0, 0, 1], [0.2, 0.5, 0.8])
    assert value(GAE(), reference) == near([0.7655, 0.49, 0.2])
    assert value(LambdaReturn(), reference) == near([0.9655, 0.99, 1.0])
    assert value(BiLevelGAE(turn_gamma=1.0), reference) == near([0.7655, 0.49, 0.2])


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_gae_reduces(seed):
    reference = made(seed)
    batch = converted(reference)[0]
    v, paid = batch[Signal.OLD_VALUE], ReturnToGo(0.0, TOKEN)(batch)
    # lambda = 0: the TD error
    after = torch.cat([v.x[1:], v.x[:1]])
    last = (batch.tree.size(TOKEN, TRAJECTORY) - batch.tree.index(TOKEN, TRAJECTORY) <= 1).x
    td = paid.x + 0.9 * torch.where(last, 0.0, after) - v.x
    torch.testing.assert_close(GAE(0.9, 0.0)(batch).x, td)
    # lambda = 1, V = 0: reward to go
    blank = batch.put({Signal.OLD_VALUE: v.map(torch.zeros_like)})
    torch.testing.assert_close(GAE(1.0, 1.0)(blank).x, ReturnToGo(1.0, TOKEN)(batch).x)
    # gamma = lambda = 1 and a reward at the end alone: R − V of every token
    for trajectory in records.trajectories(reference):
        for turn in trajectory.turns:
            turn.reward = 0.0
        trajectory.turns[-1].reward = 1.5
    assert value(GAE(1.0, 1.0), reference) == near([1.5 - one.old_value for one in records.tokens(reference)])


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_two_levels_are_one_where_one_is_trivial(seed):
    """One turn: its return is its reward. One token a turn: nothing runs inside it."""
    reference = one_turn(seed)
    for at, one in enumerate(records.tokens(reference)):
        one.old_value = math.sin(at)
    assert value(BiLevelGAE(0.9), reference) == near(value(GAE(0.9), reference))
    reference = critic([0.3, -1.0, 2.0], [0.2, 0.5, 0.8])
    assert value(BiLevelGAE(turn_gamma=0.7), reference) == near(value(GAE(0.7), reference))
    assert value(BiLevelGAE() + Measured(Signal.OLD_VALUE), reference) == near(
        oracle.bilevel_gae(reference).extra["returns"]
    )


# ---------------------------------------------------------------------- states


def unique_states(reference: records.Batch) -> records.Batch:
    for at, (*_, turn) in enumerate(oracle.steps(reference)):
        turn.facts["state"] = str(at)
    return reference


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_gigpo_reduces(seed):
    reference, single = made(seed), one_turn(seed)
    # omega = 0: GRPO, without the scale Dr.GRPO
    assert credit("gigpo", reference, omega=0.0, rows="trajectory") == near(credit("dr_grpo", reference))
    assert credit("gigpo", reference, omega=0.0, rows="trajectory", scale=True) == near(credit("grpo", reference))
    # one turn from one state: 1 + omega times the group's
    for rows in ("turn", "trajectory"):
        expected = [1.7 * a for a in credit("dr_grpo", single)]
        assert credit("gigpo", single, omega=0.7, rows=rows) == near(expected)
    # no two states alike: nothing to compare
    unique_states(reference)
    for scale in (False, True):
        alone = credit("gigpo", reference, omega=0.0, scale=scale)
        assert credit("gigpo", reference, omega=3.0, scale=scale) == near(alone)


def test_an_unknown_state_is_nobodys_peer():
    reference = enrich_plain([[path([0, 1]), path([2])]])
    for *_, turn in oracle.steps(reference):
        turn.facts["state"] = None
    for kin in (SameRecentStates(), SameTransition()):
        assert kin(converted(reference)[0]).count == 3
    assert credit("gigpo", reference) == near(credit("gigpo", reference, omega=0.0))
    assert credit("salt", reference) == near(credit("grpo", reference))


def test_hgpo_golden():
    """Levels +1 and −½ with weights 2/5 and 3/5: 0.1."""
    group = [
        path([0, 1.0], state=["a", "b"]),
        path([0, 2.0], state=["a", "b"]),
        path([0, -1.5], state=["c", "b"]),
        path([0, -1.5], state=["c", "b"]),
    ]  # at b: 1 above the mean of all, ½ below that of those who came from a
    term = HierarchyOfGroups(ReturnToGo(), history=1, scale=False)
    assert value(term, enrich_plain([group]))[1] == near(0.10, 1e-6)
    assert value(HierarchyOfGroups(ReturnToGo(), 1, alpha=0.0, scale=False), [group])[1] == near(
        0.25, 1e-6
    )  # plain mean
    assert value(HierarchyOfGroups(ReturnToGo(), 1, alpha=200.0, scale=False), [group])[1] == near(
        -0.5, 1e-6
    )  # the finest


def test_what_differs_by_rounding_is_a_level_without_a_peer():
    """A billionth from the mean counts as 0, twice as much does not."""
    term = HierarchyOfGroups(ReturnToGo(), history=0, scale=False)
    for gap, expected in ((1e-9, [0.0, 0.0]), (2e-9, [-2e-9, 2e-9])):
        batch = pack(records_of([[[1]], [[1]]], 0))
        paid = Field(batch.tree, TURN, torch.tensor([0.0, 2 * gap], dtype=torch.float64))
        among = term._among(paid, Partition.by(batch.tree, TURN, torch.zeros(2, dtype=torch.int64)))
        assert among.x.tolist() == expected


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_hgpo_without_history_is_the_step_term(seed):
    reference = made(seed)
    step = value(Standardise(ReturnToGo(0.9), SameRecentStates(), scale=False), reference)
    assert value(HierarchyOfGroups(ReturnToGo(0.9), 0, scale=False), reference) == near(step, 1e-5)
    scaled = value(Standardise(ReturnToGo(0.9), SameRecentStates(), correction=0), reference)
    assert value(HierarchyOfGroups(ReturnToGo(0.9), 0), reference) == near(scaled, 1e-5)


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS, window=st.integers(0, 3))
def test_salt_reduces(seed, window):
    # a step shared by the whole group is neutral
    single = one_turn(seed)
    for base in ("grpo", "rloo"):
        assert credit("salt", single, base=base) == near([0.0] * len(credit("salt", single)))
    # merging keeps the sum of a step that everyone takes at most once
    reference = made(seed)
    batch = converted(reference)[0]
    peers = SameTransition(window)(batch)
    again = Partition.by(batch.tree, TURN, peers.label, batch.tree.ancestor(TURN, TRAJECTORY))
    base = Standardise()(batch).at(TURN)
    merged = recipes.build("salt", window=window).advantage(batch)
    once = base.peer_count(again).max(peers).x == 1
    torch.testing.assert_close(merged.sum(peers).x[once], base.sum(peers).x[once])
    # no shared step: the base
    unique_states(reference)
    assert credit("salt", reference, window=window) == near(credit("grpo", reference))
    lone = [len(group) == 1 for group in reference for t in group for _ in records.sampled(t)]
    expected = [0.0 if one else a for one, a in zip(lone, credit("rloo", reference))]
    assert credit("salt", reference, window=window, base="rloo") == near(expected)


def test_salt_by_hand():
    group = [
        path([0, 1], state=["a", "b"], action=["x", "y"]),
        path([0, 0], state=["a", "b"], action=["x", "z"]),
        path([0, 0, 2], state=["c", "a", "b"], action=["x", "x", "y"]),
    ]
    assert credit("salt", [group], base="rloo") == near([-0.75, 0, -0.75, -1.5, 1.5, 1.5, 1.5])
    assert credit("salt", [group], base="rloo", window=0) == near([0, 0.75, 0, -1.5, 1.5, 0, 0.75])


# ----------------------------------------------------------------- information


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_igpo_reduces(seed):
    # the rises telescope: without the last turn they sum to the last probability minus the first
    reference = made(seed)
    batch = converted(reference)[0]
    p = batch[Signal.ANSWER_LOGP].exp()
    index, size = batch.tree.index(TURN, TRAJECTORY), batch.tree.size(TURN, TRAJECTORY)
    at = lambda mark: (p * mark.to(torch.float64)).sum(TRAJECTORY)  # noqa: E731
    sums = AnswerProbabilityGain(0.0)(batch).sum(TRAJECTORY)
    torch.testing.assert_close(sums.x, (at(size - index <= 1) - at(index <= 0)).x)
    # nothing told on the way and equal lengths: the same credit for all turns, Dr.GRPO's in the released form
    flat = [[path([0, 0, r], [2, 1, 2]) for r in (1.0, -1.0, 0.5, -0.5)]]
    assert credit("igpo", flat, form="code") == near(credit("dr_grpo", flat))
    scale = objectives.std([0.0] * 8 + [1.0, -1.0, 0.5, -0.5]) + 1e-6
    assert credit("igpo", flat) == near([r / scale for r in (1.0, -1.0, 0.5, -0.5) for _ in range(5)])
    # one turn: GRPO
    assert credit("igpo", one_turn(seed)) == near(credit("grpo", one_turn(seed)))


def test_igpo_by_hand():
    reference = [[path([0, 1]), path([0])]]
    reference[0][0].before, reference[0][0].turns[0].answer = math.log(0.25), math.log(0.75)
    z = [(one - 0.5) / (0.5 + 1e-6) for one in (0.5, 1.0, 0.0)]
    assert credit("igpo", reference, gamma=0.5) == near([z[0] + 0.5 * z[1], z[1], z[2]])
    assert credit("igpo", reference, form="code") == near([0.75, 0.5, -0.75])


@dataclass(frozen=True)
class One(Term):
    """1 for every group."""

    def __call__(self, batch):
        return batch.tree.full(GROUP, 1.0, torch.float64)


def test_infopo_golden():
    """The gate at four spreads of the outcome."""
    reference = [[path([0]), path([std * math.sqrt(2)])] for std in (0, 0.05, 0.2, 0.5)]
    found = value(LowSpreadGate(One(), 0.05), reference)
    assert found[:3] == near([0.5, 0.2689, 0.0180], 5e-5)
    assert found[3] == near(4.5e-5, 1e-6)


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_infopo_reduces(seed):
    reference = made(seed)
    assert credit("infopo", reference, beta=0.0) == near(credit("grpo", reference))
    # outcomes alike: half of beta times the information
    for *_, turn in oracle.steps(reference):
        turn.reward = 0.0
    theirs = oracle.infopo(reference, beta=0.4)
    expected = [0.2 * theirs.extra["scale"] * one for one in theirs.extra["information"]]
    assert credit("infopo", reference, beta=0.4) == near(expected)
    # an answer like no answer tells nothing
    for one in records.tokens(reference):
        one.facts["blind"] = one.behaviour
    assert set(value(FeedbackInformationGain(), reference)) == {0.0}
    assert credit("infopo", reference) == near(credit("infopo", reference, beta=0.0))


def test_a2tgpo_golden():
    """z = 1, −½, ½ and the answer: D = 1/√3, 0, ½, 0 and windows 1.13864, 0.92652, 1.07348, 1. One turn before it: D = z."""
    above, below = 0.25 + math.sqrt(0.8125), 0.25 - math.sqrt(0.8125)  # with −½ a sample of mean 0 and variance 1
    rises = [(1, -0.5, 0.5), (0, above, -above), (-1, below, -below)]
    group = [path([0, 0, 0, 0]) for _ in rises]
    for trajectory, gains in zip(group, rises):
        for turn, answer in zip(trajectory.turns, itertools.accumulate(gains)):
            turn.answer = answer
    objective = recipes.build("a2tgpo", alpha=1.0).objective
    planned = objective.plan(objective.credit(converted([group])[0]))
    assert planned["advantage"].x.tolist()[:4] == near([0.57735, 0, 0.5, 0], 1e-5)
    assert planned[objective.gate].x.tolist()[:4] == near([1.13864, 0.92652, 1.07348, 1], 1e-5)
    pair = [[path([0, 0]), path([0, 0])]]
    for trajectory, rise in zip(pair[0], (2.0, 0.0)):
        trajectory.turns[0].answer = rise
    half = math.sqrt(0.5)
    assert credit("a2tgpo", pair, alpha=1.0) == near([half, 0, -half, 0], 1e-5)
    assert credit("a2tgpo", made(1), alpha=0.0) == near(credit("grpo", made(1)))


# -------------------------------------------------------- roles, indices, lots


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_mars_reduces(seed):
    single = one_turn(seed)
    assert credit("mars", single) == near(credit("dr_grpo", single))
    merged = [[t for group in single for t in group]]
    assert credit("mars", single, game="domain") == near(credit("dr_grpo", merged))
    reference = made(seed)
    for *_, turn in oracle.steps(reference):
        turn.facts["agent"] = 0
    expected = Standardise(ReturnToGo(), GROUP, scale=False)(converted(reference)[0]).at(TOKEN).x.tolist()
    assert credit("mars", reference) == near(expected)


def test_mars_by_hand():
    reference = [[path([1, 2, 4], agent=[0, 1, 0]), path([0, 8], agent=[0, 1])]]
    assert credit("mars", reference) == near([2, -3, 1, -3, 3])


def test_trloo_golden():
    reference = [[path([0, 1]), path([1, 0]), path([0, 0])]]
    assert value(ReturnToGo(0.9), reference) == near([0.9, 1, 1, 0, 0, 0])
    assert credit("trloo", reference, gamma=0.9) == near([0.40, 1.0, 0.55, -0.5, -0.95, -0.5])


def test_trloo_filters():
    reference = [[path([0, 1, 5], valid=[True, False, True]), path([1, 0], valid=[True, True])]]
    assert credit("trloo", reference) == near([5, 0, 5, -5, 0])
    reference[0][1].turns[1].reward = 3.0
    assert credit("trloo", reference) == near([2, 0, 5, -2, 3])


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_trloo_reduces(seed):
    assert credit("trloo", one_turn(seed)) == near(credit("rloo", one_turn(seed)))
    # N/(N − 1) times the centred return of its turn index
    reference = made(seed)
    for *_, turn in oracle.steps(reference):
        turn.facts["valid"] = True
    batch = converted(reference)[0]
    peers = batch.same("index")
    g = ReturnToGo(0.9)(batch)
    n = g.peer_count(peers)
    centred = (g - g.mean(peers)).x * (n.x / (n.x - 1).clamp(min=1))
    expected = Field(batch.tree, TURN, torch.where(n.x > 1, centred, g.x)).at(TOKEN).x.tolist()
    assert credit("trloo", reference, gamma=0.9) == near(expected)


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_flow_grpo_reduces(seed):
    for rows in ("turn", "trajectory"):
        assert credit("flow_grpo", one_turn(seed), rows=rows) == near(credit("grpo", one_turn(seed)))


def test_flow_grpo_rows():
    reference = [[path([0, 0, 1], planner=[True, True, False]), path([0], planner=[True])]]
    third = objectives.std([1.0, 1.0, 0.0]) + 1e-6
    assert credit("flow_grpo", reference, rows="turn") == near([1 / 3 / third, 1 / 3 / third, 0, -2 / 3 / third])
    half = math.sqrt(0.5)
    assert credit("flow_grpo", reference, rows="trajectory") == near([half, half, 0, -half], 1e-5)


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_srgpo_reduces(seed):
    reference = made(seed)
    assert credit("srgpo", reference, omega=0.0, rows="trajectory") == near(credit("grpo", reference))
    alone = credit("srgpo", reference, omega=0.0)
    assert credit("srgpo", reference, size=1) == near(alone)
    # one group of all: whatever the lots
    whole = Standardise(EnvironmentReward(), BATCH)(converted(reference)[0]).at(TOKEN).x.tolist()
    expected = [a + 0.5 * z for a, z in zip(alone, whole)]
    turns = len(oracle.steps(reference))
    small = credit("srgpo", reference, size=4)
    for shift in (0, 1):
        for trajectory in records.trajectories(reference):
            trajectory.lot = (trajectory.lot + 0.37 * shift) % 1
        for size in (turns, turns + 5, -1):
            assert credit("srgpo", reference, size=size) == near(expected)
    assert credit("srgpo", reference, size=4) != near(small)


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS, size=st.integers(1, 5), within=st.sampled_from(["batch", "task", "trajectory"]))
def test_drawn_groups_have_their_size(seed, size, within):
    batch = converted(made(seed))[0]
    peers = RandomGroups(size, within)(batch)
    level = {"batch": BATCH, "task": GROUP, "trajectory": TRAJECTORY}[within]
    counts = torch.bincount(peers.label)
    pools = batch.tree.size(TURN, level).x
    assert counts.max() <= size and peers.count == int(((pools + size - 1) // size).sum())


def test_ui_s1_golden():
    term = ReturnUntilMismatch(Fact("match", TURN), 0.5)
    matched = lambda rewards, match: value(term, [[path(rewards, match=match)]])  # noqa: E731
    assert matched([1, 1, 0, 1], [True, True, False, True]) == near([1.5, 1, 0, 1])
    assert matched([1, 4, 1], [True, False, True]) == near([1, 4, 1])


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_ui_s1_reduces(seed):
    reference = made(seed)
    batch = converted(reference)[0]
    index = batch.same("index")
    step = (batch.reward - batch.reward.mean(index)) / (batch.reward.std(index) + 1e-6)
    # gamma = 0, episodes weigh nothing: GRPO of single steps
    assert credit("ui_s1", reference, episode_weight=0.0, gamma=0.0) == near(step.at(TOKEN).x.tolist())
    # everything matches, gamma = 1: reward to go
    for *_, turn in oracle.steps(reference):
        turn.facts["match"] = True
    matched = value(ReturnUntilMismatch(Fact("match", TURN), 1.0), reference)
    assert matched == near(value(ReturnToGo(), reference))


def test_ui_s1_lone_episodes():
    assert credit("ui_s1", [[path([3], match=[True])]]) == near([3])
    half = 1 / (2**0.5 + 1e-6)  # two steps of one episode: (3 − 2)/(√2 + ε)
    assert credit("ui_s1", [[path([3, 1], match=[True, True])]]) == near([half, -half])


# ------------------------------------------------------------ what was not masked


@settings(deadline=None, max_examples=60)
@given(counts=COUNTS, seed=st.integers(0, 10**6))
def test_a_turn_before_which_nothing_was_masked_gains_exactly_nothing(counts, seed):
    """Found by a loop over the records; two readings of one text differ by rounding, which is no information."""
    rng = random.Random(seed)
    groups, changed = [], []
    for group in records_of(counts, seed, asks=frozenset({"feedback"})):
        members = []
        for t in group.trajectories:
            turns, pending = [], False
            for turn in t.turns:
                mask = rng.random() < 0.5
                blind = tuple(1 + i for i in turn.context) if mask else turn.context
                turns.append(replace(turn, masked_context=blind))
                pending = mask or (pending and not turn.restart)
                changed.append(pending and bool(turn.tokens))
                pending = pending and not turn.tokens
            members.append(replace(t, turns=tuple(turns)))
        groups.append(replace(group, trajectories=tuple(members)))
    batch = pack(groups)
    assert feedback_was_masked(batch).x.tolist() == changed
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    mixed = batch.select(order)
    back = batch.tree.select(order)[1][1]
    assert torch.equal(feedback_was_masked(mixed).x, feedback_was_masked(batch).x[back])
    noisy = batch.put({Signal.LOGP_WITHOUT_FEEDBACK: batch.behaviour + 1e-3})
    gain = FeedbackInformationGain(shared=False)(noisy).x
    answered = [n + 1 < len(changed) and changed[n + 1] for n in range(len(changed))]
    last = (batch.tree.index(TURN, TRAJECTORY) + 1).x == batch.tree.size(TURN, TRAJECTORY).at(TURN).x
    asked = Field(batch.tree, TURN, torch.tensor(answered, dtype=torch.bool) & ~last).at(TOKEN).x
    assert bool((gain[~asked] == 0).all()) and bool((gain[asked] != 0).all())


def test_where_nobody_recorded_what_was_masked_every_turn_counts():
    assert bool(feedback_was_masked(pack(records_of([[[1, 2], [2]]], 0))).x.all())
