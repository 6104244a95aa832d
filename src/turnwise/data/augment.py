"""Rows that become several: a pair with its revisions, a rated answer conditioned on several reward directions.

Knows no tokens and no method; the caller names the ratings.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from turnwise.core.records import Message
from turnwise.data.dataset import Dataset, DatasetRow, Example
from turnwise.data.files import LineErrors

REVISE: Message = {"role": "user", "content": "Write a better answer."}
DIRECTIONS = 4  # per prompt
MAX_ANGLE = math.pi / 4  # between a direction and the first rating
DIRECTION_PREFIX = "toward_"


def with_revisions(dataset: Dataset) -> Dataset:
    """Each pair as six examples: both answers alone (fact ``revises`` 0), after the rejected one (1), after the chosen one
    (2)."""
    return replace(dataset, rows=tuple(replace(row, examples=_revisions(*row.examples)) for row in dataset.rows))


def _revisions(chosen: Example, rejected: Example) -> tuple[Example, ...]:
    earlier = {0.0: (), 1.0: (*rejected.completion, REVISE), 2.0: (*chosen.completion, REVISE)}
    return tuple(
        replace(example, prompt=(*example.prompt, *messages), facts={**example.facts, "revises": code})
        for code, messages in earlier.items()
        for example in (chosen, rejected)
    )


def with_directions(dataset: Dataset, names: Sequence[str], seed: int) -> Dataset:
    """Each rated answer in ``DIRECTIONS`` directions: a unit vector v over the ratings ``names``, sampled per prompt, stated at
    the start of the prompt in whole hundredths and recorded as the facts ``toward_NAME``. The ratings become named rewards.

    v = cos φ · first + sin φ · u, φ at most 45°, u a unit vector over the others. A row that gives its direction keeps it: its
    prompt already states it. Rows of one prompt and direction form one group, whatever task they name."""
    errors, rows = LineErrors(dataset.path), list[DatasetRow]()
    for row in dataset.rows:
        example = row.examples[0]
        missing = [name for name in names if not isinstance(example.facts.get(name), float)]
        if missing:
            errors.add(row.line, f"no rating {', '.join(missing)}; write a number in a column of that name")
            continue
        rated = replace(example, rewards={name: float(example.facts[name]) for name in names})
        if all(f"{DIRECTION_PREFIX}{name}" in example.facts for name in names):
            rows.append(replace(row, examples=(rated,), task=None))
            continue
        rng = random.Random(f"{seed}/{json.dumps(example.prompt, sort_keys=True)}")  # equal prompts, equal directions
        for copy in range(DIRECTIONS):
            # A direction rounded to whole hundredths, as the prompt states it
            angle, others = rng.uniform(0, MAX_ANGLE), [rng.gauss(0, 1) for _ in names[1:]]
            length = math.hypot(*others) or 1.0
            exact = [math.cos(angle), *(math.sin(angle) * x / length for x in others)]
            rows.append(
                replace(
                    row,
                    examples=(_conditioned(rated, {name: round(x, 2) for name, x in zip(names, exact)}),),
                    task=None,
                    copy=copy,
                )
            )
    errors.raise_if_any(len(dataset))
    return replace(dataset, rows=tuple(rows))


def _conditioned(example: Example, direction: Mapping[str, float]) -> Example:
    stated = " + ".join(f"{name}*{round(100 * x)}" for name, x in direction.items())
    first, *later = example.prompt
    prompt = ({**first, "content": f"[{stated}]\n{first['content']}"}, *later)
    facts = {**example.facts, **{f"{DIRECTION_PREFIX}{n}": x for n, x in direction.items()}}
    return replace(example, prompt=prompt, facts=facts)


__all__ = ["with_directions", "with_revisions"]
