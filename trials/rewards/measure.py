"""Measures ``turnwise probe-reward`` on environments with a planted loophole and on sound ones.

python -m trials.rewards.measure                              play all (about half an hour), one row each
python -m trials.rewards.measure --write docs/probe-reward.md  the table of the page from the rows
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trials.rewards import multi_turn, single_turn, sound
from turnwise.environments.base import Environment, overrides
from turnwise.inspector.probe.probe import probe_reward

ROWS = Path(__file__).parent.parent / "results" / "probe_reward.jsonl"
BEGIN, END = "<!-- table of trials.rewards.measure: begin -->", "<!-- table of trials.rewards.measure: end -->"


def environments() -> Iterator[tuple[str, type[Environment]]]:
    """The kind and the class of each, in the order of their files."""
    for kind, module in (("loophole", single_turn), ("loophole", multi_turn), ("sound", sound)):
        for value in vars(module).values():
            own = isinstance(value, type) and issubclass(value, Environment) and value.__module__ == module.__name__
            if own and (overrides(value, "pay") or overrides(value, "act")) and value.__doc__ and _pays(value):
                yield kind, value


def _pays(cls: type[Any]) -> bool:
    return all(getattr(cls, name, None) is not getattr(base, name, None)
               for name, base in (("pay", single_turn.OneAnswer), ("act", multi_turn.Turns)) if hasattr(cls, name))  # fmt: skip


def measure(minutes: float, only: list[str]) -> None:
    for kind, cls in environments():
        if only and cls.__name__ not in only:
            continue
        report = probe_reward(cls, minutes)
        found = [{"family": f.family, "about": f.about, "reason": f.verdict.reason} for f in report.findings]
        about = " ".join((cls.__doc__ or "").split())
        row = {"environment": cls.__name__, "kind": kind, "about": about, "found": not report.ok, "minutes": minutes}
        row |= {"seconds": round(report.seconds, 1), "behaviours": report.behaviours, "episodes": report.episodes}
        _store(row | {"findings": found, "notes": list(report.notes)})
        print(json.dumps(row), flush=True)


def _store(row: dict[str, Any]) -> None:
    """In place of an earlier row of the same environment; in the order of the environments."""
    known = {r["environment"]: r for r in stored_rows()} | {row["environment"]: row}
    names = [cls.__name__ for _, cls in environments()]
    ROWS.write_text("".join(json.dumps(known[name]) + "\n" for name in names if name in known))


def stored_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.is_file() else []


def table(rows: list[dict[str, Any]]) -> str:
    loopholes, others = ([r for r in rows if r["kind"] == kind] for kind in ("loophole", "sound"))
    found, alarms = sum(r["found"] for r in loopholes), sum(r["found"] for r in others)
    lines = [
        f"Found: {found} of {len(loopholes)} loopholes. False alarms: {alarms} of {len(others)} sound environments.", "",
        "| environment | what it pays | found by | seconds |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in loopholes:
        ways = ", ".join(f["family"] for f in row["findings"][:3]) or "**not found**"
        lines.append(f"| {row['environment']} | {row['about']} | {ways} | {row['seconds']:.0f} |")
    lines += ["", "| sound environment | why it is tempting | alarm | seconds |", "|---|---|---|---|"]
    for row in others:
        ways = ", ".join(f["family"] for f in row["findings"]) or "none"
        lines.append(f"| {row['environment']} | {row['about']} | {ways} | {row['seconds']:.0f} |")
    return "\n".join(lines)


def write(page: Path) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table(stored_rows())}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--only", nargs="*", default=[], help="names of environments [all]")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    write(arguments.write) if arguments.write else measure(arguments.minutes, arguments.only)
