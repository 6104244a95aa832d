"""The house rules: who may import whom, how large a room may be, and that no line outside recipes knows a method's name.

A rule over many files is one test, whose message names every file that breaks it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from trials.shape import Shape, nodes
from turnwise import recipes

ROOT = Path(__file__).parent.parent / "src" / "turnwise"
FILES = sorted(ROOT.rglob("*.py"))
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in FILES}

CORE = "errors core maths"
MAY_IMPORT = {  # room: rooms below it, or single files of a room ("data.replay")
    "__init__": "",  # public names are imported lazily, by name
    "errors": "",
    "maths": "",
    "workers": "errors",
    "core": "errors maths",
    "config": "errors core.limits core.records",
    "algebra": CORE,
    "credit": f"{CORE} algebra",
    "tasks": CORE,
    "tools": f"{CORE} workers.sockets",
    "rewards": f"{CORE} workers tools config.named_object",
    "store": CORE,
    "observe": CORE,
    "engines": f"{CORE} workers store.shard_files",
    "models": "errors store.atomic",
    "environments": f"{CORE} workers tools rewards config.named_object",
    "rollout": f"{CORE} rewards environments.contract environments.calls",
    "serve": f"{CORE} workers rollout",
    "data": f"{CORE} tasks rollout",
    "recipes": f"{CORE} config algebra credit tasks data.replay rollout.strategies rollout.guidance rollout.support",
    "checks": f"{CORE} algebra recipes",
    "integrations": f"{CORE} algebra credit tasks.admission recipes",
    "evaluation": f"{CORE} config",
    "training": f"{CORE} workers config algebra credit tasks rewards environments rollout serve data recipes engines models "
    "store observe evaluation",
    "bench": f"{CORE} recipes engines models environments training",
    "inspector": f"{CORE} config algebra credit recipes checks environments rollout data store observe evaluation models engines "
    "integrations training workers.tokens serve.server serve.front",
    "cli": f"__init__ {CORE} config recipes checks environments observe rollout data store models training bench inspector",
    "__main__": "cli",
}
HEAVY = {  # who may touch a heavy library
    "torch": "maths core algebra credit checks engines models store training integrations bench inspector",
    "transformers": "engines models training integrations bench",
    "tokenizers": "models bench inspector",
    "peft": "engines",
    "ray": "training",
    "numpy": "core tasks maths evaluation observe store engines integrations inspector",
}
LATE = {  # for those who ask for it: TensorBoard's writer, the profiler, a tokenizer's template
    "observe/trackers.py": {"torch"},
    "observe/profile.py": {"torch"},
    "rollout/chat_template.py": {"transformers"},
}

# Budgets that a reader feels. A room that outgrows its line, or a module that only one other needs, is a question before it is
# a number: which mechanism of it exists already? `make shape` prints what there is.
LINES = {  # at most so many in each room
    "engines": 14_750, "recipes": 9_000, "training": 9_270, "environments": 6_700, "rollout": 6_680, "inspector": 7_250,
    "store": 2_140, "tools": 2_700, "observe": 2_100, "data": 2_110, "algebra": 1_850, "core": 1_870,
    "serve": 1_990, "cli": 2_010, "bench": 1_450, "integrations": 1_440, "rewards": 1_680, "tasks": 1_280,
    "config": 1_230, "credit": 870, "models": 730, "checks": 600, "maths": 510, "workers": 540,
    "evaluation": 440, "errors": 210, "__init__": 60, "__main__": 10,
}  # fmt: skip
ONE_IMPORTER = 70  # modules that exactly one other module imports
SMALL = ("core/", "maths/", "algebra/", "recipes/recipe.py", "training/loop.py", "training/collector.py", "errors.py")
CORE_LINES = 5_155


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def for_types_only(source: str) -> set[ast.AST]:
    """Everything under ``if TYPE_CHECKING``: names for annotations, never imported."""
    guarded = [n for n in nodes(source) if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    return {inner for outer in guarded for inner in ast.walk(outer)}


@functools.cache
def imports(source: str) -> tuple[str, ...]:
    """Dotted names of everything a file imports, at any depth of its functions."""
    names: list[str] = []
    excused = for_types_only(source)
    for node in nodes(source):
        if node in excused:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which room they reach into"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def target(name: str) -> tuple[str, str]:
    """``turnwise.rollout.strategies.Play`` → (``rollout``, ``rollout.strategy``)."""
    parts = [*name.split(".")[1:], ""]
    room = parts[0] if parts[0] in MAY_IMPORT else "__init__"
    return room, ".".join(parts[:2])


def test_every_room_is_in_the_table():
    assert {room_of(path) for path in SOURCES} == set(MAY_IMPORT)


def test_the_top_level_holds_rooms_and_three_files():
    assert {path for path in SOURCES if "/" not in path} == {"__init__.py", "__main__.py", "errors.py"}
    assert len(MAY_IMPORT) <= 28  # with these three


def test_rooms_have_no_circles():
    """Every arrow points to a room that is listed earlier."""
    rooms = list(MAY_IMPORT)
    upward = [
        (room, to)
        for n, room in enumerate(rooms)
        for to in MAY_IMPORT[room].split()
        if rooms.index(to.split(".")[0]) >= n
    ]
    assert not upward


def test_every_room_says_what_it_holds():
    silent = [p for p in SOURCES if p.endswith("__init__.py") and not ast.get_docstring(nodes(SOURCES[p])[0])]
    assert not silent


def forbidden(path: str) -> set[str]:
    """What a file imports of rooms that its own may not import."""
    room = room_of(path)
    allowed = {room, *MAY_IMPORT[room].split()}
    ours = {target(name) for name in imports(SOURCES[path]) if name.split(".")[0] == "turnwise"}
    return {file for to, file in ours if to not in allowed and file not in allowed}


def test_imports_follow_the_table():
    assert {path: wrong for path in SOURCES if (wrong := forbidden(path))} == {}


def test_heavy_libraries_stay_where_they_belong():
    wrong = []
    for library, rooms in HEAVY.items():
        users = {p for p, source in SOURCES.items() if library in {name.split(".")[0] for name in imports(source)}}
        wrong += [(library, p) for p in users if room_of(p) not in rooms.split() and library not in LATE.get(p, ())]
    assert wrong == []


def test_a_forbidden_arrow_is_seen():
    late = "def f():\n    from turnwise.engines.learner.learner import LocalLearner\n    import torch.nn"
    assert set(imports(late)) == {"turnwise.engines.learner.learner.LocalLearner", "torch.nn"}
    assert target("turnwise.engines.learner.learner.LocalLearner") == ("engines", "engines.learner")
    assert list(imports("if TYPE_CHECKING:\n    import torch")) == []


def test_a_public_class_name_has_one_meaning():
    places: dict[str, list[str]] = {}
    for path, source in SOURCES.items():
        for node in nodes(source):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


# ------------------------------------------------------------------- budgets


@functools.cache
def shape() -> Shape:
    return Shape.of(ROOT)


def test_rooms_stay_within_their_lines():
    assert {room: lines for room, lines in shape().rooms.items() if lines > LINES.get(room, 0)} == {}


def test_few_modules_have_one_importer():
    """A module that only one other imports is part of that one, unless it is a noun of its own (`trials.shape --alone`)."""
    assert len(shape().alone) <= ONE_IMPORTER


def test_one_importer_is_counted(tmp_path):
    """Absolute and relative imports, late ones too; a package and what tests import do not count."""
    package = tmp_path / "house"
    (package / "room").mkdir(parents=True)
    for name, text in {
        "__init__": "", "shared": "", "alone": "", "late": "", "room/__init__": "", "room/inner": "from house import shared",
        "one": "import house.shared\nfrom house.alone import x", "two": "def f():\n    from house.late import y",
        "room/outer": "from .inner import z\nfrom .. import shared",
    }.items():  # fmt: skip
        (package / f"{name}.py").write_text(text)
    assert Shape.of(package).alone == [
        ("house.alone", "house.one"), ("house.late", "house.two"), ("house.room.inner", "house.room.outer"),
    ]  # fmt: skip


def test_the_core_stays_small():
    lines = sum(len(source.splitlines()) for path, source in SOURCES.items() if path.startswith(SMALL))
    assert 1000 < lines <= CORE_LINES


# ------------------------------------------------------------------- recipes


def is_piece(node: ast.AST) -> bool:
    """A piece, or a sum, difference or product of pieces, or a weighted piece; never a number."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return is_piece(node.left) and is_piece(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return (isinstance(node.left, ast.Name | ast.Constant) or is_piece(node.left)) and is_piece(node.right)
    return isinstance(node, ast.Call)


def recipe_functions(source: str) -> str:
    """The methods of a family, without the pieces that stand beside them: pieces compute, recipes compose."""
    returned = {
        node: ast.unparse(node.returns or node) for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
    }
    return "\n".join(ast.unparse(node) for node, kind in returned.items() if kind == "Recipe")


def arithmetic(source: str) -> list[str]:
    """Every place where numbers are computed, compared or branched on."""
    parts = nodes(source)
    inner = {child for n in parts if isinstance(n, ast.BinOp) and is_piece(n) for child in ast.walk(n)}
    wrong = (
        ast.BinOp | ast.UnaryOp | ast.AugAssign | ast.Compare | ast.BoolOp | ast.IfExp | ast.If | ast.For | ast.While
    )
    types = {part for n in parts if isinstance(n, ast.arg) and n.annotation for part in ast.walk(n.annotation)}
    inner |= {
        n for n in parts if isinstance(n, ast.UnaryOp) and isinstance(n.operand, ast.Constant)
    }  # a negative number
    return [ast.unparse(n) for n in parts if isinstance(n, wrong) and n not in inner and n not in types]


def test_recipes_hold_no_arithmetic():
    families = {p: recipe_functions(source) for p, source in SOURCES.items() if p.startswith("recipes/families/")}
    assert sum(map(len, families.values())) > 100_000
    assert {p: wrong for p, source in families.items() if (wrong := arithmetic(source))} == {}


def test_arithmetic_is_seen():
    assert arithmetic("Recipe(a=A() + omega * B(gamma))") == []
    assert arithmetic("def f(x: float | None): return A(x)") == []
    assert arithmetic(
        recipe_functions("def f() -> float:\n    return 1 + x\n\ndef g() -> Recipe:\n    return A(1 + x)")
    )
    assert not arithmetic(recipe_functions("class A:\n    def f(self) -> float:\n        return 1 + self.x"))
    for wrong in ("A(1 - clip)", "A(2 * clip)", "A() + 1", "A(-clip)", "A() if clip > 0 else B()"):
        assert arithmetic(wrong), wrong


def named_methods(source: str) -> list[str]:
    """Comparisons with a method's name: ``==``, ``in``, ``match``, ``startswith``."""
    found = []
    for node in nodes(source):
        asks = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "endswith")
        if asks or isinstance(node, ast.Compare | ast.match_case):
            part = node.pattern if isinstance(node, ast.match_case) else node
            words = {n.value for n in ast.walk(part) if isinstance(n, ast.Constant)}
            found += [ast.unparse(part)] * bool(words & set(recipes.METHODS))
    return found


def test_no_branch_on_a_methods_name():
    assert {p: wrong for p, source in SOURCES.items() if (wrong := named_methods(source))} == {}


def test_a_branch_on_a_methods_name_is_seen():
    for wrong in ('x == "grpo"', 'm in ("ppo", "gspo")', 'm.startswith("grpo")', 'match m:\n    case "dapo": pass'):
        assert named_methods(wrong), wrong
    assert named_methods('recipes.build("grpo")') == []


# --------------------------------------------------------------------- tests

TESTS = Path(__file__).parent


def imported_modules(source: str) -> set[str]:
    """Every part of every module path in the import statements of a file, relative imports included."""
    statements = re.findall(r"^[ \t]*(?:from[ \t]+\S+[ \t]+)?import[ \t]+(?:\([^)]*\)|[^\n]*)", source, re.MULTILINE)
    return {word for statement in statements for word in re.findall(r"\w+", statement)}


def test_no_test_module_imports_another():
    """Helpers that several test files share live in tests/support or in a fixture."""
    test_modules = {p.stem for p in TESTS.rglob("test_*.py")} | {"conftest"}
    sources = {p.relative_to(TESTS).as_posix(): p.read_text(encoding="utf-8") for p in TESTS.rglob("*.py")}
    assert not {(p, name) for p, source in sources.items() for name in imported_modules(source) & test_modules}


def test_test_modules_have_names_of_their_own():
    """pytest imports a test file of a folder that is no package by its bare name."""
    files = [p for p in TESTS.rglob("test_*.py") if not (p.parent / "__init__.py").exists()]
    names = [p.stem for p in files]
    assert not {p.relative_to(TESTS).as_posix() for p in files if names.count(p.stem) > 1}


def test_an_import_of_a_test_module_is_seen():
    for wrong in (
        "from test_rooms import x",
        "import oracles.test_trust",
        "from .test_trust import y",
        "from a import conftest",
    ):
        assert imported_modules(wrong) & {"test_rooms", "test_trust", "conftest"}, wrong
