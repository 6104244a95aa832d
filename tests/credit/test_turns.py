"""Credit by turns, states and what a turn tells: every method against its oracle."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import credit_turns as oracle
from oracles import records
from oracles.objectives import BOUND, bounded, constant, larger, smaller
from oracles.result import Result
from support.proven import TURNS
from support.turn_helpers import converted, made, near

from turnwise import recipes
from turnwise.algebra.objective import Objective
from turnwise.core.levels import TOKEN
from turnwise.core.signals import Signal
from turnwise.recipes.families.turn_credit import SameAgent, SameTask

CASES = [
    *((name, {}) for name in TURNS),
    ("bilevel_gae", {"gamma": 0.9, "lam": 0.7, "turn_gamma": 0.6}),
    ("gigpo", {"omega": 0.3, "gamma": 0.5, "scale": True, "rows": "trajectory"}),
    ("gigpo", {"omega": 2.0, "scale": True}),
    ("hgpo", {"past": 4, "alpha": 2.5, "gamma": 0.5, "base": True}),
    ("hgpo", {"past": 0, "scale": False}),
    ("hgpo", {"past": 1, "alpha": 0.0, "scale": False, "base": True, "rows": "trajectory"}),
    ("salt", {"base": "rloo", "window": 1}),
    ("salt", {"window": 0}),
    ("igpo", {"form": "code"}),
    ("igpo", {"gamma": 0.8, "answer_weight": 0.5}),
    ("igpo", {"form": "code", "gamma": 0.6, "answer_weight": 2.0}),
    ("infopo", {"per_token": False, "beta": 2.0, "gate_temperature": 0.5}),
    ("mars", {"game": "domain"}),
    ("trloo", {"gamma": 0.7}),
    ("flow_grpo", {"rows": "trajectory"}),
    ("srgpo", {"size": 3, "within": "task", "scale": False}),
    ("srgpo", {"size": 2, "within": "trajectory", "omega": 2.0, "rows": "trajectory"}),
    ("srgpo", {"size": 4}),
    ("srgpo", {"size": -1}),
    ("ui_s1", {"scale": False, "episode_weight": 0.3, "step_weight": 2.0, "gamma": 0.9}),
]
LOSSES = {  # besides the advantage; what is left out: clip 0.2, mean over trajectories, no KL
    "bilevel_gae": {"over": "token"},
    "gigpo": {"beta": 0.01, "over": "token"},
    "hgpo": {"beta": 0.01, "over": "token"},
    "igpo": {"beta": 1e-3, "over": "token"},
    "infopo": {"over": "token"},
    "mars": {"beta": 0.2, "dual": 1.4},
    "trloo": {"high": 0.28, "over": "sum over turn", "keep": lambda group, turn: turn.facts["valid"]},
    "flow_grpo": {"high": 0.3, "beta": 1e-3, "over": "token", "keep": lambda group, turn: turn.facts["planner"]},
    "srgpo": {"beta": 0.01, "over": "token"},
    "ui_s1": {"beta": 1e-4, "over": "token", "keep": lambda group, turn, gamma=0.5: varied(group, gamma)},
}
OTHERWISE = {"past": "history", "gate_temperature": "temperature"}  # flags of a run have these names already
SEEDS = st.integers(0, 10**6)


def varied(group: records.Group, gamma: float) -> bool:
    """UI-S1: the returns of the first steps differ (population std), or the task was tried once."""
    first = [
        oracle.matched_returns([u.reward for u in t.turns], [u.facts["match"] for u in t.turns], gamma)[0] for t in group
    ]
    return len(first) == 1 or statistics.pstdev(first) > 0.3


def surrogate(reference, advantage, low=0.2, high=0.2, dual=None, beta=0.0, over="trajectory", keep=None, target=None):
    """A clipped objective with given advantages, token by token, as a number to minimise."""
    rows, position = [], 0
    for g, i, k, _, turn in oracle.steps(reference):
        for token in turn.tokens:
            if keep is None or keep(reference[g], turn):
                rows.append((token, advantage[position], target and target[position], (g, i), (g, i, k)))
            position += 1
    episodes, turns = {row[3] for row in rows}, {row[4] for row in rows}
    loss = constant(0.0)
    for token, a, goal, episode, _ in rows:
        ratio = torch.exp(bounded(token.logp - token.behaviour, -BOUND, BOUND))
        cost = larger(-a * ratio, -a * bounded(ratio, 1 - low, 1 + high))
        if dual is not None and a < 0:
            cost = smaller(cost, constant(-dual * a))
        x = bounded(token.logp - token.reference, -BOUND, BOUND)
        cost = cost + beta * smaller(torch.exp(-x) + x - 1, constant(10.0))
        if goal is not None:
            held = bounded(token.value, token.old_value - 0.5, token.old_value + 0.5)
            cost = cost + 0.5 * larger((token.value - goal) ** 2, (held - goal) ** 2)
        share = {
            "token": len(rows),
            "trajectory": len(episodes) * sum(row[3] == episode for row in rows),
            "sum over turn": len(turns),
        }
        loss = loss + cost / share[over]
    return loss


@pytest.mark.parametrize("name, hyper", CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_credit_loss_and_gradient(name, hyper, seed):
    reference = made(seed)
    batch, policy = converted(reference)
    found = getattr(oracle, name)(reference, **{OTHERWISE.get(key, key): x for key, x in hyper.items()})
    advantage, extra = (found.advantage, found.extra) if isinstance(found, Result) else (found, {})
    objective = recipes.build(name, **hyper).objective
    credited = objective.credit(batch)
    ours = credited["advantage"].at(TOKEN).x
    torch.testing.assert_close(ours, torch.tensor(advantage, dtype=torch.float64), rtol=1e-8, atol=1e-8)
    loss = objective(objective.plan(credited), policy).loss
    others = dict(LOSSES.get(name, {}))
    if name == "ui_s1" and "gamma" in hyper:
        others["keep"] = lambda group, turn: varied(group, hyper["gamma"])
    expected = surrogate(reference, advantage, target=extra.get("returns"), **others)
    assert loss.item() == near(expected.item())
    for signal in (Signal.LOGP, Signal.VALUE):
        mine = torch.autograd.grad(loss, policy[signal].x, retain_graph=True, allow_unused=True)[0]
        theirs = torch.tensor(records.gradients(reference, expected, str(signal)), dtype=torch.float64)
        torch.testing.assert_close(torch.zeros_like(theirs) if mine is None else mine, theirs, rtol=1e-7, atol=1e-9)


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS, rate=st.floats(0.0, 1.0), epoch=st.integers(0, 9))
def test_information_fades(seed, rate, epoch):
    reference = made(seed)
    objective = recipes.build("infopo", rate=rate).objective
    objective.memory.clock = epoch
    found = objective.credit(converted(reference)[0])["advantage"].at(TOKEN).x.tolist()
    assert found == near(oracle.infopo(reference, rate=rate, epoch=epoch).advantage)


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS, alpha=st.floats(0, 2), beta=st.floats(0, 1), gamma=st.floats(0, 1), probability=st.booleans())
def test_a2tgpo_credit(seed, alpha, beta, gamma, probability):
    """The gain of the answer in log-probability, or (the score being any number) in probability."""
    reference = made(seed)
    batch, _ = converted(reference)
    if probability:
        batch = batch.put({Signal.ANSWER_LOGP: batch[Signal.ANSWER_LOGP].exp()})
    theirs = oracle.a2tgpo_credit(reference, alpha, beta, gamma, probability)
    objective = recipes.build("a2tgpo", alpha=alpha, beta=beta, gamma=gamma).objective
    credited = objective.credit(batch)
    assert credited["advantage"].at(TOKEN).x.tolist() == near(theirs.advantage)
    planned = objective.plan(credited)
    assert planned[objective.gate].at(TOKEN).x.tolist() == near(theirs.extra["clip_scale"])


# ------------------------------------------------------------------------ words


@pytest.mark.parametrize(
    "name, hyper, words",
    [
        ("gigpo", {"rows": "token"}, "rows is 'token'"),
        ("hgpo", {"past": -1}, "history is -1"),
        ("hgpo", {"alpha": 1e6}, "alpha is"),
        ("salt", {"window": -1}, "window is -1"),
        ("salt", {"base": "ppo"}, "base is 'ppo'"),
        ("igpo", {"form": "blog"}, "form is 'blog'"),
        ("infopo", {"gate_temperature": 0.0}, "temperature is 0"),
        ("trloo", {"absent": "away"}, "absent is 'away'"),
        ("srgpo", {"size": 0}, "size is 0"),
        ("bilevel_gae", {"turn_gamma": 2.0}, "turn_gamma is 2"),
        ("ui_s1", {"gamma": -0.1}, "gamma is -0.1"),
    ],
)
def test_bad_hyper_parameters_are_refused_in_words(name, hyper, words):
    with pytest.raises(ValueError, match=words):
        recipes.build(name, **hyper)


@pytest.mark.parametrize("piece", [SameTask, SameAgent])
def test_kin_refuse_unknown_words(piece):
    with pytest.raises(ValueError, match="write"):
        piece("nobody")


def test_what_methods_ask_to_be_told():
    asks = {name: recipes.build(name).requirements for name in TURNS}
    assert asks["gigpo"] == asks["hgpo"] == asks["salt"] == {"state"}
    assert asks["igpo"] == {"answer"} and asks["infopo"] == {"feedback"} and asks["ui_s1"] == {"turn fact match"}
    assert isinstance(recipes.build("infopo").objective, Objective)
    assert Signal.LOGP_WITHOUT_FEEDBACK in recipes.build("infopo").objective.signals
