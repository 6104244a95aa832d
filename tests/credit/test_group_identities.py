"""Group-, reward- and baseline-level credit: golden numbers, and what each method reduces to."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from oracles import credit_groups as cg
from oracles import objectives, records
from support.group_helpers import SEEDS, credit, group, named, one, packed, remembering, rich, same

from turnwise import recipes
from turnwise.algebra.advantage import Standardise
from turnwise.algebra.value import Outcome
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.credit.fact import SameAnswer
from turnwise.recipes.families.group_credit import (
    CappedEntropyBonus,
    NoveltyBonus,
    PairwiseCalibration,
    StandardiseByMeanDeviation,
    TailRisk,
    answer_entropy,
    beta_log_density,
    fit_beta,
)


def test_medians_golden():
    same(credit("mc_grpo", [group([1, 0, 0, 1, 0.3])]), [2.32558, -0.99668, -0.99668, 2.32558, 0], 1e-5)
    same(credit("mc_grpo", [group([1, 0, 0, 0, 0])]), [1000.0, 0, 0, 0, 0])
    same(credit("mc_grpo", [group([1, 0, 0, 0, 0])], fallback=True), [1 / 1.001, 0, 0, 0, 0])
    same(credit("mc_grpo", [group([1, 0, 0, 0, 0])], rescale=True), [5000.0, 0, 0, 0, 0])
    same(credit("mc_grpo", [group([0.7] * 5)]), [0.0] * 5)
    symmetric = [0.0, 0.2, 0.5, 0.8, 1.0]
    same(credit("mc_grpo", [group(symmetric)]), [(r - 0.5) / 0.301 for r in symmetric])
    same(credit("mc_grpo", [group([0, 1, 2, 4])]), [-1 / 1.001, 0, 1 / 1.001, 3 / 1.001])  # even: the lower middle one


def test_beta_golden():
    shape = fit_beta(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    same(torch.stack(shape), [1.5, 1.5])
    rates = torch.tensor([0.25, 0.5, 0.75, 0.1, 0.6], dtype=torch.float64)
    density = beta_log_density(rates, *shape).exp()
    same(1 / density[:3], [0.906900, 0.785398, 0.906900], 1e-6)
    same(density, 8 / math.pi * (rates * (1 - rates)).sqrt())  # the population std of 0/1 rewards, up to a constant
    flat = [group([1, 0, 0, 0])]
    for case in (flat, flat * 2, [group([1, 1]), group([0, 0]), *flat]):  # α = β = 1: the mean baseline alone
        same(credit("bnpo", case), objectives.dr_grpo(case)[0])


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_one_reward_or_correlated_ones(seed):
    reference = rich(seed)
    separate = [credit("bnpo", reference, rewards=(name,)) for name in ("accuracy", "format")]
    same(credit("bnpo", reference, rewards=("accuracy", "format")), (separate[0] + separate[1]) / 2)
    plain, z = credit("grpo", reference), [x for g in reference for x in cg.zscores(cg.totals(g), 1e-4)]
    for t in records.trajectories(reference):
        t.facts["rewards"] = {"a": records.total(t)}
    same(credit("gdpo", reference), objectives.spread(reference, cg.zscores(z, 1e-4)))
    same(credit("dvao", reference), plain)
    for t in records.trajectories(reference):
        t.facts["rewards"] = {"a": records.total(t), "b": 3 * records.total(t) + 1}
    same(credit("dvao", reference, rewards=("a", "b"), weights=(1.0, 2.0), eps=7e-6), plain)


def test_several_rewards_golden():
    batch = [named(r1=[1, 0, 0, 1], r2=[0, 0, 1, 1])]
    same(credit("gdpo", batch, whiten="none"), [0, -1.73175, 0, 1.73175], 1e-5)
    same(credit("gdpo", batch), [0, -1.22466, 0, 1.22466], 1e-5)
    same(credit("gdpo", batch, whiten="tokens"), [0, -1.22466, 0, 1.22466], 1e-5)
    scale = statistics.stdev([1, 0, 1, 2]) / statistics.stdev([1, 0, 0, 1])
    same(credit("gdpo", batch, whiten="none", eps=1e-9), [x * scale for x in cg.zscores([1, 0, 1, 2], 1e-9)])
    same(credit("dvao", [named(r1=[1, 0, 0, 0], r2=[2, 0, 4, 2])]), [0.351619, -1.054856, 0.820443, -0.117206], 1e-5)
    same(credit("dvao", [named(a=[1, 1, 1], b=[0, 0, 0])]), [0.0] * 3)
    three = [named(a=[1, 0, 0, 1], b=[0, 0, 1, 1], c=[5, 1, 2, 2])]
    for name in ("gdpo", "dvao"):  # nothing is made for two
        same(credit(name, three), getattr(cg, name)(three))


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_a_shared_scale_is_never_above_that_of_the_sum(seed):
    reference = rich(seed)
    found = credit("dvao", reference)
    for t in records.trajectories(reference):
        t.facts["rewards"] = {"sum": sum(cg.component(t, name) for name in ("accuracy", "format", "length"))}
    assert (found.abs() <= credit("dvao", reference).abs() + 1e-9).all()


def test_risk_golden():
    # within 1e-4, because the released code adds 1e-6 to the widths of its tails
    risk = TailRisk(a=0.2, b=0.8, omega=1.5).risk
    tensor = lambda *x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    same(risk(tensor(0, 2, 4, 5), tensor(1), tensor(4)), [-3.0, 2 / 3, 2.0, 2.0], 1e-4)
    slope = lambda s, f: (f(tensor(s + 1e-3), tensor(1), tensor(4)) - f(tensor(s), tensor(1), tensor(4))) / 1e-3  # noqa: E731
    same(slope(2.0, TailRisk(omega=0.0).risk), [1 / 0.6], 1e-4)
    same(torch.cat([slope(5.0, risk), slope(0.0, risk)]), [0.0, 1.5 / 0.2 / 2.5], 1e-4)


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_risk_without_tails_is_the_centred_score(seed):
    reference = [g for g in rich(seed) if len(g) > 1]
    found = credit("risk_po", reference, bundle=1, omega=0.0, a=1e-9, b=1 - 1e-9, mode="batch", share="uniform")
    found = iter(found.tolist())
    for g in reference:
        seen = [(records.total(t), next(found)) for t in g for _ in records.sampled(t)]
        scale = statistics.stdev(cg.totals(g)) + 1e-6
        for (r1, a1), (r2, a2) in pairwise(seen):
            assert a1 - a2 == pytest.approx((r1 - r2) / scale, abs=1e-5)


def test_halves_golden():
    batch = [group([1, 0, 1, 1], count=[1, 2, 3, 4])]
    starts = [0, 1, 3, 6]
    found = lambda **hyper: credit("canon", batch, metric="length", **hyper)[starts]  # noqa: E731
    same(found(), [0, -1, 0.5, 0.5])
    same(found(mu=0.0), [0.5, -0.5, 0, 0])
    same(found(mu=0.5), [0.25, -0.75, 0.25, 0.25])
    same(found(alpha=0.5), [0.5, -0.5, 0, 0])
    same(found(mu=None), found(mu=0.75))
    same(credit("canon", [group([1.0])]), [0.0])


def test_strata_golden():
    batch = [group([1, 0, 1, 1, 0, 0], tool_calls=[0, 0, 1, 1, 1, 1])]
    same(credit("stratified_grpo", batch, alpha=1.0), [0.7071, -0.7071, 0.8660, 0.8660, -0.8660, -0.8660], 1e-4)
    same(credit("stratified_grpo", batch, alpha=0.0), [0.91287, -0.91287, 0.91287, 0.91287, -0.91287, -0.91287], 1e-5)
    same(credit("stratified_grpo", batch), [0.74826, -0.74826, 0.87539, 0.87539, -0.87539, -0.87539], 1e-5)


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_reductions_to_grpo_and_dr_grpo(seed):
    reference = rich(seed)
    z, centred = credit("grpo", reference), objectives.dr_grpo(reference)[0]
    same(credit("stratified_grpo", reference, alpha=0.0), z)
    same(credit("adora", reference, damp=1.0), z)
    same(credit("adora", reference, damp=1.0, lenient=True), z)
    same(credit("unlikeliness", reference, beta=0.0), z)
    same(credit("xrpo", reference, novelty=0.0), z)
    same(credit("xrpo", reference, kappa=0.0), z)
    same(credit("pipo", reference), z)
    same(credit("copo", reference, k=1e9, b=-1.0), z)
    assert (credit("xrpo", reference) <= torch.where(z > 0, 1.5 * z, z) + 1e-12).all()
    even = [g if len(g) % 2 == 0 else g[:-1] for g in reference if len(g) > 1]
    for metric in ("entropy", "length"):
        same(credit("canon", even, mu=0.5, metric=metric), objectives.dr_grpo(even)[0])
    for t in records.trajectories(reference):
        for turn in t.turns:
            turn.tool_calls, turn.facts["agent"], turn.facts["function"] = 0, 0, "task"
    same(credit("stratified_grpo", reference), z)  # one stratum
    same(credit("public_baseline", reference), centred)  # one agent
    same(credit("public_baseline", reference, scale=True), z)
    before = credit("stratified_grpo", reference)
    for t in records.trajectories(reference):
        for turn in t.turns:
            turn.reward *= 3
        t.turns[-1].reward += 2
    same(
        credit("stratified_grpo", reference), before, 1e-2
    )  # positive affine maps of the reward, but for ε beside a small std


def test_difficulty_golden():
    exact = StandardiseByMeanDeviation(eps=1e-12)
    of = lambda rewards: exact(packed([group(rewards)])[0]).x  # noqa: E731
    same(of([1, 0, 0, 0]), [2, -2 / 3, -2 / 3, -2 / 3])
    same(of([1, 1, 0, 0]), [1, 1, -1, -1])
    batch = [group([1, 0, 0, 0]), group([1, 1, 0, 0]), group([1, 1, 1, 0]), group([1, 1, 1, 1])]
    found = credit("dgpo_difficulty", batch, eps=1e-12)
    weights = [1.12727, 0.994812, 0.877918]
    same(found[[0, 4, 8]], [16 / 12 * w / (2 * p) for w, p in zip(weights, (0.25, 0.5, 0.75))], 1e-5)
    assert not found[12:].any()
    for summed in (False, True):  # T → ∞: λ = 1, and every task moves the policy alike
        flat = credit("dgpo_difficulty", batch, softness=1e12, eps=1e-12, summed=summed, valid_tokens=False)
        same(flat.view(4, 4).abs().sum(1), [4, 4, 4, 0])
        same(flat[3:12:4], [-1 / (2 * (1 - p)) for p in (0.25, 0.5, 0.75)])
    same(credit("dgpo_difficulty", [group([-1, 1])], eps=1e-12), [-1, 1])  # p of 0 counts as 1
    assert not credit("dgpo_difficulty", [group([1, 1])]).any()  # no task is left


def test_likelihood_golden():
    batch = [group([1, 1, 0, 0], logp=[-0.5, -0.3, -0.2, -0.9], success=[True, True, False, False])]
    found = credit("capo_calibration", batch)
    same(found, [0.961703, 0.810512, -1.164030, -0.608185], 1e-6)
    same(credit("capo_calibration", batch, scaled=True), found / 0.6)
    same(credit("capo_calibration", batch, high=1.5), [0.0, *found[1:].tolist()])
    same(credit("capo_calibration", batch, low=1.5), [*found[:2].tolist(), 0.0, float(found[3])])
    rare = [group([1, 1, 1, 0], logp=[-1, -0.5, -2, -0.1])]
    same(credit("unlikeliness", rare), [0.49706, 0.36451, 0.62961, -1.49119], 1e-5)
    assert credit("unlikeliness", [group([1, 1], logp=[-1, -2])]).abs().min() > 0  # all right: still something to learn
    batch, _ = packed([group([0.8, 0.8, -1.6], logp=[-0.5, -1.5, -1])])
    same(NoveltyBonus(Outcome())(batch).x, [0.8, 1.2, -1.6])


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_pairs_cancel_and_flatten(seed):
    reference = [[t for t in g if records.sampled(t)] for g in rich(seed)]
    for t in records.trajectories(reference):
        t.turns = [records.Turn(records.sampled(t)[:1], float(t.success))]
    batch, _ = packed(reference)
    batch = batch.put({Signal.REFERENCE: batch.behaviour})
    assert float(PairwiseCalibration(high=torch.inf, low=0.0)(batch).x.sum()) == pytest.approx(0, abs=1e-9)
    flat = PairwiseCalibration(tau=1e9, high=torch.inf, low=0.0)(batch).x
    centred = Standardise(scale=False)(batch)
    same(flat, (0.5 * centred.peer_count(GROUP) * centred).x, 1e-6)  # Dr.GRPO, up to scale


def test_agreement_golden():
    for kinds, (entropy, weight) in {1: (0, 0.3775), 2: (1, 0.6225), 8: (3, 0.9241)}.items():
        answers = [str(i % kinds) for i in range(8)]
        batch, _ = packed([group([float(i) for i in range(8)], said=answers), group([1.0, 0.0], said=["a", "b"])])
        same(answer_entropy(batch, SameAnswer()).x, [entropy, 1.0])
        factor = {1: 1.0, 2: 0.70833, 8: 0.125}[kinds]
        parts = recipes.build("copo").advantage
        same((parts.left(batch).x / Standardise()(batch).x)[:8], [weight] * 8, 1e-4)
        values = [3.5 * factor, 0.25]
        across = parts.right.across(batch)
        assert across.level == GROUP
        same(across.x, cg.zscores(values), 1e-4)
    single = recipes.build("copo").advantage.right.across
    same(single(packed([group([1, 0], said=["a", "b"])])[0]).x, [0.0])
    forced = packed([group([1, 1], said=["a", "a"]), group([0, 1], said=["a", "b"])])[0]
    assert not recipes.build("copo", forced=True).advantage.left(forced).x[:2].any()


def test_sets_golden_and_reductions():
    same(credit("polychromic", [group([1, 0, 0], key=["a", "b", "a"])], size=2), [0.125, 0.0, -0.125])
    for seed in range(5):
        clipped = [
            [one(max(0.0, min(1.0, records.total(t))), key=t.facts["key"], lot=t.lot) for t in g] for g in rich(seed)
        ]
        same(credit("polychromic", clipped, size=1), objectives.dr_grpo(clipped)[0])
        for g in clipped:
            for i, t in enumerate(g):
                t.facts["key"] = str(i)
            n = min(2, len(g))
            factor = (len(g) - n) / (n * (len(g) - 1)) if len(g) > 1 else 0.0
            same(credit("polychromic", [g], size=2), [x * factor for x in objectives.dr_grpo([g])[0]])


def test_sets_of_a_large_group():
    """Closed form against counting, sizes where counting is still possible."""
    dice = random.Random(1)
    for members, size in ((9, 4), (10, 9), (8, 8), (7, 6)):
        g = group([dice.random() for _ in range(members)], key=[dice.choice("abcd") for _ in range(members)])
        same(credit("polychromic", [g], size=size), cg.polychromic([g], size))
    many = group([dice.random() for _ in range(200)], key=[dice.choice("abcd") for _ in range(200)])
    assert torch.isfinite(credit("polychromic", [many], size=50)).all()


def test_verdicts_golden():
    history = {"means": [0.4, 0.5, 0.45]}
    for rewards, phi in (([1, 0.1], 2.0), ([0.7, 0.0], -1.0), ([1.0, 0.0], 1.0)):
        batch, _ = packed([group(rewards)])
        objective, part = remembering("pipo", "ImprovementWeighted", history)
        assert float(part.improvement(objective.credit(batch)).item) == pytest.approx(phi, abs=1e-4)


def test_entropy_golden():
    batch, _ = packed([group([0.5, -0.1])])
    unsure = batch.put({Signal.OLD_ENTROPY: batch.tree.full(TOKEN, 0.3, torch.float64)})
    same(CappedEntropyBonus(Outcome())(unsure).x, [0.5 + 0.6, -0.1 + 0.25])
    reference = rich(1)
    plain, shaped = credit("mssr", reference, weight=0.0), credit("mssr", reference)
    assert (shaped >= plain).all()  # never less, and with γ ≥ 1 never more than twice as much
    assert (credit("mssr", reference, gamma=1.0) - plain <= plain.abs() + 1e-12).all()
    entropy = torch.tensor([t.old_entropy for t in records.tokens(reference)], dtype=torch.float64)
    same(shaped, plain + torch.minimum(plain.abs() / 0.4, 2 * entropy))


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_a_rollout_does_not_predict_its_own_baseline(seed):
    reference = rich(seed)
    batch, _ = packed(reference)
    advantage = recipes.build("poise", normalise=False).advantage
    chosen = seed % len(batch)
    moved = batch[Signal.REWARD_PROBE].x.clone()
    moved[chosen] += 1.0
    again = advantage(batch.put({Signal.REWARD_PROBE: Field(batch.tree, TRAJECTORY, moved)})).x
    assert float(again[chosen]) == pytest.approx(float(advantage(batch).x[chosen]), abs=1e-12)
    several = [g for g in reference if len(g) > 1]
    for g in several:
        for t in g:
            t.facts["probe"] = t.facts["chance"]
    same(credit("poise", several, normalise=False), credit("probe_baseline", several))  # features of the task alone
    for t in records.trajectories(several):
        t.facts["probe"] = 0.0
    same(credit("poise", several, normalise=False), credit("reinforce", several))


def test_predictions_golden():
    batch = [group([1, 0], probe=[0.2, 0.7], chance=[0.3, 0.3]), group([1], probe=[0.1], chance=[0.5])]
    same(credit("poise", batch, normalise=False), [0.3, -0.2, 0.0])
    same(credit("poise", batch), [*cg.zscores([0.3, -0.2]), 0.0])
    same(credit("probe_baseline", batch), [0.7, -0.3, 0.5])
