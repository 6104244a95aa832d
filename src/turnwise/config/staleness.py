"""The setting ``staleness``: ``N``, ``N,wait``, ``N,drop``, ``N,keep`` or ``0,continuous``. Knows the text, not what a run does
with it."""

from __future__ import annotations

from turnwise.errors import SettingError, nearest

WAIT, DROP, KEEP = LATE = ("wait", "drop", "keep")
CONTINUOUS = "continuous"  # a synchronous run whose dialogues do not wait for each other's tools


def parse_staleness(value: int | str) -> tuple[int, str]:
    """(steps that rollouts may run ahead, what happens to groups that come late or how a synchronous run samples)."""
    number, comma, late = (part.strip() for part in str(value).partition(","))
    late = late if comma else WAIT
    if not number.isdecimal():
        raise SettingError(
            f"staleness is {value}; write 0 for synchronous, or a positive number of steps (4), which may be followed by what "
            "happens to groups that come late: 4,wait 4,drop 4,keep; 0,continuous does not wait for slow tools"
        )
    if late == CONTINUOUS:
        if int(number):
            raise SettingError(
                f"staleness is {value!r}, and rollouts that run ahead never wait for each other's tools; write {number}, or "
                f"0,{CONTINUOUS} for a synchronous run"
            )
        return 0, late
    if late not in LATE:
        raise SettingError(
            f"staleness is {value!r}, and {late!r} does not say what to do; {nearest(late, (*LATE, CONTINUOUS))}"
        )
    if not int(number) and late != WAIT:
        raise SettingError(f"staleness is {value!r}, and nothing comes late in a synchronous run; write 0, or 1,{late}")
    return int(number), late


def steps_ahead(value: int | str) -> int:
    """The steps that rollouts may run ahead of training."""
    return parse_staleness(value)[0]


def staleness_setting(value: int | str) -> int | str:
    """The shortest way to write it: a number where training waits, as in releases that knew nothing else."""
    limit, late = parse_staleness(value)
    return limit if late == WAIT else f"{limit},{late}"
