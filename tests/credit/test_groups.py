"""Group-, reward- and baseline-level credit against its independent oracles, step by step where it remembers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import credit_groups as cg
from oracles import records
from support.group_helpers import NAN, SEEDS, credit, packed, remembering, rich, same, slopes
from support.proven import GROUPS

from turnwise import recipes
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.recipes.families.group_credit import LEVELS

QUANTILES = [0.1 * i + 0.0123456 for i in range(19)]  # between the scores: no ties to be decided

CASES = {  # method and variant: hyper-parameters of ours, the oracle
    "mc_grpo": ({}, cg.mc_grpo),
    "mc_grpo rescaled": ({"rescale": True, "eps": 0.1}, lambda b: cg.mc_grpo(b, eps=0.1, rescale=True)),
    "mc_grpo fallback": ({"fallback": True}, lambda b: cg.mc_grpo(b, fallback=True)),
    "bnpo": ({}, cg.bnpo),
    "bnpo two": ({"rewards": ("accuracy", "format")}, lambda b: cg.bnpo(b, ("accuracy", "format"))),
    "bnpo all": ({"rewards": (), "bottom": -1.0, "top": 5.0}, lambda b: cg.bnpo(b, tuple(cg.names(b)), -1.0, 5.0)),
    "gdpo": ({}, cg.gdpo),
    "gdpo tokens": ({"whiten": "tokens", "eps": 1e-3}, lambda b: cg.gdpo(b, eps=1e-3, whiten="tokens")),
    "gdpo plain": ({"whiten": "none"}, lambda b: cg.gdpo(b, whiten="none")),
    "gdpo weighted": (
        {"rewards": ("length", "accuracy", "format"), "weights": (0.5, 2.0, 0.0)},
        lambda b: cg.gdpo(b, {"accuracy": 2.0, "format": 0.0, "length": 0.5}),
    ),
    "dvao": ({}, cg.dvao),
    "dvao weighted": (
        {"rewards": ("accuracy", "format", "length"), "weights": (2.0, 1.0, 0.5), "eps": 1e-3},
        lambda b: cg.dvao(b, {"accuracy": 2.0, "length": 0.5}, eps=1e-3),
    ),
    "risk_po": ({}, cg.risk_po),
    "risk_po batch": (
        {"bundle": 2, "mode": "batch", "share": "std", "baseline": True, "omega": 0.5, "a": 0.3, "b": 0.9},
        lambda b: cg.risk_po(b, bundle=2, mode="batch", credit="std", baseline=True, omega=0.5, a=0.3, b=0.9),
    ),
    "risk_po mix": ({"mode": "mix", "share": "score"}, lambda b: cg.risk_po(b, mode="mix", credit="score")),
    "risk_po uniform": ({"share": "uniform", "bundle": 1}, lambda b: cg.risk_po(b, credit="uniform", bundle=1)),
    "canon": ({}, cg.canon),
    "canon length": (
        {"mu": None, "alpha": 0.8, "metric": "length"},
        lambda b: cg.canon(b, mu=None, alpha=0.8, metric="length"),
    ),
    "canon blend": ({"mu": 0.3, "alpha": 0.5}, lambda b: cg.canon(b, mu=0.3, alpha=0.5)),
    "stratified_grpo": ({}, cg.stratified_grpo),
    "stratified_grpo half": ({"alpha": 0.5, "eps": 1e-3}, lambda b: cg.stratified_grpo(b, alpha=0.5, eps=1e-3)),
    "dgpo_difficulty": ({}, cg.dgpo_difficulty),
    "dgpo_difficulty code": (
        {"summed": True, "accuracy": "accuracy", "softness": 0.5, "valid_tokens": False},
        lambda b: cg.dgpo_difficulty(b, 0.5, code=True, accuracy="accuracy", valid_tokens=False),
    ),
    "capo_calibration": ({}, cg.capo_calibration),
    "capo_calibration scaled": (
        {"tau": 0.3, "high": 30.0, "low": 8.0, "scaled": True},
        lambda b: cg.capo_calibration(b, tau=0.3, high=30.0, low=8.0, scaled=True),
    ),
    "copo": ({}, cg.copo),
    "copo forced": ({"forced": True, "b": 0.8, "k": 3.0}, lambda b: cg.copo(b, b=0.8, k=3.0, forced=True)),
    "adora": ({"threshold": 1.01}, cg.adora),
    "adora lenient": ({"lenient": True, "damp": 0.3}, lambda b: cg.adora(b, damp=0.3, vision=True)),
    "adora strict": ({}, lambda b: cg.adora(b, threshold=0.5)),
    "unlikeliness": ({}, cg.unlikeliness),
    "unlikeliness strong": ({"beta": 0.9, "eps": 1e-3}, lambda b: cg.unlikeliness(b, beta=0.9, eps=1e-3)),
    "xrpo": ({}, cg.xrpo),
    "xrpo wide": ({"novelty": 0.5, "kappa": 3.0}, lambda b: cg.xrpo(b, novelty=0.5, kappa=3.0)),
    "pipo": ({}, cg.pipo),
    "polychromic": ({}, cg.polychromic),
    "polychromic pairs": ({"size": 2, "bottom": -1.0, "top": 2.0}, lambda b: cg.polychromic(b, 2, -1.0, 2.0)),
    "polychromic three": ({"size": 3}, lambda b: cg.polychromic(b, 3)),
    "public_baseline": ({}, cg.public_baseline),
    "public_baseline scaled": ({"scale": True}, lambda b: cg.public_baseline(b, scale=True)),
    "mssr": ({}, cg.mssr),
    "mssr plain": ({"weight": 0.0, "bottom": -1.0, "top": 2.0}, lambda b: cg.mssr(b, weight=0.0, bottom=-1.0, top=2.0)),
    "poise": ({}, cg.poise),
    "poise raw": ({"normalise": False}, lambda b: cg.poise(b, normalise=False)),
    "probe_baseline": ({}, cg.probe_baseline),
}


def test_the_cases_are_those_the_contract_counts_on():
    assert sorted({case.split()[0] for case in CASES}) == sorted(GROUPS)


@pytest.mark.parametrize("case", CASES)
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS, overflow=st.booleans())
def test_advantage(case, seed, overflow):
    reference = rich(seed, overflow=overflow)
    hyper, oracle = CASES[case]
    expected = oracle(reference)
    expected = expected.advantage if hasattr(expected, "advantage") else expected
    same(credit(case.split()[0], reference, **hyper), expected)


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_one_at_the_median_leaves_the_loss(seed):
    reference = rich(seed)
    batch, policy = packed(reference)
    objective = recipes.build("mc_grpo").objective
    planned = objective.plan(objective.credit(batch))
    kept = torch.tensor(cg.mc_grpo(reference).extra["kept"])
    tokens = batch.tree.size(TOKEN, TRAJECTORY).x
    assert torch.equal(planned["weight"].sum(TRAJECTORY).x > 0, kept & (tokens > 0))
    _, gradient = slopes(objective, batch, policy)
    assert not gradient[~kept[batch.tree.ancestor(TOKEN, TRAJECTORY)]].any()


@pytest.mark.parametrize("forced", [False, True])
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS, overflow=st.booleans())
def test_two_clipped_objectives(forced, seed, overflow):
    reference = rich(seed, overflow=overflow)
    batch, policy = packed(reference)
    expected = cg.copo(reference, forced=forced, clip=0.1)
    loss, gradient = slopes(recipes.build("copo", forced=forced, clip=0.1).objective, batch, policy)
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-8, abs=1e-9)
    same(gradient, records.gradients(reference, expected.loss))


@pytest.mark.parametrize("mode", ["track", "mix"])
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_quantiles_are_read_before_they_are_written(mode, seed):
    reference = rich(seed)
    batch, _ = packed(reference)
    hyper = {"mode": mode, "bundle": 3, "eta": 0.2, "b": 0.9}
    objective, part = remembering("risk_po", "TailRisk", {"quantiles": QUANTILES}, **hyper)
    expected = cg.risk_po(reference, QUANTILES, **hyper)
    same(objective.credit(batch)["advantage"].at(TOKEN).x, expected.advantage)
    assert objective.memory.of(part)["quantiles"] == pytest.approx(expected.extra["tracker"])
    first = recipes.build("risk_po", **hyper).objective
    first.credit(batch)
    held = first.memory.of(first.advantage)["quantiles"]
    assert held == pytest.approx(cg.risk_po(reference, **hyper).extra["tracker"]) and len(held) == len(LEVELS)


def test_the_batch_before_is_judged_by_the_next():
    """Five steps; each replays the batch before with its credit times the verdict, as the oracle says."""
    objective, state, before, stored = recipes.build("pipo").objective, None, [], {}
    for seed in range(5):
        reference = rich(seed)
        expected = cg.pipo(reference, state)
        state = expected.extra["state"]
        batch, _ = packed([*reference, *before])
        keys = batch.seed.x.tolist()
        told = torch.tensor([stored.get(k, NAN) for k in keys], dtype=torch.float64)
        batch = replace(batch, facts={**batch.facts, "advantage": Field(batch.tree, TRAJECTORY, told)})
        credited = objective.credit(batch)["advantage"]
        same(credited.at(TOKEN).x, [*expected.advantage, *expected.extra["replay"]])
        stored = dict(zip(keys, credited.x.tolist()))
        before = reference
        for t in records.trajectories(before):
            t.facts["origin"] = "replay"
    verdict = objective.advantage.right.term
    assert objective.memory.of(verdict)["means"] == pytest.approx(state["history"])


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_expectations_are_read_before_they_are_written(seed):
    reference = rich(seed)
    for i, g in enumerate(reference):
        for t in g:
            t.facts["prompt"] = i
    dice = random.Random(seed)
    tracker = {i: (dice.uniform(0.5, 5), dice.uniform(0.5, 5)) for i in range(0, len(reference), 2)}
    kls = [dice.uniform(0, 0.02) for _ in range(30)]
    batch, _ = packed(reference)
    batch = batch.put({Signal.PREVIOUS: batch[Signal.PROXIMAL]})  # the last update went nowhere
    objective, keep = remembering("mssr", "RetentionByKL", {"batches": 30, "kl": kls[-19:]})
    part = next(p for p in objective.advantage.parts if type(p).__name__ == "SuccessTracker")
    objective.memory.of(part).update({"tasks": {str(i): list(row) for i, row in tracker.items()}})
    expected = cg.mssr(reference, {"tracker": tracker, "kl": [*kls, 0.0]})
    credited = objective.credit(batch)
    same(credited["advantage"].at(TOKEN).x, expected.advantage)
    assert float(keep(credited).item) == pytest.approx(expected.extra["eta"])
    for task, row in expected.extra["state"]["tracker"].items():
        assert objective.memory.of(part)["tasks"][str(task)] == pytest.approx(row)


def test_the_first_batch_has_no_update_before_it():
    batch, _ = packed(rich(0))
    objective, keep = remembering("mssr", "RetentionByKL", {})
    assert float(keep(objective.credit(batch)).item) == pytest.approx(0.96)
    moved = batch.put({Signal.PREVIOUS: batch[Signal.PROXIMAL] - 3.0})
    assert float(keep(objective.credit(moved)).item) == pytest.approx(0.875)


@pytest.mark.parametrize(
    "name, hyper, words",
    [
        ("mc_grpo", {"eps": 0.0}, "eps is 0"),
        ("bnpo", {"bottom": 1.0}, r"bottom is 1.0; write a number < top \(top is 1.0\)"),
        ("gdpo", {"rewards": ("a",), "weights": (-1.0,)}, "numbers >= 0"),
        ("gdpo", {"whiten": "turns"}, "whiten is 'turns'"),
        ("risk_po", {"a": 0.9}, r"a is 0.9; write a number in \(0, b\) \(b is 0.8\)"),
        ("canon", {"mu": 2.0}, "mu is 2"),
        ("stratified_grpo", {"alpha": -1.0}, "share is -1"),
        ("dgpo_difficulty", {"softness": 0.0}, "softness is 0"),
        ("capo_calibration", {"tau": 0.0}, "tau is 0"),
        ("copo", {"clip": 2.0}, "low is 2"),
        ("adora", {"damp": -0.1}, "damp is -0.1"),
        ("unlikeliness", {"beta": 2.0}, "beta is 2"),
        ("xrpo", {"kappa": -1.0}, "cap is -1"),
        ("pipo", {"window": 0}, "window is 0"),
        ("polychromic", {"size": 0}, "SetAdvantage: size is 0"),
        ("mssr", {"gamma": 0.0}, "gamma is 0"),
    ],
)
def test_bad_hyper_parameters_are_refused_in_words(name, hyper, words):
    with pytest.raises(ValueError, match=words):
        recipes.build(name, **hyper)


def test_what_methods_ask_to_be_told():
    asked = lambda name, **hyper: recipes.build(name, **hyper).requirements  # noqa: E731
    assert asked("gdpo", rewards=("a", "b", "c")) == {"reward a", "reward b", "reward c"}
    assert asked("gdpo") == asked("bnpo") == asked("polychromic") == frozenset()
    assert asked("copo") == {"fact said"}
    assert asked("capo_calibration") == asked("risk_po", share="score") == {"verdict"}
    assert asked("pipo") == {"replay"} and asked("dgpo_difficulty", accuracy="right") == {"reward right"}
    probed = [recipes.build(name).objective.signals_before_batch for name in ("poise", "probe_baseline")]
    assert all(Signal.REWARD_PROBE in signals for signals in probed)
