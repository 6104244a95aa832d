"""Reading a run imports nothing that the run names. A marker is planted in every field of everything that a real run stores, one
field at a time, and every reading command runs over it: the marker must never execute. Fields are found by walking, so that a
new one is covered; so are commands, because each must say here which kind it is."""

from __future__ import annotations

import json
import pickle
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from turnwise.cli.main import FUNCTIONS, main
from turnwise.config.named_object import check_reading, reading
from turnwise.errors import SettingError
from turnwise.inspector.page.blocks import ViewQuery
from turnwise.inspector.page.views.table import show_view
from turnwise.inspector.queries import RunReader

pytestmark = pytest.mark.slow(tier="test")

READERS = ("status", "doctor", "bisect", "compare", "config", "export", "push", "view")
# these take no run, or take what it names: its method, environment or model
OTHERS = {
    "train", "resume", "eval", "endpoint", "serve", "launch", "environments", "list", "explain", "diff", "check-env",
    "check-agent", "check-method", "model", "bench", "replay", "sweep", "audit", "probe-reward", "mcp", "search",
    "credit-bench", "evidence",
}  # fmt: skip
MARKER = """
import os, pathlib
pathlib.Path(os.environ["MARKER_RAN"]).write_text("ran")
from turnwise.environments.builtin.guess import Guess
from turnwise.recipes.families.critic_free import grpo
def __getattr__(name):
    return Guess if name == "Guess" else grpo
"""


class Bomb:
    """Unpickled, it leaves its mark."""

    def __reduce__(self) -> Any:
        return exec, (MARKER,)


class Planted:
    """A copy of a run, a marker that it may name, and whether the marker ran."""

    def __init__(self, run: Path, other: Path, folder: Path) -> None:
        self.run, self.other, self.folder, self.ran = folder / "run", other, folder, folder / "ran"
        shutil.copytree(run, self.run)
        self.marker = folder / "planted_marker.py"
        self.marker.write_text(MARKER)
        self.names = (f"{self.marker}:planted", "planted_marker:planted", f"{self.marker}:Guess")

    def commands(self) -> Iterator[list[str]]:
        run, other = str(self.run), str(self.other)
        for scratch in ("rows.jsonl", "pushed"):
            path = self.folder / scratch
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        yield ["status", run]
        yield ["doctor", run]
        yield ["bisect", run, other]
        yield ["compare", run, other]
        yield ["config", run]
        yield ["export", run, str(self.folder / "rows.jsonl"), "--as", "demos"]
        yield ["push", run, "me/mine", "--dry-run", str(self.folder / "pushed")]
        yield ["view", run, "--json", "--view", "why", "--token", "0"]

    def read(self) -> None:
        for words in self.commands():
            try:
                main(words)
            except Exception as fault:  # damage that is not refused in words is another test's matter
                assert not self.ran.exists(), (words, fault)
            assert not self.ran.exists(), words


@pytest.fixture
def planted(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("MARKER_RAN", str(tmp_path / "ran"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield Planted(finished("grpo"), finished("dr_grpo"), tmp_path)
    for name in [name for name in sys.modules if name.startswith("planted_marker")]:
        del sys.modules[name]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value below ``value``: fields, items, and what holds them."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def with_value(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of ``value`` in which ``path`` leads to ``new``."""
    if not path:
        return new
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[path[0]] = with_value(copy[path[0]], path[1:], new)
    return copy


def shape(path: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple("item" if isinstance(part, int) else part for part in path)


def test_every_command_says_whether_it_only_reads():
    assert {*READERS, *OTHERS} == set(FUNCTIONS) and not {*READERS} & OTHERS


def test_the_marker_would_run(planted, capsys):
    """A command that may import does run it, by every name: else the tests below would prove nothing."""
    for name in planted.names[:2]:
        assert main(["explain", name]) == 0 and planted.ran.read_text() == "ran"
        planted.ran.unlink()
        for module in [module for module in sys.modules if module.startswith("planted_marker")]:
            del sys.modules[module]
    capsys.readouterr()
    pickle.loads(pickle.dumps(Bomb()))
    assert planted.ran.read_text() == "ran"


@pytest.mark.parametrize("field", ["env", "method", "credit", "agent", "sampler", "reward"])
def test_no_field_that_names_code_imports_it(planted, field, capsys):
    record = json.loads((planted.run / "run.json").read_text())
    del record["tools"]  # a run of before they were recorded, which export took from the environment
    for name in planted.names:
        value = [name] if isinstance(record["settings"][field], list) else name
        damaged = {**record, "settings": {**record["settings"], field: value}}
        (planted.run / "run.json").write_text(json.dumps(damaged))
        planted.read()


def test_a_refusal_names_the_code_and_what_to_write(planted, capsys):
    record = json.loads((planted.run / "run.json").read_text())
    record["settings"]["env"] = planted.names[2]
    del record["tools"]
    (planted.run / "run.json").write_text(json.dumps(record))
    words = ["export", str(planted.run), str(planted.folder / "rows.jsonl"), "--as", "demos"]
    assert main(words) == 2
    refusal = capsys.readouterr().err
    assert planted.names[2] in refusal and "--trust-run" in refusal and not planted.ran.exists()
    main([*words, "--trust-run"])  # a run without a success has no rows
    assert planted.ran.exists()


def test_a_run_records_its_tools_so_that_export_imports_no_environment(finished):
    record = json.loads((finished("grpo") / "run.json").read_text())
    from turnwise.environments.builtin.guess import Guess

    assert record["tools"] == list(Guess.tools)


def test_a_page_takes_no_code_from_its_address(planted, capsys):
    with RunReader(planted.run) as run:
        for name in (*planted.names, "shutil:rmtree", "turnwise.store.atomic:remove"):
            page = show_view("what-if", run, ViewQuery(method=name))
            assert any("--trust-run" in getattr(block, "text", "") for block in page.blocks), page.blocks
    assert not planted.ran.exists()
    # what the user writes beside the command is the user's
    name = planted.names[0]
    assert main(["view", str(planted.run), "--json", "--view", "what-if", "--method", name]) == 0
    assert planted.ran.exists() and "Agreement" in capsys.readouterr().out


def test_a_loaded_module_is_refused_as_well_and_the_outermost_block_decides():
    with reading("mine:f"):
        check_reading("mine:f", "method")
        with reading(trusted=True), pytest.raises(SettingError, match="names"):
            check_reading("shutil:rmtree", "method")
    with reading(trusted=True), reading():
        check_reading("shutil:rmtree", "method")
    check_reading("shutil:rmtree", "method")


@pytest.mark.thorough
def test_no_file_of_a_run_is_unpickled(planted, capsys):
    for path in sorted(path for path in planted.run.rglob("*") if path.is_file()):
        content = path.read_bytes()
        path.write_bytes(pickle.dumps(Bomb()))
        planted.read()
        path.write_bytes(content)
    capsys.readouterr()


@pytest.mark.thorough
def test_modules_that_lie_in_the_current_folder_are_not_imported(planted):
    """Inside a folder that a stranger wrote, with a file for each library that a reader may still have to import."""
    for name in ("torch", "numpy", "scipy", "matplotlib", "tokenizers", "transformers", "safetensors", "jinja2", "yaml"):
        (planted.run / f"{name}.py").write_text(MARKER)
    program = "import sys; from turnwise.cli.main import main; sys.exit(main(['doctor', '.']) + main(['config', '.']))"
    # as the console script does, Python does not put the current folder on the path by itself
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=planted.run, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert not planted.ran.exists()


# ------------------------------------------------------------------ every field


@pytest.mark.thorough
@pytest.mark.parametrize("form", [0, 1])
def test_a_marker_in_every_field_of_every_json_file(planted, form, capsys):
    files = [path for path in sorted(planted.run.rglob("*")) if path.suffix in (".json", ".jsonl")]
    assert len(files) > 5
    for path in files:
        text = path.read_text()
        whole = path.suffix == ".json"
        record = json.loads(text) if whole else [json.loads(line) for line in text.splitlines()]
        seen: set[tuple[Any, ...]] = set()
        for place in places(record):
            # items of a list are alike: the first of each shape stands for them. A vocabulary is thousands of numbers
            if shape(place) in seen or "vocab" in place or "merges" in place:
                continue
            seen.add(shape(place))
            damaged = with_value(record, place, planted.names[form])
            path.write_text(json.dumps(damaged) if whole else "".join(f"{json.dumps(row)}\n" for row in damaged))
            planted.read()
        path.write_text(text)
        capsys.readouterr()


@pytest.mark.thorough
def test_a_marker_in_every_column_of_the_ledger(planted, capsys):
    ledger = planted.run / "ledger.sqlite"
    content = ledger.read_bytes()
    with closing(sqlite3.connect(ledger)) as db:
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = [(table, row[1]) for table in tables for row in db.execute(f"PRAGMA table_info({table})")]
        first = {pair: db.execute(f"SELECT {pair[1]} FROM {pair[0]} LIMIT 1").fetchone() for pair in columns}
    assert ("trajectories", "record") in columns
    for (table, column), row in first.items():
        if row is None:
            continue
        damages: list[str] = [planted.names[0]]
        if isinstance(row[0], str) and row[0][:1] in ("[", "{"):
            record = json.loads(row[0])
            shapes = {shape(place): place for place in reversed(list(places(record)))}
            damages += [json.dumps(with_value(record, place, planted.names[0])) for place in shapes.values()]
        for damage in damages:
            with closing(sqlite3.connect(ledger)) as db:
                db.execute("PRAGMA ignore_check_constraints = ON")
                with suppress(sqlite3.IntegrityError):  # a number of a row, which SQLite itself keeps a number
                    db.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (damage,))
                db.commit()
            planted.read()
            ledger.write_bytes(content)
        capsys.readouterr()
