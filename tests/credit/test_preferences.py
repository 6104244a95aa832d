"""Methods that learn from preferences: against their oracles, their limits, and what their diagnostics say."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import others, records, shelf
from support.batches import from_oracle
from support.other_helpers import built, enriched, near, packed, plain, proven, ran, rewarded, row, same, slope
from support.proven import PREFERENCES

from turnwise import recipes
from turnwise.algebra.aggregate import Mean
from turnwise.algebra.penalty import NegativeLogLikelihood, WeightedPenalty
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.value import Constant
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.credit.preference import BestWorstPairs, LabelledPairs, LogRatioScore, ranking_metrics
from turnwise.recipes.families.preferences import WinRate
from turnwise.recipes.recipe import Recipe

SEEDS = st.integers(0, 10**6)
FIXED = range(6)
EVEN = {"groups": 10, "size": 2}  # many groups of two

CASES = [
    *(("dpo", {"kind": kind}, {"kind": kind}) for kind in ("sigmoid", "hinge", "ipo", "bco", "sppo")),
    *(("dpo", x, x) for x in ({"beta": 0.7, "smoothing": 0.2}, {"kind": "ipo", "beta": 0.5, "smoothing": 0.1})),
    ("rdpo", {}, {}),
    ("rdpo", {"flip": 0.3, "beta": 0.5, "bound": 1.5}, {"flip": 0.3, "beta": 0.5, "bound": 1.5}),
    ("simpo", {}, {}),
    ("simpo", {"beta": 10.0, "gamma": 0.3}, {"beta": 10.0, "gamma": 0.3}),
    ("inpo", {"pairs": "told"}, {}),
    ("inpo", {"pairs": "told", "eta": 0.5, "tau": 0.1}, {"eta": 0.5, "tau": 0.1}),
    ("inpo", {"pairs": "told", "eta": 0.5, "tau": 0.0}, {"eta": 0.5, "tau": 0.0}),
    *((name, {}, {}) for name in ("exo", "nca", "apo", "discopop", "aot", "kto", "orpo", "cpo")),
    *(
        (name, hyper, hyper)
        for name, hyper in (
            ("exo", {"beta": 0.7, "eps": 0.05}),
            ("nca", {"beta": 0.6}),
            ("apo", {"anchor": "down", "beta": 0.4}),
            ("discopop", {"beta": 0.3, "tau": 0.2}),
            ("aot", {"beta": 0.5, "smoothing": 0.1}),
            ("aot", {"beta": 0.5, "paired": False}),
            ("kto", {"beta": 0.5, "desirable": 1.3, "undesirable": 0.7}),
            ("orpo", {"weight": 0.6}),
            ("cpo", {"beta": 0.4, "imitation": 0.3}),
        )
    ),
]


@pytest.mark.parametrize(("name", "mine", "theirs"), CASES)
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_oracle(name, mine, theirs, seed):
    reference = enriched(seed, **EVEN)
    batch, policy = packed(reference)
    expected = (getattr(others, name, None) or getattr(shelf, name))(reference, **theirs)
    stats = proven(built(name, **mine), batch, policy, reference, expected)
    margins = expected.extra["margin"]
    assert bool(margins) == ("preference/margin" in stats)
    if margins and name in ("dpo", "rdpo") and mine.get("kind") != "ipo":  # those whose score is the implicit reward
        near(stats["preference/margin"], sum(margins) / len(margins))
        near(stats["preference/accuracy"], sum(expected.extra["accuracy"]) / len(margins))


@pytest.mark.parametrize("clip", [0.2, 0.05])
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_spo_minimax(clip, seed):
    reference = enriched(seed)
    told(reference)
    batch, policy = packed(reference)
    expected = others.spo_minimax(reference, clip)
    near(WinRate()(batch).x, expected.extra["reward"])
    proven(built("spo_minimax", clip=clip), batch, policy, reference, expected)


def told(reference: records.Batch) -> None:
    """A list of probabilities as facts, one for each of the others."""
    for group in reference:
        for i, one in enumerate(group):
            said = one.facts.get("prefer", [])
            one.facts.update({f"beats_{j}": float(p) for j, p in enumerate(said) if j != i})


def rated(reference: records.Batch) -> tuple[Any, Any]:
    """The heads of the reward model as named rewards, the direction as facts."""
    batch, policy = packed(reference)
    rows = list(records.trajectories(reference))
    numbers = lambda name, k: Field(  # noqa: E731
        batch.tree, TRAJECTORY, torch.tensor([one.facts[name][k] for one in rows], dtype=torch.float64)
    )
    names = ("helpfulness", "verbosity")
    named = {name: numbers("ratings", k) for k, name in enumerate(names)}
    toward = {f"toward_{name}": numbers("direction", k) for k, name in enumerate(names)}
    return replace(batch, reward_components=named, facts={**batch.facts, **toward}), policy


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_dpa(seed):
    reference = enriched(seed)
    batch, policy = rated(reference)
    expected = others.dpa(reference)
    objective = built("dpa", answers="formed")
    proven(objective, batch, policy, reference, expected)
    assert objective.penalties[0].rows.select(batch).x.tolist() == expected.extra["kept"]


# ------------------------------------------------- data that says one text twice


def slopes(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[float]:
    """∂ loss / ∂ leaf of all of them, in one backward pass."""
    told = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    return [0.0 if g is None else g.item() for g in told]


class Spread:
    """Records in which a text stands several times, each with the leaf of the oracle's record that it stands for."""

    def __init__(self) -> None:
        self.groups: records.Batch = []
        self.leaves: list[Any] = []

    def add(self, rows: list[tuple[records.Trajectory, str, dict]]) -> None:
        group = []
        for one, name, facts in rows:
            made = copy.deepcopy(one)
            made.facts = {k: v for k, v in made.facts.items() if k in ("chosen", "gap", "family")} | facts
            for mine, theirs in zip(records.sampled(made), records.sampled(one)):
                leaf, anchor = theirs.logp, theirs.reference
                if name:
                    leaf, anchor = theirs.facts[name], theirs.facts[f"{name}_reference"]
                mine.logp, mine.reference, mine.facts = records.leaf(leaf.item()), anchor, {}
                self.leaves.append(leaf)
            group.append(made)
        self.groups.append(group)

    def proven(self, objective, expected) -> None:
        batch, policy = from_oracle(self.groups)
        _, loss, stats = ran(objective, batch, policy)
        near(loss.detach(), expected.loss.detach())
        found: dict[int, float] = {}
        for leaf, g in zip(self.leaves, slope(loss, policy[Signal.LOGP].x).tolist()):
            found[id(leaf)] = found.get(id(leaf), 0.0) + g
        leaves = list({id(leaf): leaf for leaf in self.leaves}.values())
        near([found[id(leaf)] for leaf in leaves], slopes(expected.loss, leaves))
        assert all(torch.isfinite(torch.as_tensor(v)) for v in stats.values())


@pytest.mark.parametrize("hyper", [{}, {"beta": 0.4, "alpha": 0.2}, {"alpha": 0.0}, {"alpha": 1.0}])
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_srpo(hyper, seed):
    """A pair becomes six rows: both as answers, as revisions of the rejected and as revisions of the chosen."""
    reference = enriched(seed, **EVEN)
    data = Spread()
    for group in reference:
        if {one.facts.get("chosen") for one in group} == {True, False}:
            names = ("", "revise_rejected", "revise_chosen")
            data.add([(one, name, {"revises": k}) for k, name in enumerate(names) for one in group])
        else:
            data.add([(one, "", {}) for one in group])
    data.proven(built("srpo", **hyper), others.srpo(reference, **hyper))


@pytest.mark.parametrize("hyper", [{}, {"beta": 0.5, "intra": 0.3, "inter": 2.0}, {"intra": 0.0}, {"inter": 0.0}])
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_mapl(hyper, seed):
    """A text under its own prompt and under the changed one is a pair of its own."""
    reference = enriched(seed, groups=10, size=3)
    data = Spread()
    for group in reference:
        data.add([(one, "", {}) for one in group])
        for one in group:
            if records.sampled(one) and "changed" in records.sampled(one)[0].facts:
                both = (("", True), ("changed", False))
                data.add([(one, name, {"chosen": ok, "within": 1.0, "family": 99.0}) for name, ok in both])
    data.proven(built("mapl", **hyper), others.mapl(reference, **hyper))


# --------------------------------------------------------------------- limits


def pair(d: float) -> records.Batch:
    """One pair of one token each with s(w) − s(l) = d."""
    winner, loser = row([-1.0], chosen=True), row([-1.0], chosen=False)
    records.sampled(winner)[0].reference = -1.0 - d / 2
    records.sampled(loser)[0].reference = -1.0 + d / 2
    return [[loser, winner]]


def loss_of(name: str, reference: records.Batch, **hyper: Any) -> float:
    return ran(built(name, **hyper), *packed(reference))[1].item()


def test_dpo_goldens():
    assert loss_of("dpo", pair(3.0), beta=1e-9) == pytest.approx(math.log(2), abs=1e-8)
    assert loss_of("dpo", pair(2.0), beta=0.5) == pytest.approx(math.log(1 + math.exp(-1.0)))
    batch, policy = packed(pair(2.0))
    weight = 1 / (1 + math.exp(0.2))  # the gradient by s(w) is −β σ(−βd)
    near(slope(ran(built("dpo"), batch, policy)[1], policy[Signal.LOGP].x), [0.1 * weight, -0.1 * weight])
    for kind, expected in (("hinge", 0.6), ("ipo", 1.0), ("sppo", 18.0), ("bco", 2 * math.log(1 + math.exp(-0.2)))):
        assert loss_of("dpo", pair(4.0), kind=kind) == pytest.approx(expected)
    mixed = 0.9 * loss_of("dpo", pair(4.0)) + 0.1 * loss_of("dpo", pair(-4.0))
    assert loss_of("dpo", pair(4.0), smoothing=0.1) == pytest.approx(mixed)
    with pytest.raises(ValueError, match="kind is 'kto'"):
        recipes.build("dpo", kind="kto")


def swapped(reference: records.Batch) -> records.Batch:
    other = copy.deepcopy(reference)
    for one in records.trajectories(other):
        if "chosen" in one.facts:
            one.facts["chosen"] = not one.facts["chosen"]
    return other


@pytest.mark.parametrize("seed", FIXED)
def test_rdpo_is_dpo_on_average(seed):
    reference = enriched(seed, **EVEN)
    same(built("rdpo", flip=0.0), built("dpo"), *packed(reference))
    flipped = 0.8 * loss_of("rdpo", reference, flip=0.2) + 0.2 * loss_of("rdpo", swapped(reference), flip=0.2)
    assert flipped == pytest.approx(loss_of("dpo", reference))


def test_rdpo_falls_for_ever_unless_bound():
    assert loss_of("rdpo", pair(1e4)) < -100
    assert loss_of("rdpo", pair(1e4), bound=5.0) == pytest.approx(loss_of("rdpo", pair(5.0)))


def test_simpo_needs_no_reference():
    reference = [[row([-1.0, -2.0], chosen=True), row([-3.0], chosen=False)]]
    assert loss_of("simpo", reference) == pytest.approx(math.log(1 + math.exp(-2.0)))  # 2(−1.5) − 2(−3) − 1 = 2
    assert Signal.REFERENCE not in recipes.build("simpo").objective.signals


def test_inpo_between_its_anchors():
    """τ = η is IPO with the reference, τ = 0 IPO with the sampler in its place (single tokens: sums are means)."""
    reference, eta = pair(1.5), 0.5
    records.sampled(reference[0][0])[0].behaviour = -1.7
    inpo = lambda tau: built("inpo", eta=eta, tau=tau, pairs="told")  # noqa: E731
    ipo = built("dpo", kind="ipo", beta=eta)
    same(inpo(eta), ipo, *packed(reference))
    batch, policy = packed(reference)
    sampler = batch.put({Signal.REFERENCE: batch.behaviour})
    near(ran(inpo(0.0), batch, policy)[1].detach(), ran(ipo, sampler, policy)[1].detach())
    assert Signal.REFERENCE not in inpo(0.0).signals


def test_inpo_fixed_point():
    """h = (P − ½)/η: labels drawn at rate P pull neither way."""
    eta, wins = 0.5, 0.7
    reference = pair((wins - 0.5) / eta)
    pulls = []
    for labelled in (reference, swapped(reference)):
        batch, policy = packed(labelled)
        pulls.append(slope(ran(built("inpo", eta=eta, tau=eta, pairs="told"), batch, policy)[1], policy[Signal.LOGP].x))
    near(wins * pulls[0] + (1 - wins) * pulls[1], [0.0, 0.0])


def test_spo_ranks_and_cycles():
    groups = [[row([-1.0], 3.0), row([-1.0], 1.0), row([-1.0], 2.0)], [row([-1.0], 5.0), row([-1.0], 4.0)]]
    near(WinRate()(packed(groups)[0]).x, [1.0, 0.0, 0.5, 1.0, 0.0])  # ranks; of two, who wins
    near(WinRate()(packed([[row([-1.0], 1.0), row([-1.0], 1.0), row([-1.0])], [row([-1.0])]])[0]).x, [0.75, 0.75, 0, 0])
    cycle = [[row([-1.0], prefer=p) for p in ([0, 1, 0], [0, 0, 1], [1, 0, 0])]]
    told(cycle)
    batch, policy = packed(cycle)
    near(WinRate()(batch).x, [0.5] * 3)
    near(ran(built("spo_minimax"), batch, policy)[0], [0.0] * 3)


def test_srpo_optimum():
    """p(w ≻ l) = 1: r(w|l) − r(l|l) = r(w|w) − r(l|w) = 1/2β and r(w) − r(l) = r(w|w) − r(l|l) make the loss 0."""
    scores = {"w": 0.0, "l": 0.0, "w_l": 1.3, "l_l": -0.7, "w_w": 0.4, "l_w": -1.6}
    scores["w"] = scores["w_w"] - scores["l_l"]
    rows = []
    for key, score in scores.items():
        given = {"": 0, "l": 1, "w": 2}[key[2:]]
        rows.append(row([-2.0], chosen=key[0] == "w", revises=given))
        records.sampled(rows[-1])[0].reference = -2.0 - score
    for alpha in (0.0, 0.5, 1.0):
        assert loss_of("srpo", [rows], beta=0.25, alpha=alpha) == pytest.approx(0.0)
    first, second = (loss_of("srpo", [rows], alpha=alpha) for alpha in (0.0, 1.0))
    assert (first, second) == pytest.approx(((0.5 - 0.05 * 4.0) ** 2, 2 * (0.5 - 0.2) ** 2))
    assert loss_of("srpo", [rows], alpha=0.3) == pytest.approx(0.7 * first + 0.3 * second)
    assert loss_of("srpo", [rows[:5]]) == 0  # an incomplete group says nothing


@pytest.mark.parametrize("seed", FIXED)
def test_mapl_without_its_terms_is_dpo(seed):
    same(built("mapl", intra=0.0, inter=0.0), built("dpo"), *packed(enriched(seed, **EVEN)))


def test_mapl_terms():
    groups = [[*pair(4.0)[0]], [*pair(1.0)[0]]]
    for gap, group in zip((2.0, 1.0), groups):
        for one in group:
            one.facts.update(family=0, gap=gap)
    base = loss_of("mapl", groups, beta=0.5, intra=0.0, inter=0.0)
    assert loss_of("mapl", groups, beta=0.5) - base == pytest.approx(math.log(1 + math.exp(-1.5)))
    within = [[*pair(4.0)[0]]]
    for one in within[0]:
        one.facts["within"] = 1.0
    assert loss_of("mapl", within, beta=0.5) == pytest.approx(math.log(1 + math.exp(-2.0)))


def test_dpa_in_one_direction_is_rejection_sampling():
    rows = rewarded(
        [row([-1.0, -2.0], ratings=[1.0, 9.0]), row([-3.0], ratings=[2.0, 0.0]), row([-4.0], ratings=[2.0, 1.0])]
    )
    for angle, expected in ((0.0, 3.0), (0.7, 1.5)):
        for one in rows:
            one.facts["direction"] = [math.cos(angle), math.sin(angle)]
        assert ran(built("dpa", answers="formed"), *rated([rows]))[1].item() == pytest.approx(expected)


# ------------------------------------------------------------------ own pairs


@pytest.mark.parametrize("seed", FIXED)
@pytest.mark.parametrize("name", ["dpo", "rdpo", "simpo", "inpo"])
def test_formed_pairs_are_the_best_and_the_worst(name, seed):
    """The same loss as if someone had told which they are, in groups of two."""
    batch, policy = packed(plain(seed))
    sign = BestWorstPairs().sign(batch)
    outcome = batch.reward.sum(TRAJECTORY)
    worth = outcome.max(GROUP) > outcome.min(GROUP)
    near(sign.abs().sum(GROUP).x, 2 * worth.x.double())
    assert torch.equal(outcome.x[sign.x > 0], outcome.max(GROUP).x[worth.x])
    assert torch.equal(outcome.x[sign.x < 0].sort().values, outcome.min(GROUP).x[worth.x].sort().values)
    two = numbered(batch).select(sign.x.nonzero().squeeze(1))
    facts = {"chosen": Field(two.tree, TRAJECTORY, (BestWorstPairs().sign(two).x > 0).double())}
    mine = {s: Field(two.tree, TOKEN, f.x[two["row"].x]) for s, f in policy.items()}
    expected = ran(built(name, pairs="told"), replace(two, facts=facts), mine)[1]
    near(ran(built(name, pairs="formed"), batch, policy)[1].detach(), expected.detach())


def numbered(batch):
    return batch.put(row=Field(batch.tree, TOKEN, torch.arange(batch.tree.count(TOKEN))))


# ---------------------------------------------------------- counts, diagnostics


@pytest.mark.parametrize("name", PREFERENCES)
@pytest.mark.parametrize("seed", FIXED)
def test_every_part_has_a_count_of_its_own(name, seed):
    """Pairs torn apart, one trajectory at a time: losses, gradients and diagnostics still add up to the whole."""
    batch, policy = rated(enriched(seed, **EVEN))
    objective = built(name)
    planned = objective.plan(objective.credit(batch))
    whole = objective(planned, policy)
    rows = numbered(planned)
    cut = lambda part: {s: Field(part.tree, TOKEN, f.x[part["row"].x]) for s, f in policy.items()}  # noqa: E731
    found = [objective(part, cut(part)) for part in (rows.select([k]) for k in range(len(rows)))]
    total = sum(one.loss for one in found)
    near(total.detach(), whole.loss.detach())
    near(slope(total, policy[Signal.LOGP].x), slope(whole.loss, policy[Signal.LOGP].x))
    for key in (key for key in whole.stats if key.startswith("preference/")):
        near(sum(one.stats[key] for one in found), whole.stats[key])


@pytest.mark.parametrize("name", ["dpo", "rdpo", "simpo", "srpo", "mapl"])
def test_without_a_pair_there_is_nothing(name):
    for seed in FIXED:
        batch, policy = packed(plain(seed))
        _, loss, stats = ran(built(name), batch, policy)
        assert loss.item() == 0 and not slope(loss, policy[Signal.LOGP].x).any()
        assert not any(key.startswith("preference/") for key in stats)


@pytest.mark.parametrize("seed", FIXED)
def test_ranking_and_the_loss_that_turns_it(seed):
    """Ranking is right just where the loss is at most −log σ(βc), c = log π_ref(l)/π_ref(w); below 0.6 it is, if it was."""
    beta = 0.1
    batch, policy = packed(enriched(seed, **EVEN))
    now, pairs = MicroBatchView(batch, policy), LabelledPairs()
    found = ranking_metrics(now, pairs, LogRatioScore())
    there = found["pairs"].x > 0
    sign = pairs.sign(batch)
    total = lambda x: (sign * x.detach().sum(TRAJECTORY)).sum(GROUP).x[there]  # noqa: E731
    policy_gap, reference_gap = total(now.logp), total(batch[Signal.REFERENCE])
    loss = -torch.nn.functional.logsigmoid(beta * (policy_gap - reference_gap))
    limit = -torch.nn.functional.logsigmoid(-beta * reference_gap)
    right = found["ranking"].x[there] > 0
    assert torch.equal(right, loss <= limit)
    assert torch.equal(found["accuracy"].x[there] > 0, policy_gap > reference_gap)
    assert bool(right[(reference_gap > 0) & (loss <= 0.6)].all())



def test_the_score_may_be_right_and_the_policy_still_wrong():
    """Reward accuracy is not ranking accuracy: the chosen gained on the reference, but is still said less often."""
    winner, loser = row([-5.0, -5.0], chosen=True), row([-1.0], chosen=False)
    records.sampled(winner)[0].reference = -9.0
    stats = ran(built("dpo"), *packed([[winner, loser]]))[2]
    assert [float(stats[f"preference/{name}"]) for name in ("margin", "accuracy", "ranking", "ranking/mean")] == [
        4,
        1,
        0,
        0,
    ]


def test_imitation_of_the_best_is_plain_likelihood():
    rows = [row([-1.0, -2.0], ratings=[1.0, 0.0], direction=[1.0, 0.0])]
    imitate = Recipe(
        advantage=Constant(0.0), aggregate=Mean(TOKEN), penalties=(WeightedPenalty(1.0, NegativeLogLikelihood()),)
    )
    same(built("dpa", answers="formed"), built(imitate), *rated([rows]))
