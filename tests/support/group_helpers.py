"""What the tests of group-, reward- and baseline-level credit share: oracle records with all their facts as our batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from oracles import credit_groups as cg
from oracles import records
from oracles.records import Group, Trajectory, Turn, token

from support.batches import from_oracle
from turnwise import recipes
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal

NAN = float("nan")
SEEDS = st.integers(0, 10**6)


def by_lot(reference):
    """Groups and trajectories in the order of our lots: there, the oracles' "order of the batch" is ours."""
    seed = lambda t: int(t.lot * 2**31)  # noqa: E731
    return sorted((sorted(g, key=seed) for g in reference), key=lambda g: sum(map(seed, g)) % 2**32)


def rich(seed, **options):
    return by_lot(cg.enrich(records.random_batch(seed, **options), seed))


def packed(reference, probe="probe"):
    """The oracle's records as our batch: its facts become named rewards, task keys and the probe's signal."""
    batch, policy = from_oracle(reference)
    rows = list(records.trajectories(reference))
    column = lambda values: Field(batch.tree, TRAJECTORY, torch.tensor(values, dtype=torch.float64))  # noqa: E731
    rewards = {name: column([t.facts["rewards"].get(name, NAN) for t in rows]) for name in cg.names(reference)}
    tasks = tuple(str(g[0].facts.get("prompt", i)) for i, g in enumerate(reference))
    told = column([t.facts.get(probe, 0.0) for t in rows])
    return replace(batch, reward_components=rewards, task_keys=tasks).put({Signal.REWARD_PROBE: told}), policy


def credit(name, reference, **hyper):
    batch, _ = packed(reference, "chance" if name == "probe_baseline" else "probe")
    return recipes.build(name, **hyper).objective.credit(batch)["advantage"].at(TOKEN).x


def same(found, expected, tolerance=1e-8):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64), expected, rtol=tolerance, atol=tolerance)


def slopes(objective, batch, policy):
    """Loss and its gradient by log π."""
    loss = objective(objective.plan(objective.credit(batch)), policy).loss
    return loss, torch.autograd.grad(loss, policy[Signal.LOGP].x)[0]


def remembering(name, piece, state, **hyper):
    """An objective that remembers something of the batches before."""
    objective = recipes.build(name, **hyper).objective
    part = next(p for p in objective.advantage.parts if type(p).__name__ == piece)
    objective.memory.of(part).update(state)
    return objective, part


def one(reward: float, logp: float = -1.0, count: int = 1, **fields: Any) -> Trajectory:
    """A trajectory of a single turn; what is not a field of the record is a fact."""
    made = Trajectory([Turn([token(logp) for _ in range(count)], float(reward))])
    for name, value in fields.items():
        if hasattr(made, name):
            setattr(made, name, value)
        elif name == "tool_calls":
            made.turns[0].tool_calls = value
        else:
            made.facts[name] = value
    return made


def group(rewards: list[float], /, **columns: list[Any]) -> Group:
    return [one(r, **{name: column[i] for name, column in columns.items()}) for i, r in enumerate(rewards)]


def named(**columns: list[float]) -> Group:
    count = len(next(iter(columns.values())))
    return group([0.0] * count, rewards=[{name: column[i] for name, column in columns.items()} for i in range(count)])
