"""Broken run directories: `resume` continues or refuses in words; it never trains on what it cannot trust."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trials import fixtures
from trials.cases import Case


def _facts(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = run / "run.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _settings(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        facts = json.loads((run / "run.json").read_text())
        _facts(settings={**facts["settings"], **changes})(run)

    return change


def _flip(pattern: str) -> Callable[[Path], None]:
    """One byte in the middle of a file differs."""

    def change(run: Path) -> None:
        path = sorted(run.glob(pattern))[-1]
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x41
        path.write_bytes(bytes(content))

    return change


def _cut(pattern: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = sorted(run.glob(pattern))[-1]
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return change


def _remove(pattern: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        for path in run.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


REFUSED: dict[str, Callable[[Path], None]] = {
    "run.json removed": _remove("run.json"),
    "run.json cut": _cut("run.json"),
    "run.json is a list": lambda run: (run / "run.json").write_text("[]") and None,
    "format of the future": _facts(format=99),
    "format is text": _facts(format="two"),
    "no settings": _facts(settings={}),
    "settings are text": _facts(settings="x"),
    "unknown setting": _settings(stpes=3),
    "wrong setting": _settings(steps="many"),
    "another recipe": _facts(recipe="Recipe(other)"),
    "another environment": _settings(env="nowhere:Env"),
    "weights at the start flipped": _flip("initial/model.safetensors"),
    "weights at the start cut": _cut("initial/model.safetensors"),
    "tokenizer changed": _flip("initial/tokenizer.json"),
    "ledger removed": _remove("ledger.sqlite*"),
    "ledger is text": lambda run: (run / "ledger.sqlite").write_text("hello") and None,
    "ledger cut": _cut("ledger.sqlite"),
    "evaluation removed": _remove("evaluation_before.json"),
    "evaluation cut": _cut("evaluation_before.json"),
    "evaluation of other types": lambda run: (run / "evaluation_before.json").write_text('{"summary": 3}') and None,
    "ledger empty": lambda run: (run / "ledger.sqlite").write_bytes(b"") and None,
}
EITHER: dict[str, Callable[[Path], None]] = {  # an older checkpoint may be taken instead, and said
    "checkpoint flipped": _flip("checkpoints/*/*.safetensors"),
    "checkpoint cut": _cut("checkpoints/*/*.safetensors"),
    "checkpoint state cut": _cut("checkpoints/*/*.json"),
    "checkpoints removed": _remove("checkpoints"),
    "metrics removed": _remove("metrics.jsonl"),
    "metrics cut": _cut("metrics.jsonl"),
    "initial model removed": _remove("initial"),
}
FINISHED: dict[str, Callable[[Path], None]] = {
    "summary cut": _cut("summary.json"),
    "model cut": _cut("model/model.safetensors"),
    "model removed": _remove("model"),
}


def cases() -> Iterator[Case]:
    yield Case("run directories", "an untouched one", ("resume", "run"), "ran", _prepare(lambda run: None))
    for name, change in REFUSED.items():
        yield Case("run directories", name, ("resume", "run"), "refused", _prepare(change))
    for name, change in EITHER.items():
        yield Case("run directories", name, ("resume", "run"), "either", _prepare(change))
    for name, change in FINISHED.items():
        for command in ("resume", "eval"):
            argv = (command, "run", *(() if command == "resume" else ("--eval-tasks", "2")))
            yield Case("run directories", f"{command}: {name}", argv, "either", _prepare(change, finished=True))
    yield Case(
        "run directories", "an empty folder", ("resume", "run"), "refused", lambda folder: (folder / "run").mkdir()
    )


def _prepare(change: Callable[[Path], None], finished: bool = False) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        change(fixtures.copy_run(folder, finished))

    return prepare
