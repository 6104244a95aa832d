"""Methods that learn from expert text, past successes and teachers: against their oracles, and their limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import offpolicy, others, records
from support.other_helpers import built, enriched, near, packed, plain, proven, ran, rewarded, row, same, slope
from support.proven import OTHERS

from turnwise import recipes
from turnwise.algebra.advantage import Standardise
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.gate import Clip, NoGate, ScoreFunction
from turnwise.algebra.penalty import NegativeLogLikelihood, WeightedPenalty
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.ratio import Importance, OnPolicy
from turnwise.algebra.value import Constant
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.credit.selectors import FromOrigin
from turnwise.credit.self_imitation import PastMedian, cosine_decay
from turnwise.recipes.families.experts_and_replay import (
    PatchFailedGroups,
    ShapedProbability,
    UnrewardedGroups,
    WarmupCosine,
    WeightedNegativeLogLikelihood,
)
from turnwise.recipes.recipe import Recipe

SEEDS = st.integers(0, 10**6)
FIXED = range(6)

CASES = [  # ours, theirs, and at which step where it matters
    ("chord", {}, {}, 0),
    ("chord", {"weight": "phi", "peak": 0.1, "valley": 0.1}, {"weight": "phi", "peak": 0.1, "valley": 0.1}, 7),
    (
        "chord",
        {"weight": "is", "rise": 20, "fall": 40, "peak": 0.5, "valley": 0.02, "cutoff": 0.05, "clip": 0.1},
        {"weight": "is", "warmup": 20, "decay": 40, "peak": 0.5, "valley": 0.02, "cutoff": 0.05, "clip": 0.1},
        33,
    ),
    ("chord", {"rise": 20, "fall": 40}, {"warmup": 20, "decay": 40}, 9),
    ("chord", {"rise": 20, "fall": 40}, {"warmup": 20, "decay": 40}, 99),
    ("hpt", {}, {}, 0),
    (
        "hpt",
        {"gate": 0.5, "coef": 0.3, "length": 7, "low": 0.2, "high": 0.2},
        {"gate": 0.5, "coef": 0.3, "length": 7, "clip": 0.2},
        0,
    ),
    ("luffy", {}, {}, 0),
    ("luffy", {"shape": 0.3, "normalise": True, "length": 9}, {"shape": 0.3, "normalise": True, "length": 9}, 0),
    ("luffy", {"kind": "power", "power": 0.3}, {"kind": "power", "power": 0.3}, 0),
    ("luffy", {"kind": "none"}, {"kind": "none"}, 0),
    ("luffy", {"kind": "log"}, {"kind": "log"}, 0),
    ("guide", {}, {}, 0),
    ("guide", {"clip": 0.05}, {"clip": 0.05}, 0),
    ("adhint", {}, {}, 0),
    ("adhint", {"clip": 0.05}, {"clip": 0.05}, 0),
    ("arpo_gui", {}, {}, 0),
    ("arpo_gui", {"low": 0.1, "high": 0.1, "dual": None}, {"low": 0.1, "high": 0.1, "dual": None}, 0),
    ("bepa", {}, {}, 0),
    ("bepa", {"shape": 0.4, "low": 0.1, "high": 0.4}, {"shape": 0.4, "low": 0.1, "high": 0.4}, 0),
    ("bepa", {"kind": "same"}, {"mode": "recompute"}, 0),
    ("r1v2", {}, {}, 0),
    (
        "r1v2",
        {"beta": 0.5, "preference": 0.3, "quality": 2.0, "generation": 0.1, "delta": 0.2, "clip": 0.1},
        {"beta": 0.5, "preference": 0.3, "quality": 2.0, "generation": 0.1, "delta": 0.2, "clip": 0.1},
        0,
    ),
    ("opd", {}, {}, 0),
    ("opd", {"lam": 1.0, "clip": 0.1}, {"lam": 1.0, "clip": 0.1}, 0),
    ("opd", {"lam": 0.0}, {"lam": 0.0}, 0),
    ("opd_corrected", {}, {"cap": 5.0}, 0),
    ("opd_corrected", {"lam": 1.0, "cap": 1.1}, {"lam": 1.0, "cap": 1.1}, 0),
]  # fmt: skip


def latest(reference: records.Batch) -> records.Batch:
    """The oracle's cache is the group's last stored row, else its last expert's; ours is the youngest, then by lot."""
    for group in reference:
        for age, one in enumerate(reversed(others.of(group, "replay"))):
            one.facts["age"] = age
        shown = others.of(group, "expert")
        for one, lot in zip(reversed(shown), sorted(one.lot for one in shown)):
            one.lot = lot
    return reference


def first_shown(reference: records.Batch) -> records.Batch:
    for group in reference:
        shown = others.of(group, "expert")
        for one, lot in zip(shown, sorted(one.lot for one in shown)):
            one.lot = lot
    return reference


PREPARED = {"bepa": latest, "hpt": first_shown}


@pytest.mark.parametrize(("name", "mine", "theirs", "step"), CASES)
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_oracle(name, mine, theirs, step, seed):
    reference = PREPARED.get(name, lambda one: one)(enriched(seed))
    batch, policy = packed(reference)
    at = {"step": step} if name == "chord" else {}
    expected = getattr(others, name.removesuffix("_corrected"))(reference, **theirs, **at)
    objective = built(name, step, **mine)
    proven(objective, batch, policy, reference, expected)
    if "used" in expected.extra and name != "hpt":  # the rule itself, row by row
        assert objective.keep.select(batch).x.tolist() == expected.extra["used"]


@pytest.mark.parametrize("step", [0, 60, 150, 400])
@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"covariance": 0.5, "length": 9, "oldest": 4, "tool_horizon": 200},
        {"bonus": 0.0, "imitation": 0.0, "low": 0.1},
    ],
)
@settings(deadline=None, max_examples=10)
@given(seed=SEEDS, past=st.lists(st.floats(-1, 2), max_size=4))
def test_spear_replay(step, hyper, seed, past):
    reference = enriched(seed)
    batch, policy = packed(reference)
    theirs = {name: hyper[name] for name in hyper if name not in ("bonus", "imitation")}
    theirs |= {"bonus": hyper.get("bonus", 1.0) > 0, "imitate": hyper.get("imitation", 1.0) > 0}
    narrow = {"least": 0.01, "most": 40.0} if "covariance" in hyper else {}
    expected = others.spear_replay(reference, step, list(past), **theirs, **narrow)
    recipe = recipes.build("spear_replay", **hyper)
    if narrow:  # the usual window is wide of small batches
        recipe = narrowed(recipe)
    objective = built(recipe, step)
    memory = next(p for p in objective.advantage.parts if isinstance(p, PastMedian))
    objective.memory.of(memory)["means"] = list(past)
    proven(objective, batch, policy, reference, expected)
    near(objective.memory.of(memory)["means"], expected.extra["history"])


def narrowed(recipe: Recipe) -> Recipe:
    def behind(gate):
        return replace(gate, mask=replace(gate.mask, low=0.01))

    (again,) = recipe.penalties
    again = replace(again, penalty=replace(again.penalty, gate=behind(again.penalty.gate)))
    return replace(recipe, gate=behind(recipe.gate), penalties=(again,))


@pytest.mark.parametrize("tau", [1.0, 0.4])
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_scope(tau, seed):
    """The oracle weighs by the present policy; that of the start of the batch is the same before the first update."""
    reference = enriched(seed)
    for token in records.tokens(reference):
        token.proximal = token.logp.item()
    batch, policy = packed(reference)
    proven(built("scope", tau=tau), batch, policy, reference, others.scope(reference, tau))


@pytest.mark.parametrize(("negative", "candidates"), [(-0.1, 8), (-0.3, 4), (0.0, 4)])
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_otr(negative, candidates, seed):
    """With as many candidates at every token; the others' gradients are each that of their sum."""
    reference = enriched(seed)
    for at, token in enumerate(records.tokens(reference)):
        hits = at % (candidates + 1)
        token.facts["hits"] = hits
        token.facts["others"] = [records.leaf(-1.0 - (at + j) % 5) for j in range(candidates - hits)]
    batch, policy = packed(reference)
    expected = others.otr(reference, negative)
    objective = built("otr", negative=negative, candidates=candidates)
    proven(objective, batch, policy, reference, expected)
    rivals = slope(ran(objective, batch, policy)[1], policy[Signal.CANDIDATE_LOGP].x)
    for token, found in zip(records.tokens(reference), rivals.tolist()):
        if token.facts["others"] and expected.loss.requires_grad:
            near(found, slope(expected.loss, token.facts["others"][0]))


# ----------------------------------------------------------------- own counts


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("seed", FIXED)
def test_every_part_has_a_count_of_its_own(name, seed):
    """One trajectory at a time, the losses add up to the whole: no mean over what happens to be in a micro-batch."""
    batch, policy = packed(enriched(seed))
    objective = built(name, 60)
    planned = objective.plan(objective.credit(batch))
    whole = objective(planned, policy).loss
    rows = planned.put(row=Field(planned.tree, TOKEN, torch.arange(planned.tree.count(TOKEN))))
    parts = [rows.select([k]) for k in range(len(rows))]
    cut = lambda part: {s: Field(part.tree, TOKEN, f.x[part["row"].x]) for s, f in policy.items()}  # noqa: E731
    summed = sum(objective(part, cut(part)).loss for part in parts)
    near(summed.detach(), whole.detach())
    near(slope(summed, policy[Signal.LOGP].x), slope(whole, policy[Signal.LOGP].x))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("origin", ["policy", "expert", "replay"])
def test_what_is_not_there_is_nothing(name, origin):
    """All rows of one origin: the oracle's loss, and exactly 0 where no row takes part."""
    for seed in FIXED:
        reference = enriched(seed)
        for one in records.trajectories(reference):
            one.facts["origin"] = origin
            one.facts.pop("chosen", None)
            one.facts["age"] = math.inf if origin == "expert" else one.facts.get("age", 0)
        reference = PREPARED.get(name, lambda one: one)(reference)
        for token in records.tokens(reference):
            token.proximal = token.logp.item()
            token.facts.update(hits=2, others=[records.leaf(-1.0)] * 6)
        batch, policy = packed(reference)
        theirs = {"cap": 5.0} if name == "opd_corrected" else {"step": 60} if name in ("chord", "spear_replay") else {}
        expected = getattr(others, name.removesuffix("_corrected"))(reference, **theirs)
        stats = proven(built(name, 60), batch, policy, reference, expected)
        if not any(records.gradients(reference, expected.loss)):
            assert all(float(stats[key]) == 0 for key in stats if key.startswith("penalty/") or key == "objective")


# --------------------------------------------------------------------- limits


def test_chord_schedule():
    found = [WarmupCosine(200, 400, 0.5, 0.02).at(s) for s in (0, 100, 200, 400, 600)]
    assert found == pytest.approx([0, 0.25, 0.5, 0.26, 0.02])
    assert [WarmupCosine(0, 1, 1.0, 0.0).at(s) for s in (0, 1, 2)] == [1, 0, 0]  # first imitate, then reinforce


@pytest.mark.parametrize("seed", FIXED)
def test_chord_between_its_ends(seed):
    batch, policy = packed(plain(seed))
    plain_grpo = Recipe(advantage=Standardise(), gate=Clip(0.2, 0.2, 3.0), aggregate=Mean(TOKEN))
    same(built("chord", peak=0.0, valley=0.0), built(plain_grpo), batch, policy)
    shown = replace(batch, expert=batch.expert.map(torch.ones_like))
    imitate = Recipe(
        advantage=Constant(0.0), aggregate=Mean(TOKEN), penalties=(WeightedPenalty(1.0, NegativeLogLikelihood()),)
    )
    same(built("chord", peak=1.0, valley=1.0), built(imitate), shown, policy)
    sure = packed(enriched(seed))
    same(built("chord", 30, weight="none"), built("chord", 30), *sure)


@pytest.mark.parametrize(("p", "phi"), [(0.5, 0.25), (1.0, 0.0), (0.2, 0.16), (1e-12, 0.0)])
def test_what_the_policy_is_unsure_of(p, phi):
    """The weight is largest at ½ and carries no gradient: a finite difference of −φ log π with φ held still."""
    batch, policy = packed([[row([math.log(p)], origin="expert")]])
    loss = ran(built("chord", weight="phi", peak=1.0, valley=1.0), batch, policy)[1]
    near(slope(loss, policy[Signal.LOGP].x), [-phi])
    near(loss.detach(), -phi * math.log(p))
    step = 1e-6
    near((-phi * (math.log(p) + step) + phi * (math.log(p) - step)) / (2 * step), -phi)


def test_likely_tokens_teach_nothing_beyond_the_cutoff():
    batch, policy = packed([[row([math.log(0.6), math.log(0.3)], origin="expert")]])
    for hyper, expected in (({"cutoff": 0.5}, [0.0, -0.5]), ({"weight": "is"}, [-0.3, -0.15])):
        loss = ran(built("chord", peak=1.0, valley=1.0, **hyper), batch, policy)[1]
        near(slope(loss, policy[Signal.LOGP].x), expected)
    with pytest.raises(ValueError, match="write none or phi or is"):
        WeightedNegativeLogLikelihood("psi")


def test_four_parts_of_one_gradient():
    """mask · 1/π_ref · A · ∇π: imitation is A = 1 over the policy itself, PPO at ρ = 1 is REINFORCE."""
    batch, policy = packed([[row([-1.7, -0.4], 0.3)]])
    now, logp = MicroBatchView(batch, policy), policy[Signal.LOGP].x
    near(slope(OnPolicy()(now).x.sum(), logp), slope(-NegativeLogLikelihood()(now).x.sum(), logp))
    near(slope((0.3 * Importance()(now)).x.sum(), logp), slope((0.3 * ScoreFunction()(None, None, now)).x.sum(), logp))


@pytest.mark.parametrize("seed", FIXED)
def test_hpt_between_its_ends(seed):
    batch, policy = packed(plain(seed))
    same(built("hpt", gate=-1.0, low=0.2, high=0.2), built("dr_grpo"), batch, policy)
    shown = replace(batch, expert=batch.expert.map(torch.ones_like))
    objective = built("hpt", gate=1.0)
    only = objective.penalties[0].rows
    assert only.select(shown).to(torch.int64).sum(TRAJECTORY + 1).x.tolist() == [1] * shown.tree.count(TRAJECTORY + 1)
    imitate = WeightedPenalty(1.0, NegativeLogLikelihood(), Mean(TRAJECTORY), rows=only)
    same(objective, built(Recipe(advantage=Constant(0.0), penalties=(imitate,))), shown, policy)


def test_hpt_gate():
    def loss(solved: int, **hyper) -> float:
        rows = [row([-1.0], float(i < solved), i < solved) for i in range(4)]
        return ran(built("hpt", **hyper), *packed([[*rows, row([-2.0, -4.0], 1.0, origin="expert")]]))[1].item()

    assert loss(0) == pytest.approx(3.0)
    assert loss(0, coef=0.3) == pytest.approx(0.9)
    assert loss(1) == pytest.approx(0.0)
    assert loss(1, gate=0.25) == pytest.approx(3.0)


@pytest.mark.parametrize("seed", FIXED)
def test_luffy_without_an_expert(seed):
    open_ = Recipe(advantage=Standardise(scale=False), gate=NoGate(), aggregate=Sum(TRAJECTORY, length=64))
    same(built("luffy"), built(open_), *packed(plain(seed)))


@settings(deadline=None, max_examples=25)
@given(p=st.floats(1e-6, 1.0))
def test_policy_shaping(p):
    batch, policy = packed([[row([math.log(p)])]])
    now, logp = MicroBatchView(batch, policy), policy[Signal.LOGP].x
    value = lambda shape: ShapedProbability("ratio", shape)(now).x  # noqa: E731
    near(1e12 * value(1e12).detach(), [p])  # a large shape, scaled back, is p itself
    assert abs(float(slope(value(1e-15).sum(), logp))) < 1e-6  # a small one is 1, without gradient
    near(slope(value(0.1).sum(), logp), [0.1 / (p + 0.1) ** 2 * p])


def test_policy_shaping_goldens():
    for p, expected in ((1e-9, 10.0), (1.0, 0.0826446)):
        batch, policy = packed([[row([math.log(p)])]])
        found = slope(ShapedProbability()(MicroBatchView(batch, policy)).x.sum(), policy[Signal.LOGP].x)
        assert float(found) / p == pytest.approx(expected, rel=1e-6)
    advantage, loss, _ = ran(
        built("luffy", length=1), *packed([[row([-1.0]), row([math.log(0.4)], 1.0, origin="expert")]])
    )
    near(advantage, [-0.5, 0.5])
    near(loss.detach(), (0.5 - 0.5 * 0.8) / 2)


@pytest.mark.parametrize("seed", FIXED)
def test_guide_without_a_hint(seed):
    reference = plain(seed)
    same(built("guide"), built("grpo", beta=0.0), *packed(reference))
    for one in records.trajectories(reference):  # an empty hint: one group of one policy
        one.success = False
        one.facts["guided"] = one.lot < 0.5
    same(built("guide"), built("grpo", beta=0.0), *packed(reference))


@pytest.mark.parametrize("seed", FIXED)
def test_adhint_without_help_is_grpo(seed):
    same(built("adhint"), built("grpo", beta=0.0), *packed(plain(seed)))


def test_adhint_prefers_successes_without_help():
    """Two kinds with the same rewards but a help that was worth 1/2: 1 of 2 without it, 2 of 2 or 3 of 4 with it."""
    rows = [row([-1.0], r, bool(r), guided=helped) for r, helped in
            ((1, False), (0, False), (0, False), (1, True), (1, True), (0, True))]  # fmt: skip
    advantage = ran(built("adhint"), *packed([rows]))[0]
    unit, gap = 1 / 3**0.5, 2 / 3 - 1 / 3  # z-scores of one in three
    expected = [2 * unit * (1 + gap), -unit, -unit, unit * (1 - gap), unit * (1 - gap), -2 * unit]
    assert advantage.tolist() == pytest.approx(expected, abs=1e-5)
    harmful = [row([-1.0], r, bool(r), guided=not helped) for r, helped in ((1, False), (0, False), (1, True), (1, True))]
    first = ran(built("adhint"), *packed([harmful]))[0][:2].tolist()
    assert first == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)  # worse with help: g = 0


def test_guide_divides_by_what_was_sampled_with_the_hint():
    """The recorded log-probability is the hinted one; a ratio of two hinted ones would be 1 and train the hinted policy."""
    rows = [row([-1.0]), row([-1.0]), row([-1.2], 1.0, True, guided=True)]
    records.sampled(rows[2])[0].behaviour = -1.1
    batch, policy = packed([rows])
    advantage, loss, _ = ran(built("guide"), batch, policy)
    found = slope(loss, policy[Signal.LOGP].x)[2]
    near(found, -float(advantage[2]) * math.exp(-0.1) / 3)
    rows[0].success = True
    near(ran(built("guide"), *packed([rows]))[0], [0.0] * 3)


@pytest.mark.parametrize("seed", FIXED)
def test_arpo_without_a_failing_group(seed):
    reference = plain(seed)
    grpo = built("grpo", clip=0.2, beta=0.0)
    same(built("arpo_gui", low=0.2, high=0.2, dual=None), grpo, *packed(reference))
    for group in reference:
        for one in group:
            one.turns[0].reward += 9.0
    before = built("arpo_gui")
    batch, policy = packed([[*group, row([-1.0], 9.0, origin="replay")] for group in reference])
    stored = batch.replayed.at(TOKEN).x
    (_, loss, _), (alone, expected) = ran(before, batch, policy), packed(reference)
    found = slope(loss, policy[Signal.LOGP].x)
    near(found[~stored], slope(ran(built("arpo_gui"), alone, expected)[1], expected[Signal.LOGP].x))
    assert not found[stored].any()


def test_arpo_patches_a_failing_group():
    old = [row([-1.0], 1.0, origin="replay") for _ in range(3)]
    for at, one in enumerate(old):
        one.lot, records.sampled(one)[0].behaviour = (0.9, 0.2, 0.5)[at], -5.0
    fresh = rewarded([row([-1.0]), row([-1.0], 0.02, format=-1.0), row([-1.0])])
    batch, policy = packed([fresh + old])
    objective = built("arpo_gui")
    assert objective.keep.select(batch).x.tolist() == [False, True, True, False, True, False]
    advantage, loss, _ = ran(objective, batch, policy)
    near(slope(loss, policy[Signal.LOGP].x)[4], -advantage[4] / 3)  # ρ = 1, whatever was recorded
    fresh[1].turns[0].reward = 0.5
    assert objective.keep.select(packed([fresh + old])[0]).x.tolist() == [True] * 3 + [False] * 3


def test_bepa_with_own_successes_is_arpo():
    groups = [[*rewarded([row([-1.0, -2.0]), row([-0.5])]), row([-3.0], 1.0, origin="replay")] for _ in range(2)]
    arpo = built("arpo_gui", dual=None, format_weight=0.0)
    same(built("bepa", kind="same", low=0.2, high=0.3), arpo, *packed(groups))


def test_bepa_prefers_its_own_last_success_to_an_expert():
    expert = row([math.log(0.4)], 1.0, origin="expert")
    mine = [row([-1.0], 1.0, origin="replay", age=age) for age in (3, 1, 2)]
    group = [*rewarded([row([-1.0]), row([-1.0])]), expert, *mine]
    rule = built("bepa").keep
    assert rule.select(packed([group])[0]).x.tolist() == [False, True, False, False, True, False]
    assert rule.select(packed([group[:3]])[0]).x.tolist() == [False, True, True]  # a static cache replaces one trace
    assert rule == PatchFailedGroups(UnrewardedGroups(), rule.pool)
    batch, policy = packed([group[:3]])
    advantage, loss, _ = ran(built("bepa"), batch, policy)
    found = slope(loss, policy[Signal.LOGP].x)
    near(found[2], -float(advantage[2]) * 0.1 / 0.25 * 0.4 / 2)


@pytest.mark.parametrize("seed", FIXED)
def test_spear_between_its_ends(seed):
    batch, policy = packed(plain(seed))
    same(built("spear_replay", bonus=0.0, imitation=0.0, high=0.2), built("dr_grpo"), batch, policy)
    reference = plain(seed)[4:5]
    objective = built("spear_replay", bonus=0.0)
    objective.credit(packed(reference)[0])
    memory = next(p for p in objective.advantage.parts if isinstance(p, PastMedian))
    rewards = [records.total(one) for one in reference[0]]
    near(objective.memory.of(memory)["means"], [sum(rewards) / len(rewards)])  # the median of one group is its mean


def test_spear_schedules_and_what_replay_changes():
    assert [cosine_decay(t, 100) for t in (0, 50, 100, 101)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert [1 - cosine_decay(t, 200) for t in (0, 100, 200, 500)] == pytest.approx([0.0, 0.5, 1.0, 1.0])
    fresh = [row([-1.0], 1.0), row([-1.0], 0.0)]
    fresh[0].turns[0].tool_calls = 3
    again = [row([-1.0], reward, origin="replay", age=age) for reward, age in ((1.0, 0), (0.1, 0), (1.0, 11))]

    def found():
        batch, policy = packed([fresh + again])
        objective = built("spear_replay", 100, length=1)
        memory = next(p for p in objective.advantage.parts if isinstance(p, PastMedian))
        objective.memory.of(memory)["means"] = [0.1, 0.4]
        advantage, loss, _ = ran(objective, batch, policy)
        return advantage, slope(loss, policy[Signal.LOGP].x)

    near(found()[0], [0.5, -0.5, 0.6, 0.0, 0.0])
    near(found()[1], [-0.25, 0.25, -0.3, 0.0, 0.0])
    again[0].turns[0].reward = 2.0  # only replayed data changes, and only its gradient
    near(found()[1], [-0.25, 0.25, -0.8, 0.0, 0.0])


@pytest.mark.parametrize("seed", FIXED)
def test_r1v2_between_its_ends(seed):
    same(built("r1v2"), built("grpo", beta=0.0), *packed(plain(seed)))
    reference = [g for g in enriched(seed, size=2) if len(g) == 2 and "chosen" in g[0].facts]
    if reference:
        batch, policy = packed(reference)
        same(built("r1v2", preference=1.0, quality=0.0, generation=0.0), built("dpo"), batch, policy)
        same(built("r1v2", preference=0.0, quality=1.0, generation=0.0), built("dpo", kind="bco"), batch, policy)


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS, baseline=st.floats(-0.5, 0.5))
def test_topr_on_stored_data(seed, baseline):
    """Stored rows need no method of their own: the recorded log-probability is that of whoever sampled them."""
    reference = enriched(seed)
    for one in records.trajectories(reference):
        one.facts["origin"] = "replay"
        one.turns[-1].reward += -2.0 * (one.lot < 0.5)
    batch, policy = packed(reference)
    advantage, expected, *_ = offpolicy.topr(reference, baseline)
    found, loss, _ = ran(built("topr", baseline=baseline), batch, policy)
    near(found, advantage)
    near(slope(loss, policy[Signal.LOGP].x), records.gradients(reference, expected))


@pytest.mark.parametrize(("p", "c"), [(0.3, -0.5), (0.6, 0.2), (0.5, 0.0)])
def test_topr_baseline_sets_the_share_of_good_ones(p, c):
    """p̃ = p(1 − c)/(1 + (1 − 2p)c): the weight that good rows have among all, rewards ±1, on-policy."""
    n = 10
    batch, policy = packed([[row([-1.0], 1.0 if i < n * p else -1.0) for i in range(n)]])
    weight = slope(ran(built("topr", baseline=c), batch, policy)[1], policy[Signal.LOGP].x).abs()
    near(weight[: int(n * p)].sum() / weight.sum(), p * (1 - c) / (1 + (1 - 2 * p) * c))


@pytest.mark.parametrize("seed", FIXED)
def test_topr_ends(seed):
    reference = plain(seed)
    for token in records.tokens(reference):
        token.behaviour = token.logp.item()
    batch, policy = packed(reference)  # on-policy: REINFORCE
    grads = [slope(ran(built(name), batch, policy)[1], policy[Signal.LOGP].x) for name in ("topr", "reinforce")]
    near(*grads)
    for token in records.tokens(reference):
        token.behaviour -= 1.0
    for one in records.trajectories(reference):
        one.turns[-1].reward += 9.0
    batch, policy = packed(reference)  # only good ones: rewards weigh the likelihood, however far they are
    grads = [slope(ran(built(name), batch, policy)[1], policy[Signal.LOGP].x) for name in ("topr", "reinforce")]
    near(*grads)


# -------------------------------------------------------------------- teachers


@pytest.mark.parametrize("seed", FIXED)
def test_opd_at_its_values_of_lambda(seed):
    batch, policy = packed(enriched(seed))
    far = batch.put({Signal.REFERENCE: batch[Signal.REFERENCE] - 1.3})
    one = [ran(built("opd", lam=1.0), b, policy) for b in (batch, far)]
    assert torch.equal(one[0][0], one[1][0]) and torch.equal(one[0][1], one[1][1])  # bit for bit
    assert Signal.REFERENCE not in built("opd", lam=1.0).signals
    own = FromOrigin("policy").select(batch).at(TOKEN).x
    back = (batch[Signal.REFERENCE] - batch.behaviour).x
    near(ran(built("opd", lam=0.0), batch, policy)[0][own], back[own])  # pulled back to the reference
    alike = batch.put({Signal.TEACHER: batch[Signal.REFERENCE]})
    near(ran(built("opd"), alike, policy)[0][own], back[own])  # a teacher that is the reference


def test_opd_optimum():
    """At log π = λ log T + (1 − λ) log π_ref every token has the same credit, so nothing moves on average."""
    teacher, reference, lam = [0.6, 0.3, 0.1], [0.2, 0.5, 0.3], 1.25
    raw = [t**lam * r ** (1 - lam) for t, r in zip(teacher, reference)]
    rows = [row([math.log(x / sum(raw))]) for x in raw]
    for token, t, r in zip(records.tokens([rows]), teacher, reference):
        token.facts["teacher"], token.reference = math.log(t), math.log(r)
    near(ran(built("opd", lam=lam), *packed([rows]))[0], [math.log(sum(raw))] * 3)


def test_scope_weights():
    def weights(numbers: list[float], right: bool):
        rows = [row([-math.log(x)] * 2, success=right) for x in numbers]
        for token in records.tokens([rows]):
            token.facts["teacher"] = token.logp.item()
        batch, policy = packed([rows])
        if not right:  # the credit itself, by a teacher that likes each token better by 1
            batch = batch.put({Signal.PROXIMAL: batch[Signal.PROXIMAL] - 1})
        return ran(built("scope"), batch, policy)[0][::2].tolist()

    assert weights([1.2, 2.6, 3.8], True) == pytest.approx([0.158, 0.342, 0.5], abs=6e-4)
    assert weights([4.5, 2.9, 1.7], False) == pytest.approx([0.192, 0.298, 0.509], abs=6e-4)


def test_scope_between_its_ends():
    rows = [row([-1.0, -2.0]), row([-2.5, -0.5])]
    for at, token in enumerate(records.tokens([rows])):
        token.facts["teacher"] = -1.5 + (0.2 if at % 2 else -0.2)
    batch, policy = packed([rows])  # all wrong, equally plausible: distillation with a weight a row
    (a, loss, _), (b, other, _) = (
        ran(built(*m[:1], **m[1]), batch, policy) for m in (("scope", {}), ("opd", {"lam": 1.0}))
    )
    near(a, b / 2)
    near(slope(loss, policy[Signal.LOGP].x), 2 * slope(other, policy[Signal.LOGP].x))
    rows = [row([-1.0, -1.0], success=True, teacher=0), row([-1.0], success=True)]
    for token in records.tokens([rows]):
        token.facts["teacher"] = -9.0
    batch, policy = packed([rows])  # all right: the teacher has no say
    near(slope(ran(built("scope"), batch, policy)[1], policy[Signal.LOGP].x), [-0.5] * 3)


def test_otr_between_its_ends():
    rows = [row([-1.0, -2.0], origin="expert")]
    for token in records.sampled(rows[0]):
        token.facts.update(hits=4, others=[])
    batch, policy = packed([rows])
    near(ran(built("otr", candidates=4), batch, policy)[1].detach(), 1.5)  # all equal to the label: imitation
    records.sampled(rows[0])[1].facts.update(hits=1, others=[records.leaf(x) for x in (-0.5, -3.0, -3.0)])
    batch, policy = packed([rows])
    near(ran(built("otr", candidates=4), batch, policy)[1].detach(), 0.5 * (1.0 + 0.25 * 2.0 - 0.025 * 6.5))
    found = slope(ran(built("otr", negative=0.0, candidates=4), batch, policy)[1], policy[Signal.LOGP].x)
    near(found, [-0.5, -0.125])  # weighted by hits/K, on average p
