"""Enriched oracle records as our batch, and credit and values of them as lists."""

from __future__ import annotations

import pytest
from oracles import credit_turns as oracle
from oracles import records

from support.batches import from_oracle
from turnwise import recipes
from turnwise.algebra.term import Term
from turnwise.core.levels import BATCH, TOKEN, TURN
from turnwise.core.signals import Signal


def converted(reference: records.Batch):
    """Our batch and policy of enriched records; the lots we draw become the records'."""
    batch, policy = from_oracle(reference)
    for (*_, turn), lot in zip(oracle.steps(reference), batch.lots(TURN).x.tolist()):
        turn.facts["lot"] = lot
    if "blind" in batch.facts:
        batch = batch.put({Signal.BLIND: batch.facts["blind"]})
    return batch, policy


def made(seed: int, **options) -> records.Batch:
    return oracle.enrich(records.random_batch(seed, **options), seed)


def credit(name: str, reference: records.Batch, **hyper) -> list[float]:
    return recipes.build(name, **hyper).objective.credit(converted(reference)[0])["advantage"].at(TOKEN).x.tolist()


def value(term: Term, reference: records.Batch) -> list[float]:
    batch = converted(reference)[0]
    return term(batch.put(clock=batch.tree.full(BATCH, 0.0))).x.tolist()


def near(numbers, tolerance: float = 1e-8):
    return pytest.approx(numbers, abs=tolerance, rel=tolerance)
