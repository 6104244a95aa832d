"""What the tests of methods that learn from others share: an oracle's records with all their facts, and one comparison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from oracles import others, records

from support.batches import from_oracle
from turnwise import recipes
from turnwise.algebra.objective import Objective
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.recipes.recipe import Recipe

Policy = dict[Signal, Field]


def enriched(seed: int, **shape: Any) -> records.Batch:
    """Random records with facts. "First" is by lot with us: the first own row of a group gets the lowest lot of its own
    rows, and of what is stored the latest is the youngest; experts have no age."""
    batch = others.enrich(records.random_batch(seed, **shape), seed)
    for group in batch:
        own = others.of(group, "policy")
        for one, lot in zip(own, sorted(one.lot for one in own)):
            one.lot = lot
        for one in others.of(group, "expert"):
            one.facts.pop("age", None)
    return batch


def plain(seed: int) -> records.Batch:
    """Nothing but the policy's rows, without any fact."""
    return records.random_batch(seed)


def column(batch: Batch, level, values) -> Field:
    return Field(batch.tree, level, torch.tensor(values))


def packed(reference: records.Batch) -> tuple[Batch, Policy]:
    """Ours, with the signals and facts of the records."""
    batch, policy = from_oracle(reference)
    rows, flat = list(records.trajectories(reference)), list(records.tokens(reference))
    numbers = lambda values: Field(batch.tree, TOKEN, torch.tensor(values, dtype=torch.float64))  # noqa: E731
    batch = replace(batch, guided=column(batch, TRAJECTORY, [bool(t.facts.get("guided", False)) for t in rows]))
    if flat and all("teacher" in t.facts for t in flat):
        batch = batch.put({Signal.TEACHER: numbers([t.facts["teacher"] for t in flat])})
    if flat and all("others" in t.facts for t in flat):
        batch = batch.put({Signal.CANDIDATE_MATCHES: numbers([float(t.facts["hits"]) for t in flat])})
        rivals = numbers([sum(o.item() for o in t.facts["others"]) for t in flat])
        policy = {**policy, Signal.CANDIDATE_LOGP: rivals.map(lambda x: x.requires_grad_())}
    return batch, policy


def built(method: str | Recipe, step: int = 0, **hyper: Any) -> Objective:
    recipe = recipes.build(method, **hyper) if isinstance(method, str) else method
    objective = recipe.objective
    objective.memory.clock = step
    return objective


def ran(objective: Objective, batch: Batch, policy: Policy):
    """(credited advantage of each token, the loss, its statistics)."""
    credited = objective.credit(batch)
    found = objective(objective.plan(credited), policy)
    return credited["advantage"].at(TOKEN).x, found.loss, found.stats


def slope(loss: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)[0] if loss.requires_grad else None
    return torch.zeros_like(leaf) if found is None else found


def near(found, expected) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64), expected, rtol=1e-8, atol=1e-8)


def proven(objective: Objective, batch: Batch, policy: Policy, reference: records.Batch, expected: others.Result):
    """Advantage, loss and gradient of ours are the oracle's."""
    advantage, loss, stats = ran(objective, batch, policy)
    near(advantage.detach(), expected.advantage)
    near(loss.detach(), expected.loss.detach())
    near(slope(loss, policy[Signal.LOGP].x), records.gradients(reference, expected.loss))
    assert all(torch.isfinite(torch.as_tensor(v)) for v in stats.values())
    return stats


def same(left: Objective, right: Objective, batch: Batch, policy: Policy) -> None:
    """Two objectives are one and the same on this batch."""
    (a, loss_a, _), (b, loss_b, _) = ran(left, batch, policy), ran(right, batch, policy)
    near(a, b)
    near(loss_a.detach(), loss_b.detach())
    near(slope(loss_a, policy[Signal.LOGP].x), slope(loss_b, policy[Signal.LOGP].x))


def row(logps: list[float], reward: float = 0.0, success: bool = False, **facts: Any) -> records.Trajectory:
    made = [records.token(x) for x in logps]
    return records.Trajectory([records.Turn(made, reward)], success=success, facts=facts)


def rewarded(rows: list[records.Trajectory]) -> list[records.Trajectory]:
    """Lots in order, so that the first is the first."""
    for at, one in enumerate(rows):
        one.lot = (at + 1) / 100
    return rows
