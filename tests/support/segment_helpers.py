"""What the tests of credit by segments share: enriched oracle records, our credit of them, and comparisons."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from oracles import credit_segments as oracle
from oracles import records

from support.batches import from_oracle
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.signals import TURN_CRITIC, TURN_CRITIC_TARGET


def made(seed: int) -> records.Batch:
    return oracle.enrich(records.random_batch(seed), seed)


def close(found, expected) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-8, atol=1e-8)


def credit(recipe, batch):
    return recipe.objective.credit(batch)["advantage"].at(TOKEN).x


def told(batch, **facts):
    """More facts, each by level and values."""
    columns = {n: Field(batch.tree, level, torch.tensor(x, dtype=torch.float64)) for n, (level, x) in facts.items()}
    return replace(batch, facts={**batch.facts, **columns})


def kept(recipe, batch):
    """Which tokens the planned averaging counts."""
    objective = recipe.objective
    return (objective.plan(objective.credit(batch))["weight"].at(TOKEN).x > 0).double()


def slopes(objective, batch, policy, credited=None):
    """Loss and gradients by live signal, zeros where there is none."""
    loss = objective(objective.plan(credited or objective.credit(batch)), policy).loss
    found = torch.autograd.grad(loss, [f.x for f in policy.values()], allow_unused=True)
    return loss, {s: f.x * 0 if g is None else g for (s, f), g in zip(policy.items(), found)}


def criticised(reference: records.Batch):
    """The oracle's critics as signals: live ones with a gradient, slow ones on the batch."""
    batch, policy = from_oracle(reference)
    turns = [turn for one in records.trajectories(reference) for turn in one.turns]
    names = [("q", 0), ("q", 1), ("v", 0), ("v", 1)]
    column = lambda name, j: torch.tensor([turn.facts[name][j] for turn in turns], dtype=torch.float64)  # noqa: E731
    live = {s: Field(batch.tree, TURN, column(n, j).requires_grad_()) for s, (n, j) in zip(TURN_CRITIC, names)}
    slow = {s: Field(batch.tree, TURN, column(f"slow_{n}", j)) for s, (n, j) in zip(TURN_CRITIC_TARGET, names)}
    return batch.put({**slow, **{s: f.detach() for s, f in live.items()}}), {**policy, **live}


def asked(reference: records.Batch, batch):
    """The oracle's sets and lists as numbers: a bit for each piece that came, a fact for the worth of each piece."""
    rows = list(records.trajectories(reference))
    turns = [turn for one in rows for turn in one.turns]
    most = max(len(one.facts["shapley"]) for one in rows)
    worth = lambda one, k: one.facts["shapley"][k] if k < len(one.facts["shapley"]) else math.nan  # noqa: E731
    return told(
        batch,
        question=(TURN, [float(turn.facts["kind"] == "question") for turn in turns]),
        answer=(TURN, [float(turn.facts["kind"] == "answer") for turn in turns]),
        uncovered=(TURN, [float(sum(1 << k for k in turn.facts["uncovered"])) for turn in turns]),
        **{f"worth {k}": (TRAJECTORY, [worth(one, k) for one in rows]) for k in range(most)},
    )
