"""What is logged of each source of rows, against slow loops; and that it does not depend on the cut into micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import COUNTS, records_of

from turnwise import recipes
from turnwise.algebra import diagnostics
from turnwise.algebra.piece import MicroBatchView
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN, Field
from turnwise.core.records import Origin
from turnwise.core.signals import Signal
from turnwise.credit.metrics import measure_credit

BOTH = frozenset({"demonstrations", "replay"})
UPDATED = ("ratio", "over_2", "clipped", "gradient_share", "logp", "entropy")


def mixed(counts, seed):
    """Records of every source: experts and stored ones by lot, every third of the rest hinted, pairs among the experts."""
    groups = []
    for group in records_of(counts, seed, asks=BOTH):
        members = []
        for i, t in enumerate(group.trajectories):
            if t.origin == Origin.EXPERT and i % 2:
                t = replace(t, facts={**t.facts, "chosen": 1.0})
            members.append(replace(t, guidance="hint: x" if i % 3 == 1 else ""))
        groups.append(replace(group, trajectories=tuple(members)))
    return groups


def named(t):
    if t.origin == Origin.EXPERT:
        return "pairs" if "chosen" in t.facts else "expert"
    return "replay" if t.origin == Origin.REPLAY else "guided" if t.guidance else "policy"


def policy_of(batch, seed=0):
    g = torch.Generator().manual_seed(seed)
    rand = torch.rand(batch.tree.count(TOKEN), generator=g, dtype=torch.float64)
    logp = (-2.5 * rand).requires_grad_()
    return {Signal.LOGP: Field(batch.tree, TOKEN, logp), Signal.ENTROPY: Field(batch.tree, TOKEN, rand)}


def cut(batch, policy, chosen):
    """Some trajectories of a planned step, with their signals that carry a gradient."""
    part = batch.put(row=batch.tree.field(TOKEN, torch.arange(batch.tree.count(TOKEN)))).select(chosen)
    return part, {name: Field(part.tree, TOKEN, f.x[part["row"].x]) for name, f in policy.items()}


def logged(objective, batch, policy, parts):
    sums = {}
    for chosen in parts:
        for name, value in objective(*cut(batch, policy, chosen)).stats.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return diagnostics.finish(sums)


@settings(deadline=None, max_examples=40)
@given(counts=COUNTS, seed=st.integers(0, 10**6))
@pytest.mark.parametrize("method", ["luffy", "chord"])
def test_every_source_has_means_of_its_own(method, counts, seed):
    groups = mixed(counts, seed)
    rows = [t for g in groups for t in g.trajectories]
    objective = recipes.build(method).objective
    batch = objective.plan(objective.credit(pack(groups)))
    policy = policy_of(batch, seed)
    whole = logged(objective, batch, policy, [list(range(len(rows)))])
    apart = logged(objective, batch, policy, [[k] for k in reversed(range(len(rows)))])
    for name in (name for name in whole if name.startswith("source/")):
        assert apart[name] == pytest.approx(whole[name], rel=1e-6, abs=1e-9), name
    logp, rho = policy[Signal.LOGP].x.tolist(), objective.ratio(MicroBatchView(batch, policy)).at(TOKEN).x.tolist()
    told, before = measure_credit(batch), 0
    seen: dict[str, list[int]] = {}
    for t in rows:
        seen.setdefault(named(t), []).extend(range(before, before + t.sampled))
        before += t.sampled
    if set(seen) == {"policy"}:
        assert not any(name.startswith("source/") for name in (*whole, *told))
        return
    for name, tokens in seen.items():
        mine = [t for t in rows if named(t) == name]
        if not before:
            continue
        assert told[f"source/{name}/rows"] == len(mine) and told[f"source/{name}/tokens"] == len(tokens)
        assert told[f"source/{name}/reward"] == pytest.approx(sum(t.reward for t in mine) / len(mine), abs=1e-6)
        if tokens and {n for n, some in seen.items() if some} != {"policy"}:
            mean = lambda x, at=tokens: sum(x[i] for i in at) / len(at)  # noqa: E731
            assert whole[f"source/{name}/logp"] == pytest.approx(mean(logp), abs=1e-6)
            assert whole[f"source/{name}/ratio"] == pytest.approx(mean(rho), rel=1e-6)
            assert all(f"source/{name}/{key}" in whole for key in UPDATED)
    shares = [value for name, value in whole.items() if name.endswith("/gradient_share")]
    assert not shares or math.isclose(sum(shares), 1.0, abs_tol=1e-6) or sum(shares) == 0


def test_what_is_imitated_has_its_share_of_the_gradient():
    """Expert rows take no part in the ratio of CHORD; their pull comes from a penalty, and is seen."""
    groups = mixed([[[3], [2], [4], [1]]], 1)
    shown = replace(groups[0].trajectories[1], origin=Origin.EXPERT, guidance="", facts={})
    own = [replace(t, origin=Origin.POLICY, guidance="") for t in groups[0].trajectories]
    batch = pack([replace(groups[0], trajectories=(own[0], shown, *own[2:]))])
    objective = recipes.build("chord", peak=0.5, valley=0.5).objective
    batch = objective.plan(objective.credit(batch))
    found = logged(objective, batch, policy_of(batch), [[0, 1, 2, 3]])
    assert found["source/expert/gradient_share"] > 0.1 and found["source/policy/gradient_share"] > 0.1


def test_the_policy_alone_is_not_told_twice():
    batch = pack(records_of([[[2, 1], [3]]], 0))
    objective = recipes.build("grpo", beta=0.0).objective
    batch = objective.plan(objective.credit(batch))
    found = logged(objective, batch, policy_of(batch), [[0, 1]]) | measure_credit(batch)
    assert not any(name.startswith("source/") for name in found)


@pytest.mark.parametrize("rewards", [(1.0, 0.0), (2.0, 1.0)])
def test_the_share_of_successes_in_the_gradient(rewards):
    """Two trajectories as long as each other pull equally hard in opposite directions."""
    (group,) = records_of([[[3], [3]]])
    members = tuple(
        replace(t, turns=(replace(t.turns[0], reward=r),)) for t, r in zip(group.trajectories, rewards, strict=True)
    )
    objective = recipes.build("grpo", beta=0.0).objective
    batch = objective.plan(objective.credit(pack([replace(group, trajectories=members)])))
    policy = {Signal.LOGP: Field(batch.tree, TOKEN, batch.behaviour.x.double().clone().requires_grad_())}
    share = logged(objective, batch, policy, [[0, 1]])["gradient_share/positive_advantage"]
    assert share == pytest.approx(0.5 if rewards[1] == 0.0 else 1.0)


def test_the_share_of_each_turn_in_the_gradient():
    """Turns of 2 and 1 tokens and one of 3: with weights of one size per token, shares go by the tokens of each turn."""
    (group,) = records_of([[[2, 1], [3]]])
    members = tuple(
        replace(t, turns=tuple(replace(turn, reward=reward / len(t.turns)) for turn in t.turns))
        for t, reward in zip(group.trajectories, (1.0, -1.0), strict=True)
    )
    objective = recipes.build("reinforce").objective
    batch = objective.plan(objective.credit(pack([replace(group, trajectories=members)])))
    policy = {Signal.LOGP: Field(batch.tree, TOKEN, batch.behaviour.x.double().clone().requires_grad_())}
    metrics = logged(objective, batch, policy, [[0, 1]])
    assert [name for name in metrics if name.startswith("gradient_share/turn")] == [
        "gradient_share/turn0", "gradient_share/turn1",
    ]  # fmt: skip
    assert metrics["gradient_share/turn0"] + metrics["gradient_share/turn1"] == pytest.approx(1.0)
    assert metrics["gradient_share/turn1"] == pytest.approx(1 / 6)
