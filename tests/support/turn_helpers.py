"""Enriched oracle records as our batch, and credit and values of them as lists."""

from __future__ import annotations

import random

import pytest
from oracles import credit_turns as oracle
from oracles import records
from oracles.records import Batch, Trajectory, Turn, token, trajectories

from support.batches import from_oracle
from turnwise import recipes
from turnwise.algebra.term import Term
from turnwise.core.levels import BATCH, TOKEN, TURN
from turnwise.core.signals import Signal


def converted(reference: records.Batch):
    """Our batch and policy of enriched records; the lots we draw become the records'."""
    batch, policy = from_oracle(reference)
    for (*_, turn), lot in zip(oracle.steps(reference), batch.uniform_draws(TURN).x.tolist()):
        turn.facts["lot"] = lot
    if "blind" in batch.facts:
        batch = batch.put({Signal.LOGP_WITHOUT_FEEDBACK: batch.facts["blind"]})
    return batch, policy


def made(seed: int, **options) -> records.Batch:
    return oracle.enrich(records.random_batch(seed, **options), seed)


def credit(name: str, reference: records.Batch, **hyper) -> list[float]:
    return recipes.build(name, **hyper).objective.credit(converted(reference)[0])["advantage"].at(TOKEN).x.tolist()


def value(term: Term, reference: records.Batch) -> list[float]:
    batch = converted(reference)[0]
    return term(batch.put(batch_index=batch.tree.full(BATCH, 0.0))).x.tolist()


def near(numbers, tolerance: float = 1e-8):
    return pytest.approx(numbers, abs=tolerance, rel=tolerance)


def path(rewards: list[float], lengths: list[int] | None = None, **facts) -> Trajectory:
    """A trajectory of turns with these rewards; each fact is a list with one entry per turn."""
    lengths = lengths or [1] * len(rewards)
    turns = [Turn([token(-1.0) for _ in range(n)], float(r)) for r, n in zip(rewards, lengths)]
    for name, entries in facts.items():
        for turn, entry in zip(turns, entries):
            turn.facts[name] = entry
    return Trajectory(turns, facts={"final_state": "end"})


def one_turn(seed: int) -> Batch:
    """Groups of one-turn trajectories with tokens."""
    dice = random.Random(seed)
    batch = []
    for size in (1, 2, 4, 5):
        batch.append([path([dice.gauss(0, 1)], [dice.randint(1, 3)], state=["s"]) for _ in range(size)])
    return enrich_plain(batch)


def enrich_plain(batch: Batch) -> Batch:
    """Facts of the simplest kind: one state, one agent, every turn valid, planned and matching."""
    dice = random.Random(0)
    for trajectory in trajectories(batch):
        for turn in trajectory.turns:
            plain = {"state": "s", "action": "a", "agent": 0, "feedback": True, "valid": True, "planner": True}
            turn.facts = {**plain, "match": True, "lot": dice.random(), **turn.facts}
    return batch


def critic(rewards: list[float], values: list[float]) -> Batch:
    """One trajectory, one token a turn."""
    return [[Trajectory([Turn([token(-1.0, value=v)], r) for r, v in zip(rewards, values)])]]
