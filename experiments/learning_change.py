"""The change of a success rate between two evaluations, with an interval that has the error of both. Knows rows; runs nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from processes import Row

from turnwise.maths.statistics import wilson

MOST_TASKS = 2000


@dataclass(frozen=True)
class Change:
    """after − before, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        low, high = 100 * self.low, 100 * self.high
        return f"{100 * self.value:+.0f} [{low:+.0f}, {high:+.0f}]"


def tasks_of(success: float, interval: tuple[float, float]) -> int:
    """How many tasks were played: the number whose Wilson interval this is. Early rows do not say it."""

    def error(count: int) -> float:
        expected = wilson(round(success * count), count)
        return (
            abs(expected.low - interval[0])
            + abs(expected.high - interval[1])
            + abs(round(success * count) / count - success)
        )

    return min(range(1, MOST_TASKS + 1), key=error)


def change(row: Row) -> Change:
    """Newcombe's interval of a difference of two proportions, from the Wilson intervals of both.

    Both evaluations play the same held-out tasks; the interval treats them as independent, so it is rather too wide.
    """
    before, after, low, high = row["before"], row["after"], *row["interval"]
    if "before_interval" in row:
        before_low, before_high = row["before_interval"]
    else:
        count = tasks_of(after, (low, high))
        played = wilson(round(before * count), count)
        before_low, before_high = played.low, played.high
    value = after - before
    return Change(
        value,
        value - math.hypot(after - low, before_high - before),
        value + math.hypot(high - after, before - before_low),
    )


def mean_change(rows: list[Row]) -> Change:
    """The mean over seeds; its error is that of the single evaluations, so it says nothing about other seeds."""
    changes = [change(row) for row in rows]
    value = fmean(one.value for one in changes)
    below = math.hypot(*(one.value - one.low for one in changes)) / len(changes)
    above = math.hypot(*(one.high - one.value for one in changes)) / len(changes)
    return Change(value, value - below, value + above)
