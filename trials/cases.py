"""A bad input: a name, the files it needs, the command, and how the command must end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trials.commands import classify, run_command
from trials.outcome import Outcome, Results


@dataclass(frozen=True)
class Case:
    """``prepare`` writes what the command needs into the folder it runs in."""

    part: str
    name: str
    argv: Sequence[str]
    expect: str = "refused"
    prepare: Callable[[Path], None] = field(default=lambda folder: None)
    seconds: float = 120.0  # a hang, not a slow machine


def trial(cases: Iterable[Case], results: Results, progress: Callable[[str], None]) -> Iterator[Outcome]:
    for n, case in enumerate(cases, start=1):
        if results.done(case.part, case.name):
            continue
        progress(f"bad inputs: {n}, {case.part}: {case.name}")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            case.prepare(folder)
            yield classify(case.part, case.name, run_command(case.argv, folder, case.seconds), case.expect)


def text_file(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Prepares one file of the given content."""

    def prepare(folder: Path) -> None:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))

    return prepare
