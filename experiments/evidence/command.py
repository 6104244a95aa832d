"""``turnwise evidence``: what it does with a file of claims and a place of rows: play, repeat, check, and tell."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from experiments.evidence import rows as evidence_rows
from experiments.evidence.claims import Claim, beds, chosen, distinct_runs, judge, load
from experiments.evidence.play import Player, repeated
from experiments.evidence.rows import SEAL, Row
from turnwise.cli.flags import Parser
from turnwise.errors import SettingError, nearest

HERE = Path("experiments/evidence")


@dataclass(frozen=True)
class Evidence:
    claims: list[Claim]
    rows: list[Row]
    place: Path  # of rows

    @classmethod
    def of(cls, file: Path, place: Path, names: str) -> Evidence:
        return cls(chosen(load(file), names), evidence_rows.read(place), place)

    @cached_property
    def ended(self) -> dict[str, Row]:
        """Rows that ended, by the name of their run; of several the first, but a stale one only where there is no other."""
        ended = [row for row in reversed(self.rows) if "measured" in row]
        return {row["run"]: row for row in sorted(ended, key=lambda row: not evidence_rows.stale(row))}

    @cached_property
    def sound(self) -> dict[str, Row]:
        return {name: row for name, row in self.ended.items() if not evidence_rows.stale(row)}

    # ------------------------------------------------------------- commands

    def run(self, options: argparse.Namespace) -> int:
        """Play the runs of the claims that no row has."""
        missing = [run for run in distinct_runs(self.claims) if run.name not in self.sound]
        wanted = sum(run.seconds for run in missing)
        print(f"{len(missing)} runs, about {wanted:,.0f} core-seconds, of {len(self.claims)} claims", flush=True)
        target = self.place if self.place.suffix == ".jsonl" else self.place / "rows.jsonl"
        end = time.monotonic() + 60 * options.minutes
        player = Player(Path(options.out), options.jobs, end, lambda text: print(text, flush=True))
        written = player.play(missing, target)
        failed = sum("error" in row for row in written)
        print(f"{len(written) - failed} rows written to {target}, {failed} failed, {len(missing) - len(written)} left")
        return 1 if failed else 0

    def rerun(self, options: argparse.Namespace) -> int:
        """Repeat rows: those that are named, or so many drawn at random."""
        names = options.names or ["1"]
        if len(names) == 1 and names[0].isdigit() and names[0] not in self.sound:
            able = [n for n, row in self.sound.items() if not options.seconds or row["cost"]["seconds"] <= options.seconds]
            names = random.sample(sorted(able), min(int(names[0]), len(able)))
        if not names:
            raise SettingError(f"no row of {self.place} takes so little; write a larger --seconds")
        differing = 0
        for name in names:
            if name not in self.sound:
                raise SettingError(f"no row {name!r} in {self.place}; {nearest(name, self.sound)}")
            row = self.sound[name]
            here = evidence_rows.provenance()
            player = Player(Path(options.out), 1, time.monotonic() + 60 * options.minutes, print)
            where = repeated(row, player)
            differing += bool(where)
            print(
                f"{name} {row['bed']} {row['settings']['method']}: "
                + (f"different: {where}" if where else "equal bit for bit")
            )
            others = [f"{key}: {row[key]}, here {here[key]}" for key in ("machine", "versions") if row[key] != here[key]]
            print("".join(f"  {text}\n" for text in others if where), end="")
        return 1 if differing else 0

    def check(self, options: argparse.Namespace) -> int:
        """Checksums, and what the code would run otherwise now."""
        problems, changed = [], 0
        for row in self.rows:
            if row.get(SEAL) != evidence_rows.seal(row):
                changed += 1
                problems.append(f"{row['place']}: tampered with: its content is not what its checksum says")
            elif "measured" in row and (why := evidence_rows.stale(row)):
                problems.append(f"{row['place']} {row['run']} {row['settings']['method']}: stale: {why}")
        stale = len(problems) - changed
        cure = "; `turnwise evidence run` plays them again" if stale else ""
        print("\n".join([*problems, f"{len(self.rows)} rows: {changed} tampered with, {stale} stale{cure}"]))
        return 1 if problems else 0

    def table(self, options: argparse.Namespace) -> int:
        """The verdicts; with ``--write`` the pages."""
        from experiments.evidence.pages import pages, table

        print("\n".join(table([judge(claim, self.sound) for claim in self.claims])))
        if options.write:
            made = pages(self.claims, self.ended, beds(Path(options.file)), HERE / "limits.toml")
            folder = Path(options.write)
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in made.items():
                (folder / name).write_text(text, encoding="utf-8")
            print(f"{len(made)} pages written to {folder}")
        return 0


def main(argv: Sequence[str]) -> int:
    words = ("run", "rerun", "check", "table")
    parser = Parser(
        "evidence",
        "Decide claims of papers: play the runs that they miss, repeat rows bit for bit, check them, print the verdicts.",
        json="",
    )
    doing = "play missing runs; repeat rows; check checksums and code; print verdicts"
    parser.add("what", choices=words, metavar="run|rerun|check|table", help=doing)
    parser.add("names", nargs="*", metavar="ROW", help="with rerun: names of rows, or a number of rows drawn at random [1]")
    parser.add("--file", default=str(HERE / "claims.toml"), help="the claims [%(default)s]")
    parser.add("--rows", default="", metavar="PLACE", help="folder or .jsonl of rows [the folder of the claims]")
    parser.add("--claims", default="all", metavar="A,B", help="claims to play or to judge, in this order [all]")
    parser.add("--jobs", type=int, default=1, help="processes at a time, one thread each [1]")
    parser.add("--minutes", type=float, default=60.0, help="stop then; finished runs have their rows [60]")
    parser.add("--seconds", type=float, default=0.0, help="with rerun: draw among rows that took at most so long")
    parser.add("--out", default="runs/evidence", help="cold starts, and runs while they go on [%(default)s]")
    parser.add("--write", default="", metavar="FOLDER", help="with table: write the pages into this folder")
    options = parser.parse(argv)
    place = Path(options.rows or Path(options.file).parent)
    if options.rows and options.what in ("rerun", "check", "table") and not place.exists():
        raise SettingError(f"there is nothing at {place}; write --rows with a folder or a .jsonl file of rows")
    return getattr(Evidence.of(Path(options.file), place, options.claims), options.what)(options)
