"""The shape of the source as a reader meets it: lines, files, how long functions are, how often a reason stands beside a line.

    make shape                            # this table, and the files and functions of one training step
    python -m trials.shape --rooms        # and the lines of each room
    python -m trials.shape --alone        # and the modules that exactly one other module imports
    python -m trials.shape --caps         # only the caps of tests/test_rooms.py, with a little slack, to be copied there
    python -m trials.shape --of FOLDER    # another package, measured the same way

Figures of other packages are fixed: they were measured once by this program, without their tests.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "turnwise"
SHORT = 3  # lines of a body that is over before a thought begins
VAGUE = frozenset(
    {"found", "kept", "told", "asked", "own", "known"}
)  # names of variables that say nothing of what they hold
DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|mypy:|ruff:|pragma|!|pylint|pyright)")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Everything in a source, parsed and walked once: a dozen rules look at the same files."""
    return tuple(ast.walk(ast.parse(text)))


@dataclass(frozen=True)
class Module:
    """One file, parsed once."""

    name: str  # dotted, as others import it
    path: Path
    text: str

    @cached_property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def comments(self) -> int:
        """Lines that hold nothing but a comment; remarks behind code are counted apart."""
        return self._comments[0]

    @cached_property
    def remarks(self) -> int:
        """Comments behind code, without directives for tools (``noqa``, ``type:``, ``fmt:``)."""
        return self._comments[1]

    @cached_property
    def _comments(self) -> tuple[int, int]:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        comments = [token for token in tokens if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string)]
        whole = sum(token.line.lstrip().startswith("#") for token in comments)
        return whole, len(comments) - whole

    def nodes(self, kind: type | tuple[type, ...]) -> Iterator[ast.AST]:
        return (node for node in nodes(self.text) if isinstance(node, kind))

    def imports(self) -> set[str]:
        """Dotted names of all that the file imports, at any depth: of a ``from`` both the module and what is taken from it."""
        names = {alias.name for node in self.nodes(ast.Import) for alias in node.names}
        for node in self.nodes(ast.ImportFrom):
            package = self.name.split(".")
            # a relative import counts from the package that holds the file; an ``__init__`` is its package itself
            up = node.level - (self.path.name == "__init__.py")
            base = (
                ".".join([*package[: len(package) - up], *filter(None, [node.module])]) if node.level else node.module
            )
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        return names


@dataclass(frozen=True)
class Shape:
    """A package of Python files."""

    modules: tuple[Module, ...]
    root: Path = field(default=SOURCE, compare=False)

    @classmethod
    def of(cls, root: Path) -> Shape:
        modules = []
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            if "tests" in parts or parts[-1].startswith("test_") or parts[-1].endswith("_test"):
                continue
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules.append(Module(name, path, path.read_text(encoding="utf-8")))
        return cls(tuple(modules), root)

    @cached_property
    def lines(self) -> int:
        return sum(module.lines for module in self.modules)

    @cached_property
    def rooms(self) -> dict[str, int]:
        """Lines of each folder of the package; files beside the folders count under their own name."""
        lines: dict[str, int] = defaultdict(int)
        for module in self.modules:
            lines[module.path.relative_to(self.root).parts[0].removesuffix(".py")] += module.lines
        return dict(lines)

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """The modules that import each module; a package is imported by those who take something from its ``__init__``."""
        names = {module.name for module in self.modules}
        importers: dict[str, set[str]] = {name: set() for name in names}
        for module in self.modules:
            for imported in module.imports() & names:
                importers[imported].add(module.name)
        return importers

    @cached_property
    def alone(self) -> list[tuple[str, str]]:
        """Modules that exactly one other module imports, with that module. Packages do not count: a folder is no mechanism."""
        packages = {module.name for module in self.modules if module.path.name == "__init__.py"}
        return [
            (name, next(iter(users)))
            for name, users in sorted(self.importers.items())
            if len(users) == 1 and name not in packages
        ]

    @cached_property
    def bodies(self) -> list[int]:
        """Lines of every function without its docstring."""
        return [
            body_lines(node)
            for module in self.modules
            for node in module.nodes((ast.FunctionDef, ast.AsyncFunctionDef))
        ]

    @cached_property
    def vague(self) -> int:
        """Variables and parameters with a name of ``VAGUE``."""
        return sum(
            getattr(node, "id", getattr(node, "arg", "")) in VAGUE
            for module in self.modules
            for node in module.nodes((ast.Name, ast.arg))
            if isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)
        )

    def per_thousand(self, count: int) -> float:
        return 1000 * count / self.lines

    def figures(self) -> dict[str, str]:
        raises = sum(1 for module in self.modules for _ in module.nodes(ast.Raise))
        comments, remarks = (sum(getattr(m, kind) for m in self.modules) for kind in ("comments", "remarks"))
        return {
            "lines": f"{self.lines:,}",
            "files": f"{len(self.modules):,}",
            "files with one importer": str(len(self.alone)),
            "functions": f"{len(self.bodies):,}",
            "median body of a function, lines": f"{statistics.median(self.bodies):g}",
            f"functions of at most {SHORT} lines": f"{sum(n <= SHORT for n in self.bodies) / len(self.bodies):.0%}",
            "raise, per 1000 lines": f"{self.per_thousand(raises):.1f}",
            "lines of comment, per 1000 lines": f"{self.per_thousand(comments):.0f}",
            "remarks behind code, per 1000 lines": f"{self.per_thousand(remarks):.0f}",
            "variables called found, kept, told ...": str(self.vague),
        }


def body_lines(function: Function) -> int:
    """Lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


NAMES = (
    "lines", "files", "files with one importer", "functions", "median body of a function, lines",
    f"functions of at most {SHORT} lines", "raise, per 1000 lines", "lines of comment, per 1000 lines",
    "remarks behind code, per 1000 lines", "variables called found, kept, told ...", "files of one training step",
)  # fmt: skip
TEACHERS = {  # prime-rl 559b447 (its step by reading), torchtitan b5bcd76, TRL f2cd577
    "prime-rl": dict(zip(NAMES, ("42,008", "200", "73", "1,815", "7", "35%", "6.5", "46", "3", "4", "≈ 20"))),
    "torchtitan": dict(zip(NAMES, ("97,593", "331", "75", "2,841", "10", "23%", "8.0", "68", "3", "3"))),
    "TRL": dict(zip(NAMES, ("62,224", "153", "51", "1,163", "12", "21%", "10.5", "100", "8", "0"))),
}


def step_figures() -> dict[str, str]:
    """Files and functions that one training step executes."""
    from trials.step_shape import executed  # trains a small run, so only for those who ask

    # whether a comprehension is a call of its own depends on the release of Python
    code = [part for part in executed() if not part.co_name.endswith(("comp>", "<genexpr>"))]
    return {
        "files of one training step": str(len({c.co_filename for c in code})),
        "functions of one training step": str(len(code)),
    }


def caps(shape: Shape) -> str:
    """The lines of each room and two in a hundred, rounded up to tens; the modules with one importer as they are."""
    rooms = sorted(shape.rooms.items(), key=lambda item: -item[1])
    rounded = [f'"{room}": {-(-lines * 102 // 1000) * 10:_}' for room, lines in rooms]
    rows = [f"    {', '.join(rounded[n : n + 6])}," for n in range(0, len(rounded), 6)]
    return "\n".join(["LINES = {", *rows, "}", f"ONE_IMPORTER = {len(shape.alone)}"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trials.shape", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--of", type=Path, default=SOURCE, help="the package to measure")
    parser.add_argument("--rooms", action="store_true", help="also print the lines of each room")
    parser.add_argument("--alone", action="store_true", help="also print the modules with one importer")
    parser.add_argument("--caps", action="store_true", help="only print the caps for tests/test_rooms.py")
    parser.add_argument("--step", action="store_true", help="also run a training step and count what it executes")
    options = parser.parse_args()
    shape = Shape.of(options.of.resolve())
    if options.caps:
        print(caps(shape))
        return 0
    figures = shape.figures() | (step_figures() if options.step else {})
    print(f"{'':42}{options.of.resolve().name:>12}" + "".join(f"{name:>12}" for name in TEACHERS))
    for what, value in figures.items():
        print(f"{what:42}{value:>12}" + "".join(f"{theirs.get(what, '–'):>12}" for theirs in TEACHERS.values()))
    if options.rooms:
        for room, lines in sorted(shape.rooms.items(), key=lambda item: -item[1]):
            print(f"{room:20}{lines:8,}")
    if options.alone:
        for name, user in shape.alone:
            print(f"{name:60} <- {user}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
