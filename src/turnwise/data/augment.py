"""Rows that become several: a pair with its revisions, a rated answer asked for in several directions.

Knows no tokens and no method; what is wanted is told in words by whoever reads the rows.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from turnwise.core.records import Message
from turnwise.data.dataset import Row, Rows, Script
from turnwise.data.files import Faults

REVISE: Message = {"role": "user", "content": "Write a better answer."}
DIRECTIONS = 4  # in which each prompt is asked
WIDEST = math.pi / 4  # of a direction from the first rating
TOWARD = "toward_"


def with_revisions(rows: Rows) -> Rows:
    """Each pair as six: both answers alone (fact ``revises`` 0), after the worse was shown (1), after the better was (2)."""
    return replace(rows, rows=tuple(replace(row, scripts=_six(*row.scripts)) for row in rows.rows))


def _six(better: Script, worse: Script) -> tuple[Script, ...]:
    shown = {0.0: (), 1.0: (*worse.said, REVISE), 2.0: (*better.said, REVISE)}
    return tuple(
        replace(script, before=(*script.before, *seen), facts={**script.facts, "revises": code})
        for code, seen in shown.items()
        for script in (better, worse)
    )


def with_directions(rows: Rows, names: Sequence[str], seed: int) -> Rows:
    """Each rated answer in a few directions: a unit vector v over the ratings ``names``, drawn for its prompt, stated at the
    beginning of the prompt as whole hundredths and told as the facts ``toward_NAME``. The ratings become named rewards.

    v = cos φ · first + sin φ · u, φ at most 45°, u a unit vector over the others. A row that tells its direction keeps it: its
    prompt states it already. Rows of one prompt and direction are one group, whatever task they name."""
    faults, found = Faults(rows.path), list[Row]()
    for row in rows.rows:
        script = row.scripts[0]
        missing = [name for name in names if not isinstance(script.facts.get(name), float)]
        if missing:
            faults.add(row.line, f"no rating {', '.join(missing)}; write a number in a column of that name")
            continue
        rated = replace(script, rewards={name: float(script.facts[name]) for name in names})
        if all(f"{TOWARD}{name}" in script.facts for name in names):
            found.append(replace(row, scripts=(rated,), task=None))
            continue
        dice = random.Random(f"{seed}/{json.dumps(script.before, sort_keys=True)}")  # one prompt, the same directions
        for copy in range(DIRECTIONS):
            found.append(replace(row, scripts=(_toward(rated, _direction(names, dice)),), task=None, copy=copy))
    faults.refuse(len(rows))
    return replace(rows, rows=tuple(found))


def _direction(names: Sequence[str], dice: random.Random) -> dict[str, float]:
    """In whole hundredths, as it is stated."""
    angle, others = dice.uniform(0, WIDEST), [dice.gauss(0, 1) for _ in names[1:]]
    length = math.hypot(*others) or 1.0
    exact = [math.cos(angle), *(math.sin(angle) * x / length for x in others)]
    return {name: round(x, 2) for name, x in zip(names, exact)}


def _toward(script: Script, direction: Mapping[str, float]) -> Script:
    stated = " + ".join(f"{name}*{round(100 * x)}" for name, x in direction.items())
    first, *rest = script.before
    before = ({**first, "content": f"[{stated}]\n{first['content']}"}, *rest)
    return replace(script, before=before, facts={**script.facts, **{f"{TOWARD}{n}": x for n, x in direction.items()}})


__all__ = ["with_directions", "with_revisions"]
