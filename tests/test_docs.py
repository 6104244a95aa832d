"""The documentation is run: every Python block of a page, in order, and every command it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from turnwise.cli import main as cli
from turnwise.recipes import catalogue

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": page.stem}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, page.name, "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_links_exist(page):
    text = page.read_text()
    for command in re.findall(r"^turnwise ([a-z-]+)", text, re.MULTILINE):
        assert command in cli.RUN
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / target).exists(), target


def test_the_catalogue_page_is_up_to_date():
    assert (ROOT / "docs" / "methods.md").read_text() == catalogue.markdown(), "run `make docs`"


def test_the_environment_of_the_tutorial_passes_its_own_check(tmp_path, monkeypatch):
    block = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial-environment.md").read_text(), re.DOTALL)
    (tmp_path / "reverse_of_the_tutorial.py").write_text(block.group(1))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["check-env", "reverse_of_the_tutorial:Reverse", "--episodes", "5"]) == 0
