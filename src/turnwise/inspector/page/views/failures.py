"""Failures first: held-out and training episodes by how they failed, the most frequent cause comes first."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.core.records import Message
from turnwise.core.text import printable_line
from turnwise.evaluation.failures import failure
from turnwise.inspector.page.blocks import DataTable, FactList, Note, SideBySide, Transcript, ViewQuery
from turnwise.inspector.page.views.transcripts import message_transcript
from turnwise.inspector.queries import RunReader
from turnwise.observe.charts import Cell, Link

WINDOW = 10  # steps at the beginning and at the end that are compared
EPISODES, CAUSES, EXAMPLES, TEXT, TOP = 1000, 12, 5, 160, 3
BEFORE, AFTER = "before", "after"  # the two evaluations, in the addresses of their episodes: "after.12"
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Failure:
    """One failed episode: when it was played, how it failed, what was said, and where it is shown."""

    period: str
    cause: str
    messages: Sequence[Message]
    link: Link


@dataclass(frozen=True)
class Failures:
    """All failures of a run's periods, with the number of episodes of each period: solved ones count, too."""

    episodes: dict[str, int]
    failures: list[Failure]

    @property
    def table(self) -> list[tuple[str, Counter[str]]]:
        """Causes with their counts by period: most frequent in the last period first, then in the one before it."""
        counts = defaultdict[str, Counter[str]](Counter)
        for one in self.failures:
            counts[one.cause][one.period] += 1
        newest = [p for p in ("held-out after", *reversed(self.episodes)) if p in self.episodes]
        return sorted(counts.items(), key=lambda row: ([-row[1][p] for p in newest], row[0]))

    def share(self, counts: Counter[str], period: str) -> str:
        percent = 100 * counts[period] / max(1, self.episodes[period])
        # two digits: one episode of 200 is not 0 %
        return f"{counts[period]} ({percent:{'.0f' if percent >= 10 else '.2g'}} %)" if counts[period] else "0"


def read_failures(run: RunReader) -> Failures:
    """Of both evaluations, the first episode of each task; of training, the first and the last steps."""
    episodes, failures = dict[str, int](), list[Failure]()
    for when in (BEFORE, AFTER):
        rows = (run.evaluation(when) or {}).get("rows") or []
        period = f"held-out {when}"
        if rows:
            episodes[period] = len(rows)
        for number, row in enumerate(rows):
            solved = row["success"] if row.get("success") is not None else row.get("reward", 0.0) > 0
            if not solved:
                link = Link(row["task"], "failures", {"trajectory": f"{when}.{number}"})
                failures.append(Failure(period, row.get("failure", NOT_RECORDED), row.get("messages", ()), link))
    steps = run.steps() if run.has_ledger else []
    size = min(WINDOW, len(steps) // 2)
    for part in (steps[:size], steps[-size:]) if size else ():
        period = f"training, steps {part[0]} to {part[-1]}" if len(part) > 1 else f"training, step {part[0]}"
        members = run.episodes_of(part[0], part[-1], EPISODES)
        episodes[period] = len(members)
        for t in members:
            if cause := failure(t):
                failures.append(Failure(period, cause, t.messages, Link(t.id, "why", {"trajectory": t.id})))
    return Failures(episodes, failures)


def failures(run: RunReader, query: ViewQuery) -> Iterator[Any]:
    """How episodes failed, before and after training; the most frequent cause after it comes first."""
    sides = held_out_episode(run, query.trajectory)
    if sides:
        yield FactList("", [("all failures", Link("how episodes failed", "failures"))])
        yield SideBySide(sides[:1], sides[1:])
        return
    if query.trajectory:
        name = printable_line(query.trajectory, 40)
        yield Note(f"There is no held-out episode {name!r}: {AFTER}.0 is the first one after training.", "warning")
    read = read_failures(run)
    if not read.episodes:
        yield Note("No episode has finished yet.")
        return
    counts = Counter(one.period for one in read.failures)
    yield FactList("Failed episodes", [(p, f"{counts[p]} of {n}") for p, n in read.episodes.items()])
    if not read.failures:
        yield Note("No episode failed in these periods.", "good")
        return
    yield causes_table(read)
    for cause, _ in read.table[:CAUSES]:
        yield _examples(cause, [one for one in read.failures if one.cause == cause], list(read.episodes))


def causes_table(read: Failures, limit: int = 0) -> DataTable:
    """One row for each cause, at most ``limit``."""
    rows: list[tuple[Cell, ...]] = []
    for cause, counts in read.table[: limit or None]:
        newest = [one for one in read.failures if one.cause == cause][-1]
        rows.append((cause, *(read.share(counts, p) for p in read.episodes), newest.link))
    about = "share of all episodes of the period" + (
        f"; the first {limit} causes" if 0 < limit < len(read.table) else ""
    )
    return DataTable("How episodes failed", ("cause", *read.episodes, "for example"), rows, about)


def _examples(cause: str, members: Sequence[Failure], periods: Sequence[str]) -> DataTable:
    """The transcripts of one cause; equal ones are one row with a count."""
    same = defaultdict[str, list[Failure]](list)
    for one in members:
        same[json.dumps(list(one.messages), sort_keys=True)].append(one)
    rows: list[tuple[Cell, ...]] = []
    # the newest period first, and in it what happened most often
    order = sorted(same.values(), key=lambda m: (-max(periods.index(one.period) for one in m), -len(m)))
    for twins in order[:EXAMPLES]:
        last = twins[-1]
        texts = [str(m.get("content") or "") for m in last.messages]
        said = " → ".join(texts[1:])  # what followed the task
        rows.append(
            (last.link, len(twins), last.period, *(printable_line(x, TEXT) for x in (texts[0] if texts else "", said)))
        )
    about = f"{len(members)} episodes, {len(same)} different transcripts" + f"; {EXAMPLES} are shown" * (
        len(same) > EXAMPLES
    )
    return DataTable(cause, ("episode", "times", "period", "task", "what followed"), rows, about)


def held_out_episode(run: RunReader, name: str) -> list[Transcript]:
    """The episodes of one held-out task before and after training; none if ``name`` is not of the form "after.12"."""
    when, _, number = name.rpartition(".")
    # ASCII and short: int() takes other digits, too, and long ones in quadratic time
    if when not in (BEFORE, AFTER) or not (number.isascii() and number.isdigit() and len(number) < 10):
        return []
    sides = []
    for when in (BEFORE, AFTER):
        rows = (run.evaluation(when) or {}).get("rows") or []
        if int(number) < len(rows):
            row = rows[int(number)]
            cause = row.get("failure") or (
                "solved" if row.get("success") or row.get("reward", 0.0) > 0 else NOT_RECORDED
            )
            about = f"reward {row.get('reward', 0.0):g}: {cause}"
            sides.append(message_transcript(f"{row['task']} {when} training", row.get("messages", ()), about))
    return sides
