"""The documentation holds: Python blocks run, commands, links, files and names exist, and public names are documented."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import turnwise
from turnwise.cli import main as cli

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "turnwise"
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
WRITTEN = [page for page in PAGES if page.parent.name not in ("methods", "reference")]  # by hand
PUBLIC_ROOMS = ("core", "algebra", "credit", "tasks", "rollout", "recipes")  # and single modules of other rooms
PUBLIC_MODULES = (
    "environments/base.py",
    "training/api.py",
    "config/settings.py",
    "integrations/padded.py",
    "errors.py",
)
README_WORDS = 1_100


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# --------------------------------------------------------------------- pages


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


@pytest.mark.thorough
@pytest.mark.parametrize("page", [page for page in WRITTEN if blocks(page)], ids=name_of)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": page.stem}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), scope)


def test_commands_exist():
    commands = [
        (page.name, word) for page in PAGES for word in re.findall(r"^turnwise ([a-z-]+)", page.read_text(), re.M)
    ]
    assert commands and [each for each in commands if each[1] not in cli.COMMANDS] == []


def test_links_lead_to_files():
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\((?!http)([^)#\s]+)[^)]*\)", prose(page))]
    assert links and [(name_of(page), link) for page, link in links if not (page.parent / link).exists()] == []


def test_files_that_pages_mention_exist():
    """Paths in backticks: from the repository's root, inside the package, or among the results."""
    pattern = r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|c|md|jsonl|json))(?:::\w+)?`"
    paths = [(page.name, path) for page in WRITTEN for path in re.findall(pattern, prose(page))]
    roots = (ROOT, SOURCE, ROOT / "experiments/results")
    assert paths and [each for each in paths if not any((root / each[1]).exists() for root in roots)] == []


def test_names_that_pages_mention_exist():
    """CamelCase in backticks is a class of the package, or of a package we name. The change log names what is gone."""
    foreign = {"GRPOTrainer", "GRPOConfig", "ResourceWarning", "SystemExit", "AutoModelForCausalLM", "FSDP2"}
    words = [
        (page.name, word)
        for page in WRITTEN
        if page.name != "CHANGELOG.md"
        for span in re.findall(r"`([^`\n]+)`", prose(page))
        for word in re.findall(r"(?<![\w./-])([A-Z][a-z]+(?:[A-Z][a-z]*)+)(?![\w/-])", span)
    ]
    assert words and [each for each in words if each[1] not in class_names() | foreign] == []


@cache
def class_names() -> set[str]:
    trees = [ast.parse(path.read_text()) for folder in (SOURCE, ROOT / "examples") for path in folder.rglob("*.py")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


def test_pages_name_no_private_place():
    for page in PAGES:
        found = re.search(r"\.\./shared|/work/|/tmp/|localhost", page.read_text())
        assert not found, f"{page.name}: {found and found.group()}"


def test_the_environment_of_the_tutorial_passes_its_own_check(tmp_path, monkeypatch):
    block = re.search(r"```python\n(.*?)```", (DOCS / "tutorial-environment.md").read_text(), re.DOTALL)
    (tmp_path / "reverse_of_the_tutorial.py").write_text(block.group(1))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["check-env", "reverse_of_the_tutorial:Reverse", "--episodes", "5"]) == 0


# ------------------------------------------------------------- generated pages


def load_hook(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / "hooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_pages_of_methods_are_up_to_date():
    made = load_hook("method_pages").pages()
    assert {path.name: path.read_text() for path in (DOCS / "methods").glob("*.md")} == made, "run `make docs`"


def test_every_family_has_a_title_and_a_place_in_the_navigation():
    hook, navigation = load_hook("method_pages"), (ROOT / "mkdocs.yml").read_text()
    for page in hook.pages():
        assert f"methods/{page}" in navigation
        assert page in ("index.md", "acts.md") or page.removesuffix(".md") in hook.TITLES


def test_the_navigation_has_at_most_twelve_entries_and_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    assert 1 < len(re.findall(r"^  - ", navigation, re.M)) <= 12
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages == set(re.findall(r"[\w/-]+\.md", navigation))


def test_equations_are_read():
    equations = load_hook("equations")
    assert equations.latex("Aᵢ = (Rᵢ − mean) / (std + ε)") == (
        r"A_{i} = \frac{R_{i} - \operatorname{mean}}{\operatorname{std} + \varepsilon}"
    )
    assert equations.latex("π(y)/μ(y)") == r"\pi ( y ) / \mu ( y )"  # not a fraction of (y) and μ
    assert equations.latex("1/2β") == r"\frac{1}{2 \beta}"
    assert equations.lines("kept where A > 0 and p ≤ high", ["high"]) == [
        ("prose", r"kept where $A > 0$ and $p \le \mathrm{high}$")
    ]
    with pytest.raises(equations.Unreadable):
        equations.latex("A = ♥")


# ------------------------------------------------------------------ public names


def public_files() -> list[Path]:
    rooms = [path for room in PUBLIC_ROOMS for path in sorted((SOURCE / room).rglob("*.py"))]
    return [*rooms, *(SOURCE / path for path in PUBLIC_MODULES)]


def public_definitions(path: Path) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [n for n in ast.parse(path.read_text()).body if isinstance(n, kinds) and not n.name.startswith("_")]


def test_public_names_have_docstrings():
    silent = []
    for path in public_files():
        nodes = [ast.parse(path.read_text()), *public_definitions(path)]
        silent += [(path.name, getattr(node, "name", "")) for node in nodes if not ast.get_docstring(node)]
    assert silent == []  # an empty name: the module itself


def test_public_names_are_in_the_api_reference():
    pages = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))
    wanted = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        for path in public_files()
        if path.name != "__init__.py" and "families" not in path.parts and public_definitions(path)
    }
    assert not wanted - shown, "add `::: MODULE` to a page of docs/reference"
    gone = [name for name in shown if not module_exists(name)]
    assert not gone
    for name in turnwise.__all__:
        assert f"[`{name}`][" in pages or name == "__version__", name


def module_exists(name: str) -> bool:
    path = SOURCE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


# ----------------------------------------------------------------------- the site


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="pip install 'turnwise-rl[docs]'")
def test_the_site_builds_and_fetches_nothing(tmp_path):
    """Strict: a broken link, anchor or reference fails. No page loads anything from another host."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not [url for url in loaded if 'rel="canonical"' not in url], page.name
    assert "<math" in (tmp_path / "site" / "methods" / "critic_free.html").read_text()
