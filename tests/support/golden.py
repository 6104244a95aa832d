"""Golden numbers check two sides: an oracle, and the recipe of the same name on the same records.

A golden test takes the fixture ``side`` (tests/oracles/conftest.py) and calls ``side(oracle, batch, **hyper)`` in place of
``oracle(batch, **hyper)``. Once the oracle answers, once the recipe: the records are packed, credited and scored through the
public algebra, and the loss depends on the records' own tensors, so that ``records.gradients`` reads the recipe's gradient
too. ``extra`` is what only an oracle tells; a test compares it where it is not empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from oracles import objectives, records
from oracles.result import Result

from support.batches import from_oracle, oracle_name
from support.drawn import RENAMED
from turnwise import recipes
from turnwise.core.levels import TOKEN, Field

OURS = {name: {theirs: ours for ours, theirs in pairs.items()} for name, pairs in RENAMED.items()}


@dataclass(frozen=True)
class Side:
    """Who computes the numbers of a golden test."""

    recipe: bool

    def __call__(
        self,
        oracle: Callable[..., Any],
        batch: records.Batch,
        *positional: Any,
        method: str = "",
        ours: dict[str, Any] | None = None,
        **hyper: Any,
    ) -> Any:
        """The oracle's answer, or the recipe's in the same form.

        ``method`` is the recipe's name where it is not the oracle's; ``ours`` are its hyper-parameters where they mean
        something else than the oracle's.
        """
        if not self.recipe:
            return oracle(batch, *positional, **hyper)
        name = method or oracle.__name__
        if ours is None:
            assert not positional, "name the hyper-parameters: a recipe may order them otherwise"
            ours = {OURS.get(name, {}).get(key, key): value for key, value in hyper.items()}
        found = recipe_result(name, batch, **ours)
        return found[:2] if oracle.__module__ == objectives.__name__ else found


def recipe_result(name: str, batch: records.Batch, **hyper: Any) -> Result:
    """Advantages and loss of a recipe on an oracle's records; the loss has a gradient by the records' own tensors."""
    packed, policy = from_oracle(batch)
    flat = list(records.tokens(batch))
    policy = {
        signal: Field(packed.tree, TOKEN, torch.stack([getattr(one, oracle_name(signal)) for one in flat]))
        for signal in policy
    }
    objective = recipes.build(name, **hyper).objective
    credited = objective.credit(packed)
    loss = objective(objective.plan(credited), policy).loss
    return Result(credited["advantage"].at(TOKEN).x.tolist(), loss, {})


ORACLE, RECIPE = Side(recipe=False), Side(recipe=True)
