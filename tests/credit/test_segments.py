"""Credit by segments, trees, tools and shaped outcomes: every method against its oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import credit_segments as oracle
from oracles import objectives, records
from oracles.records import Trajectory, Turn
from support import forests
from support.batches import from_oracle, oracle_name
from support.segment_helpers import asked, close, credit, criticised, kept, made, slopes, told

from turnwise import recipes
from turnwise.algebra.advantage import Standardise
from turnwise.algebra.penalty import WeightedPenalty
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.signals import TURN_CRITIC, Signal
from turnwise.credit.fact import Fact
from turnwise.credit.tracker import Solved, SuccessTracker
from turnwise.recipes.families.reward_shaping import RetentionByDrift
from turnwise.recipes.families.segment_credit import segment_index

SEEDS = st.integers(0, 10**6)
some = settings(deadline=None, max_examples=25)


def surrogate(reference, advantage, keep=None, low=0.2, high=None, dual=None, over="token", kl=0.0):
    """−mean of min(ρA, clip(ρ)A) less kl · k3, one token at a time: of all kept tokens alike, or of each trajectory's."""
    high = low if high is None else high
    keep = [1.0] * len(advantage) if keep is None else keep
    left, terms, rows = iter(zip(advantage, keep)), objectives.constant(0.0), 0
    for trajectory in records.trajectories(reference):
        mine = [(one, *next(left)) for one in records.sampled(trajectory)]
        count = sum(1 for *_, m in mine if m)
        rows += bool(count)
        for one, a, m in mine:
            if m:
                rho = torch.exp(torch.clamp(one.logp - one.behaviour, -20, 20))
                gain = objectives.smaller(rho * a, objectives.bounded(rho, 1 - low, 1 + high) * a)
                if dual and a < 0:
                    gain = objectives.larger(gain, objectives.constant(dual * a))
                x = torch.clamp(one.reference - one.logp, -20, 20)
                terms = terms - (gain - kl * (torch.exp(x) - x - 1)) / (count if over == "row" else 1)
    whole = rows if over == "row" else sum(1 for m in keep if m)
    return terms / max(1, whole)


def same_loss(recipe, batch, policy, reference, expected, credited=None) -> None:
    loss, found = slopes(recipe.objective, batch, policy, credited)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)
    close(found[Signal.LOGP], records.gradients(reference, expected))


# ------------------------------------------------------------------------- trees


def chained(reference: records.Batch, rho: float, m: int):
    """The oracle's chains as a real group: every completion at a cut, and at the prompt, is a trajectory that left there."""
    groups = []
    for group in reference:
        branches = [forests.Branch(one) for one in group]
        for i, one in enumerate(group):
            places = [(t, j) for t, turn in enumerate(one.turns) for j in range(len(turn.tokens))]
            text = records.sampled(one)
            unsure = [t for t, x in enumerate(text) if math.exp(x.behaviour) < rho][::m]
            begun = [((0, 0), one.facts.get("prompt_completions", []))]
            for at, rewards in [*((places[t], text[t].facts["completions"]) for t in unsure), *begun]:
                earned = sum(turn.reward for turn in one.turns[: at[0]])
                for reward in rewards:
                    row = Trajectory([Turn([records.token(-1.0)], reward - earned)])
                    branches.append(forests.Branch(row, i, at))
        groups.append(branches)
    return groups


@pytest.mark.parametrize("rho, m", [(0.9, 5), (0.15, 2), (0.05, 1), (1.1, 1)])
@some
@given(seed=SEEDS)
def test_spo_chain(rho, m, seed):
    reference = made(seed)
    for one in records.trajectories(reference):  # few completions are as good as many
        one.facts.update({k: v[:2] for k, v in one.facts.items() if k == "prompt_completions"})
        for token in records.sampled(one):
            token.facts["completions"] = token.facts["completions"][:2]
    groups = chained(reference, rho, m)
    for group, branches in zip(reference, groups):  # who began at the prompt tells the others what it is worth
        ends = [forests.outcome(branches, i) for i in range(len(branches))]
        begun = [i for i in range(len(branches)) if forests.beginning(branches, i) is None]
        for i, one in enumerate(group):
            one.facts["prompt_completions"] = [ends[j] for j in begun if j != i]
            if one.turns[0].tokens:
                one.turns[0].tokens[0].facts["completions"] = one.facts["prompt_completions"] or [0.0]
    expected = oracle.spo_segment(reference, rho=rho, m=m)
    _, batch, _ = forests.owned(groups)
    main = torch.tensor([i < len(reference[g]) for g, (i, _, _) in forests.natural(groups)])
    recipe = recipes.build("spo_chain", rho=rho)
    close(credit(recipe, batch)[main], expected.advantage)
    mask = kept(recipe, batch)
    close(mask[main], expected.extra["mask"])
    assert not mask[~main].any()


@pytest.mark.parametrize("scale", [False, True])
@some
@given(seed=SEEDS)
def test_spo_tree(scale, seed):
    groups = forests.forest(seed)
    reference, batch, policy = forests.owned(groups)
    copies = forests.copied(groups)
    expected = oracle.spo_tree(copies, normalise=scale)
    recipe = recipes.build("spo_tree", rho=1.1, scale=scale)
    found = credit(recipe, batch).tolist()
    values, weights = (forests.by_token(copies, x) for x in (expected.advantage, expected.extra["weight"]))
    mask = kept(recipe, batch).tolist()
    for at, (g, key) in enumerate(forests.natural(groups)):
        assert [found[at]] * len(values[g][key]) == pytest.approx(values[g][key], rel=1e-8, abs=1e-8)
        assert mask[at] == pytest.approx(sum(weights[g][key]))  # a shared edge is one sample
    if any(mask):
        same_loss(recipe, batch, policy, reference, surrogate(reference, found, mask))


@some
@given(seed=SEEDS)
def test_arpo(seed):
    groups = forests.forest(seed)
    reference, batch, policy = forests.owned(groups)
    copies = forests.copied(groups)
    hard, soft = (forests.by_token(copies, oracle.arpo_credit(copies, hard=x)) for x in (True, False))
    found = credit(recipes.build("arpo"), batch).tolist()
    summed = credit(recipes.build("arpo", copies=True), batch).tolist()
    for at, (g, key) in enumerate(forests.natural(groups)):
        assert [found[at]] * len(hard[g][key]) == pytest.approx(hard[g][key], rel=1e-8, abs=1e-8)
        assert summed[at] == pytest.approx(sum(soft[g][key]), rel=1e-8, abs=1e-8)
    same_loss(recipes.build("arpo"), batch, policy, reference, surrogate(reference, found))


@pytest.mark.parametrize("hyper", [{}, {"beta": 0.7, "local": 2.0, "kl": 0.1}])
@some
@given(seed=SEEDS)
def test_ib_tpo(hyper, seed):
    groups = forests.forest(seed, inside=False)
    reference, batch, policy = forests.owned(groups)
    copies = forests.whole(groups)
    for group, rows in zip(groups, copies):
        for i, (branch, row) in enumerate(zip(group, rows)):
            for k, turn in enumerate(row.turns):  # those before the fork are the parent's
                shared = branch.parent is not None and k < row.facts["pivot"]
                turn.facts["node"] = rows[branch.parent].turns[k].facts["node"] if shared else (i, k)
    expected = forests.by_token(copies, oracle.ib_tpo(copies, hyper.get("beta", 5.0), hyper.get("local", 0.1)))
    recipe = recipes.build("ib_tpo", **hyper)
    found = credit(recipe, batch).tolist()
    for at, (g, key) in enumerate(forests.natural(groups)):
        assert [found[at]] * len(expected[g][key]) == pytest.approx(expected[g][key], rel=1e-8, abs=1e-8)
    loss = surrogate(reference, found, over="row", kl=hyper.get("kl", 1e-3))
    same_loss(recipe, batch, policy, reference, loss)
    plain = credit(recipes.build("ib_tpo", local=0.0), batch)  # identity: without the local part, ARPO's tree of means
    close(plain, credit(recipes.build("arpo"), batch))


def test_ib_tpo_inside_one_response():
    token = lambda: records.token(-1.0, reference=math.log(0.5))  # noqa: E731
    first = Trajectory([Turn([token(), token()], 1.0)])
    group = [forests.Branch(first), forests.Branch(Trajectory([Turn([token()], 0.0)]), 0, (0, 1))]
    _, batch, _ = forests.owned([group])
    local = recipes.build("ib_tpo").advantage.right(batch).at(TOKEN).x  # 0.1 · (p(s)/p(parent) − 1.2)/2
    close(local, [0.1 * (x - 1.2) / 2 for x in (1.0, 2.0, 0.0)])


@pytest.mark.parametrize("segment, likelihoods", [(2, [0.5, 0.5, 0.125, 0.125, 0.0625]), (0, [0.5**2.4] * 5)])
def test_steps_of_ib_tpo_are_those_of_its_tree(segment, likelihoods):
    """Nobody forks: what a step tells is (1 − 1.2)·π_ref of the step, and a step has so many tokens."""
    tokens = [records.token(-1.0, reference=math.log(p)) for p in (0.5, 0.5, 0.25, 0.0625, 0.0625)]
    rows = [Trajectory([Turn(tokens, 1.0)]), Trajectory([Turn([records.token(-1.0, reference=0.0)], 1.0)])]
    _, batch, _ = forests.owned([[forests.Branch(row) for row in rows]])
    recipe = recipes.build("ib_tpo", segment=segment)
    assert recipe.strategy.segment == segment
    close(recipe.advantage.right(batch).at(TOKEN).x, [0.1 * -0.2 * x for x in (*likelihoods, 1.0)])


@pytest.mark.parametrize(
    "hyper, theirs",
    [({}, {}), ({"alpha": 1.5, "best": 0.75, "perfect": 1.5, "tau": 0.5}, {"alpha": 1.5, "best": 0.75, "tau": 0.5})],
)
@some
@given(seed=SEEDS)
def test_r3l(hyper, theirs, seed):
    groups = forests.forest(seed, inside=False)
    _, batch, policy = forests.owned(groups)
    copies = forests.whole(groups)
    expected = oracle.r3l(copies, documented=bool(hyper), **theirs)
    recipe = recipes.build("r3l", **hyper)
    found, mask = credit(recipe, batch), kept(recipe, batch)
    _, grads = slopes(recipe.objective, batch, policy)
    advantage, masks = (forests.by_token(copies, x) for x in (expected.advantage, expected.extra["mask"]))
    wanted = forests.by_token(copies, records.gradients(copies, expected.loss))
    own = forests.natural(groups)
    close(mask, [max(masks[g][key]) for g, key in own])
    close(found * mask, [sum(advantage[g][key]) / max(1, sum(masks[g][key])) for g, key in own])
    close(grads[Signal.LOGP], [sum(wanted[g][key]) for g, key in own])


# ------------------------------------------------------------------ turns, segments


@pytest.mark.parametrize("gamma, mismatch", [(0.95, 5.0), (0.5, 1.05)])
@some
@given(seed=SEEDS)
def test_ipa(gamma, mismatch, seed):
    reference = made(seed)
    batch, policy = from_oracle(reference)
    expected = oracle.ipa(reference, gamma=gamma, H=mismatch)
    recipe = recipes.build("ipa", gamma=gamma, mismatch=mismatch)
    close(credit(recipe, batch), expected.advantage)
    _, found = slopes(recipe.objective, batch, policy)
    close(found[Signal.LOGP], records.gradients(reference, expected.loss))


@pytest.mark.parametrize("keep", [None, 1, 2])
@some
@given(seed=SEEDS)
def test_dcpo(keep, seed):
    reference = made(seed)
    batch, policy = from_oracle(reference)
    expected = oracle.dcpo(reference, keep)
    recipe = recipes.build("dcpo", segments=keep)
    close(credit(recipe, batch), expected.advantage)
    close(segment_index(batch).at(TOKEN).x, expected.extra["segment"])
    close(kept(recipe, batch), expected.extra["mask"])
    same_loss(recipe, batch, policy, reference, surrogate(reference, expected.advantage, expected.extra["mask"]))


# ------------------------------------------------------------------------- critics


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("gamma", [0.9, 0.3])
@some
@given(seed=SEEDS)
def test_archer(baseline, gamma, seed):
    reference = made(seed)
    batch, policy = criticised(reference)
    expected = oracle.archer(reference, gamma, baseline)
    actor = recipes.build("archer", gamma=gamma, baseline=baseline, value_weight=0.0, fresh=0)
    _, found = slopes(actor.objective, batch, policy)
    for signal in (Signal.LOGP, Signal.VALUE):
        close(found[signal], records.gradients(reference, expected.loss, oracle_name(signal)))
    tokens = batch.tree.size(TOKEN, TURN).x
    spoken = int((tokens > 0).sum())
    close(-found[Signal.LOGP] * spoken, expected.advantage)
    objective = replace(recipes.build("archer", gamma=gamma, fresh=0), advantage=actor.advantage).objective
    _, found = slopes(objective, batch, policy)
    targets = [*zip(*expected.extra["q_target"]), *zip(*expected.extra["v_target"])]
    for signal, goal in zip(TURN_CRITIC, targets):
        error = (
            2 * (policy[signal].x.detach() - torch.tensor(goal, dtype=torch.float64)) * (tokens > 0) / max(1, spoken)
        )
        close(found[signal], error)


@pytest.mark.parametrize("beta, least", [(0.1, 0.0), (0.7, 0.2)])
@some
@given(seed=SEEDS)
def test_direct_advantage(beta, least, seed):
    reference = made(seed)
    for one in records.trajectories(reference):  # V before the first token; an empty turn is worth what follows it
        after = records.total(one)
        for turn in reversed(one.turns):
            after = 1 / (1 + math.exp(-turn.tokens[0].old_value)) if turn.tokens else after
            turn.facts["value"] = after
    expected = oracle.direct_advantage(reference, beta, least)
    batch, policy = from_oracle(reference)
    recipe = recipes.build("direct_advantage", beta=beta, least=least, value_weight=0.0, warm=0, every=0)
    close(credit(recipe, batch), expected.advantage)
    close(kept(recipe, batch), expected.extra["mask"])
    same_loss(recipe, batch, policy, reference, expected.loss)


# ------------------------------------------------------------- between the steps


def drifts(reference: records.Batch) -> list[float]:
    """D of each trajectory's task."""
    of = lambda group: [abs(old - now) for old, now in group[0].facts["stored"]]  # noqa: E731
    return [records_mean(of(group)) for group in reference for _ in group]


def records_mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers) if numbers else 0.0


@pytest.mark.parametrize("half, low, high", [(0.06, 0.875, 0.96), (0.5, 0.1, 1.0)])
@some
@given(seed=SEEDS)
def test_spo_single(half, low, high, seed):
    reference = made(seed)
    batch, policy = from_oracle(reference)
    batch = told(batch, drift=(TRAJECTORY, drifts(reference)))
    expected = oracle.spo_single_stream(reference, half, low, high)
    tracker = SuccessTracker(keep=RetentionByDrift(Fact("drift"), half, low, high))
    recipe = replace(
        recipes.build("spo_single", half=half, low=low, high=high),
        advantage=Standardise(Solved() - tracker, BATCH, eps=1e-8),
    )
    objective = recipe.objective
    known = {f"task {i}": list(group[0].facts["tracker"]) for i, group in enumerate(reference)}
    objective.memory.of(tracker)["tasks"] = dict(known)
    credited = objective.credit(batch)
    close(credited["advantage"].at(TOKEN).x, expected.advantage)
    after = objective.memory.of(tracker)["tasks"]
    for i, pair in enumerate(expected.extra["tracker"]):
        assert after[f"task {i}"] == pytest.approx(pair)
    published = recipes.build("spo_single").objective
    first = next(p for p in published.advantage.parts if isinstance(p, SuccessTracker))
    published.memory.of(first)["tasks"] = dict(known)
    close(published.credit(batch)["advantage"].at(TOKEN).x, expected.advantage)  # the drift only matters next time
    loss = surrogate(reference, expected.advantage, high=0.28)
    same_loss(recipe, batch, policy, reference, loss, credited)


@pytest.mark.parametrize("step", [0, 30, 150, 300])
@pytest.mark.parametrize("scale", [False, True])
@some
@given(seed=SEEDS)
def test_spear(step, scale, seed):
    reference = made(seed)
    for at, one in enumerate(records.trajectories(reference)):
        one.facts["origin"] = "replay" if (at + seed) % 3 == 0 else "policy"
    past = [[one for one in group if one.facts["origin"] == "replay"] for group in reference]
    fresh = [group for group in ([o for o in g if o.facts["origin"] == "policy"] for g in reference) if group]
    batch, _ = from_oracle(reference)
    recipe = recipes.build("spear", scale=scale, size=4)
    objective = recipe.objective
    objective.memory.clock = step
    credited = objective.credit(batch)
    planned = objective.plan(credited)
    advantage = credited["advantage"].at(TOKEN).x
    old = batch.replayed.at(TOKEN).x
    close(advantage[~old], oracle.spear_fresh(fresh, step))
    totals = [[records.total(one) for one in group] for group in fresh]
    spreads = [oracle.std(x) if len(x) > 1 else 0.0 for x in totals]
    means = [records_mean(x) for x in totals]
    stored = [one for group in past for one in group]
    expected = oracle.spear([stored], means, spreads, scale, size=4, step=step)
    penalty = objective.penalties[0]
    keep = planned[penalty.rows].x
    assert keep[batch.replayed.x].tolist() == expected.extra["keep"] and not keep[~batch.replayed.x].any()
    close(advantage[old] * planned[penalty.rows].at(TOKEN).x[old], expected.advantage)
    assert planned[penalty.weight].item == pytest.approx(expected.extra["weight"])
    close((planned["weight"].at(TOKEN).x > 0).double(), (~old).double())
    close((planned["penalty_weight", 0].at(TOKEN).x > 0).double(), planned[penalty.rows].at(TOKEN).x.double())
    able = [[o for o, k in zip(stored, expected.extra["keep"]) if k]]
    chosen = planned[penalty.rows].at(TOKEN).x
    spared = oracle.spear_clip(able, advantage[chosen].tolist())
    close(planned[penalty.penalty.gate.mask].at(TOKEN).x[chosen].double(), spared)


# ------------------------------------------------------------------ hidden states


@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"everywhere": True, "kappa": 1.3, "follow": 0.8, "sharpness": 0.5},
        {"explore": (0.3, 0.1, 0.6), "exploit": (0.2, 0.5, 0.3)},
    ],
)
@some
@given(seed=SEEDS, begun=st.booleans())
def test_verl_rank(hyper, seed, begun):
    reference = made(seed)
    state = {"ER": 1.5, "ERV": 0.1, "ERA": -0.02} if begun else None
    names = {"follow": "a", "sharpness": "g"}
    expected = oracle.verl_rank(reference, state, stride=1, **{names.get(k, k): v for k, v in hyper.items()})
    batch, policy = from_oracle(reference)
    kinds = {
        Signal.EFFECTIVE_RANK: "ER",
        Signal.EFFECTIVE_RANK_VELOCITY: "ERV",
        Signal.EFFECTIVE_RANK_ACCELERATION: "ERA",
    }
    measured = {s: [0.0 if x is None else x[k] for x in expected.extra["signals"]] for s, k in kinds.items()}
    batch = batch.put({s: batch.tree.field(TRAJECTORY, x, torch.float64) for s, x in measured.items()})
    recipe = recipes.build("verl_rank", **hyper)
    objective = recipe.objective
    potential = recipe.advantage.bonus
    ours = {"rank": "ER", "speed": "ERV", "push": "ERA"}
    if begun:
        objective.memory.of(potential).update(seen=1.0, **{k: state[v] for k, v in ours.items()})
    credited = objective.credit(batch)
    close(credited["advantage"].at(TOKEN).x, expected.advantage)
    after = objective.memory.of(potential)
    assert {v: after[k] for k, v in ours.items()} == pytest.approx(expected.extra["state"])
    same_loss(recipe, batch, policy, reference, surrogate(reference, expected.advantage, kl=1e-3), credited)


@pytest.mark.parametrize("threshold, top, coef, levels", [(0.6, 15, 0.01, (0.8,)), (0.2, 1, 0.5, (0.8, 0.5))])
@some
@given(seed=SEEDS)
def test_rlfr(threshold, top, coef, levels, seed):
    reference = made(seed)
    batch, _ = from_oracle(reference)
    mean = lambda x: math.fsum(x) / len(x)  # noqa: E731
    score = lambda one: mean([mean([s / (1 - s) * dev for dev in one.facts["deviation"][s]]) for s in levels])  # noqa: E731
    exact = torch.tensor([score(x) for x in records.tokens(reference)], dtype=torch.float64)
    batch = batch.put({Signal.FLOW_DEVIATION: Field(batch.tree, TOKEN, exact)})
    expected = oracle.rlfr(reference, threshold, top, coef, levels)
    recipe = recipes.build("rlfr", threshold=threshold, top=top, coef=coef)
    close(credit(recipe, batch), expected)  # its loss: tests/recipes/test_loss_around_credit.py


# ---------------------------------------------------------------- shaped outcomes


@pytest.mark.parametrize(
    "hyper, theirs",
    [
        ({}, {}),
        (
            {"threshold": 0.3, "length": 0.5, "longest": 3, "form": 0.2},
            {"threshold": 0.3, "length_weight": 0.5, "longest": 3, "format_weight": 0.2},
        ),
    ],
)
@some
@given(seed=SEEDS, by_calls=st.booleans())
def test_gcpo(hyper, theirs, seed, by_calls):
    reference = made(seed)
    batch, policy = from_oracle(reference)
    rows = list(records.trajectories(reference))
    batch = told(batch, format=(TRAJECTORY, [one.facts["format"] for one in rows]))
    if by_calls:  # nobody tells the action: a tool call is one
        batch = replace(batch, facts={k: v for k, v in batch.facts.items() if k != "action"})
        for one in rows:
            one.facts["action"] = any(turn.tool_calls for turn in one.turns)
    expected = oracle.gcpo(reference, **theirs)
    recipe = recipes.build("gcpo", **hyper)
    close(recipe.advantage.value(batch).x, expected.extra["reward"])
    close(credit(recipe, batch), expected.advantage)
    same_loss(recipe, batch, policy, reference, surrogate(reference, expected.advantage, over="row"))


@pytest.mark.parametrize(
    "hyper, theirs",
    [
        ({}, {}),
        ({"places": False, "fresh": True}, {"by_position": False, "fresh_only": True}),
        ({"alpha": 0.5, "beta": 3.0, "gamma": 1.0, "form": 0.3, "softness": 0.4}, None),
    ],
)
@some
@given(seed=SEEDS)
def test_promed(hyper, theirs, seed):
    reference = made(seed)
    batch, policy = from_oracle(reference)
    batch = asked(reference, batch)
    names = {"softness": "temperature"}
    expected = oracle.shapley_gain(reference, **(theirs or {names.get(k, k): v for k, v in hyper.items()}))
    recipe = recipes.build("promed", **hyper)
    paid = recipe.advantage.value.value
    close(paid.gain(batch).x, expected.extra["gain"])
    close(paid(batch).at(TOKEN).x, expected.extra["reward"])
    close(credit(recipe, batch), expected.advantage)
    loss = surrogate(reference, expected.advantage, low=0.1, over="row", kl=0.04)
    same_loss(recipe, batch, policy, reference, loss)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, 0.3])
@some
@given(seed=SEEDS)
def test_fapo(penalty, seed):
    reference = made(seed)
    batch, policy = from_oracle(reference)
    expected = oracle.fapo(reference, penalty)
    recipe = recipes.build("fapo", penalty=penalty)
    close(credit(recipe, batch), expected)
    same_loss(recipe, batch, policy, reference, surrogate(reference, expected, high=0.28, dual=10.0))


@pytest.mark.parametrize("alpha, slack, alone", [(1.0, 4.0, False), (2.0, 1.5, False), (1.0, 4.0, True)])
@some
@given(seed=SEEDS)
def test_otc(alpha, slack, alone, seed):
    reference = made(seed)
    batch, policy = from_oracle(reference)
    expected = oracle.otc(reference, alpha, slack, alone)
    recipe = recipes.build("otc", alpha=alpha, slack=slack, alone=alone)
    objective = recipe.objective
    thrift = recipe.advantage.value
    before = {f"task {i}": group[0].facts["fewest"] for i, group in enumerate(reference)}
    objective.memory.of(thrift)["tasks"] = {k: n for k, n in before.items() if n is not None}
    credited = objective.credit(batch)
    close(thrift(credited).x, expected.extra["reward"])
    close(credited["advantage"].at(TOKEN).x, expected.advantage)
    after = objective.memory.of(thrift)["tasks"]
    assert [after.get(f"task {i}") for i in range(len(reference))] == expected.extra["fewest"]
    same_loss(recipe, batch, policy, reference, surrogate(reference, expected.advantage, over="row"), credited)


@pytest.mark.parametrize("helpful, stable", [(1.0, 1.0), (0.3, 2.0)])
@some
@given(seed=SEEDS)
def test_information_consistency(helpful, stable, seed):
    reference = made(seed)
    batch, policy = from_oracle(reference)
    words = ["abc".index(one.facts["word"]) for one in records.tokens(reference)]
    batch = replace(batch, token=batch.tree.field(TOKEN, words, torch.int64))
    expected = oracle.information_consistency(reference, helpful, stable)
    recipe = recipes.build("information_consistency", helpful=helpful, stable=stable)
    close(credit(recipe, batch), expected)
    same_loss(recipe, batch, policy, reference, surrogate(reference, expected, over="row"))


def test_a_penalty_can_have_no_rows():
    """Nothing to replay: the second loss is 0, and the first is as ever."""
    reference = made(3)
    batch, policy = from_oracle(reference)
    recipe = recipes.build("spear")
    loss, found = slopes(recipe.objective, batch, policy)
    alone = replace(recipe, penalties=())
    expected, theirs = slopes(alone.objective, batch, policy)
    assert isinstance(recipe.penalties[0], WeightedPenalty) and loss.item() == expected.item()
    close(found[Signal.LOGP], theirs[Signal.LOGP])
