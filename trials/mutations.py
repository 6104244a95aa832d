"""``python -m trials.mutations [--count 210] [--jobs 2] [--write docs/testing.md]``: do the tests notice small faults?

Draws mutants of the rooms whose formulas and choices make a method (``ROOMS``) by a hash of the change and the seed, so that new
code elsewhere draws the same ones. pytest collects the tests once; then a forked process for each mutant changes the imported
module and runs the tests of the methods that have the changed piece, until one fails. Every result is a row of
``trials/results/mutations.jsonl``; a run that was interrupted continues.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import resource
import signal
import struct
import sys
import time
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from _pytest import runner

from trials.mutants import Mutant, mutants
from turnwise.recipes.signatures import method_names

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (  # a folder, or a module
    "algebra", "credit", "recipes/families", "tasks", "rollout/strategies", "rollout/guidance.py", "data/replay.py",
)  # fmt: skip
TESTS = (
    "tests/algebra", "tests/credit", "tests/recipes", "tests/tasks", "tests/rollout", "tests/data/test_past_batches.py",
    "tests/data/test_replay.py", "tests/data/test_demonstrations.py", "tests/store/test_shared_pool.py",
    "tests/training/test_pivot_runs.py",
)  # fmt: skip
SWEEPS = ("test_contract", "test_every_method")  # their tests are chosen by the method they are about
TIERS = {"test": ["-m", "not thorough"], "thorough": ["--hypothesis-profile=thorough"]}  # of the Makefile
ROWS = ROOT / "trials/results/mutations.jsonl"
EQUIVALENT = ROOT / "trials/results/equivalent_mutants.json"
METHODS = 4  # whose tests are run for a mutant
LIMIT, BUDGET = 90, 25.0  # seconds of processor time: when a mutant is stopped, and after which no further test begins
KILLED = ("killed",)


# ----------------------------------------------------------------------------- a change in modules that are imported


def module_name(file: str) -> str:
    """The module of a file below the package."""
    return "turnwise." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def transplant(module: Any, source: bytes) -> None:
    """Give the functions, defaults and constants of an imported module those of the changed source.

    Classes keep their identity, so recipes and tests that imported them see the change.
    """
    fresh = types.ModuleType(module.__name__)
    fresh.__file__, fresh.__package__ = module.__file__, module.__package__
    known = sys.modules[module.__name__]
    sys.modules[module.__name__] = fresh  # dataclasses look their module up
    try:
        exec(compile(source, module.__file__, "exec"), fresh.__dict__)
    finally:
        sys.modules[module.__name__] = known
    for name, value in vars(fresh).items():
        old = vars(module).get(name)
        if isinstance(value, type) and value.__module__ == module.__name__:
            for key, member in vars(value).items():
                _replace(old, key, vars(old).get(key), member)
        elif getattr(value, "__module__", module.__name__) == module.__name__ and not name.startswith("__"):
            _replace(module, name, old, value)


def _replace(owner: Any, name: str, old: Any, new: Any) -> None:
    for reach in ("__wrapped__", "fget", "func", "__func__"):  # decorated functions, properties, cached ones, class methods
        while hasattr(old, reach) and hasattr(new, reach):
            old, new = getattr(old, reach), getattr(new, reach)
    if isinstance(old, types.FunctionType) and isinstance(new, types.FunctionType):
        if len(old.__code__.co_freevars) == len(new.__code__.co_freevars):
            old.__code__ = new.__code__
        old.__defaults__, old.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
    elif isinstance(new, bool | int | float | tuple | dict | frozenset):
        if name == "__dataclass_fields__" or not name.startswith("__"):  # the limits of a piece are kept with its fields
            setattr(owner, name, new)


# ------------------------------------------------------------------------------------------- which tests are run for it


def methods_of(mutant: Mutant) -> list[str]:
    """Methods with a piece that is, or refers to, the class or function of the change; those with the fewest pieces first."""
    from turnwise import recipes

    wanted = set(changed_names(mutant))
    references = _references()
    while True:
        more = {name for name, used in references.items() if used & wanted} - wanted
        if not more:
            break
        wanted |= more
    pieces = {name: set(re.findall(r"[A-Z]\w+", repr(recipes.build(name)))) for name in recipes.METHODS}
    direct = changed_names(mutant)
    users = [name for name, used in pieces.items() if used & wanted]
    return sorted(users, key=lambda name: (not direct & pieces[name], len(pieces[name])))


def changed_names(mutant: Mutant) -> frozenset[str]:
    """The class or function of the change; for a constant of a module everything in it that mentions the constant."""
    name = mutant.function.split(".")[0]
    if name != "module":
        return frozenset({name})
    body = ast.parse((ROOT / "src/turnwise" / mutant.file).read_text(encoding="utf-8")).body
    statement = next(n for n in body if n.lineno <= mutant.line <= (n.end_lineno or n.lineno))
    constants = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
    users = [n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    return frozenset(n.name for n in users if constants & {x.id for x in ast.walk(n) if isinstance(x, ast.Name)})


@functools.cache
def _references() -> dict[str, set[str]]:
    """Classes and functions of the rooms, with the names that their source mentions."""
    found: dict[str, set[str]] = {}
    for path in (path for room in ROOMS for path in modules(room)):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                found.setdefault(node.name, set()).update(names - {node.name})
    return found


def chosen_items(mutant: Mutant, items: list[Any]) -> list[Any]:
    """Tests of the methods that have the piece, then those that belong to no method; oracles first."""
    from turnwise import recipes

    methods = methods_of(mutant)[:METHODS]
    words = {item: set(re.findall(r"\w+", item.nodeid.split("::", 1)[1])) for item in items}
    mentioned = {item: _mentioned(item.function) for item in items}
    mine = [item for item in items if changed_names(mutant) & (words[item] | mentioned[item])]
    mine += [item for name in methods for item in items if name in words[item] | mentioned[item]]
    free = [item for item in items if not words[item] & set(recipes.METHODS)]
    near = {item.module for item in items if _imports(item.module, module_name(mutant.file))}
    mine += [item for item in items if item.module in near and item.module.__name__ not in SWEEPS]
    ordered = sorted(
        dict.fromkeys(mine), key=lambda item: "test_oracle" not in item.name and item.module.__name__ in SWEEPS
    )
    return list(dict.fromkeys([*ordered, *free]))


@functools.cache
def _imports(module: Any, name: str) -> bool:
    """Whether a file of tests imports the changed module or something of it."""
    return any(
        getattr(v, "__module__", None) == name or getattr(v, "__name__", None) == name for v in vars(module).values()
    )


@functools.cache
def _mentioned(function: Any) -> frozenset[str]:
    """Names and short strings in the source of a test: the methods and pieces it is about."""
    return frozenset(re.findall(r"\w+", inspect.getsource(inspect.unwrap(function))))


class Mutation:
    """A pytest plugin: after collection it forks once for each mutant, changes the module and runs the chosen tests."""

    def __init__(self, picked: list[Mutant], path: Path, again: bool, seconds: float, jobs: int = 1) -> None:
        self.picked, self.path, self.again, self.end = picked, path, again, time.monotonic() + seconds
        self.jobs = jobs
        self.broken: list[Any] = []  # tests that fail without any change, on this machine

    @pytest.hookimpl(trylast=True)  # after hypothesis has loaded the profile of the tier
    def pytest_configure(self) -> None:
        """A failing example is not made smaller: that it fails is enough."""
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutation", settings.default, phases=phases, derandomize=True)
        settings.load_profile("mutation")

    def pytest_runtestloop(self, session: Any) -> bool:
        """In place of the tests: the mutants, ``jobs`` at a time."""
        known, explained = results(self.path), equivalent_mutants()
        left = [number for number, mutant in enumerate(self.picked) if self._is_left(mutant, known, explained)]
        reader, writer = os.pipe()
        os.write(writer, struct.pack(f"{len(left)}i", *left))  # a worker takes the next number when it is free
        os.close(writer)
        workers = []
        for _ in range(self.jobs):
            if not (worker := os.fork()):
                self._work(reader, session)
                os._exit(0)
            workers.append(worker)
        for worker in workers:
            os.waitpid(worker, 0)
        return True

    def _is_left(self, mutant: Mutant, known: dict[str, dict[str, Any]], explained: dict[str, str]) -> bool:
        before = known.get(mutant.key, {}).get("result")
        return before not in KILLED and not (before and (not self.again or mutant.key in explained))

    def _work(self, reader: int, session: Any) -> None:
        while time.monotonic() < self.end and (number := os.read(reader, struct.calcsize("i"))):
            mutant = self.picked[struct.unpack("i", number)[0]]
            began = time.monotonic()
            outcome, test = judge(
                mutant, [item for item in chosen_items(mutant, session.items) if item not in self.broken]
            )
            while outcome in KILLED and (item := self._fails_without(test, session.items)):
                self.broken.append(item)
                outcome, test = judge(mutant, [i for i in chosen_items(mutant, session.items) if i not in self.broken])
            row = {**asdict(mutant), "key": mutant.key, "result": outcome, "test": test}
            row["seconds"] = round(time.monotonic() - began, 1)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            print(f"{outcome}: {mutant.key}", file=sys.stderr, flush=True)

    def _fails_without(self, test: str, items: list[Any]) -> Any:
        """The test that noticed a mutant, if it fails without the change, too."""
        item = next((item for item in items if item.nodeid == test), None)
        return item if item and judge(None, [item])[0] in KILLED else None


def judge(mutant: Mutant | None, items: list[Any]) -> tuple[str, str]:
    """What became of a mutant, and the test that noticed it. The child has a limit of processor time, not of waiting."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _run_items(mutant, items, writer)
    os.close(writer)
    with os.fdopen(reader, errors="replace") as told:
        words = told.read().splitlines()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    last = words[-1] if words else ""
    if status == -signal.SIGXCPU:
        return "out of time", last.removeprefix("ran ")
    return ("killed" if last.startswith("failed ") or status else "survived"), last.partition(" ")[2]


def _run_items(mutant: Mutant | None, items: list[Any], writer: int) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5))
    try:
        if mutant:
            source = mutant.apply((ROOT / "src/turnwise" / mutant.file).read_bytes())
            transplant(importlib.import_module(module_name(mutant.file)), source)
        for item in items:
            reports = runner.runtestprotocol(item, log=False, nextitem=None)
            if any(report.failed for report in reports):
                os.write(writer, f"failed {item.nodeid}\n".encode())
                os._exit(0)
            if time.process_time() > BUDGET:
                break
        os.write(writer, b"ran all\n")
    except Exception as error:  # the change broke the import
        os.write(writer, f"failed import: {error!r}\n".encode())
    os._exit(0)


# ------------------------------------------------------------------------------------------------------------ the run


def modules(room: str) -> list[Path]:
    """The files of a room, which may be one module."""
    place = ROOT / "src/turnwise" / room
    return sorted(place.glob("*.py")) if place.is_dir() else [place]


def drawn_mutants(count: int, seed: int) -> list[Mutant]:
    """``count`` mutants, the same number of each room, in a fixed order."""
    order = lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()  # noqa: E731
    picked: list[Mutant] = []
    for room in ROOMS:
        every: dict[str, Mutant] = {}
        for path in modules(room):
            for mutant in mutants(path.read_text(encoding="utf-8"), path.relative_to(ROOT / "src/turnwise").as_posix()):
                if mutant.function not in method_names():  # a recipe computes nothing: its numbers are the paper's
                    every.setdefault(mutant.key, mutant)  # the same change twice in one function counts once
        picked += sorted(every.values(), key=order)[: count // len(ROOMS)]
    return sorted(picked, key=order)


def results(path: Path) -> dict[str, dict[str, Any]]:
    """The last row of each mutant."""
    rows = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["key"]: row for row in map(json.loads, rows)}


def equivalent_mutants() -> dict[str, str]:
    """Mutants that cannot change a result, with the reason."""
    return dict(json.loads(EQUIVALENT.read_text(encoding="utf-8"))) if EQUIVALENT.exists() else {}


def table(rows: list[dict[str, Any]], equivalent: dict[str, str]) -> str:
    """A Markdown table of the kill rate of each room, the survivors, and the equivalent mutants with the reason."""
    head = "| room | mutants | killed | equivalent | survived | killed of those that change behaviour |"
    lines = [head, "|---|--:|--:|--:|--:|--:|"]
    survivors = [row for row in rows if row["result"] not in KILLED and row["key"] not in equivalent]
    same = [row for row in rows if row["result"] not in KILLED and row["key"] in equivalent]
    for room in ROOMS:
        mine = lambda group, room=room: [row for row in group if row["file"].startswith(room)]  # noqa: E731
        killed = [row for row in mine(rows) if row["result"] in KILLED]
        share = len(killed) / max(1, len(killed) + len(mine(survivors)))
        counts = f"{len(mine(rows))} | {len(killed)} | {len(mine(same))} | {len(mine(survivors))}"
        lines.append(f"| `{room}` | {counts} | {100 * share:.1f} % |")
    for title, group in (("Survivors", survivors), ("Equivalent", same)):
        lines += ["", f"{title}:", ""] if group else []
        for row in sorted(group, key=lambda row: row["key"]):
            reason = f": {equivalent[row['key']]}" if row["key"] in equivalent else ""
            lines.append(f"- `{row['file']}`, `{row['function']}`: `{row['before']}` → `{row['after']}`{reason}")
    return "\n".join(lines)


def write_table(page: Path, text: str) -> None:
    """Between the two markers of the page."""
    begin, end = "<!-- mutations: begin -->", "<!-- mutations: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def main() -> int:
    """Run what is left, print the table; the status is 1 if a mutant survives that changes behaviour."""
    parser = argparse.ArgumentParser(prog="python -m trials.mutations", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("--count", type=int, default=210, help="mutants, the same number of each room")
    parser.add_argument("--seed", type=int, default=0, help="which ones are drawn")
    parser.add_argument("--tier", choices=TIERS, default="thorough", help="by which tests they are to be noticed")
    parser.add_argument("--again", action="store_true", help="try those that survived before, too")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin nothing after this time; run it again later"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, a processor core each")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the result rows")
    parser.add_argument("--only-table", action="store_true", help="run nothing")
    parser.add_argument("--write", type=Path, help="page to write the table into, between its markers")
    arguments = parser.parse_args()
    picked = drawn_mutants(arguments.count, arguments.seed)
    if not arguments.only_table:
        os.environ["OMP_NUM_THREADS"] = "1"
        plugin = Mutation(picked, arguments.rows, arguments.again, arguments.seconds, arguments.jobs)
        files = [str(ROOT / name) for name in TESTS]
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *TIERS[arguments.tier]]
        pytest.main([*options, *files], plugins=[plugin])
    known = results(arguments.rows)
    rows = [known[mutant.key] for mutant in picked if mutant.key in known]
    equivalent = equivalent_mutants()
    text = table(rows, equivalent)
    print(text)
    if arguments.write:
        write_table(arguments.write, text)
    return 1 if any(row["result"] not in KILLED and row["key"] not in equivalent for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
